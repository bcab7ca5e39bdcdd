"""From which length of a prompt on is a bounded replay the cheaper way? In rows, and in seconds.

Prompts of experiment `growth`: each with a hit on all that the rules allow, and with none. At one
length, a way is the cheaper if the intervals of both costs are apart; where they overlap, or where
one has none, that is not decided. Rows follow from the rules, so theirs are points.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ripresa.cluster.evaluation.arms import EXACT
from ripresa.cluster.evaluation.bootstrap import Estimate
from ripresa.cluster.evaluation.experiments import BOUNDED, COLD, TRIMMED, Experiment
from ripresa.cluster.evaluation.summary import CostRow

OTHERS = (EXACT, TRIMMED.name, f"{COLD}{TRIMMED.name}")
"""What a bounded replay is held against."""


@dataclass(frozen=True, slots=True)
class Crossing:
    """A bounded replay and another way to the first token.

    Attributes:
        other: the other arm.
        unit: what is counted.
        lengths: of the prompts that were measured, in tokens, in order.
        start: the shortest prompt from which on the bounded one is cheaper at every longer one
            too; None if it is not, or not beyond doubt, at the longest.
        dearer: the longest prompt at which the bounded one is not cheaper, beyond doubt.
        undecided: prompts longer than that of which it is not decided, in order.
        ratios: the bounded one's cost of the other's, at the shortest and at the longest.
    """

    other: str
    unit: str
    lengths: tuple[int, ...]
    start: int | None
    dearer: int | None
    undecided: tuple[int, ...]
    ratios: tuple[float, float]


def crossings(rows: Sequence[CostRow]) -> Iterator[Crossing]:
    """In row-layers and in seconds, against each of OTHERS that was measured."""
    found = {
        (row.arm, row.num_tokens): row
        for row in rows
        if row.experiment == Experiment.GROWTH and row.num_tokens is not None
    }
    for other in OTHERS:
        for unit, of in (("row-layers", row_layers), ("seconds", _seconds)):
            pairs = {
                length: (of(found[BOUNDED.name, length]), of(row))
                for (arm, length), row in sorted(found.items())
                if arm == other and (BOUNDED.name, length) in found
            }
            if pairs:
                yield _crossing(other, unit, pairs)


def row_layers(row: CostRow) -> Estimate:
    """Of both halves; exact, so that the interval is a point."""
    total = row.encoder_row_layers + row.decoder_row_layers
    return Estimate(total, total, total)


def _crossing(other: str, unit: str, pairs: dict[int, tuple[Estimate, Estimate]]) -> Crossing:
    lengths = sorted(pairs)
    cheaper = {length: _is_cheaper(*pairs[length]) for length in lengths}
    dearer = max((length for length in lengths if cheaper[length] is False), default=None)
    start = None
    for length in reversed(lengths):
        if not cheaper[length]:
            break
        start = length
    undecided = tuple(
        length
        for length in lengths
        if cheaper[length] is None and (dearer is None or length > dearer)
    )
    first, last = (
        mine.mean / theirs.mean for mine, theirs in (pairs[lengths[0]], pairs[lengths[-1]])
    )
    return Crossing(other, unit, tuple(lengths), start, dearer, undecided, (first, last))


def _is_cheaper(mine: Estimate, theirs: Estimate) -> bool | None:
    """None: not decided."""
    if mine.low is None or mine.high is None or theirs.low is None or theirs.high is None:
        return None
    if mine.high < theirs.low:
        return True
    return False if mine.low >= theirs.high else None


def _seconds(row: CostRow) -> Estimate:
    return row.seconds
