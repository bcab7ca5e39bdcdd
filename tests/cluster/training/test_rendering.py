"""Do samples hold what the gateway would render, and learn what the assistant says?"""

from __future__ import annotations

import lzma
from bisect import bisect_left, bisect_right
from collections import Counter
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ripresa.cluster.gateway.chat_encoding import END_OF_SENTENCE
from ripresa.cluster.gateway.tokenizer import Tokenizer
from ripresa.cluster.training.rendering import Renderer
from ripresa.workers.demo.build_tokenizer import TOKENIZER
from ripresa.workers.demo.ledger.conversation import Conversation, Task
from ripresa.workers.demo.ledger.draws import Draws, Split
from ripresa.workers.demo.ledger.evaluation import (
    FILE,
    NUM_CONVERSATIONS,
    draw_evaluation,
    load_evaluation,
    to_lines,
)
from ripresa.workers.demo.ledger.filler import paragraphs
from ripresa.workers.demo.ledger.scripts import FULL, Placement, draw_conversation

WINDOW = 128


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(TOKENIZER)


@pytest.fixture(scope="module")
def evaluation() -> list[Conversation]:
    return load_evaluation()


@pytest.mark.parametrize("every", [20, pytest.param(1, marks=pytest.mark.slow)])
def test_the_committed_evaluation_set_is_what_is_drawn(renderer: Renderer, every: int) -> None:
    indices = range(0, NUM_CONVERSATIONS, every)
    drawn = to_lines(draw_evaluation(renderer, indices))
    committed = lzma.decompress(FILE.read_bytes()).decode().splitlines(keepends=True)
    assert drawn == "".join(committed[::every])


def test_every_task_and_placement_is_measured(evaluation: list[Conversation]) -> None:
    assert len(evaluation) == NUM_CONVERSATIONS
    tasks = Counter(e.task for c in evaluation for e in c.expected)
    assert min(tasks[task] for task in Task) >= 50
    assert Counter(c.placement for c in evaluation if c.placement) == {
        placement.value: 25 for placement in Placement
    }
    assert any(c.declares_tools for c in evaluation)


def test_straddles_ask_for_what_is_stated_once_and_where_they_say(
    renderer: Renderer, evaluation: list[Conversation]
) -> None:
    tokenizer = Tokenizer(TOKENIZER)
    for conversation in (c for c in evaluation if c.placement):
        boundary = conversation.boundary
        assert boundary is not None
        answers = renderer.answers(conversation)
        pieces = [tokenizer.token_bytes([token]) for token in answers.token_ids]
        fact = conversation.messages[-1]["content"].encode()
        before, _, behind = b"".join(pieces).partition(fact)
        # Said once, and then by the answer alone.
        assert behind.count(fact.partition(b" is ")[0] + b" is ") == 1
        assert behind.endswith(fact + END_OF_SENTENCE.encode())
        stops = list(accumulate(map(len, pieces)))
        start = bisect_right(stops, len(before))
        end = bisect_left(stops, len(before + fact)) + 1
        assert {
            Placement.BEFORE: end <= boundary - WINDOW,
            Placement.WITHIN: boundary - WINDOW <= start and end <= boundary,
            Placement.ACROSS: start < boundary < end,
            Placement.AFTER: start >= boundary,
        }[Placement(conversation.placement)], (start, end, boundary, conversation.placement)
        # The question comes behind the boundary.
        assert renderer.num_tokens(conversation.messages[:-2]) > boundary
        evidence = conversation.expected[-1].evidence
        assert evidence is not None
        assert fact.decode() in conversation.messages[evidence]["content"].splitlines()
        assert conversation.messages[evidence]["role"] == "tool"


@given(st.integers(0, 2**40), st.booleans())
@settings(max_examples=20, deadline=None)
def test_what_the_assistant_says_counts_and_what_is_coined_elsewhere_does_not(
    renderer: Renderer, index: int, with_tools: bool
) -> None:
    conversation = draw_conversation(
        Draws(Split.TRAINING, index), FULL, paragraphs(Split.TRAINING), 700, float(with_tools)
    )
    sample = renderer.conversation(conversation, 0.25)
    assert len(sample.token_ids) == len(sample.weights)
    text = Tokenizer(TOKENIZER).decode

    pairs = list(zip(sample.token_ids, sample.weights, strict=True))
    learnt = text([token for token, weight in pairs if weight == 1.0])
    answers = learnt.split("<｜end▁of▁sentence｜>")
    said = [m["content"] for m in conversation.messages if m["role"] == "assistant"]
    assert len(answers) == len(said) + 1
    assert answers[-1] == ""
    for answer, content in zip(answers[:-1], said, strict=True):
        assert answer == content or (content == "" and answer.startswith("\n\n<｜DSML｜ calls>"))
    read = text([token for token, weight in pairs if weight == 0.25])
    assert "tool" in read or "Repeat" in read
    assert not any(character.isdigit() for character in read)
    assert renderer.conversation(conversation, 0.0).token_ids == sample.token_ids
