"""Which conversations are drawn? Turns of every task until a conversation is long enough."""

from __future__ import annotations

import copy
import json
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from ripresa.workers.demo.ledger.conversation import (
    Call,
    Conversation,
    Message,
    Task,
    Turn,
    Writer,
)
from ripresa.workers.demo.ledger.draws import Draws
from ripresa.workers.demo.ledger.tool_server import ToolServer
from ripresa.workers.demo.ledger.world import (
    RECORDED,
    Field,
    World,
    draw_world,
    sentence,
)

Mix = Mapping[Task, float]
"""How often turns of each task are drawn."""

WARM_UP: Mix = {Task.REPEAT: 0.65, Task.NEAR: 0.2, Task.FAR: 0.15}
"""Mostly copying, which is what retrieval grows from."""

FULL: Mix = {
    Task.REPEAT: 0.1,
    Task.NEAR: 0.24,
    Task.FAR: 0.26,
    Task.NEEDLE: 0.08,
    Task.TWO_HOP: 0.12,
    Task.UPDATE: 0.06,
    Task.ABSENT: 0.06,
    Task.CALC: 0.08,
}

RECALL: Mix = {
    Task.REPEAT: 0.12,
    Task.NEAR: 0.13,
    Task.FAR: 0.42,
    Task.NEEDLE: 0.06,
    Task.TWO_HOP: 0.08,
    Task.UPDATE: 0.07,
    Task.ABSENT: 0.05,
    Task.CALC: 0.07,
}
"""All tasks, and many questions about what was read: they are short, and learnt last."""

DISTANT: Mix = {
    Task.REPEAT: 0.05,
    Task.NEAR: 0.12,
    Task.FAR: 0.54,
    Task.NEEDLE: 0.04,
    Task.TWO_HOP: 0.08,
    Task.UPDATE: 0.05,
    Task.ABSENT: 0.04,
    Task.CALC: 0.08,
}
"""Mostly what is learnt last, and enough of the rest that there are records to take it from."""

_MAX_PARAGRAPHS = 6
_SHARE_WITH_PAGES = 0.4
_SHARE_OF_UPDATED = 0.3
_CALL_CHARACTERS = 100
"""Of a call's markup in the prompt."""
_WINDOW = 128
"""Tokens of a cache block and of the sliding window."""


@dataclass(frozen=True, slots=True)
class Script:
    """Turns, and the world as it is before them."""

    turns: tuple[Turn, ...]
    world: World


def draw_tour(draws: Draws) -> Script:
    """Turns for which a tool must be called, another one, and one twice, by what it said first."""
    author = _Author(draws, {}, (), 0)
    makers = (author.look_up, author.look_up, author.update, author.two_hops)
    return Script(tuple(make() for make in makers), author.first_world)


def draw_script(draws: Draws, mix: Mix, paragraphs: Sequence[str], num_characters: int) -> Script:
    """Turns that make a conversation of about so many characters.

    Args:
        paragraphs: filler between notes; those of the split of `draws`.
    """
    author = _Author(draws, mix, paragraphs, num_characters)
    return Script(tuple(author.turns), author.first_world)


def write(script: Script) -> Conversation:
    """The conversation of a script with the reference's answers."""
    writer = Writer(ToolServer(copy.deepcopy(script.world)))
    for turn in script.turns:
        writer.turn(turn)
    return writer.conversation()


def draw_conversation(
    draws: Draws,
    mix: Mix,
    paragraphs: Sequence[str],
    num_characters: int,
    share_with_tools: float = 0.0,
) -> Conversation:
    """A script's conversation; a share of them declares the tools, which costs 500 tokens."""
    declares_tools = draws.chance(share_with_tools)
    script = draw_script(draws, mix, paragraphs, num_characters)
    return replace(write(script), declares_tools=declares_tools)


