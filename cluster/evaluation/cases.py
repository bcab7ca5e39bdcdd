"""Which tokens are foretold, behind which boundaries? Conversations as an engine gets them.

    0 ............ hit .................. answer ................. end
                   |                      |<- behind the answer's boundary ->|
                   |<----------- behind the hit's boundary ----------------->|

Two boundaries, because a served prompt has two: the encoder half goes on from the end of the cached
prefix, the decoder half begins with the last rows of the prompt. Both are drawn from all places
that a conversation has for them, so that hits of few and of many blocks are among the cases.
"""

from __future__ import annotations

import lzma
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ripresa.cluster.training.rendering import Answers, Renderer
from ripresa.workers.demo.ledger.conversation import Conversation
from ripresa.workers.demo.ledger.evaluation import FILE, load_evaluation
from ripresa.workers.errors import InvalidArgument, RipresaError
from ripresa.workers.replay_query import ReplayGeometry

LONGEST_DISTANCE = 8
"""Windows behind a boundary that are looked at: 1,024 tokens."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Where an assistant's message lies: tokens [start, stop), and what finding it takes."""

    task: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Case:
    """A conversation's tokens, and where its boundaries are.

    Attributes:
        number: of the conversation in its file.
        hit: end of the cached prefix, where both halves restart; None if it has no place for one.
        answer: first token of an answer, and length of the prompt before it; None likewise.
        answers: every message of the assistant.
        placement: where the evidence of a straddle lies to `hit`; None for others.
    """

    number: int
    token_ids: tuple[int, ...]
    hit: int | None
    answer: int | None
    answers: tuple[Answer, ...]
    placement: str | None = None

    @property
    def supervised(self) -> frozenset[int]:
        """Positions of what the assistant says; all others are context."""
        return frozenset(p for each in self.answers for p in range(each.start, each.stop))


def read_conversations(path: Path | None) -> list[Conversation]:
    """The committed evaluation set, or another file of its form.

    Raises:
        InvalidArgument: it cannot be read, or is no such file.
    """
    file = FILE if path is None else path
    try:
        conversations = load_evaluation(file)
    except OSError as error:
        raise InvalidArgument("--conversations", f"{file} cannot be read: {error}") from error
    except (lzma.LZMAError, ValueError) as error:
        raise InvalidArgument(
            "--conversations",
            f"{file} is no file of conversations ({type(error).__name__}: {error}); it must be "
            "xz-compressed JSON lines, as workers/demo/ledger/evaluation.py writes them",
        ) from error
    if not conversations:
        raise InvalidArgument("--conversations", f"{file} has no conversation")
    return conversations


def spread(num_conversations: int, limit: int, seed: int) -> list[int]:
    """`limit` numbers below `num_conversations`, evenly spread; `seed` says where they begin."""
    limit = min(limit, num_conversations)
    first = seed % num_conversations
    places = (place * num_conversations // limit for place in range(limit))
    return sorted((place + first) % num_conversations for place in places)


def cases_of(
    conversations: Sequence[Conversation],
    numbers: Iterable[int],
    renderer: Renderer,
    geometry: ReplayGeometry,
    max_tokens: int,
    seed: int | None,
    file: Path | None = None,
) -> Iterator[Case]:
    """The chosen conversations as cases.

    Args:
        max_tokens: a conversation ends there.
        seed: of the boundaries' draw; None for the last ones.
        file: that holds them; None for the committed set.

    Raises:
        InvalidArgument: a conversation, which is named, cannot be a prompt.
    """
    for number in numbers:
        conversation = conversations[number]
        try:
            answers = renderer.answers(conversation)
        except (RipresaError, ValueError) as error:
            raise InvalidArgument(
                "--conversations", f"{file or FILE}, line {number + 1}: cannot be a prompt: {error}"
            ) from error
        yield make_case(
            number,
            answers.token_ids[:max_tokens],
            _answers(answers),
            geometry,
            seed,
            conversation.boundary,
            conversation.placement,
        )


def make_case(
    number: int,
    token_ids: tuple[int, ...],
    answers: Sequence[Answer],
    geometry: ReplayGeometry,
    seed: int | None,
    boundary: int | None = None,
    placement: str | None = None,
) -> Case:
    """Choose the boundaries of a conversation.

    The hit ends at `boundary` if there is one, else at a block boundary behind the first one that
    has half a window behind it. The answer is one whose prompt can have a bounded replay: two
    cached blocks, and behind them the rows that the hit rule leaves native.

    Args:
        seed: of the draw among these places, all equally likely; None for the last ones.
    """
    window, length = geometry.window, len(token_ids)
    whole = tuple(each for each in answers if each.stop <= length)
    hits = range(2 * window, length - window // 2, window)
    if boundary is not None:
        is_place = boundary % window == 0 and window < boundary < length - 1
        hits = range(boundary, boundary + is_place)
    shortest = 3 * geometry.window + geometry.rewind
    starts = [each.start for each in whole if each.start >= shortest]
    generator = None if seed is None else random.Random(f"{seed} {number}")
    hit, answer = _one_of(hits, generator), _one_of(starts, generator)
    return Case(number, token_ids, hit, answer, whole, placement)


def _one_of(places: Sequence[int], generator: random.Random | None) -> int | None:
    if not places:
        return None
    return places[-1] if generator is None else generator.choice(places)


def stack_of(cases: Iterable[Case], num_tokens: int) -> Iterator[Case]:
    """Cases of `num_tokens` tokens: conversations one behind the other, none used twice.

    A conversation is too short for many cached prefixes that were each computed behind another.
    """
    token_ids: list[int] = []
    answers: list[Answer] = []
    number = 0
    for case in cases:
        if not token_ids:
            number = case.number
        shift = len(token_ids)
        answers += [Answer(a.task, a.start + shift, a.stop + shift) for a in case.answers]
        token_ids += case.token_ids
        if len(token_ids) >= num_tokens:
            kept = tuple(a for a in answers if a.stop <= num_tokens)
            yield Case(number, tuple(token_ids[:num_tokens]), None, None, kept)
            token_ids, answers = [], []


def _answers(answers: Answers) -> tuple[Answer, ...]:
    return tuple(Answer(span.task.value, span.start, span.stop) for span in answers.spans)
