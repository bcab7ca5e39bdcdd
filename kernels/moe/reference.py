"""Which experts see a row, and what do they answer? Routing and clamped SwiGLU experts.

Source: model specification, section 9.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ripresa.kernels.codecs.grids import round_linear_input
from ripresa.kernels.lanes.reference import whole_lanes
from ripresa.kernels.linear.reference import linear


def moe_route(
    scores: torch.Tensor, bias: torch.Tensor, num_picked: int, scaling: float, min_rows: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pick experts for rows of raw gate outputs.

    Args:
        scores: [T, experts] float32, `x @ gate^T`.
        bias: [experts] float32; it only picks.

    Returns:
        weights [T, num_picked] float32 and expert numbers [T, num_picked] int64.
    """
    gate = whole_lanes(F.softplus, scores, min_rows > 0).sqrt_()
    picked = torch.topk(gate + bias, num_picked, dim=-1).indices
    weights = gate.gather(-1, picked)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * scaling
    return weights, picked


def swiglu_expert(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    limit: float,
    weights: torch.Tensor | None = None,
    min_rows: int = 0,
    round_inputs: bool = False,
) -> torch.Tensor:
    """One expert: `w2 (weights * silu(min(w1 x, limit)) * clamp(w3 x, +-limit))`.

    Args:
        x: [T, d]; w13: [2 I, d], w1 above w3; w2: [d, I]; weights: [T] or None.
        round_inputs: round the input of w2 as `round_linear_input` does; x has been.
    """
    gate, up = linear(x, w13, min_rows).chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    z = whole_lanes(F.silu, gate, True) if min_rows else F.silu(gate, inplace=True)
    z.mul_(up.clamp_(-limit, limit))
    if weights is not None:
        z.mul_(weights[:, None])
    if round_inputs:
        z = round_linear_input(z)
    return linear(z, w2, min_rows)


def moe_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    picked: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    limit: float,
    min_rows: int = 0,
    round_inputs: bool = False,
) -> torch.Tensor:
    """Sum of the picked experts' answers, in ascending expert order: [T, d] float32.

    Loops over the experts that are present, so that weights are read in place and never copied.

    Args:
        x: [T, d]; weights, picked: [T, k]; w13: [experts, 2 I, d]; w2: [experts, d, I].
    """
    k = picked.shape[1]
    order = torch.argsort(picked.flatten(), stable=True)
    rows = order.div(k, rounding_mode="floor")
    sorted_x = x.index_select(0, rows)
    sorted_weights = weights.flatten().index_select(0, order)
    out = torch.zeros_like(x)
    first = 0
    for expert, count in enumerate(torch.bincount(picked.flatten()).tolist()):
        if not count:
            continue
        part = slice(first, first + count)
        first += count
        answer = swiglu_expert(
            sorted_x[part],
            w13[expert],
            w2[expert],
            limit,
            sorted_weights[part],
            min_rows,
            round_inputs,
        )
        out.index_add_(0, rows[part], answer)
    return out