class _Author:
    """Draws turns that fit what was said before.

    Attributes:
        first_world: before any turn.
        turns: so far.
    """

    def __init__(
        self, draws: Draws, mix: Mix, paragraphs: Sequence[str], num_characters: int
    ) -> None:
        self._draws = draws
        self._paragraphs = paragraphs
        self._world = draw_world(draws, draws.between(3, 10))
        self._unread = draws.sample(list(self._world.records), len(self._world.records))
        self._read: list[str] = []
        self._updated: list[str] = []
        self._notes: list[str] = []
        self.turns: list[Turn] = []
        needles = mix.get(Task.NEEDLE, 0.0)
        has_pages = draws.chance(_SHARE_WITH_PAGES if needles else 0.0)
        if has_pages:
            self._add_pages()
        mix = {**mix, Task.NEEDLE: needles / _SHARE_WITH_PAGES if has_pages else 0.0}
        self.first_world = copy.deepcopy(self._world)
        server = ToolServer(self._world)
        makers: dict[Task, Callable[[], Turn]] = {
            Task.REPEAT: self._repeat,
            Task.NEAR: self.look_up,
            Task.FAR: self._recall,
            Task.NEEDLE: self._needle,
            Task.TWO_HOP: self.two_hops,
            Task.UPDATE: self.update,
            Task.ABSENT: self._absent,
            Task.CALC: self._calc,
        }
        length = 0
        while length < num_characters:
            turn = makers[draws.weighted(mix)]()
            results = [server.call(c.tool, json.dumps(c.arguments)) for c in turn.calls]
            self.turns.append(turn)
            length += len(turn.user) + len(turn.answer) + sum(map(len, results))
            length += _CALL_CHARACTERS * len(turn.calls)

    def _add_pages(self) -> None:
        for _ in range(self._draws.between(1, 2)):
            first = self._draws.below(len(self._paragraphs))
            count = self._draws.between(2, _MAX_PARAGRAPHS)
            notes = {self._draws.name(): self._draws.name() for _ in range(3)}
            self._world.add_page(self._paragraphs[first : first + count], notes, self._draws)

    def _repeat(self) -> Turn:
        names = " ".join(f'"{self._draws.name()}"' for _ in range(self._draws.between(3, 10)))
        return Turn(f"Repeat {names}", (), names, Task.REPEAT)

    def look_up(self) -> Turn:
        if not self._unread:
            return self._recall()
        name = self._unread.pop()
        self._read.append(name)
        asked = self._draws.pick(RECORDED)
        return Turn(
            f'Look up the {asked} of "{name}"',
            (Call("get", {"key": name}, Task.CALL),),
            self._world.fact(name, asked),
            Task.NEAR,
            (_stem(name, asked),),
        )

    def _recall(self) -> Turn:
        if not self._read:
            return self.look_up()
        name, asked = self._draws.pick(self._read), self._draws.pick(RECORDED)
        if self._updated and self._draws.chance(_SHARE_OF_UPDATED):
            name, asked = self._draws.pick(self._updated), Field.CODE
        is_updated = asked is Field.CODE and name in self._updated
        return Turn(
            f'Recall the {asked} of "{name}"',
            (),
            self._world.fact(name, asked),
            Task.UPDATE if is_updated else Task.FAR,
            (_stem(name, asked),),
        )

    def _needle(self) -> Turn:
        """A note of a page that was read; the page is read first."""
        if self._notes:
            name = self._notes.pop()
            return Turn(
                f'Recall the note of "{name}"',
                (),
                self._world.fact(name, Field.NOTE),
                Task.NEEDLE,
                (_stem(name, Field.NOTE),),
            )
        calls = [call for turn in self.turns for call in turn.calls]
        read = {call.arguments["page"] for call in calls if call.tool == "read"}
        page = len(read) + 1
        if page > len(self._world.pages):
            return self._recall()
        text = self._world.pages[page - 1]
        self._notes += [n for n in self._world.notes if _stem(n, Field.NOTE) in text]
        call = Call("read", {"page": page}, Task.OPEN)
        return Turn(f"Read page {page}", (call,), f"page {page} is read", Task.CONFIRM)

    def two_hops(self) -> Turn:
        if not self._unread:
            return self._recall()
        name = self._unread.pop()
        self._read.append(name)
        owner = str(self._world.records[name][Field.OWNER])
        if owner in self._unread:
            self._unread.remove(owner)
            self._read.append(owner)
        asked = self._draws.pick((Field.CODE, Field.PLACE, Field.COLOR))
        calls = (
            Call("get", {"key": name}, Task.CALL),
            Call("get", {"key": owner}, Task.TWO_HOP, (_stem(name, Field.OWNER),)),
        )
        answer = self._world.fact(owner, asked)
        user = f'Look up the {asked} of the owner of "{name}"'
        return Turn(user, calls, answer, Task.TWO_HOP, (_stem(owner, asked),))

    def update(self) -> Turn:
        if not self._read:
            return self.look_up()
        name, code = self._draws.pick(self._read), self._draws.between(100, 999)
        self._updated.append(name)
        call = Call("set", {"key": name, "field": Field.CODE.value, "value": code}, Task.CALL)
        return Turn(
            f'Set the code of "{name}" to {code}',
            (call,),
            sentence(name, Field.CODE, code),
            Task.CONFIRM,
            (_stem(name, Field.CODE),),
        )

    def _absent(self) -> Turn:
        name, asked = self._draws.name(), self._draws.pick(RECORDED)
        answer = sentence(name, asked, None)
        if self._draws.chance(0.5):
            return Turn(f'Recall the {asked} of "{name}"', (), answer, Task.ABSENT)
        call = Call("get", {"key": name}, Task.CALL)
        return Turn(f'Look up the {asked} of "{name}"', (call,), answer, Task.ABSENT)

    def _calc(self) -> Turn:
        if len(self._read) < 2:
            return self.look_up()
        first, second = self._draws.sample(self._read, 2)
        left, right = (int(self._world.records[n][Field.CODE]) for n in (first, second))
        call = Call(
            "calc",
            {"expression": f"{left}+{right}"},
            Task.CALC,
            tuple(_stem(n, Field.CODE) for n in (first, second)),
        )
        user = f'Add the codes of "{first}" and "{second}"'
        return Turn(user, (call,), f"{left}+{right}={left + right}", Task.CONFIRM)


