"""Which pool entries does a row read? Index scores, candidate blocks and exact top-k.

Source: model specification, sections 8.3 and 8.4. Keys are scored in chunks, so that the
workspace never holds [rows, context] at once; ties go to the lowest entry. `workspace_bytes` bounds
everything that a selection allocates, its result and the keys that it reads included.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ripresa.kernels.lanes.reference import LANES

KeyReader = Callable[[int, int], torch.Tensor]


# Products and loops of fewer columns take other code paths on a CPU and round differently.
_GRANULE = LANES


def index_scores(
    q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, min_rows: int = 0
) -> torch.Tensor:
    """score[m, t] = sum over heads of weights[m, h] * max(0, q[m, h] . key_t).

    Args:
        q: [G, M, H, D] float32, M rows of each of G sequences.
        weights: [G, M, H] float32, may be negative.
        keys: [G, N, D] float32.
        min_rows: least height of the matrix product (see `linear`).

    Returns:
        [G, M, N] float32.
    """
    groups, rows, heads, dim = q.shape
    flat = q.reshape(groups, rows * heads, dim)
    if rows * heads < min_rows:
        flat = F.pad(flat, (0, 0, 0, min_rows - rows * heads))
    dots = torch.bmm(flat, keys.transpose(1, 2))[:, : rows * heads].relu_()
    dots = dots.view(groups, rows, heads, -1)
    scores = dots[:, :, 0] * weights[:, :, 0, None]
    for head in range(1, heads):
        scores.addcmul_(dots[:, :, head], weights[:, :, head, None])
    return scores


def top_columns(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Columns of the k best scores of each row, ascending; ties go to the lower column.

    Args:
        scores: [T, N] float32; -inf marks what may not be chosen.

    Returns:
        [T, min(k, N)] int64 column numbers, ascending; columns with -inf are given as N, last.
    """
    columns = scores.shape[1]
    k = min(k, columns)
    best = torch.topk(scores, k, dim=-1, sorted=False)
    threshold = best.values.amin(-1, keepdim=True)
    chosen = best.indices
    tied = ((scores >= threshold).sum(-1) > k) & (threshold[:, 0] > -torch.inf)
    if bool(tied.any()):
        rows = tied.nonzero()[:, 0]
        over = scores[rows] > threshold[rows]
        equal = scores[rows] == threshold[rows]
        room = k - over.sum(-1, keepdim=True)
        keep = over | (equal & (equal.cumsum(-1, dtype=torch.int32) <= room))
        chosen[rows] = keep.nonzero()[:, 1].view(-1, k)
    chosen = chosen.masked_fill(scores.gather(-1, chosen) == -torch.inf, columns)
    return chosen.sort(-1).values


def select_entries(
    q: torch.Tensor,
    weights: torch.Tensor,
    read_keys: KeyReader,
    visible: torch.Tensor,
    k: int,
    workspace_bytes: int,
    candidates: torch.Tensor | None = None,
    block_size: int = 1,
    min_rows: int = 0,
) -> torch.Tensor:
    """The k best visible entries of each row.

    Args:
        q: [G, M, H, D] float32; weights: [G, M, H] float32.
        read_keys: (first, last) -> keys [G, last - first, D] of entries [first, last); entries
            that a sequence does not have, up to the next multiple of 32, may hold anything.
        visible: [G, M] int64, row m sees entries below it.
        workspace_bytes: bound of what is allocated at once; where it is too small for one row of
            each sequence and 32 entries, these are scored all the same.
        candidates: [G, M, B] int64 block numbers (negative for none) that restrict the choice.
        block_size: entries a candidate block.
        min_rows: least height of the matrix product (see `linear`).

    Returns:
        [G, M, k] int64 entry numbers, ascending, -1 where fewer are visible (last).
    """
    total = int(visible.max())
    if total <= k:  # everything visible is chosen: no score is needed
        entry = torch.arange(k, device=q.device)
        return torch.where(entry < visible[:, :, None], entry, -1)
    width = 0 if candidates is None else candidates.shape[-1]
    plan = _plan(total, q.shape, workspace_bytes, block_size, k, width, min_rows)
    chosen = visible.new_empty(*visible.shape, k)
    for rows in plan.row_slices:
        best = _Best(k)
        for first, last in plan.chunks:
            scores = _visible_scores(
                q[:, rows], weights[:, rows], read_keys, visible[:, rows], first, last, min_rows
            )
            if candidates is not None:
                mask = _candidate_mask(candidates[:, rows].flatten(0, 1), first, last, block_size)
                scores.masked_fill_(mask.logical_not_(), -torch.inf)
                del mask
            best.merge(scores, first)
            del scores  # the next chunk's products take its place
        chosen[:, rows] = best.numbers().view_as(chosen[:, rows])
    return chosen


