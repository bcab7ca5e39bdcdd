"""What did models say lately, through whichever gateway? Numbered answers; plain Python.

Whoever reads the feed names the place up to which he has read it. A feed that begins anew, in
another process, has another epoch: places in the old one count for nothing there.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

ANSWER_TOKENS = 64
"""What an answer takes beside its tokens, in their room, about."""
MAX_NEWS_TOKENS = 1 << 18
"""Tokens that are told at once, unless one answer alone has more."""


@dataclass(frozen=True, slots=True)
class SaidAnswer:
    """One answer as the model said it.

    Attributes:
        key: what it is found by in a prompt; of one tenant and salt alone.
        said: its token ids, as bytes of `array("I")`.
    """

    key: bytes
    said: bytes

    @property
    def num_tokens(self) -> int:
        """The room it takes."""
        return ANSWER_TOKENS + len(self.said) // 4


@dataclass(frozen=True, slots=True)
class FeedPlace:
    """Up to where a feed was read.

    Attributes:
        epoch: of the feed; empty for one that was never read.
        number: of the first answer that was not read.
    """

    epoch: str = ""
    number: int = 0


@dataclass(frozen=True, slots=True)
class SaidNews:
    """A piece of the feed; oldest answer first, without the reader's own.

    Attributes:
        place: behind the piece.
    """

    place: FeedPlace
    answers: tuple[SaidAnswer, ...]


@dataclass(slots=True)
class SaidFeed:
    """The newest answers of all gateways; the oldest go first.

    Attributes:
        max_tokens: their room in all; 0 keeps none.
        num_tokens: the room that is taken.
    """

    max_tokens: int
    num_tokens: int = 0
    _epoch: str = field(default_factory=lambda: secrets.token_hex(8))
    _num_forgotten: int = 0
    _answers: deque[tuple[str, SaidAnswer]] = field(default_factory=deque)

    def add(self, gateway: str, answers: Iterable[SaidAnswer]) -> None:
        """What a gateway has heard; an answer that is larger than the feed is left out."""
        for answer in answers:
            if answer.num_tokens > self.max_tokens:
                continue
            self._answers.append((gateway, answer))
            self.num_tokens += answer.num_tokens
        while self.num_tokens > self.max_tokens:
            _, oldest = self._answers.popleft()
            self.num_tokens -= oldest.num_tokens
            self._num_forgotten += 1

    def news(self, gateway: str, place: FeedPlace) -> SaidNews:
        """What others have added behind a place, as far as it is kept; some of it if it is much."""
        number = place.number if place.epoch == self._epoch else 0
        number = max(number, self._num_forgotten)
        answers: list[SaidAnswer] = []
        num_tokens = 0
        while number < self._num_forgotten + len(self._answers):
            by, answer = self._answers[number - self._num_forgotten]
            if by != gateway:
                num_tokens += answer.num_tokens
                if answers and num_tokens > MAX_NEWS_TOKENS:
                    break
                answers.append(answer)
            number += 1
        return SaidNews(FeedPlace(self._epoch, number), tuple(answers))
