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


class ReplayMode(StrEnum):
    """Which cached blocks a request may reuse, and what its encoder windows are then worth."""

    BOUNDED = "bounded"
    EXACT = "exact"
    CANONICAL = "canonical"


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
        anchor_interval: A of mode canonical, whose decode restarts at every later multiple too;
            None in the other modes.
        source_floor: lowest of layer E's own window rows that a decoder row may read, if it lies
            below `decoder_start` (tail layer_exact); None if it is `decoder_start`.
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
    anchor_interval: int | None = None
    source_floor: int | None = None

    def restarts_below(self, stop: int) -> tuple[int, ...]:
        """Lineage of rows that end at `stop`; mode canonical restarts beyond the prompt too."""
        if self.anchor_interval is not None:
            return canonical_restarts(stop, self.anchor_interval)
        return tuple(restart for restart in self.restarts if restart < stop)


def decoder_start(
    num_tokens: int,
    window: int,
    tail: TailVariant,
    start: int,
    num_decoder_layers: int | None = None,
) -> int:
    """First decoder row of a prefill of `num_tokens` positions (replay rules, sections 2 and 5).

    Tail `exact` needs the encoder output of the last 1 + (W-1)D positions and so D, the number of
    decoder layers; the other tails do not.
    """
    match tail:
        case TailVariant.FULL:
            return start
        case TailVariant.EXACT:
            if num_decoder_layers is None:
                raise ValueError("tail 'exact' depends on the number of decoder layers")
            return max(0, num_tokens - 1 - (window - 1) * num_decoder_layers)
        case TailVariant.FLOORED | TailVariant.LAYER_EXACT:
            return max(0, num_tokens - window)


def canonical_restarts(stop: int, interval: int) -> tuple[int, ...]:
    """Lineage canonical(A) of rows that end at `stop`: every multiple of A below it, but 0."""
    return tuple(range(interval, stop, interval))


def may_reuse(mode: ReplayMode, restarts: tuple[int, ...], interval: int | None) -> bool:
    """Whether some chain with these restarts, all of them, can serve a request of this mode."""
    match mode:
        case ReplayMode.BOUNDED:
            return True
        case ReplayMode.EXACT:
            return not restarts
        case ReplayMode.CANONICAL:
            assert interval is not None
            return restarts == canonical_restarts(restarts[-1] + 1 if restarts else 0, interval)


def follows(
    mode: ReplayMode,
    lineage: tuple[int, ...],
    restarts: tuple[int, ...],
    boundary: int,
    interval: int | None,
) -> bool:
    """Whether a block with `restarts` may come next in a reused chain (replay rules, section 5).

    Args:
        lineage: restarts of the block before it; () for none.
        boundary: the block's first position. A restart below the block's end that the block
            before it does not have can only be this one.
        interval: A of mode canonical; None in the other modes.
    """
    extended = (*lineage, boundary) if boundary else lineage
    match mode:
        case ReplayMode.BOUNDED:
            return restarts in (lineage, extended)
        case ReplayMode.EXACT:
            return not restarts
        case ReplayMode.CANONICAL:
            assert interval is not None
            return restarts == (lineage if boundary % interval else extended)


def cold_recipe(
    num_tokens: int,
    window: int,
    tail: TailVariant,
    seed: int,
    num_decoder_layers: int | None = None,
) -> Recipe:
    """The recipe of a prompt none of whose state is reused; see `decoder_start`."""
    return Recipe(
        kind=PlanKind.COLD,
        start=0,
        swa_floor=0,
        write_floor=0,
        restarts=(),
        decoder_start=decoder_start(num_tokens, window, tail, 0, num_decoder_layers),
        tail=tail,
        seed=seed,
    )
