"""What did the model really say in the earlier turns of a conversation?

A client sends an answer back as it understood it: without its reasoning, with its arguments written
anew. Rendered again, that is another text than the one whose state is cached. So the token ids of
each finished answer are kept, and stand in for the turn whenever it comes back in the same place.
"""

from __future__ import annotations

import json
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from threading import Lock
from typing import Protocol

from ripresa.cluster.gateway.chat_encoding import (
    ASSISTANT,
    END_OF_SENTENCE,
    ChatEncoding,
    Prompt,
    Segment,
    Turn,
)

_NUM_HEADER_TOKENS = 2
"""`<｜Assistant｜>`, and the token that opens or closes the reasoning."""


class Said(Protocol):
    """Where answers are found as the model said them."""

    def find(self, key: bytes) -> Sequence[int] | None:
        """The token ids of an answer, its end of sentence included."""


class SaidTurns:
    """Answers by where and what they were; the least recently used go first. Thread-safe.

    Args:
        max_tokens: how many are kept in all; 0 keeps none.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._turns: OrderedDict[bytes, array[int]] = OrderedDict()
        self._num_tokens = 0
        self._lock = Lock()

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def find(self, key: bytes) -> Sequence[int] | None:
        """The token ids of an answer, its end of sentence included."""
        with self._lock:
            found = self._turns.get(key)
            if found is not None:
                self._turns.move_to_end(key)
            return found

    def keep(self, key: bytes, token_ids: Iterable[int]) -> None:
        """Remember an answer; the newest of those that look the same counts."""
        said = array("I", token_ids)
        with self._lock:
            self._forget(key)
            if len(said) > self._max_tokens:
                return
            while self._num_tokens + len(said) > self._max_tokens:
                self._forget(next(iter(self._turns)))
            self._turns[key] = said
            self._num_tokens += len(said)

    def _forget(self, key: bytes) -> None:
        self._num_tokens -= len(self._turns.pop(key, ()))


@dataclass(frozen=True, slots=True)
class OpenTurn:
    """The turn that a prompt leaves to the model.

    Attributes:
        place: what was said before it, as a digest; differs by tenant.
        mark: the header's second token.
        opening: its tokens behind the header that are part of the prompt.
    """

    place: bytes
    mark: int
    opening: tuple[int, ...]

    def key(self, turn: Turn) -> bytes:
        """What the turn is found by, once it is known what it says."""
        return _key(self.place, what_is_said(turn))


@dataclass(frozen=True, slots=True)
class EarlierTurn:
    """An answer that is part of a prompt.

    Attributes:
        start: where its header's second token stands in the prompt.
        what: see `what_is_said`.
        has_calls: whether it calls tools.
    """

    start: int
    what: bytes
    has_calls: bool


@dataclass(frozen=True, slots=True)
class SplicedPrompt:
    """A prompt's token ids.

    Attributes:
        token_ids: as unsigned 32-bit numbers.
        num_spliced: earlier answers that stand as the model said them.
        turns: all earlier answers.
        open_turn: None if the prompt goes on with a message of the client's.
    """

    token_ids: array[int]
    num_spliced: int
    turns: tuple[EarlierTurn, ...]
    open_turn: OpenTurn | None


def splice(encoding: ChatEncoding, prompt: Prompt, said: Said | None, salt: bytes) -> SplicedPrompt:
    """Encode a prompt, earlier answers as the model said them where that is known.

    Args:
        said: where answers are kept; None re-renders all of them.
        salt: the tenant's; answers of another one are never found.
    """
    encoder = encoding.encoder(salt)
    token_ids = array("I")
    digest = blake2b(digest_size=16, person=b"ripresa.turns", salt=b"", key=salt[:64])
    num_hashed = num_spliced = place = 0
    turns: list[EarlierTurn] = []
    open_turn: tuple[bytes, int] | None = None
    segments = prompt.segments
    while place < len(segments):
        header = _next(segments, place, ASSISTANT)
        token_ids += encoder.encode(segments[place:header])
        if header == len(segments):
            break
        place = header + _NUM_HEADER_TOKENS
        token_ids += encoder.encode(segments[header:place])
        digest.update(token_ids[num_hashed:])
        num_hashed = len(token_ids)
        if len(turns) == len(prompt.turns):
            open_turn = digest.digest(), len(token_ids)
            continue
        turn = prompt.turns[len(turns)]
        what = what_is_said(turn)
        turns.append(EarlierTurn(len(token_ids) - 1, what, bool(turn.calls)))
        is_open = prompt.continues and len(turns) == len(prompt.turns)
        found = None if said is None or is_open else said.find(_key(digest.digest(), what))
        if found is not None:
            token_ids.extend(found)
            num_spliced += 1
            place = _next(segments, place, END_OF_SENTENCE) + 1
    opened = None
    if open_turn is not None:
        start = open_turn[1]
        opened = OpenTurn(open_turn[0], token_ids[start - 1], tuple(token_ids[start:]))
    return SplicedPrompt(token_ids, num_spliced, tuple(turns), opened)


def _next(segments: Sequence[Segment], place: int, spelling: str) -> int:
    """Where a special token stands next, from `place` on; the number of segments for nowhere."""
    for number in range(place, len(segments)):
        segment = segments[number]
        if segment.is_special and segment.text == spelling:
            return number
    return len(segments)


def what_is_said(turn: Turn) -> bytes:
    """Digest of a turn's content and calls, however its client wrote them; not its reasoning."""
    calls = [[name, _canonical(arguments)] for name, arguments in turn.calls]
    told = json.dumps([turn.content.strip(), calls])
    return blake2b(told.encode(), digest_size=16).digest()


def _key(place: bytes, what: bytes) -> bytes:
    """What a turn is found by."""
    return blake2b(what, digest_size=16, key=place).digest()


def _canonical(arguments: str) -> str:
    """Arguments without the choices of whoever wrote them; as they are if they are no JSON."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments
