"""How are vectors normalised? Root mean square over the last axis, in float32."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """`weight * x / sqrt(mean(x^2) + eps)` over the last axis of x [..., N] float32."""
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True).add_(eps))
    return y if weight is None else y.mul_(weight)
