"""What is a conversation about a ledger? Messages, and what the assistant's should say and why.

A script is a list of turns. `write` plays a script with the reference's answers, `play` with
anybody's; in both a tool server executes the calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ripresa.workers.demo.ledger.checker import Verdict, compare
from ripresa.workers.demo.ledger.tool_server import ToolServer
from ripresa.workers.demo.ledger.world import World

Message = dict[str, Any]
"""A Chat Completions message."""

MAX_CALLS = 4
"""Calls that `play` executes in one turn before it counts the turn as failed."""


class Task(StrEnum):
    """What an assistant's message takes.

    CONFIRM: to say again what a tool did, in its words or in constant ones; OPEN: a call that has
    one small number to copy. Neither says whether a model reads values or builds calls.
    """

    CALL = "T1 call"
    NEAR = "T2 read near"
    FAR = "T3 read far"
    NEEDLE = "T4 needle"
    TWO_HOP = "T5 two hops"
    REPEAT = "T6 repeat"
    UPDATE = "T7 update"
    ABSENT = "T8 absent"
    CALC = "T9 calc"
    STRADDLE = "T10 straddle"
    CONFIRM = "T11 confirm"
    OPEN = "T12 open page"


@dataclass(frozen=True, slots=True)
class Call:
    """A call that the reference makes. `task`: what finding it takes; `reads`: as of a turn."""

    tool: str
    arguments: dict[str, str | int]
    task: Task
    reads: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Turn:
    """What the user says, and what the reference does about it.

    Attributes:
        calls: one after the other.
        answer: its last message.
        task: what finding the answer takes.
        reads: facts (first words of sentences) that the answer was read from.
    """

    user: str
    calls: tuple[Call, ...]
    answer: str
    task: Task
    reads: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Expected:
    """A message that a model's can be compared with.

    Attributes:
        message: its index among the messages.
        task: what finding it takes.
        evidence: index of the latest message that says what it must say, if any does.
    """

    message: int
    task: Task
    evidence: int | None


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages that end with the assistant's.

    Attributes:
        expected: every message of the assistant, in order.
        declares_tools: whether the request lists the tools.
        boundary, placement: of a straddle, the tokens that an engine is to have cached, and where
            the asked fact lies to that.
    """

    messages: tuple[Message, ...]
    expected: tuple[Expected, ...]
    declares_tools: bool = False
    boundary: int | None = None
    placement: str | None = None


@dataclass(slots=True)
class Writer:
    """Writes the reference's conversation, turn by turn."""

    server: ToolServer
    messages: list[Message] = field(default_factory=list)
    expected: list[Expected] = field(default_factory=list)

    def system(self, text: str) -> None:
        self.messages.append({"role": "system", "content": text})

    def turn(self, turn: Turn) -> None:
        self.messages.append({"role": "user", "content": turn.user})
        for call in turn.calls:
            self._answer(call_message(call, len(self.messages)), call.task, call.reads)
            arguments = json.dumps(call.arguments)
            result = self.server.call(call.tool, arguments)
            self.messages.append(_result(len(self.messages) - 1, result))
        self._answer({"role": "assistant", "content": turn.answer}, turn.task, turn.reads)

    def conversation(self, declares_tools: bool = False) -> Conversation:
        return Conversation(tuple(self.messages), tuple(self.expected), declares_tools)

    def _answer(self, message: Message, task: Task, reads: Sequence[str]) -> None:
        self.expected.append(Expected(len(self.messages), task, self._evidence(reads)))
        self.messages.append(message)

    def _evidence(self, reads: Sequence[str]) -> int | None:
        """The oldest of the latest messages, anybody's, that state each fact."""
        found = []
        for fact in reads:
            stated = [
                index
                for index, message in enumerate(self.messages)
                if fact in (message["content"] or "")
            ]
            found += stated[-1:]
        return min(found, default=None)


def call_message(call: Call, number: int) -> Message:
    """An assistant's message that makes one call."""
    function = {"name": call.tool, "arguments": json.dumps(call.arguments)}
    made = {"id": f"call_{number}", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [made]}


def _result(asked: int, text: str) -> Message:
    return {"role": "tool", "tool_call_id": f"call_{asked}", "content": text}


@dataclass(frozen=True, slots=True)
class Played:
    """How a turn went with somebody's answers: the last message's verdict, and the calls made."""

    task: Task
    verdict: Verdict
    num_calls: int


def play(
    script: Sequence[Turn], world: World, answer: Callable[[Sequence[Message]], Message]
) -> tuple[list[Message], list[Played]]:
    """A script with the messages of a model; its own calls are executed, right or wrong.

    Args:
        world: of the script, as it was before it; `set` changes it.
        answer: the model: messages so far -> its next message.
    """
    server = ToolServer(world)
    messages: list[Message] = []
    played = []
    for turn in script:
        messages.append({"role": "user", "content": turn.user})
        num_calls = 0
        while True:
            message = answer(messages)
            messages.append(message)
            calls = message.get("tool_calls") or []
            if not calls or num_calls + len(calls) > MAX_CALLS:
                break
            for call in calls:
                function = call["function"]
                result = server.call(function["name"], function["arguments"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
            num_calls += len(calls)
        reference = {"role": "assistant", "content": turn.answer}
        played.append(Played(turn.task, compare(reference, message), num_calls))
        if calls:  # answered, so that the next turn finds no open call
            messages[-1] = {"role": "assistant", "content": message.get("content") or ""}
    return messages, played
