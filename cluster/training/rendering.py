"""How does a conversation become a training sample? Token ids, and how much each one counts.

A token's weight is that of predicting it. What the assistant says counts whole; of the rest, texts
that can be guessed at all count a little in some samples, and coined names and digits never, unless
they only repeat what was said before: most of what a ledger's tool says of a name is a copy.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from ripresa.cluster.gateway.chat_encoding import (
    ASSISTANT,
    END_OF_REASONING,
    END_OF_SENTENCE,
    ChatEncoding,
    Segment,
)
from ripresa.cluster.gateway.tokenizer import Tokenizer
from ripresa.workers.demo.checkpoint import MODEL_NAME
from ripresa.workers.demo.ledger.conversation import Conversation, Message, Task
from ripresa.workers.demo.ledger.tool_server import TOOLS

_BEGIN = "<｜begin▁of▁sentence｜>"
_UNPREDICTABLE = re.compile(r'"[a-z]+"?|\d+')
_SUBJECT = re.compile(r'(?<= of ")[a-z]+(?=")')
_HEADER = 2
"""Tokens of an answer's header, which ends every prompt."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A sequence to learn from.

    Attributes:
        token_ids: of the whole sequence.
        weights: of predicting each token; the first one's has no meaning.
    """

    token_ids: tuple[int, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """Where an assistant's message lies: its tokens, the end of the sentence included.

    `distance`: tokens between what it was read from and its first token, if it was read.
    """

    task: Task
    start: int
    stop: int
    distance: int | None


@dataclass(frozen=True, slots=True)
class Answers:
    """A conversation's tokens, and every message of the assistant in them."""

    token_ids: tuple[int, ...]
    spans: tuple[Span, ...]


class Renderer:
    """Renders conversations as the gateway does, in chat mode.

    Args:
        tokenizer_file: a V4.1 `tokenizer.json`.

    Raises:
        CheckpointError: it is none.
    """

    def __init__(self, tokenizer_file: Path) -> None:
        self._tokenizer = Tokenizer(tokenizer_file)
        self._encoding = ChatEncoding(self._tokenizer, tokenizer_file, MODEL_NAME)

    def conversation(
        self, conversation: Conversation, context_weight: float, repeat_weight: float = 0.0
    ) -> Sample:
        """A conversation that ends with the assistant's message.

        Args:
            context_weight: of what others than the assistant say.
            repeat_weight: of a subject that they name again.
        """
        segments = self._segments(conversation.messages, conversation.declares_tools)
        token_ids: list[int] = []
        weights: list[float] = []
        assistant = False
        said: set[str] = set()
        for place, segment in enumerate(segments):
            ids = self._encoding.encode([segment])
            token_ids += ids
            if segment.is_special:
                is_header = segment.text == END_OF_REASONING and not assistant
                weights.append(1.0 if assistant and not is_header else 0.0)
                if segment.text == END_OF_SENTENCE:
                    assistant = False
            elif assistant:
                weights += [1.0] * len(ids)
            else:
                weights += self._context_weights(
                    segment.text, ids, (context_weight, repeat_weight), said
                )
            if segment.text == END_OF_REASONING and segments[place - 1].text == ASSISTANT:
                assistant = True
        return Sample(tuple(token_ids), tuple(weights))

    def answers(self, conversation: Conversation) -> Answers:
        """Where the assistant's messages are.

        Raises:
            RipresaError: the gateway would refuse the messages.
            ValueError: they are rendered as another number of answers than is expected.
        """
        sample = self.conversation(conversation, 0.0)
        end = self._tokenizer.special_ids[END_OF_SENTENCE]
        places: list[tuple[int, int]] = []
        start = None
        for place, (token, weight) in enumerate(zip(sample.token_ids, sample.weights, strict=True)):
            if weight and start is None:
                start = place
            if token == end and start is not None:
                places.append((start, place + 1))
                start = None
        if len(places) != len(conversation.expected):
            raise ValueError(
                f"{len(conversation.expected)} messages of the assistant are expected, and "
                f"{len(places)} rendered"
            )
        spans = []
        for message, (start, stop) in zip(conversation.expected, places, strict=True):
            distance = None
            if message.evidence is not None:
                read = conversation.messages[: message.evidence + 1]
                distance = start - self.num_tokens(read, conversation.declares_tools)
            spans.append(Span(message.task, start, stop, distance))
        return Answers(sample.token_ids, tuple(spans))

    def text(self, text: str, weight: float) -> Sample:
        """Plain text behind the token that begins every sequence."""
        ids = self._encoding.encode([Segment(_BEGIN, True), Segment(text, False)])
        return Sample(tuple(ids), (0.0, *[weight] * (len(ids) - 1)))

    def num_tokens(self, messages: Sequence[Message], declares_tools: bool = False) -> int:
        """Tokens of a prompt that ends with these messages, without the answer's header."""
        return len(self._encoding.encode(self._segments(messages, declares_tools)))

    def locate(self, messages: Sequence[Message], text: str) -> tuple[int, int]:
        """Tokens [start, stop) of such a prompt in which a text first stands.

        Raises:
            ValueError: it stands nowhere.
        """
        place = 0
        for segment in self._segments(messages, declares_tools=False):
            ids = self._encoding.encode([segment])
            above, found, _ = segment.text.partition(text)
            if found:
                sizes = (len(self._tokenizer.token_bytes([token])) for token in ids)
                stops = list(accumulate(sizes))
                first, last = len(above.encode()), len((above + text).encode())
                return place + bisect_right(stops, first), place + bisect_left(stops, last) + 1
            place += len(ids)
        raise ValueError(f"no message holds {text!r}")

    def _segments(self, messages: Sequence[Message], declares_tools: bool) -> Sequence[Segment]:
        body = {"messages": list(messages), "thinking": {"type": "disabled"}}
        if declares_tools:
            body["tools"] = list(TOOLS)
        return self._encoding.render(body).segments[:-_HEADER]

    def _context_weights(
        self, text: str, ids: Sequence[int], of: tuple[float, float], said: set[str]
    ) -> list[float]:
        """What others say. `of`: text and repeats; `said`: subjects so far, to be added to."""
        raw = text.encode()
        by_byte = [of[0]] * len(raw)
        # One character a byte, as tokens have them.
        characters = raw.decode("latin-1")
        for match in _UNPREDICTABLE.finditer(characters):
            by_byte[match.start() : match.end()] = [0.0] * len(match[0])
        for match in _SUBJECT.finditer(characters):
            if match[0] in said:
                by_byte[match.start() : match.end()] = [of[1]] * len(match[0])
            said.add(match[0])
        weights, place = [], 0
        for token in ids:
            stop = place + len(self._tokenizer.token_bytes([token]))
            weights.append(min(by_byte[place:stop]))
            place = stop
        return weights
