"""Why does a conversation's prompt no longer begin with its last prompt and answer?

Each conversation's newest prompt is remembered as digests, a few for each turn. The next prompt is
held against them; the first difference is the reason. A conversation is known by its session, or by
its head and first message.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

from ripresa.cluster.gateway.said_turns import SplicedPrompt
from ripresa.cluster.observability.metrics import BreakReason

MAX_TURNS = 200_000
"""Turns of all remembered conversations; each takes about a hundred bytes."""


@dataclass(frozen=True, slots=True)
class TurnMarks:
    """An answer, and what stands between it and the one before, as digests.

    Attributes:
        before: of all tokens since the last answer, this one's header included.
        said: of its tokens.
        reasoning: of those that end its reasoning and all before.
        what: of its content and calls, however they are written.
        has_calls: whether it calls tools.
    """

    before: bytes
    said: bytes
    reasoning: bytes
    what: bytes
    has_calls: bool


@dataclass(frozen=True, slots=True)
class Outline:
    """A prompt as digests.

    Attributes:
        head: of everything before the first message.
        turns: the answers in it.
        last: of what follows the last answer, the open turn's header included; None if no turn is
            open.
    """

    head: bytes
    turns: tuple[TurnMarks, ...]
    last: bytes | None

    @property
    def first(self) -> bytes:
        """Of what is said before the first answer."""
        return self.turns[0].before if self.turns else self.last or b""


class Conversation:
    """The newest prompt of one conversation, and the answers that it got."""

    __slots__ = ("answers", "called_at", "outline")

    def __init__(self, outline: Outline) -> None:
        self.outline = outline
        self.answers: list[TurnMarks] = []
        self.called_at: float | None = None


@dataclass(frozen=True, slots=True)
class Continuation:
    """How a prompt continues what is known of its conversation.

    Attributes:
        conversation: to be told the answer.
        broken: why it does not begin with the last prompt and answer; None if it does.
        gap_s: seconds since the last answer called tools; None if it did not.
    """

    conversation: Conversation
    broken: BreakReason | None = None
    gap_s: float | None = None


class Conversations:
    """The newest prompts of a gateway's conversations; the least recently seen go first.

    Used on one event loop.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float], max_turns: int = MAX_TURNS) -> None:
        self._clock = clock
        self._max_turns = max_turns
        self._known: OrderedDict[tuple[bytes, str, bytes], Conversation] = OrderedDict()
        self._num_turns = 0

    @property
    def num_turns(self) -> int:
        return self._num_turns

    def arrived(self, salt: bytes, session_id: str | None, outline: Outline) -> Continuation:
        """A prompt was accepted: compare it with the last one, and remember it instead."""
        key = (salt, session_id, b"") if session_id else (salt, "", outline.head + outline.first)
        before = self._known.pop(key, None)
        conversation = self._known[key] = Conversation(outline)
        self._num_turns += _size(outline)
        if before is not None:
            self._num_turns -= _size(before.outline)
        while self._num_turns > self._max_turns:
            _, oldest = self._known.popitem(last=False)
            self._num_turns -= _size(oldest.outline)
        if before is None:
            return Continuation(conversation)
        called_at = before.called_at
        return Continuation(
            conversation,
            break_reason(before, outline),
            None if called_at is None else self._clock() - called_at,
        )

    def answered(self, conversation: Conversation, marks: TurnMarks) -> None:
        """The model has ended an answer to the conversation's newest prompt."""
        conversation.answers.append(marks)
        if marks.has_calls:
            conversation.called_at = self._clock()


def break_reason(before: Conversation, outline: Outline) -> BreakReason | None:
    """Why `outline` does not begin with the conversation's prompt and one of its answers."""
    old = before.outline
    if outline.head != old.head:
        return BreakReason.HEAD_CHANGED
    if len(outline.turns) < len(old.turns):
        return BreakReason.HISTORY_EDITED
    for was, now in zip(old.turns, outline.turns, strict=False):
        if (reason := _difference(was, now)) is not None:
            return reason
    if not before.answers:
        return None
    if len(outline.turns) == len(old.turns):
        # The same prompt once more, or its last messages were changed.
        return None if outline.last == old.last else BreakReason.HISTORY_EDITED
    answer = outline.turns[len(old.turns)]
    same = [a for a in before.answers if a.what == answer.what] or before.answers
    reasons = [_difference(was, answer) for was in same]
    return None if None in reasons else reasons[0]


def _difference(was: TurnMarks, now: TurnMarks) -> BreakReason | None:
    if was.before != now.before or was.what != now.what:
        return BreakReason.HISTORY_EDITED
    if was.said == now.said:
        return None
    if was.reasoning != now.reasoning:
        return BreakReason.REASONING_MISSING
    return BreakReason.ARGS_RERENDERED if was.has_calls else BreakReason.HISTORY_EDITED


def outline_of(
    prompt: SplicedPrompt, *, user_id: int, end_id: int, end_of_reasoning_id: int
) -> Outline:
    """A prompt's digests, made once a request: a pass over its tokens at the speed of memory.

    Args:
        user_id: opens the first message.
        end_id: closes a turn.
        end_of_reasoning_id: closes the reasoning in it.
    """
    token_ids = prompt.token_ids
    starts = [turn.start for turn in prompt.turns]
    turn = prompt.open_turn
    open_at = None if turn is None else len(token_ids) - len(turn.opening) - 1
    first = starts[0] if starts else len(token_ids) if open_at is None else open_at
    head_stop = _find(token_ids, user_id, 0, first)
    turns = []
    place = head_stop
    for earlier in prompt.turns:
        start = earlier.start
        stop = min(len(token_ids), _find(token_ids, end_id, start, len(token_ids)) + 1)
        before, said = _digest(token_ids[place:start]), token_ids[start:stop]
        marks = turn_marks(before, said, earlier.what, earlier.has_calls, end_of_reasoning_id)
        turns.append(marks)
        place = stop
    last = None if open_at is None else _digest(token_ids[place:open_at])
    return Outline(_digest(token_ids[:head_stop]), tuple(turns), last)


def turn_marks(
    before: bytes, said: array[int], what: bytes, has_calls: bool, end_of_reasoning_id: int
) -> TurnMarks:
    """An answer's digests.

    Args:
        before: of the tokens in front of it.
        said: its tokens, from its header's second one to the end of sentence.
        what: see `what_is_said`.
    """
    stop = _find(said, end_of_reasoning_id, 0, len(said))
    return TurnMarks(before, _digest(said), _digest(said[: stop + 1]), what, has_calls)


def _find(token_ids: array[int], wanted: int, start: int, stop: int) -> int:
    """The first place of a token within [start, stop); `stop` if it is not there."""
    try:
        return token_ids.index(wanted, start, stop)
    except ValueError:
        return stop


def _digest(token_ids: array[int]) -> bytes:
    return blake2b(token_ids, digest_size=8).digest()


def _size(outline: Outline) -> int:
    return len(outline.turns) + 1
