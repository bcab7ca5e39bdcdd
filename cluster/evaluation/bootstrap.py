"""How sure is a mean over conversations, or a median of runs? 95 % intervals.

Means: by the percentile bootstrap. Tokens of one conversation are no independent draws, so whole
conversations are drawn again. Medians: by the values' ranks, whatever their distribution, since a
few runs of a busy machine say little about its shape.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import comb

import numpy as np
from numpy.typing import NDArray

NUM_DRAWS = 2000
_TAIL = 0.025
"""Beyond either end of an interval."""
FEWEST = 5
"""Conversations that an interval takes: of fewer there are hardly any different draws."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with its interval; None where there is too little for one."""

    mean: float
    low: float | None = None
    high: float | None = None


def ratio(totals: Sequence[float], counts: Sequence[float], seed: int) -> Estimate:
    """The mean of all items, and its 95 % interval; none of fewer than FEWEST conversations.

    Efron and Tibshirani, An Introduction to the Bootstrap, chapter 13: percentiles 2.5 and 97.5.
    A ratio of sums, so that a conversation counts by how many items it has.

    Args:
        totals, counts: of each conversation, the sum over its items and their number, above 0. For
            what two arms say of the same items, the totals' differences: paired, since a draw then
            has the same conversations of both.
        seed: draws are the same for all means of as many conversations.

    Raises:
        ValueError: there is no conversation, or one has no item.
    """
    if not len(totals) or min(counts) <= 0:
        raise ValueError("every conversation must have an item, and there must be one")
    sums = np.asarray([totals, counts], dtype=np.float64)
    mean = float(sums[0].sum() / sums[1].sum())
    if len(totals) < FEWEST:
        return Estimate(mean)
    drawn = _draws(sums.shape[1], seed) @ sums.T
    low, high = np.percentile(drawn[:, 0] / drawn[:, 1], (2.5, 97.5))
    return Estimate(mean, float(low), float(high))


def median(values: Sequence[float]) -> Estimate:
    """The median of independent runs, and its 95 % interval; none of fewer than 6 runs.

    The interval ends at the k-th smallest and the k-th largest value, with the largest k of which
    fewer than k values lie on one side of the true median with a chance of at most 2.5 % (Conover,
    Practical Nonparametric Statistics, section 3.2).

    Raises:
        ValueError: there is no value.
    """
    if not values:
        raise ValueError("a median needs a value")
    ordered = sorted(values)
    number, rank, below = len(ordered), 0, 1
    while below <= _TAIL * 2**number:
        rank += 1
        below += comb(number, rank)
    middle = statistics.median(ordered)
    return Estimate(middle, ordered[rank - 1], ordered[-rank]) if rank else Estimate(middle)


@lru_cache(maxsize=512)
def _draws(number: int, seed: int) -> NDArray[np.float64]:
    """[draws, number]: how often each of `number` conversations is in a draw of as many."""
    generator = np.random.default_rng((seed, number))
    drawn = generator.multinomial(number, np.full(number, 1 / number), size=NUM_DRAWS)
    return drawn.astype(np.float64)
