"""What does an n-gram memory add to the streams? Gated injection of looked-up values.

Source: model specification, section 10.
"""

from __future__ import annotations

import torch

from ripresa.kernels.lanes.reference import whole_lanes
from ripresa.kernels.rms_norm.reference import rms_norm


def engram_inject(
    streams: torch.Tensor,
    projected: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    min_rows: int = 0,
) -> torch.Tensor:
    """Streams with the looked-up values added, each copy behind its own gate.

    Args:
        streams: [T, n, d] float32.
        projected: [T, (n + 1) d] float32, a key for each copy, then the value.
        q_weight, k_weight: [n, d].

    Returns:
        [T, n, d], a new tensor.
    """
    rows, n, d = streams.shape
    keys, value = projected.view(rows, n + 1, d).split((n, 1), dim=1)
    products = rms_norm(streams, None, eps) * rms_norm(keys, None, eps) * (q_weight * k_weight)
    dots = products.sum(-1).mul_(d**-0.5)
    roots = dots.abs().clamp_(min=1e-6).sqrt_().mul_(dots.sign())
    gates = whole_lanes(torch.sigmoid, roots, min_rows > 0)
    return torch.addcmul(streams, gates[:, :, None], value)
