"""How far may a computed tensor be from its reference? Roundings to a grid may land either way."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ripresa.kernels import dispatch as ops

_GRID_NOISE = 1e-5


@dataclass(frozen=True, slots=True)
class GridStep:
    """One step on the grid of a cached row, so that a reference cannot be off by more.

    Attributes:
        grid: both rows lie on it.
        group: channels that share a scale.
        share: the largest step as a share of the larger of two neighbours.
        least: the step of the smallest values as a share of a group's largest.
    """

    grid: ops.Grid
    group: int
    share: float
    least: float

    @classmethod
    def of_window(cls, dim: int) -> GridStep:
        return cls(ops.window_grid(dim), 32, 1 / 8, 2.0**-15)

    @classmethod
    def of_entry(cls, dim: int) -> GridStep:
        return cls(ops.entry_grid(dim), 16, 1 / 3, 1 / 6)

    @classmethod
    def of_index_key(cls, dim: int) -> GridStep:
        return cls(ops.index_grid(dim), 32, 1 / 3, 1 / 6)

    def at_most_one(self, expected: torch.Tensor, computed: torch.Tensor) -> bool:
        """Whether [N, dim] rows are neighbours on the grid, channel by channel."""
        expected, computed = expected.float(), computed.float()
        larger = torch.maximum(expected.abs(), computed.abs())
        groups = larger.view(*larger.shape[:-1], -1, self.group)
        of_group = groups.amax(-1, keepdim=True).expand_as(groups).reshape(larger.shape)
        noise = _GRID_NOISE * larger
        on_grid = (self.grid.round_trip(expected) - expected).abs() <= noise
        step = torch.maximum(self.share * larger, self.least * of_group) + noise
        return bool((on_grid & ((expected - computed).abs() <= step)).all())


@dataclass(frozen=True, slots=True)
class Limit:
    """How far a computed tensor may be from the reference.

    Attributes:
        usual: every row's largest absolute difference.
        rare: what one row in ten may reach instead, where a rounding to a grid can land on the
            other side: a difference, or for rows on a grid its step; None where nothing is rounded.
        axis: the axis of rows (positions).
        least_rare: rows that may reach `rare` even where that is more than one in ten.
        unordered: the last axis holds sets of numbers; their order and -1 for none mean nothing.
    """

    usual: float
    rare: float | GridStep | None = None
    axis: int = 0
    least_rare: int = 0
    unordered: bool = False

    def judge(self, expected: torch.Tensor, computed: torch.Tensor) -> tuple[float, bool]:
        """The largest difference, and whether it is within the limit."""
        if self.unordered:
            expected, computed = _as_sets(expected, computed)
        if expected.shape != computed.shape:
            return float("inf"), False
        if not expected.numel():
            return 0.0, True
        gap = (expected.double() - computed.double()).abs().movedim(self.axis, 0)
        rows = gap.nan_to_num(nan=float("inf")).reshape(len(gap), -1).amax(1)
        worst = float(rows.max())
        over = rows > self.usual
        if not bool(over.any()):
            return worst, True
        if self.rare is None or int(over.sum()) > max(len(rows) // 10, self.least_rare):
            return worst, False
        if isinstance(self.rare, GridStep):
            return worst, self.rare.at_most_one(expected[over], computed[over])
        return worst, worst <= self.rare


def _as_sets(*selections: torch.Tensor) -> list[torch.Tensor]:
    """Sorted and equally wide: a short prompt has fewer entries than may be selected."""
    width = max((s.shape[-1] for s in selections if s.dim()), default=0)
    return [
        F.pad(s, (0, width - s.shape[-1]), value=-1).sort(-1).values if s.dim() else s
        for s in selections
    ]


EXACT = Limit(0.0)
SAME_SETS = Limit(0.0, unordered=True)
