"""How do tokens become pool entries? Gated pooling of pairs, or a plain norm at ratio 1.

Source: model specification, section 8.1.
"""

from __future__ import annotations

import torch

from ripresa.kernels.lanes.reference import whole_lanes
from ripresa.kernels.rms_norm.reference import rms_norm


def compress_pairs(
    values: torch.Tensor,
    gates: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    min_rows: int = 0,
) -> torch.Tensor:
    """Latents of pairs of rows: softmax over the two gates, channel by channel, then RMS norm.

    Args:
        values, gates: [M, D] float32.
        first, second: [N] int64, the rows of each pair.

    Returns:
        [N, D] float32.
    """
    difference = gates.index_select(0, first) - gates.index_select(0, second)
    share = whole_lanes(torch.sigmoid, difference, min_rows > 0)
    older, newer = values.index_select(0, first), values.index_select(0, second)
    return rms_norm(older.mul_(share).add_(newer.mul_(1.0 - share)), norm_weight, eps)
