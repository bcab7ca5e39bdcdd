"""Which token comes next? A pure function of one row of logits, the parameters, the position and
what the sequence's earlier tokens say.

Randomness is counter-based: one uniform number keyed by (seed, position) decides a token, so a
stream that continues on another worker, in another batch or after a replay goes on unchanged.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ripresa.workers.errors import ErrorCode, InvalidArgument, RipresaError
from ripresa.workers.request import SamplingParams, TokenLogprobs
from ripresa.workers.token_history import TokenRules

logger = logging.getLogger(__name__)

TokenMask = NDArray[np.bool_]
"""[vocab], true where a token may come."""

_U64 = (1 << 64) - 1


def sample(
    logits: torch.Tensor,
    params: SamplingParams,
    position: int,
    rules: TokenRules | None = None,
    mask: TokenMask | None = None,
) -> int:
    """The token that `params` choose for `position`.

    Args:
        logits: [vocab], any float dtype and device; computed on as float32 values in float64.
            -inf forbids a token.
        params: how to choose.
        position: absolute position that the chosen token will have.
        rules: what holds for this token; None for nothing.
        mask: what the request's constraint allows; None for everything.

    Raises:
        InvalidArgument: a parameter is out of range.
        RipresaError: INTERNAL; a logit is NaN or +inf, is so after the penalties, or every token
            is forbidden.
    """
    token = sample_batch(logits.unsqueeze(0), [params], [position], [rules], [mask])[0]
    if isinstance(token, RipresaError):
        raise token
    return token


def sample_batch(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    rules: Sequence[TokenRules | None] | None = None,
    masks: Sequence[TokenMask | None] | None = None,
) -> list[int | RipresaError]:
    """`sample` for every row of `logits` [rows, vocab]; a row ignores the other rows.

    What `sample` would raise for a row stands in its place: the others have their tokens.
    """
    rows = logits.detach().to(device="cpu", dtype=torch.float32).numpy()
    rules = [None] * len(rows) if rules is None else rules
    masks = [None] * len(rows) if masks is None else masks
    return [_chosen(*row) for row in zip(rows, params, positions, rules, masks, strict=True)]


def logprobs_of(logits: torch.Tensor, token: int, num_top: int) -> TokenLogprobs:
    """Log probabilities of a row [vocab], as the model gives them: no parameter changes them.

    Of equally likely tokens the lower id comes first.
    """
    row = logits.detach().to(device="cpu", dtype=torch.float64).numpy()
    best = row.max()
    logprobs = row - (best + np.log(np.exp(row - best).sum()))
    num_top = min(num_top, len(row))
    top: tuple[tuple[int, float], ...] = ()
    if num_top:
        least = np.partition(logprobs, len(row) - num_top)[len(row) - num_top]
        ids = np.flatnonzero(logprobs >= least)
        ids = ids[np.argsort(-logprobs[ids], kind="stable")][:num_top]
        top = tuple((int(i), float(logprobs[i])) for i in ids)
    return TokenLogprobs(float(logprobs[token]), top)


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that decides the token at `position`.

    The top 53 bits of the first word that numpy's Philox-4x64-10 gives for the key
    (seed mod 2^64, position), so the numbers of neighbouring keys are independent.
    """
    key = np.array([seed & _U64, position], dtype=np.uint64)
    bits = int(np.random.Philox(key=key).random_raw())
    return (bits >> 11) * 2.0**-53


def _chosen(
    logits: NDArray[np.float32],
    params: SamplingParams,
    position: int,
    rules: TokenRules | None,
    mask: TokenMask | None,
) -> int | RipresaError:
    """What `_choose` returns or raises."""
    try:
        return _choose(logits, params, position, rules, mask)
    except RipresaError as error:
        return error
    except Exception as error:
        logger.exception("position %d was not sampled", position)
        reason = f"cannot sample position {position}: {type(error).__name__}: {error}"
        return RipresaError(ErrorCode.INTERNAL, reason)


