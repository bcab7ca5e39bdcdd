"""Which token comes next? A pure function of one row of logits, the parameters and the position.

Randomness is counter-based: one uniform number keyed by (seed, position) decides a token, so a
stream that continues on another worker, in another batch or after a replay goes on unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ripresa.workers.errors import ErrorCode, InvalidArgument, RipresaError
from ripresa.workers.request import SamplingParams

_U64 = (1 << 64) - 1


def sample(logits: torch.Tensor, params: SamplingParams, position: int) -> int:
    """The token that `params` choose for `position`.

    Args:
        logits: [vocab], any float dtype and device; computed on as float32 values in float64.
            -inf forbids a token.
        params: how to choose.
        position: absolute position that the chosen token will have.

    Raises:
        InvalidArgument: temperature, top-k or top-p is out of range.
        RipresaError: INTERNAL; a logit is NaN or +inf, or every token is forbidden.
    """
    return sample_batch(logits.unsqueeze(0), [params], [position])[0]


def sample_batch(
    logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
) -> list[int]:
    """`sample` for every row of `logits` [rows, vocab]; a row's token ignores the other rows."""
    rows = logits.detach().to(device="cpu", dtype=torch.float32).numpy()
    return [_choose(*row) for row in zip(rows, params, positions, strict=True)]


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that decides the token at `position`.

    The top 53 bits of the first word that numpy's Philox-4x64-10 gives for the key
    (seed mod 2^64, position), so the numbers of neighbouring keys are independent.
    """
    key = np.array([seed & _U64, position], dtype=np.uint64)
    bits = int(np.random.Philox(key=key).random_raw())
    return (bits >> 11) * 2.0**-53


def _choose(logits: NDArray[np.float32], params: SamplingParams, position: int) -> int:
    _check(params)
    best = int(logits.argmax())  # the first NaN if there is one, else the first maximum
    if not math.isfinite(logits[best]):
        raise RipresaError(
            ErrorCode.INTERNAL,
            f"cannot sample position {position}: the largest logit is {logits[best]}; "
            "the weights or the computation are broken, check them with `ripresa verify golden`",
        )
    if params.temperature == 0:
        return best
    ids, cumulative = _kept(logits.astype(np.float64), params)
    target = uniform(params.seed, position) * cumulative[-1]
    return int(ids[np.searchsorted(cumulative, target, side="right")])


def _kept(
    logits: NDArray[np.float64], params: SamplingParams
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Token ids that may be drawn, most likely first, and the running sum of their weights.

    Of equally likely tokens the lower id comes first, and stays first when top-k or top-p cuts
    between them. Top-k cuts before top-p, whose share is that of what top-k left.
    """
    ids = np.arange(len(logits))
    k = len(logits) if params.top_k is None else min(params.top_k, len(logits))
    if k < len(logits):
        kth_largest = np.partition(logits, len(logits) - k)[len(logits) - k]
        ids = np.flatnonzero(logits >= kth_largest)
    ids = ids[np.argsort(-logits[ids], kind="stable")][:k]
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to -inf: weight 0
        weights = np.exp((logits[ids] - logits[ids[0]]) / params.temperature)
    cumulative = np.cumsum(weights)
    count = int(np.searchsorted(cumulative, params.top_p * cumulative[-1], side="left")) + 1
    return ids[:count], cumulative[:count]


def _check(params: SamplingParams) -> None:
    if not 0 <= params.temperature < math.inf:
        raise InvalidArgument(
            "temperature", f"must be a number of at least 0, not {params.temperature}"
        )
    if params.top_k is not None and params.top_k < 1:
        raise InvalidArgument("top_k", f"must be at least 1, not {params.top_k}")
    if not 0 < params.top_p <= 1:
        raise InvalidArgument("top_p", f"must be above 0 and at most 1, not {params.top_p}")
