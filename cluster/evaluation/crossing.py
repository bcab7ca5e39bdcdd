"""From which length of a prompt on is a bounded replay the cheaper way? In rows, and in seconds.

Prompts of experiment `growth`: each with a hit on all that the rules allow, and with none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ripresa.cluster.evaluation.arms import EXACT
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
        shortest, longest: prompts that were measured, in tokens.
        start: the shortest prompt from which on the bounded one is cheaper at every longer one
            too; None if it is not at the longest.
        ratios: the bounded one's cost of the other's, at the shortest and at the longest.
    """

    other: str
    unit: str
    shortest: int
    longest: int
    start: int | None
    ratios: tuple[float, float]


def crossings(rows: Sequence[CostRow]) -> Iterator[Crossing]:
    """In row-layers and in median seconds, against each of OTHERS that was measured."""
    found = {
        (row.arm, row.num_tokens): row
        for row in rows
        if row.experiment == Experiment.GROWTH and row.num_tokens is not None
    }
    for other in OTHERS:
        for unit, of in (("row-layers", _row_layers), ("seconds", _seconds)):
            ratios = {
                length: of(found[BOUNDED.name, length]) / of(row)
                for (arm, length), row in sorted(found.items())
                if arm == other and (BOUNDED.name, length) in found
            }
            if ratios:
                yield _crossing(other, unit, ratios)


def _crossing(other: str, unit: str, ratios: dict[int, float]) -> Crossing:
    start = None
    for length in sorted(ratios, reverse=True):
        if ratios[length] >= 1:
            break
        start = length
    shortest, longest = min(ratios), max(ratios)
    return Crossing(other, unit, shortest, longest, start, (ratios[shortest], ratios[longest]))


def _row_layers(row: CostRow) -> float:
    return row.encoder_row_layers + row.decoder_row_layers


def _seconds(row: CostRow) -> float:
    return row.seconds.mean