def select_candidates(
    q: torch.Tensor,
    weights: torch.Tensor,
    read_keys: KeyReader,
    visible: torch.Tensor,
    num_blocks: int,
    block_size: int,
    workspace_bytes: int,
    min_rows: int = 0,
) -> torch.Tensor:
    """The best blocks of entries of each row; the block of the newest visible entry is forced in.

    A block's score is the best among its visible entries.

    Returns:
        [G, M, num_blocks] int64 block numbers, ascending, -1 where fewer are visible (last).
    """
    total = int(visible.max())
    plan = _plan(total, q.shape, workspace_bytes, block_size, num_blocks, 0, min_rows)
    chosen = visible.new_empty(*visible.shape, num_blocks)
    for rows in plan.row_slices:
        newest = (visible[:, rows].reshape(-1, 1) - 1).div_(block_size, rounding_mode="floor")
        best = _Best(num_blocks)
        for first, last in plan.chunks:
            scores = _visible_scores(
                q[:, rows], weights[:, rows], read_keys, visible[:, rows], first, last, min_rows
            )
            scores = scores.view(len(scores), -1, block_size).amax(-1)
            block = torch.arange(first // block_size, last // block_size, device=q.device)
            scores.masked_fill_(block == newest, torch.inf)
            best.merge(scores, first // block_size)
            del scores
        chosen[:, rows] = best.numbers().view_as(chosen[:, rows])
    return chosen


def _visible_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    read_keys: KeyReader,
    visible: torch.Tensor,
    first: int,
    last: int,
    min_rows: int,
) -> torch.Tensor:
    """Scores of entries [first, last): [G * M, last - first], -inf where a row does not see."""
    entry = torch.arange(first, last, device=q.device)
    scores = index_scores(q, weights, read_keys(first, last), min_rows)
    return scores.flatten(0, 1).masked_fill_(entry >= visible.reshape(-1, 1), -torch.inf)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Which rows are scored together, and which entries at a time.

    Attributes:
        row_slices: of each sequence's rows, in order.
        chunks: half-open ranges of entries, whole candidate blocks.
    """

    row_slices: list[slice]
    chunks: list[tuple[int, int]]


# Bytes that are live at most while ... (measured by a test)
_MERGED_BYTES = 24  # a score of a row is merged: the chunk, its copy behind the kept ones, ties
_KEPT_BYTES = 96  # a kept entry of a row is merged: score, number, and what chooses among them
_MASK_BYTES = 32  # a row's candidate block is made a mask


def _plan(
    total: int,
    q_shape: torch.Size,
    workspace_bytes: int,
    block_size: int,
    num_kept: int,
    num_candidates: int,
    min_rows: int,
) -> _Plan:
    """Slices of rows and entries whose scores, and all that it takes to choose, fit the workspace.

    Half of it may go to what is kept of each row, so that many rows with many kept blocks are
    taken in several turns, and the rest to scores.
    """
    groups, rows, heads, dim = q_shape
    granule = math.lcm(block_size, _GRANULE)
    row_bytes = groups * (
        4 * heads * dim + max(_KEPT_BYTES * num_kept, 12 * num_kept + _MASK_BYTES * num_candidates)
    )
    room = workspace_bytes - groups * rows * num_kept * 8
    turns = -(-rows // max(room // 2 // row_bytes, 1))
    height = -(-rows // turns)
    # Products of the heads and their sum, or merging; keys as records, codes and numbers.
    products = 4 * max(height * heads, min_rows) + 8 * height
    entry_bytes = groups * (max(products, _MERGED_BYTES * height) + 6 * dim + 64)
    step = max((room - height * row_bytes) // entry_bytes // granule, 1) * granule
    stop = -(-total // granule) * granule
    return _Plan(
        [slice(first, min(first + height, rows)) for first in range(0, rows, height)],
        [(first, min(first + step, stop)) for first in range(0, stop, step)],
    )


class _Best:
    """The k best scores of each row so far, and their numbers."""

    def __init__(self, k: int) -> None:
        self._k = k
        self._scores: torch.Tensor | None = None
        self._numbers: torch.Tensor | None = None

    def merge(self, scores: torch.Tensor, first: int) -> None:
        """Take in scores [T, N] of the numbers from `first` on; all were lower before."""
        width = 0
        if self._scores is not None:
            width = self._scores.shape[1]
            scores = torch.cat((self._scores, scores), dim=-1)
        columns = top_columns(scores, self._k)
        absent = columns == scores.shape[1]
        columns.clamp_(max=scores.shape[1] - 1)
        self._scores = scores.gather(-1, columns).masked_fill_(absent, -torch.inf)
        new = columns + (first - width)
        if self._numbers is not None:
            old = self._numbers.gather(-1, columns.clamp(max=width - 1))
            new = torch.where(columns < width, old, new)
        self._numbers = new

    def numbers(self) -> torch.Tensor:
        """[T, k] int64, ascending; -1 where there were fewer, last."""
        assert self._scores is not None
        assert self._numbers is not None
        found = self._numbers.masked_fill(self._scores == -torch.inf, -1)
        return F.pad(found, (0, self._k - found.shape[1]), value=-1)


def _candidate_mask(
    candidates: torch.Tensor, first: int, last: int, block_size: int
) -> torch.Tensor:
    """[T, last - first] bool: entries that lie in a row's candidate blocks."""
    first_block = first // block_size
    blocks = last // block_size - first_block
    local = candidates - first_block
    local = torch.where((candidates < 0) | (local < 0) | (local >= blocks), blocks, local)
    mask = torch.zeros(
        candidates.shape[0], blocks + 1, dtype=torch.bool, device=candidates.device
    ).scatter_(1, local, True)
    return mask[:, :blocks].repeat_interleave(block_size, dim=1)
