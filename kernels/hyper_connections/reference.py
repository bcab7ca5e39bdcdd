"""How do the residual streams of a layer mix? Single-pass hyper-connections.

Source: model specification, section 4.
"""

from __future__ import annotations

import torch

from ripresa.kernels.lanes.reference import whole_lanes
from ripresa.kernels.linear.reference import linear
from ripresa.kernels.rms_norm.reference import reciprocal_rms

_SUM_COLUMNS = 64
"""Measured: over a multiple of this many columns, a CPU sum adds every column in one order."""


def hc_mix(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    iterations: int,
    hc_eps: float,
    norm_eps: float,
    min_rows: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The mixing weights that one site derives from its incoming streams.

    Args:
        streams: [T, n, d] float32.
        fn: [(2 + n) n, n d]; base: [(2 + n) n]; scale: [3].
        iterations: Sinkhorn rounds, the softmax round included.

    Returns:
        pre_next [T, n] for the following site, post [T, n], and comb transposed: [T, n, n] with
        rows k (outgoing stream) and columns j (incoming).
    """
    rows, n, _ = streams.shape
    flat = streams.flatten(1)
    m = linear(flat, fn, min_rows)
    m = m * reciprocal_rms(flat, norm_eps)
    deterministic = min_rows > 0
    pre_next = m[:, :n] * scale[0] + base[:n]
    pre_next = whole_lanes(torch.sigmoid, pre_next, deterministic).add_(hc_eps)
    post = m[:, n : 2 * n] * scale[1] + base[n : 2 * n]
    post = whole_lanes(torch.sigmoid, post, deterministic).mul_(2.0)
    logits = (m[:, 2 * n :] * scale[2] + base[2 * n :]).view(rows, n, n)
    return pre_next, post, _sinkhorn(logits, iterations, hc_eps, deterministic)


def _sinkhorn(logits: torch.Tensor, iterations: int, eps: float, pad: bool) -> torch.Tensor:
    """Softmax over k, then alternate column and row normalisation, column step last; transposed.

    The work layout is [n + 1, n + 1, T] with a border of eps: sums then include the epsilon, and
    every operation runs along rows. `pad` rounds T up, so that a sum adds in one order whatever T.
    """
    rows, n, _ = logits.shape
    width = rows + (-rows % _SUM_COLUMNS if pad else 0)
    bordered = torch.full((n + 1, n + 1, width), eps, dtype=logits.dtype, device=logits.device)
    comb = bordered[:n, :n]
    comb[:, :, :rows].copy_(torch.softmax(logits, -1).permute(1, 2, 0)).add_(eps)
    with_row_eps, with_column_eps = bordered[:, :n], bordered[:n, :]
    comb.div_(with_row_eps.sum(0, keepdim=True))
    for _ in range(iterations - 1):
        comb.div_(with_column_eps.sum(1, keepdim=True))
        comb.div_(with_row_eps.sum(0, keepdim=True))
    return comb[:, :, :rows].permute(2, 1, 0).contiguous()


def hc_collapse(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """x = sum_k pre[k] streams[k]: [T, n, d], [T, n] -> [T, d]."""
    return torch.bmm(pre[:, None, :], streams)[:, 0]


def hc_expand(
    y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    """streams'[k] = post[k] y + sum_j comb[k, j] streams[j]: [T, d], [T, n, d] -> [T, n, d]."""
    mixed = torch.bmm(comb, streams)
    return mixed.addcmul_(post[:, :, None], y[:, None, :])