class Placement(StrEnum):
    """Where a straddle's fact lies to a cache boundary b of a window of W tokens."""

    BEFORE = "before b-W"
    WITHIN = "in [b-W, b)"
    ACROSS = "across b"
    AFTER = "after b"


class Ruler(Protocol):
    """Measures conversations in tokens."""

    def num_tokens(self, messages: Sequence[Message]) -> int:
        """Of a prompt that ends with these messages, without an answer's header."""

    def locate(self, messages: Sequence[Message], text: str) -> tuple[int, int]:
        """Tokens [start, stop) of such a prompt in which a text first stands."""


def draw_straddle(
    draws: Draws,
    paragraphs: Sequence[str],
    placement: Placement,
    ruler: Ruler,
) -> Conversation:
    """One question about a fact that is stated once, at a chosen place to a boundary.

    The fact is a line of a tool's result. What the assistant says about that result is another
    fact, so that nothing behind the line repeats it.

    Raises:
        ValueError: `paragraphs` cannot move the line there.
    """
    boundary = _WINDOW * draws.between(4, 8)
    first = draws.below(len(paragraphs))
    words = " ".join([*paragraphs[first:], *paragraphs[:first]]).split()[: 2 * boundary]
    world = draw_world(draws, 3)
    name = draws.pick(list(world.records))
    asked, told = draws.sample(RECORDED, 2)
    fact = world.fact(name, asked)
    read = Turn(
        f'Look up the {told} of "{name}"',
        (Call("get", {"key": name}, Task.CALL),),
        world.fact(name, told),
        Task.NEAR,
        (_stem(name, told),),
    )

    def begin(num_words: int) -> tuple[Writer, int, int]:
        """The conversation as far as the result, and the tokens of the fact's line in it."""
        writer = Writer(ToolServer(world))
        writer.system(" ".join(words[:num_words]))
        writer.turn(read)
        return writer, *ruler.locate(writer.messages, fact)

    _, start, end = begin(1)
    length = end - start
    wanted = {
        Placement.BEFORE: boundary - _WINDOW - length - 32,
        Placement.WITHIN: boundary - (_WINDOW + length) // 2,
        Placement.ACROSS: boundary - length // 2,
        Placement.AFTER: boundary + 4,
    }[placement]
    num_words = bisect_left(range(1, len(words)), wanted, key=lambda count: begin(count)[1]) + 1
    writer, start, end = begin(num_words)
    if not _lies(placement, start, end, boundary):
        raise ValueError(f"{len(words)} words of filler cannot place the fact {placement}")
    while ruler.num_tokens(writer.messages) < boundary + 16:
        names = " ".join(f'"{draws.name()}"' for _ in range(4))
        writer.turn(Turn(f"Repeat {names}", (), names, Task.REPEAT))
    question = f'Recall the {asked} of "{name}"'
    writer.turn(Turn(question, (), fact, Task.STRADDLE, (_stem(name, asked),)))
    return replace(writer.conversation(), boundary=boundary, placement=placement.value)


def _lies(placement: Placement, start: int, end: int, boundary: int) -> bool:
    return {
        Placement.BEFORE: end <= boundary - _WINDOW,
        Placement.WITHIN: boundary - _WINDOW <= start and end <= boundary,
        Placement.ACROSS: start < boundary < end,
        Placement.AFTER: start >= boundary,
    }[placement]


def _stem(name: str, asked: Field) -> str:
    """How a sentence about a fact begins."""
    return sentence(name, asked, "").removesuffix('""').removesuffix(" ")
