"""How are rows multiplied by a weight? `x @ weight^T`, padded to a least height if asked."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def linear(x: torch.Tensor, weight: torch.Tensor, min_rows: int = 0) -> torch.Tensor:
    """`x @ weight^T` for rows x [T, in] and weight [out, in]; returns [T, out].

    Below about 16 rows the CPU's matrix product takes other code paths and rounds differently.
    With `min_rows` = 16, shorter batches are padded with zero rows, so that a row's result does
    not depend on its batch mates.
    """
    rows = x.shape[0]
    if rows >= min_rows:
        return F.linear(x, weight)
    return F.linear(F.pad(x, (0, 0, 0, min_rows - rows)), weight)[:rows]


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, min_rows: int = 0) -> torch.Tensor:
    """Each group of channels through its own weight, results concatenated.

    Args:
        x: [T, G * in] float32, group-major; weight: [G, out, in].

    Returns:
        [T, G * out].
    """
    rows = x.shape[0]
    groups, out, width = weight.shape
    padded = x if rows >= min_rows else F.pad(x, (0, 0, 0, min_rows - rows))
    y = torch.bmm(padded.view(-1, groups, width).transpose(0, 1), weight.transpose(1, 2))
    return y.transpose(0, 1).reshape(-1, groups * out)[:rows]
