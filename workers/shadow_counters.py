"""How far were served answers from what exact replay would have said? Sums over re-scored tokens.

Plain values that travel in a worker's report; `replay_shadow.py` makes them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from math import isfinite
from operator import add, sub

KL_BOUNDS = (1e-6, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
"""Nats a token. They resolve rounding as well as a model that says something else."""


class ShadowReference(StrEnum):
    """What a served token's distribution is held against.

    EXACT: an execution without any restart, with the same decoder rows. REPEAT: one by the
    recipe that was served; it differs by batch mates, workers and devices alone, so it is the
    floor below which the other one says nothing.
    """

    EXACT = "exact"
    REPEAT = "repeat"


class ShadowOutcome(StrEnum):
    """What became of a served token that was to be scored again.

    SCORED: it was, against both references. BUSY: the worker had no idle moment in time. NO_ROOM:
    too many distributions waited already. TOO_LONG: it lies beyond what the memory for re-scoring
    holds. UNFINISHED: its request was cancelled, or failed. FLUSHED: its tenant's state was
    flushed before. FAILED: re-scoring failed; the worker's log says why. STOPPED: the worker
    stopped first.
    """

    SCORED = "scored"
    BUSY = "busy"
    NO_ROOM = "no_room"
    TOO_LONG = "too_long"
    UNFINISHED = "unfinished"
    FLUSHED = "flushed"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Divergence:
    """Distances of served distributions from a reference, token by token, summed.

    Attributes:
        kl_counts: tokens whose KL(reference || served) is at most each of `KL_BOUNDS` and above
            the bound before, and those above all.
        kl_sum: of all tokens, in nats.
        num_agreeing: tokens for which both have the same likeliest token.
    """

    kl_counts: tuple[int, ...] = (0,) * (len(KL_BOUNDS) + 1)
    kl_sum: float = 0.0
    num_agreeing: int = 0

    @classmethod
    def of(cls, distances: Iterable[float], agreements: Iterable[bool]) -> Divergence:
        """Of single tokens: their KL in nats, and whether their likeliest tokens agree.

        Raises:
            ValueError: a distance is not finite; one of the distributions is none.
        """
        counts = [0] * (len(KL_BOUNDS) + 1)
        total = 0.0
        for distance in distances:
            if not isfinite(distance):
                raise ValueError(f"{distance} nats apart: one of the two is no distribution")
            counts[bisect_left(KL_BOUNDS, distance)] += 1
            total += distance
        return cls(tuple(counts), total, sum(agreements))

    @property
    def num_tokens(self) -> int:
        return sum(self.kl_counts)

    def __add__(self, other: Divergence) -> Divergence:
        return Divergence(
            tuple(map(add, self.kl_counts, other.kl_counts)),
            self.kl_sum + other.kl_sum,
            self.num_agreeing + other.num_agreeing,
        )

    def since(self, before: Divergence) -> Divergence:
        """What came after an earlier state of the same sums; nothing if that was no such one."""
        if before.num_tokens > self.num_tokens:
            return Divergence()
        return Divergence(
            tuple(map(sub, self.kl_counts, before.kl_counts)),
            self.kl_sum - before.kl_sum,
            self.num_agreeing - before.num_agreeing,
        )


@dataclass(frozen=True, slots=True)
class ShadowCounters:
    """What a worker's re-scoring has found so far.

    Attributes:
        outcomes: tokens that were to be scored again, by name (`ShadowOutcome`); those that wait
            are in none.
        divergences: by name (`ShadowReference`); each is of the same tokens.
        num_rows: rows of both halves that it took.
    """

    outcomes: tuple[tuple[str, int], ...] = ()
    divergences: tuple[tuple[str, Divergence], ...] = ()
    num_rows: int = 0
