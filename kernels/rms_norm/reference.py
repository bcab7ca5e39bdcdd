"""How are vectors normalised? Root mean square over the last axis, in float32."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """`weight * x / sqrt(mean(x^2) + eps)` over the last axis of x [..., N] float32."""
    y = x * reciprocal_rms(x, eps)
    return y if weight is None else y.mul_(weight)


def reciprocal_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """`1 / sqrt(mean(x^2) + eps)` over the last axis: [..., N] -> [..., 1]."""
    # One pass over x; squaring and averaging are two, with a temporary of x's size.
    norm: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
