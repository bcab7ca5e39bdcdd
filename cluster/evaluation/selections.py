"""Which pool entries did each row choose, and how many of them did another execution choose too?"""

from __future__ import annotations

from collections.abc import Mapping

import torch

Selected = Mapping[int, torch.Tensor]
"""By index source layer: [rows, top-k] int64 entry numbers, -1 for none."""


class Selections:
    """An `Observer` of a model that runs one sequence at a time."""

    def __init__(self) -> None:
        self._positions = torch.empty(0, dtype=torch.int64)
        self._rows: dict[int, dict[int, torch.Tensor]] = {}

    def __call__(self, name: str, layer: int, tensor: torch.Tensor) -> None:
        if name == "positions":
            self._positions = tensor
        elif name == "selected":
            rows = self._rows.setdefault(layer, {})
            for position, entries in zip(self._positions.tolist(), tensor.clone(), strict=True):
                # What is computed a second time, behind an anchor, is not what others have read.
                rows.setdefault(position, entries)

    def forget(self) -> None:
        """Another execution begins."""
        self._rows.clear()

    def of(self, start: int, stop: int) -> Selected:
        """What rows [start, stop) have chosen, in layers that computed all of them."""
        return {
            layer: torch.stack([rows[position] for position in range(start, stop)])
            for layer, rows in sorted(self._rows.items())
            if all(position in rows for position in range(start, stop))
        }


def overlap(reference: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """[rows] float64: the share of the reference's entries that the other one chose as well.

    1 where the reference chose none.

    Args:
        reference, other: [rows, top-k] int64, -1 for none; no entry twice in a row.
    """
    num_rows = len(reference)
    stride = int(torch.stack([reference.amax(), other.amax()]).amax()) + 2 if num_rows else 1
    row = torch.arange(num_rows)[:, None] * stride
    chosen = reference >= 0
    known = (other + row)[other >= 0]
    shared = chosen & torch.isin(reference + row, known)
    count = chosen.sum(-1)
    share = shared.sum(-1).double() / count.clamp(min=1)
    return torch.where(count > 0, share, torch.ones_like(share))
