"""How are worlds and scripts drawn? The same values from the same seed on every machine.

`random.Random.random` is the one method whose sequence Python keeps across versions, so everything
is made from it.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TypeVar

T = TypeVar("T")

CONSONANTS = "bcdfghjklmnprstvwxz"
VOWELS = "aeiou"
_HELD_OUT = 8
"""One name in so many, and one paragraph, belongs to the evaluation alone."""


class Split(StrEnum):
    """What something is drawn for; the two share no name, no paragraph and no seed."""

    TRAINING = "training"
    EVALUATION = "evaluation"


class Draws:
    """A source of draws for one item of a split.

    Args:
        index: of the item, 0 or more; neighbours have nothing in common.
    """

    def __init__(self, split: Split, index: int) -> None:
        self.split = split
        self._random = random.Random(f"ledger:{split}:{index}").random
        self._coined: set[str] = set()

    def below(self, bound: int) -> int:
        """A number in [0, bound)."""
        return int(self._random() * bound)

    def between(self, first: int, last: int) -> int:
        """A number in [first, last], both included."""
        return first + self.below(last - first + 1)

    def chance(self, share: float) -> bool:
        return self._random() < share

    def pick(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def weighted(self, weights: Mapping[T, float]) -> T:
        """One of the keys, as often as its weight says."""
        place = self._random() * sum(weights.values())
        chosen = next(iter(weights))
        for option, weight in weights.items():
            if weight <= 0:
                continue
            chosen, place = option, place - weight
            if place < 0:
                break
        return chosen

    def sample(self, options: Sequence[T], count: int) -> list[T]:
        """`count` different places of a sequence, in drawn order."""
        left = list(options)
        return [left.pop(self.below(len(left))) for _ in range(count)]

    def name(self) -> str:
        """A coined name that this source has not given before: two open syllables and a consonant.

        There are about 150,000 for training and 21,000 others for evaluation.
        """
        while True:
            syllables = (self.pick(CONSONANTS) + self.pick(VOWELS) for _ in range(2))
            name = "".join(syllables) + self.pick(CONSONANTS)
            if name not in self._coined and split_of(name) is self.split:
                self._coined.add(name)
                return name


def split_of(text: str) -> Split:
    """Whom a name or a paragraph belongs to."""
    held_out = zlib.crc32(text.encode()) % _HELD_OUT == 0
    return Split.EVALUATION if held_out else Split.TRAINING
