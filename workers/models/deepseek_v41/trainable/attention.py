"""How does attention over whole sequences pass gradients? Window, chosen entries and sink.

Queries are taken in blocks of a window. A block meets the window rows of itself and the block
before, and the entries that its last query sees; a bias of -inf hides what a query must not see.
"""

# mypy: disable-error-code="no-untyped-call,misc"

from __future__ import annotations

from typing import Any

import torch

Tensor = torch.Tensor

_WIDTH = 32
"""Keys of a block are padded to a multiple of it, since products of other widths are slower."""


def block_rows(window: int) -> int:
    """Queries that are taken together. Fewer waste less of their keys, more need fewer products."""
    return window // 2


def block_biases(
    num_rows: int,
    window: int,
    chosen: list[Tensor] | None,
    dtype: torch.dtype,
    floors: Tensor | None = None,
) -> list[Tensor]:
    """The bias of each block of queries: [B or 1, rows, keys], as `attend` takes it.

    The keys are window rows, entries, the sink and padding.

    Args:
        num_rows: of a sequence, a multiple of `window`.
        chosen: bool [B, rows, entries] of each block; None for layers without a pool.
        floors: [B] int64; rows from there on see no window row below it. None for no such place.
    """
    size = block_rows(window)
    row = torch.arange(size)[:, None]
    key = torch.arange(-window, size)
    near = ((key <= row) & (key > row - window))[None]
    biases = []
    for block in range(num_rows // size):
        seen = near
        if floors is not None:
            floor = (floors - block * size)[:, None, None]
            seen = near & ((row < floor) | (key >= floor))
        seen = seen[..., max(window - block * size, 0) :]
        if chosen is not None:
            entries = chosen[block]
            seen = torch.cat((seen.expand(len(entries), -1, -1), entries), -1)
        seen = torch.nn.functional.pad(seen, (0, 1), value=True)
        seen = torch.nn.functional.pad(seen, (0, -seen.shape[-1] % _WIDTH), value=False)
        biases.append(torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf))
    return biases


def attend(
    q: Tensor,
    rows: Tensor,
    entries: Tensor | None,
    biases: list[Tensor],
    num_entries: list[int],
    sink: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, list[Tensor]]:
    """Attention of every query; products are of the biases' type.

    Args:
        q: [B, T, H, D]; rows: [B, T, D] window rows, keys and values of every head.
        entries: [B, N, D] of the layer's pool, or None.
        biases: from `block_biases`.
        num_entries: of each block, entries among its keys, the first of the pool.
        sink: [H].

    Returns:
        [B, T, H, D], and of each block the attention to entries, summed over heads:
        [B, rows, entries], without gradients; empty without a pool.
    """
    size = block_rows(window)
    outputs, shares = [], []
    dtype = biases[0].dtype
    rows = rows.to(dtype)
    entries = None if entries is None else entries.to(dtype)
    blocks = q.unflatten(1, (-1, size)).unbind(1)
    for block, (bias, queries) in enumerate(zip(biases, blocks, strict=True)):
        stop = (block + 1) * size
        first = max(stop - size - window, 0)
        keys = [rows[:, first:stop]]
        if entries is not None:
            keys.append(entries[:, : num_entries[block]])
        missing = bias.shape[-1] - sum(part.shape[1] for part in keys)
        keys.append(rows.new_zeros(rows.shape[0], missing, rows.shape[2]))
        span = (stop - first, stop - first + (0 if entries is None else num_entries[block]))
        out, share = _SinkAttention.apply(queries, torch.cat(keys, 1), bias, sink, scale, span)
        outputs.append(out)
        if entries is not None:
            shares.append(share)
    return torch.cat(outputs, 1), shares


class _SinkAttention(torch.autograd.Function):
    """softmax(q . keys * scale + bias) over keys, which are values too.

    `span` says which keys are entries; behind them come the sink's, which is zero, and padding.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        keys: Tensor,
        bias: Tensor,
        sink: Tensor,
        scale: float,
        span: tuple[int, int],
    ) -> tuple[Tensor, Tensor]:
        batch, rows, heads, _ = q.shape
        width = keys.shape[1]
        logits = bias[:, :, None].expand(batch, rows, heads, width).contiguous()
        logits[..., span[1]] = sink
        flat = q.reshape(batch, rows * heads, -1).to(keys.dtype)
        logits = logits.view(batch, rows * heads, width)
        torch.baddbmm(logits, flat, keys.transpose(1, 2), alpha=scale, out=logits)
        weights = torch.softmax(logits, -1)
        out = torch.bmm(weights, keys).view(q.shape).to(q.dtype)
        by_head = weights.view(batch, rows, heads, width)
        share = by_head[..., span[0] : span[1]].sum(2, dtype=torch.float32)
        ctx.save_for_backward(flat, keys, weights)
        ctx.scale, ctx.sink_column = scale, span[1]
        ctx.mark_non_differentiable(share)
        return out, share

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor, _: Tensor
    ) -> tuple[Tensor, Tensor, None, Tensor, None, None]:
        q, keys, weights = ctx.saved_tensors
        heads = grad.shape[2]
        of_out = grad.reshape(q.shape).to(keys.dtype)
        of_weights = torch.bmm(of_out, keys.transpose(1, 2))
        of_logits = torch._softmax_backward_data(of_weights, weights, -1, weights.dtype)
        of_sink = of_logits[..., ctx.sink_column].reshape(-1, heads).sum(0, dtype=grad.dtype)
        of_q = torch.bmm(of_logits, keys).to(grad.dtype).mul_(ctx.scale).view_as(grad)
        of_keys = torch.bmm(weights.transpose(1, 2), of_out)
        of_keys.baddbmm_(of_logits.transpose(1, 2), q, alpha=ctx.scale)
        return of_q, of_keys, None, of_sink, None, None
