"""What does a row attend to? A window of recent rows, selected pool entries, and a sink.

Source: model specification, section 7. The plain PyTorch reference, which is also the CPU path.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class WindowTiles:
    """How queries are grouped for the window part; built once a step, shared by its layers.

    A query whose last key is row r of the packed buffer belongs to tile r // window and meets the
    2 * window rows of that tile and the one before. If every sequence's buffer starts at a multiple
    of the window in rows and in positions, then a query meets its keys in an order that depends on
    its position alone: chunking and batch mates cannot change a bit of its result.

    Attributes:
        tile: [G] int64, number of the earlier of the two tiles, in the front-padded buffer.
        gather: [G * M] int64, query rows by group; short groups repeat their first row.
        scatter: [T] int64, where each query's result lies in the [G * M] layout.
        identity: every group is full and in order, so that gather and scatter can be skipped.
        bias: [G, M, 1, 2 * window] float32, 0 or -inf where a query must not see a key.
        unused: [G, 2 * window, 1] bool, keys that no query of the group sees; None if there are
            none.
    """

    tile: torch.Tensor
    gather: torch.Tensor
    scatter: torch.Tensor
    identity: bool
    bias: torch.Tensor
    unused: torch.Tensor | None


def window_tiles(
    lo: torch.Tensor, hi: torch.Tensor, window: int, min_group: int = 1
) -> WindowTiles:
    """Group queries by tile; `min_group` pads every group to at least that many queries.

    Args:
        lo, hi: [T] int64, half-open ranges of buffer rows; 1 <= hi - lo <= window.
    """
    rows = lo.shape[0]
    device = lo.device
    tile_of = (hi - 1).div(window, rounding_mode="floor")
    tile, group_of, counts = torch.unique_consecutive(
        tile_of, return_inverse=True, return_counts=True
    )
    groups = int(tile.shape[0])
    size = max(int(counts.max()), min_group)
    first = counts.cumsum(0) - counts
    within = torch.arange(rows, device=device) - first[group_of]
    scatter = group_of * size + within
    gather = first.repeat_interleave(size)
    gather[scatter] = torch.arange(rows, device=device)
    row = tile.repeat_interleave(size)[:, None] * window + torch.arange(
        -window, window, device=device
    )
    hidden = (row < lo[gather, None]) | (row >= hi[gather, None])
    hidden = hidden.view(groups, size, 2 * window)
    bias = torch.zeros(hidden.shape, device=device).masked_fill_(hidden, -torch.inf)
    unused = hidden.all(1)[:, :, None]
    return WindowTiles(
        tile=tile,
        gather=gather,
        scatter=scatter,
        identity=groups * size == rows,
        bias=bias[:, :, None],
        unused=unused if bool(unused.any()) else None,
    )


def window_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    lo: torch.Tensor,
    hi: torch.Tensor,
    sink: torch.Tensor,
    scale: float,
    window: int,
    pool: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    tiles: WindowTiles | None = None,
) -> torch.Tensor:
    """Attention of each query over a row range, its pool entries and its head's sink.

    Args:
        q: [T, H, D] float32.
        kv: [N, D] float32, packed window rows of all sequences, in position order; a row is key
            and value of every head. Rows in no query's range may hold anything, NaN included.
        lo, hi: [T] int64, query t sees rows lo[t] <= r < hi[t]; 1 <= hi - lo <= window.
        sink: [H] float32, an extra logit without a value.
        scale: factor of the dot products.
        pool: [P, D] float32 compressed entries, or None.
        slots: [T, K] integer, entries of the pool that query t also sees; negative for none.
        tiles: `window_tiles(lo, hi, window)`, if the caller has it already.

    Returns:
        [T, H, D] float32.
    """
    if tiles is None:
        tiles = window_tiles(lo, hi, window)
    rows, heads, dim = q.shape
    groups, size, _, width = tiles.bias.shape
    # One tile of padding in front lets the first tile have a predecessor.
    padding = (-kv.shape[0]) % window
    padded = torch.nn.functional.pad(kv, (0, 0, window, padding)).view(-1, window, dim)
    keys = torch.cat((padded[tiles.tile], padded[tiles.tile + 1]), dim=1)
    if tiles.unused is not None:
        keys.masked_fill_(tiles.unused, 0.0)
    q = q * scale
    grouped = q if tiles.identity else q.index_select(0, tiles.gather)
    grouped = grouped.reshape(groups, size * heads, dim)
    scores = torch.bmm(grouped, keys.transpose(1, 2)).view(groups, size, heads, width)
    scores = scores.add_(tiles.bias).view(groups * size, heads, width)
    if not tiles.identity:
        scores = scores.index_select(0, tiles.scatter)

    selected = None
    sink_column = sink[None, :, None].expand(rows, heads, 1)
    if pool is None or slots is None or slots.shape[1] == 0:
        logits = torch.cat((scores, sink_column), dim=-1)
    else:
        absent = slots < 0
        selected = pool.index_select(0, slots.clamp(min=0).flatten()).view(rows, -1, dim)
        is_short = bool(absent.any())
        if is_short:
            selected.masked_fill_(absent[:, :, None], 0.0)
        pool_scores = torch.bmm(q, selected.transpose(1, 2))
        if is_short:
            pool_scores.masked_fill_(absent[:, None, :], -torch.inf)
        logits = torch.cat((scores, pool_scores, sink_column), dim=-1)
    weights = torch.softmax(logits, dim=-1)

    near = weights[:, :, :width]
    if not tiles.identity:
        near = near.new_zeros(groups * size, heads, width).index_copy_(0, tiles.scatter, near)
    out = torch.bmm(near.reshape(groups, size * heads, width), keys)
    out = out.view(groups * size, heads, dim)
    if not tiles.identity:
        out = out.index_select(0, tiles.scatter)
    if selected is not None:
        out = torch.baddbmm(out, weights[:, :, width:-1], selected)
    return out
