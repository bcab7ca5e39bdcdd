"""How does an elementwise function give an element the same bits wherever it stands?

A CPU kernel runs whole vectors through one implementation of a transcendental function and the
elements that are left over through another, which rounds differently.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

LANES = 32
"""Two AVX-512 vectors of float32: the step of PyTorch's vectorised loops."""


def whole_lanes(
    function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, pad: bool
) -> torch.Tensor:
    """`function(x)`, elementwise; if `pad`, over a multiple of `LANES` contiguous elements."""
    if not pad:
        return function(x)
    flat = x.reshape(-1)
    missing = -flat.shape[0] % LANES
    if missing:
        flat = F.pad(flat, (0, missing))
    return function(flat)[: x.numel()].view(x.shape)
