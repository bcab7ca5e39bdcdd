"""What was measured of the bundled weights? Every answer of the evaluation set, right or wrong.

Kept by message, so that a table can be made of it, and a few conversations be asked again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ripresa.cluster.training.live import questions
from ripresa.cluster.training.rendering import Renderer
from ripresa.cluster.training.scores import Score
from ripresa.workers.demo.ledger.conversation import Conversation


@dataclass(frozen=True, slots=True)
class Marks:
    """Of a conversation's answers, in order: which were right, and which valid (`measure_live`)."""

    exact: tuple[bool, ...]
    valid: tuple[bool, ...]

    @staticmethod
    def of(scores: Sequence[Score]) -> Marks:
        """Those of a conversation's scores, as `measure_live` gives them."""
        return Marks(tuple(s.is_exact for s in scores), tuple(s.share == 1.0 for s in scores))


@dataclass(frozen=True, slots=True)
class Figures:
    """What one measurement found.

    Attributes:
        weights: `model_digest` of the checkpoint that was served.
        marks: by a conversation's place in the evaluation set.
    """

    weights: str
    marks: Mapping[int, Marks]

    def scores(self, renderer: Renderer, every: Sequence[Conversation]) -> Iterator[Score]:
        """One for each message.

        Args:
            every: the evaluation set.
        """
        for place, marks in self.marks.items():
            asked = questions(renderer, every[place])
            for question, exact, valid in zip(asked, marks.exact, marks.valid, strict=True):
                yield Score(question.task, question.bucket, exact, float(valid))

    def save(self, path: Path) -> None:
        """Write JSON, a conversation a line, a digit a message: 1 for what it was."""
        lines = (
            f'"{place}": {json.dumps([_digits(marks.exact), _digits(marks.valid)])}'
            for place, marks in sorted(self.marks.items())
        )
        marks = ",\n".join(lines)
        path.write_text(f'{{"weights": "{self.weights}", "marks": {{\n{marks}\n}}}}\n')

    @staticmethod
    def load(path: Path) -> Figures:
        """What `save` wrote."""
        document = json.loads(path.read_text())
        marks = {int(n): Marks(*map(_flags, both)) for n, both in document["marks"].items()}
        return Figures(document["weights"], marks)


def evenly(number: int, total: int) -> list[int]:
    """Places in the evaluation set, evenly spread."""
    return [place * total // number for place in range(number)]


def _digits(flags: Sequence[bool]) -> str:
    return "".join(str(int(flag)) for flag in flags)


def _flags(digits: str) -> tuple[bool, ...]:
    return tuple(digit == "1" for digit in digits)
