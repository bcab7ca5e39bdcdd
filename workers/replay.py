"""Which rows of a prompt are computed, read and written: the recipe every execution follows.

Pure: no torch, ray, clock or randomness. Positions are absolute; ranges are half-open.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

RULES_VERSION = "1"


class PlanKind(StrEnum):
    """How the state before the first computed row came to be."""

    COLD = "cold"
    WINDOW = "window"
    FROM_ZERO = "from_zero"
    PREVIOUS_WINDOW = "previous_window"
    BOUNDED = "bounded"
    RESUME = "resume"
    REBUILD = "rebuild"
    ANCHOR = "anchor"


class TailVariant(StrEnum):
    """Which sliding-window rows the decoder half of a prefill may read."""

    FLOORED = "floored"
    LAYER_EXACT = "layer_exact"
    FULL = "full"
    EXACT = "exact"


@dataclass(frozen=True, slots=True)
class Recipe:
    """What admission fixed for a request; every re-execution follows it.

    Attributes:
        kind: how the prefix was obtained.
        start: first encoder row computed; the client is told this many cached tokens.
        swa_floor: lowest position whose encoder window row may ever be read.
        write_floor: block KV below it is read as cached and never written.
        restarts: lineage of the prompt's blocks, ascending, this request's own restart included.
        decoder_start: first decoder row of the prefill and, for life, the decoder read floor.
        tail: which rows the decoder half reads.
        seed: the sampling seed really used.
        rules_version: version of these rules.
    """

    kind: PlanKind
    start: int
    swa_floor: int
    write_floor: int
    restarts: tuple[int, ...]
    decoder_start: int
    tail: TailVariant
    seed: int
    rules_version: str = RULES_VERSION


def decoder_start(num_tokens: int, window: int, tail: TailVariant, start: int) -> int:
    """First decoder row of a prefill of `num_tokens` positions (replay rules, section 2)."""
    if tail is TailVariant.FULL:
        return start
    return max(0, num_tokens - window)


def cold_recipe(num_tokens: int, window: int, tail: TailVariant, seed: int) -> Recipe:
    """The recipe of a prompt none of whose state is reused."""
    return Recipe(
        kind=PlanKind.COLD,
        start=0,
        swa_floor=0,
        write_floor=0,
        restarts=(),
        decoder_start=decoder_start(num_tokens, window, tail, 0),
        tail=tail,
        seed=seed,
    )
