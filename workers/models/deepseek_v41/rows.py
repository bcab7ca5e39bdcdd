"""Which memory does each row of a step read and write? Index tensors, built once a step.

A step's rows are runs of consecutive positions, one run a sequence. Runs of one row (decode) are
scored together, longer ones one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from ripresa.kernels import dispatch as ops
from ripresa.workers.cache.kv_layout import KVLayout

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Run:
    """Rows [start, stop) of one sequence.

    Attributes:
        floor: window rows below it do not exist for these rows.
        write_floor: block KV of positions below it is not written.
        block_table: block k holds positions [k * W, (k + 1) * W).
        cut_windows: boundaries X in (start, stop]; the window rows [X-W, X) leave the step.
        layer_starts: first row that each layer computes; () if all compute all.
    """

    slot: int
    start: int
    stop: int
    floor: int
    write_floor: int
    block_table: Sequence[int]
    cut_windows: tuple[int, ...] = ()
    layer_starts: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    def at(self, layer: int) -> Run:
        """The rows that a layer computes; an empty run at `stop` if it computes none."""
        if not self.layer_starts or self.layer_starts[layer] <= self.start:
            return self
        start = min(self.layer_starts[layer], self.stop)
        return replace(self, start=start, floor=self.stop if start == self.stop else self.floor)


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """How window rows are packed for attention and kept in rings; all tensors int64.

    The packed buffer holds, for each run, the rows from one window below the block of its first
    row on, so that a row's place in a tile depends on its position alone.

    Attributes:
        context_from: ring rows of earlier positions that are attended.
        buffer_to: buffer rows of these, then of the step's own rows.
        ring_from, ring_to: rows of the step that stay in rings, and their ring rows.
        lo, hi: [T] buffer rows that each row attends.
        cut_from: rows of the context, followed by the step's own, that leave the step.
    """

    num_buffer_rows: int
    context_from: torch.Tensor
    buffer_to: torch.Tensor
    ring_from: torch.Tensor
    ring_to: torch.Tensor
    lo: torch.Tensor
    hi: torch.Tensor
    tiles: ops.WindowTiles
    cut_from: torch.Tensor


@dataclass(frozen=True, slots=True)
class EntryPlan:
    """Which pool entries a step writes at one ratio, and from which rows; all tensors int64.

    Attributes:
        first, second: rows of each entry. At ratio 2, `first` T + s means run s's open pair.
        position: position of an entry's first token.
        pool_row: where it is written.
        open_from, open_slot: rows whose value and gate stay open, and the slots that keep them.
        run_slots: [runs] the slot of each run.
    """

    first: torch.Tensor
    second: torch.Tensor
    position: torch.Tensor
    pool_row: torch.Tensor
    open_from: torch.Tensor
    open_slot: torch.Tensor
    run_slots: torch.Tensor


@dataclass(frozen=True, slots=True)
class ReadGroup:
    """Rows that are scored in one product: G runs of M rows each.

    Attributes:
        rows: [G * M] int64, rows of the step.
        visible: [G, M] int64, entries below it may be seen.
        pool_rows: [G, N] int64, pool row of entry t; N is a multiple of 32 and at least the
            largest `visible`; entries beyond a run's own are repeats of its first.
    """

    rows: torch.Tensor
    visible: torch.Tensor
    pool_rows: torch.Tensor


class Rows:
    """The rows of one half of a step, and everything their layers look up.

    Args:
        runs: one a sequence, in batch order.
        min_rows: rows that the numerics setting pads products to.
        heads: attention heads (padding of window groups).
    """

    def __init__(
        self,
        runs: Sequence[Run],
        layout: KVLayout,
        device: torch.device,
        heads: int,
        min_rows: int = 0,
    ) -> None:
        self.runs = runs
        self._layout = layout
        self._device = device
        self._heads = heads
        self._min_rows = min_rows
        self._min_group = -(-min_rows // heads) if min_rows else 1
        self._start = np.array([run.start for run in runs], dtype=np.int64)
        self._count = np.array([run.num_rows for run in runs], dtype=np.int64)
        self._slot = np.array([run.slot for run in runs], dtype=np.int64)
        self._offset = np.cumsum(self._count) - self._count
        self._run_of = np.repeat(np.arange(len(runs)), self._count)
        self._position = _ranges(self._start, self._count)
        self.positions = self._tensor(self._position)
        self._windows: dict[tuple[int, ...], WindowPlan] = {}
        self._reads: dict[int, list[ReadGroup]] = {}

    @property
    def num_rows(self) -> int:
        return len(self._position)

    def at(self, layer: int) -> Rows:
        """The rows that a layer computes: these themselves unless some are left out."""
        runs = [run.at(layer) for run in self.runs]
        return self if runs == list(self.runs) else self._with(runs)

    def left_out(self, kept: Rows) -> Rows:
        """These rows less those of `kept`, which are the last ones of each run."""
        runs = zip(self.runs, kept.runs, strict=True)
        return self._with([replace(mine, stop=other.start) for mine, other in runs])

    def places(self, part: Rows) -> torch.Tensor:
        """[rows of `part`] int64: where they lie among these."""
        offset = self._offset - self._start
        return self._tensor(part._position + offset[part._run_of])

    @property
    def grouping(self) -> tuple[tuple[int, ...], ...]:
        """Which runs are read together; the same for rows of the same groups."""
        several = [(i,) for i, run in enumerate(self.runs) if run.num_rows > 1]
        single = tuple(i for i, run in enumerate(self.runs) if run.num_rows == 1)
        return (*several, single) if single else tuple(several)

    def _with(self, runs: Sequence[Run]) -> Rows:
        return Rows(runs, self._layout, self._device, self._heads, self._min_rows)

    def window(self, floors: Sequence[int] | None = None) -> WindowPlan:
        """The window plan for the runs' own floors, or for other ones."""
        key = tuple(run.floor for run in self.runs) if floors is None else tuple(floors)
        if key not in self._windows:
            self._windows[key] = self._window_plan(np.array(key, dtype=np.int64))
        return self._windows[key]

    def _window_plan(self, floor: Ints) -> WindowPlan:
        window, ring = self._layout.window, self._layout.ring_rows
        start, stop = self._start, self._start + self._count
        base = start // window * window - window
        length = -(-(stop - base) // window) * window
        buffer = np.cumsum(length) - length
        shift = buffer - base
        context_start = np.minimum(np.maximum(np.maximum(floor, start - window + 1), 0), start)
        context_count = start - context_start
        context = _ranges(context_start, context_count)
        context_run = np.repeat(np.arange(len(start)), context_count)
        ring_from, ring_to = self.ring_rows(stop)
        position, run = self._position, self._run_of
        lowest = np.maximum(np.maximum(floor[run], position - window + 1), 0)
        lo = self._tensor(lowest + shift[run])
        hi = self._tensor(position + 1 + shift[run])
        return WindowPlan(
            num_buffer_rows=int(length.sum()),
            context_from=self._tensor(self._slot[context_run] * ring + context % ring),
            buffer_to=self._tensor(
                np.concatenate((context + shift[context_run], position + shift[run]))
            ),
            ring_from=ring_from,
            ring_to=ring_to,
            lo=lo,
            hi=hi,
            tiles=ops.window_tiles(lo, hi, window, self._min_group),
            cut_from=self._tensor(self._cut_rows(context_start, context_count)),
        )

    def _cut_rows(self, context_start: Ints, context_count: Ints) -> Ints:
        """Where the rows of the windows to cut lie among the context rows and the step's own."""
        num_context = int(context_count.sum())
        context_offset = np.cumsum(context_count) - context_count
        parts = [np.empty(0, dtype=np.int64)]
        for number, run in enumerate(self.runs):
            for boundary in run.cut_windows:
                position = np.arange(boundary - self._layout.window, boundary)
                parts.append(
                    np.where(
                        position < run.start,
                        position - context_start[number] + context_offset[number],
                        position - run.start + self._offset[number] + num_context,
                    )
                )
        return np.concatenate(parts)

    def ring_rows(
        self, stops: Sequence[int] | Ints, firsts: Sequence[int] | Ints | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of the step in each run's [first, stop) that a ring keeps, and their ring rows."""
        ring = self._layout.ring_rows
        stop = np.minimum(np.asarray(stops, dtype=np.int64), self._start + self._count)
        first = self._start
        if firsts is not None:
            first = np.maximum(first, np.asarray(firsts, dtype=np.int64))
        kept = np.clip(stop - first, 0, ring)
        position = _ranges(stop - kept, kept)
        run = np.repeat(np.arange(len(stop)), kept)
        return (
            self._tensor(position - self._start[run] + self._offset[run]),
            self._tensor(self._slot[run] * ring + position % ring),
        )

    def entries(self, ratio: int) -> EntryPlan:
        """The entries that these rows complete, except below a run's write floor."""
        stop = self._start + self._count
        write_floor = np.array([run.write_floor for run in self.runs], dtype=np.int64)
        # A run from its write floor on may begin with the open pair of a parked state.
        written_from = np.where(self._start >= write_floor, 0, -(-write_floor // ratio))
        first_entry = np.maximum(self._start // ratio, written_from)
        count = np.maximum(stop // ratio - first_entry, 0)
        entry = _ranges(first_entry, count)
        run = np.repeat(np.arange(len(stop)), count)
        row = entry * ratio - self._start[run] + self._offset[run]
        first = np.where(entry * ratio < self._start[run], self.num_rows + run, row)
        pool_row = np.empty_like(entry)
        done = 0
        for run_rows, number in zip(self.runs, count, strict=True):
            part = slice(done, done + int(number))
            pool_row[part] = _pool_rows(run_rows.block_table, entry[part], self._layout, ratio)
            done += int(number)
        is_open = (stop % 2 == 1) & (self._count > 0) if ratio == 2 else np.zeros(len(stop), bool)
        return EntryPlan(
            first=self._tensor(first),
            second=self._tensor(row + ratio - 1),
            position=self._tensor(entry * ratio),
            pool_row=self._tensor(pool_row),
            open_from=self._tensor((self._offset + self._count - 1)[is_open]),
            open_slot=self._tensor(self._slot[is_open]),
            run_slots=self._tensor(self._slot),
        )

    def reads(self, ratio: int) -> list[ReadGroup]:
        """The rows grouped for scoring a pool of this ratio; together they cover every row."""
        if ratio not in self._reads:
            self._reads[ratio] = [self._read_group(group, ratio) for group in self.grouping]
        return self._reads[ratio]

    def unpacked_base(self, ratio: int) -> torch.Tensor:
        """[T] int64: where entry 0 of each row's sequence lies if the groups' pool rows are read
        one after another."""
        base = torch.empty(self.num_rows, dtype=torch.int64, device=self._device)
        offset = 0
        for group in self.reads(ratio):
            lines, width = group.pool_rows.shape
            first = torch.arange(lines, device=self._device) * width + offset
            base[group.rows] = first.repeat_interleave(group.visible.shape[1])
            offset += lines * width
        return base

    def _read_group(self, group: Sequence[int], ratio: int) -> ReadGroup:
        rows = np.stack([np.arange(self._count[i]) + self._offset[i] for i in group])
        visible = (self._position[rows] + 1) // ratio
        width = max(-(-int(visible.max()) // 32) * 32, 32)
        pool_rows = np.zeros((len(group), width), dtype=np.int64)
        for line, i in enumerate(group):
            entries = np.arange(int(visible[line].max()))
            mine = _pool_rows(self.runs[i].block_table, entries, self._layout, ratio)
            pool_rows[line, : len(mine)] = mine
            pool_rows[line, len(mine) :] = mine[0] if len(mine) else 0
        return ReadGroup(
            rows=self._tensor(rows.reshape(-1)),
            visible=self._tensor(visible),
            pool_rows=self._tensor(pool_rows),
        )

    def _tensor(self, values: Ints) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)


def _ranges(start: Ints, count: Ints) -> Ints:
    """start[0], start[0] + 1, .. (count[0] numbers), then the same for the next."""
    total = int(count.sum())
    offset = np.cumsum(count) - count
    within: Ints = np.arange(total, dtype=np.int64) + np.repeat(start - offset, count)
    return within


def _pool_rows(block_table: Sequence[int], entry: Ints, layout: KVLayout, ratio: int) -> Ints:
    per_block = layout.window // ratio
    if not len(entry):
        return np.empty(0, dtype=np.int64)
    blocks = np.asarray(block_table, dtype=np.int64)
    rows: Ints = blocks[entry // per_block] * per_block + entry % per_block
    return rows
