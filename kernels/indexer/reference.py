"""Which pool entries does a row read? Index scores, candidate blocks and exact top-k.

Source: model specification, sections 8.3 and 8.4. Keys are scored in chunks, so that the
workspace never holds [rows, context] at once; ties go to the lowest entry.
"""

from __future__ import annotations

import math
from collections.abc import Callable

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
    at_least = scores >= threshold
    chosen = best.indices
    tied = (at_least.sum(-1) > k) & (threshold[:, 0] > -torch.inf)
    if bool(tied.any()):
        rows = tied.nonzero()[:, 0]
        over = scores[rows] > threshold[rows]
        equal = scores[rows] == threshold[rows]
        room = k - over.sum(-1, keepdim=True)
        keep = over | (equal & (equal.cumsum(-1) <= room))
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
        workspace_bytes: bound of the scores held at once, at least one block a row.
        candidates: [G, M, B] int64 block numbers (negative for none) that restrict the choice.
        block_size: entries a candidate block.

    Returns:
        [G, M, k] int64 entry numbers, ascending, -1 where fewer are visible (last).
    """
    groups, rows = visible.shape
    flat_visible = visible.reshape(-1, 1)
    total = int(visible.max())
    if total <= k:  # everything visible is chosen: no score is needed
        entry = torch.arange(k, device=q.device)
        return torch.where(entry < visible[:, :, None], entry, -1)
    kept_scores = q.new_empty(groups * rows, 0)
    kept = flat_visible.new_empty(groups * rows, 0)
    for first, last in _chunks(total, q.shape, workspace_bytes, block_size, k):
        entry = torch.arange(first, last, device=q.device)
        scores = index_scores(q, weights, read_keys(first, last), min_rows)
        scores = scores.view(groups * rows, -1).masked_fill_(entry >= flat_visible, -torch.inf)
        if candidates is not None:
            mask = _candidate_mask(candidates.flatten(0, 1), first, last, block_size)
            scores = scores.masked_fill_(~mask, -torch.inf)
        kept_scores, kept = _merge(kept_scores, kept, scores, entry, k)
    kept = kept.masked_fill(kept_scores == -torch.inf, -1)
    if kept.shape[1] < k:
        kept = F.pad(kept, (0, k - kept.shape[1]), value=-1)
    return kept.view(groups, rows, k)


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
    groups, rows = visible.shape
    flat_visible = visible.reshape(-1, 1)
    total = int(visible.max())
    newest = (flat_visible - 1).div(block_size, rounding_mode="floor")
    kept_scores = q.new_empty(groups * rows, 0)
    kept = flat_visible.new_empty(groups * rows, 0)
    for first, last in _chunks(total, q.shape, workspace_bytes, block_size, num_blocks):
        entry = torch.arange(first, last, device=q.device)
        scores = index_scores(q, weights, read_keys(first, last), min_rows)
        scores = scores.view(groups * rows, -1).masked_fill_(entry >= flat_visible, -torch.inf)
        scores = scores.view(groups * rows, -1, block_size).amax(-1)
        block = torch.arange(first // block_size, last // block_size, device=q.device)
        scores = scores.masked_fill_(block == newest, torch.inf)
        kept_scores, kept = _merge(kept_scores, kept, scores, block, num_blocks)
    kept = kept.masked_fill(kept_scores == -torch.inf, -1)
    if kept.shape[1] < num_blocks:
        kept = F.pad(kept, (0, num_blocks - kept.shape[1]), value=-1)
    return kept.view(groups, rows, num_blocks)


def _chunks(
    total: int, q_shape: torch.Size, workspace_bytes: int, block_size: int, num_kept: int
) -> list[tuple[int, int]]:
    """Half-open ranges of entries, whole candidate blocks, whose scores fit the workspace.

    A kept entry costs its score and number four times over while a chunk is merged, and a scored
    one, beside the products of its heads, six words of scores, numbers, masks and copies.
    """
    groups, rows, heads, dim = q_shape
    granule = math.lcm(block_size, _GRANULE)
    bytes_per_entry = groups * (rows * (heads + 6) + dim) * 4
    room = workspace_bytes - groups * rows * num_kept * 48
    step = max(room // bytes_per_entry // granule, 1) * granule
    stop = -(-total // granule) * granule
    return [(first, min(first + step, stop)) for first in range(0, stop, step)]


def _merge(
    kept_scores: torch.Tensor,
    kept: torch.Tensor,
    scores: torch.Tensor,
    numbers: torch.Tensor,
    k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k best of what was kept and a new chunk; kept numbers are lower than new ones."""
    if kept.shape[1]:
        scores = torch.cat((kept_scores, scores), dim=-1)
        numbers = torch.cat((kept, numbers.expand(scores.shape[0], -1)), dim=-1)
    columns = top_columns(scores, k)
    absent = columns == scores.shape[1]
    columns = columns.clamp(max=scores.shape[1] - 1)
    best = scores.gather(-1, columns).masked_fill_(absent, -torch.inf)
    if numbers.dim() == 1:
        return best, numbers[columns]
    return best, numbers.gather(-1, columns)


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
