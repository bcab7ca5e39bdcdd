"""Do scripts say what their worlds say, and does the checker notice when somebody does not?"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ripresa.workers.demo.ledger.checker import Verdict, compare, distance_bucket
from ripresa.workers.demo.ledger.conversation import MAX_CALLS, Message, Task, play
from ripresa.workers.demo.ledger.draws import Draws, Split, split_of
from ripresa.workers.demo.ledger.filler import paragraphs
from ripresa.workers.demo.ledger.scripts import (
    FULL,
    WARM_UP,
    Placement,
    Script,
    draw_conversation,
    draw_script,
    draw_straddle,
    write,
)

indices = st.integers(0, 2**63)
splits = st.sampled_from(Split)


def script(split: Split, index: int, size: int = 1500) -> Script:
    return draw_script(Draws(split, index), FULL, paragraphs(split), size)


@given(splits, indices)
@settings(max_examples=60)
def test_playing_the_reference_is_right_in_every_turn(split: Split, index: int) -> None:
    drawn = script(split, index)
    conversation = write(drawn)
    said = iter([m for m in conversation.messages if m["role"] == "assistant"])
    messages, played = play(drawn.turns, copy.deepcopy(drawn.world), lambda _: next(said))
    assert [p.verdict for p in played] == [Verdict.RIGHT] * len(drawn.turns)
    assert tuple(messages) == conversation.messages
    assert not any(m["content"].startswith("error") for m in messages if m["role"] == "tool"
                   and "no " not in m["content"])  # fmt: skip


@given(splits, indices)
@settings(max_examples=60)
def test_evidence_says_what_the_message_must_say(split: Split, index: int) -> None:
    conversation = write(script(split, index))
    assistants = [i for i, m in enumerate(conversation.messages) if m["role"] == "assistant"]
    assert [e.message for e in conversation.expected] == assistants
    for expected in conversation.expected:
        message = conversation.messages[expected.message]
        if expected.task in (Task.FAR, Task.NEEDLE, Task.UPDATE):
            assert expected.evidence is not None
            evidence = conversation.messages[expected.evidence]["content"]
            assert message["content"] in evidence.splitlines()
            stem = message["content"].partition(" is ")[0]
            for later in conversation.messages[expected.evidence + 1 : expected.message]:
                assert f"{stem} is" not in later["content"]
        if expected.task is Task.ABSENT:
            name = message["content"].split('"')[1]
            earlier = conversation.messages[: expected.message]
            assert not any(f'of "{name}" is' in m["content"] for m in earlier)


@given(splits, indices, st.data())
@settings(max_examples=60)
def test_another_message_is_wrong(split: Split, index: int, data: st.DataObject) -> None:
    conversation = write(script(split, index, 800))
    references = [conversation.messages[e.message] for e in conversation.expected]
    first, second = data.draw(st.sampled_from(references)), data.draw(st.sampled_from(references))
    same = first["content"] == second["content"] and arguments(first) == arguments(second)
    assert (compare(first, second) is Verdict.RIGHT) == same


def arguments(message: Message) -> list[tuple[str, str]]:
    calls = message.get("tool_calls", [])
    return [(c["function"]["name"], c["function"]["arguments"]) for c in calls]


def called(name: str = "get", text: str = '{"key": "nubok"}') -> Message:
    function = {"name": name, "arguments": text}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": function}]}


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (called(text='{ "key":"nubok" }'), Verdict.RIGHT),
        (called(text='{"key": "nubod"}'), Verdict.WRONG_ARGUMENTS),
        (called(text='{"key": "nubok", "page": 1}'), Verdict.WRONG_ARGUMENTS),
        (called(text='["nubok"]'), Verdict.BROKEN_ARGUMENTS),
        (called(text='{"key": "nubod", "key": "nubok"}'), Verdict.BROKEN_ARGUMENTS),
        ({"tool_calls": [{"function": {"name": "get"}}]}, Verdict.BROKEN_ARGUMENTS),
        (
            {"tool_calls": [{"function": {"name": "get", "arguments": {"key": "nubok"}}}]},
            Verdict.BROKEN_ARGUMENTS,
        ),
        ({"tool_calls": [None]}, Verdict.WRONG_TOOL),
        ({"tool_calls": [{"function": None}]}, Verdict.WRONG_TOOL),
        ({"tool_calls": 3}, Verdict.WRONG_TOOL),
        (called() | {"content": "I call it"}, Verdict.EXTRA_TEXT),
        (called() | {"content": None}, Verdict.RIGHT),
        (called() | {"content": "\n\n"}, Verdict.RIGHT),
        (called(text='{"key": "nub'), Verdict.BROKEN_ARGUMENTS),
        (called(name="read"), Verdict.WRONG_TOOL),
        ({"role": "assistant", "content": "nubok"}, Verdict.NO_CALL),
    ],
)
def test_verdicts_on_calls(answer: Message, verdict: Verdict) -> None:
    assert compare(called(), answer) is verdict
    assert verdict.is_valid_call == (verdict.value.startswith(("right", "wrong")))


def test_verdicts_on_texts_and_numbers() -> None:
    reference = {"role": "assistant", "content": 'code of "nubok" is 412'}
    assert compare(reference, {**reference, "content": 'code of "nubok" is 412\n'}) is Verdict.RIGHT
    assert compare(reference, {**reference, "content": 'code of "nubok" is 413'}) is (
        Verdict.WRONG_TEXT
    )
    for content in (None, [{"type": "text", "text": reference["content"]}], 3):
        assert compare(reference, {**reference, "content": content}) is Verdict.WRONG_TEXT
    assert compare(reference, called()) is Verdict.UNWANTED_CALL
    one = called("read", '{"page": 1}')
    assert compare(one, called("read", '{"page": true}')) is Verdict.WRONG_ARGUMENTS
    assert compare(one, called("read", '{"page": "1"}')) is Verdict.WRONG_ARGUMENTS


def test_buckets_begin_where_they_say() -> None:
    distances = [0, 127, 128, 511, 512, 2047, 2048, 10**6]
    assert [distance_bucket(d) for d in distances] == [
        "0-128", "0-128", "128-256", "256-512", "512-1024", "1024-2048", "2048-", "2048-",
    ]  # fmt: skip


def test_a_model_that_calls_for_ever_fails_its_turn_and_the_next_begins() -> None:
    drawn = script(Split.TRAINING, 1)
    asked: list[int] = []

    def answer(messages: Sequence[Message]) -> dict[str, Any]:
        asked.append(len(messages))
        return called()

    messages, played = play(drawn.turns[:2], drawn.world, answer)
    assert len(asked) == 2 * (MAX_CALLS + 1)
    assert all(p.verdict is Verdict.UNWANTED_CALL and p.num_calls == MAX_CALLS for p in played)
    assert messages[-1]["role"] == "assistant"
    assert "tool_calls" not in messages[-1]


@given(indices)
@settings(max_examples=30)
def test_splits_share_neither_names_nor_filler(index: int) -> None:
    for split in Split:
        drawn = script(split, index, 800)
        asked = [turn.user for turn in drawn.turns]
        names = {name for line in asked for name in line.split('"')[1::2]}
        names |= set(drawn.world.records) | set(drawn.world.notes)
        assert all(split_of(name) is split for name in names)
    assert not set(paragraphs(Split.TRAINING)) & set(paragraphs(Split.EVALUATION))


def test_the_same_index_gives_the_same_conversation_and_another_gives_another() -> None:
    def text(index: int) -> str:
        drawn = draw_conversation(
            Draws(Split.TRAINING, index), WARM_UP, paragraphs(Split.TRAINING), 900, 0.5
        )
        return json.dumps(drawn.messages)

    assert text(7) == text(7)
    assert len({text(index) for index in range(20)}) == 20


class Characters:
    """Measures as if each character were a token."""

    def num_tokens(self, messages: Sequence[Message]) -> int:
        return len("".join(m["content"] for m in messages))

    def locate(self, messages: Sequence[Message], text: str) -> tuple[int, int]:
        start = "".join(m["content"] for m in messages).index(text)
        return start, start + len(text)


@pytest.mark.parametrize("placement", [Placement.WITHIN, Placement.ACROSS, Placement.AFTER])
def test_a_straddle_without_room_is_refused(placement: Placement) -> None:
    with pytest.raises(ValueError, match="words of filler"):
        draw_straddle(Draws(Split.TRAINING, 0), ["a b c d"], placement, Characters())
