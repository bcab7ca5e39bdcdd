"""How are positions encoded? Rotation of adjacent pairs in the last channels of a vector."""

from __future__ import annotations

import math

import torch


def rope_frequencies(
    rope_dim: int,
    theta: float,
    yarn_factor: float | None = None,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    original_max_position: int = 0,
) -> torch.Tensor:
    """Angular frequencies f_j [rope_dim / 2] float32 of pair j, with YaRN if a factor is given.

    Source: model specification, section 5 (both clamps of the correction range included).
    """
    j = torch.arange(rope_dim // 2, dtype=torch.float32)
    base = 1.0 / theta ** (j * 2 / rope_dim)
    if yarn_factor is None:
        return base

    def pair_of(turns: float) -> float:
        ratio = original_max_position / (2 * math.pi * turns)
        return rope_dim * math.log(ratio) / (2 * math.log(theta))

    low = max(math.floor(pair_of(beta_fast)), 0)
    high = min(math.ceil(pair_of(beta_slow)), rope_dim - 1)
    ramp = ((j - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    return base / yarn_factor * ramp + base * (1.0 - ramp)


def rope_phases(positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """e^{i position f_j} as complex64 [T, rope_dim / 2]; the angle is rounded to float32."""
    angle = positions.to(torch.float32)[:, None] * frequencies
    return torch.polar(torch.ones_like(angle), angle)


def rope_(x: torch.Tensor, phases: torch.Tensor) -> torch.Tensor:
    """Rotate the last channels of x in place.

    Args:
        x: [T, D] or [T, H, D] float32, last axis contiguous.
        phases: complex64 [T, rope_dim / 2]; pass the conjugate to rotate back.
    """
    rope_dim = 2 * phases.shape[-1]
    tail = x[..., x.shape[-1] - rope_dim :]
    pairs = torch.view_as_complex(tail.unflatten(-1, (-1, 2)))
    pairs.mul_(phases if x.dim() == 2 else phases[:, None, :])
    return x