def _choose(
    logits: NDArray[np.float32],
    params: SamplingParams,
    position: int,
    rules: TokenRules | None,
    mask: TokenMask | None,
) -> int:
    check_params(params)
    best = int(logits.argmax())  # the first NaN if there is one, else the first maximum
    if not math.isfinite(logits[best]):
        raise RipresaError(
            ErrorCode.INTERNAL,
            f"cannot sample position {position}: the largest logit is {logits[best]}; "
            "the weights or the computation are broken, check them with `ripresa verify golden`",
        )
    if rules is not None and rules.given is not None:
        if not 0 <= rules.given < len(logits):
            raise InvalidArgument(
                "given", f"token id {rules.given} is not in the vocabulary of {len(logits)}"
            )
        return rules.given
    values = logits.astype(np.float64)
    if params.logit_bias or params.banned_token_ids or rules is not None or mask is not None:
        with np.errstate(over="ignore", invalid="ignore"):  # the result is checked
            _change(values, params, rules or TokenRules(), mask)
        best = int(values.argmax())
        if values[best] == -math.inf:
            raise RipresaError(
                ErrorCode.INTERNAL,
                f"cannot sample position {position}: every token is forbidden; ask for fewer "
                "`min_tokens`, or allow more tokens",
            )
        if not math.isfinite(values[best]):
            raise RipresaError(
                ErrorCode.INTERNAL,
                f"cannot sample position {position}: the largest logit is {values[best]} after "
                "the penalties; ask for weaker ones",
            )
    if params.temperature == 0:
        return best
    ids, cumulative = _kept(values, params)
    target = uniform(params.seed, position) * cumulative[-1]
    return int(ids[np.searchsorted(cumulative, target, side="right")])


def _change(
    values: NDArray[np.float64], params: SamplingParams, rules: TokenRules, mask: TokenMask | None
) -> None:
    """Bias, penalties and what is forbidden, in place; ids beyond the vocabulary are nobody's."""
    for token_id, bias in params.logit_bias:
        if token_id < len(values):
            values[token_id] += bias
    said = np.array([token_id for token_id, _ in rules.said], dtype=np.int64)
    if params.repetition_penalty != 1:
        seen = np.union1d(said, np.array(rules.prompt_ids, dtype=np.int64))
        factor = params.repetition_penalty
        values[seen] = np.where(values[seen] > 0, values[seen] / factor, values[seen] * factor)
    if len(said):
        counts = np.array([count for _, count in rules.said], dtype=np.float64)
        values[said] -= params.frequency_penalty * counts + params.presence_penalty
    if mask is not None:
        values[~mask] = -math.inf
    _forbid(values, params.banned_token_ids)
    before = values.copy() if mask is not None and rules.forbidden else None
    _forbid(values, rules.forbidden)
    if before is not None and values.max() == -math.inf:
        # The constraint allows the end alone, and the end comes, too early or not.
        values[:] = before


def _forbid(values: NDArray[np.float64], token_ids: Sequence[int]) -> None:
    for token_id in token_ids:
        if token_id < len(values):
            values[token_id] = -math.inf


def _kept(
    logits: NDArray[np.float64], params: SamplingParams
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Token ids that may be drawn, most likely first, and the running sum of their weights.

    Of equally likely tokens the lower id comes first, and stays first when top-k or top-p cuts
    between them. Top-k and min-p cut before top-p, whose share is that of what they left.
    """
    ids = np.arange(len(logits))
    k = len(logits) if params.top_k is None else min(params.top_k, len(logits))
    if k < len(logits):
        kth_largest = np.partition(logits, len(logits) - k)[len(logits) - k]
        ids = np.flatnonzero(logits >= kth_largest)
    ids = ids[np.argsort(-logits[ids], kind="stable")][:k]
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to -inf: weight 0
        weights = np.exp((logits[ids] - logits[ids[0]]) / params.temperature)
    if params.min_p > 0:  # the likeliest has weight 1
        weights = weights[: max(1, int((weights >= params.min_p).sum()))]
    cumulative = np.cumsum(weights)
    count = int(np.searchsorted(cumulative, params.top_p * cumulative[-1], side="left")) + 1
    return ids[:count], cumulative[:count]


def check_params(params: SamplingParams) -> None:
    """Raise InvalidArgument, naming the field, for numbers that no token can be drawn by."""
    if not 0 <= params.temperature < math.inf:
        raise InvalidArgument(
            "temperature", f"must be a number of at least 0, not {params.temperature}"
        )
    if params.top_k is not None and params.top_k < 1:
        raise InvalidArgument("top_k", f"must be at least 1, not {params.top_k}")
    if not 0 < params.top_p <= 1:
        raise InvalidArgument("top_p", f"must be above 0 and at most 1, not {params.top_p}")
    if not 0 <= params.min_p <= 1:
        raise InvalidArgument("min_p", f"must be 0 to 1, not {params.min_p}")
    if not 0 < params.repetition_penalty < math.inf:
        raise InvalidArgument(
            "repetition_penalty", f"must be above 0, not {params.repetition_penalty}"
        )
    changes = {
        "presence_penalty": (params.presence_penalty,),
        "frequency_penalty": (params.frequency_penalty,),
        "logit_bias": tuple(bias for _, bias in params.logit_bias),
    }
    for field, numbers in changes.items():
        if not all(map(math.isfinite, numbers)):
            raise InvalidArgument(field, "must be finite")
