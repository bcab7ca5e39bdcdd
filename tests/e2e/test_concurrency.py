"""Do many streams at once equal their solo runs, and does cancelling half of them leave nothing?"""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from reference_engine import Question, ReferenceEngine
from served_cluster import Answer, ServedCluster

from ripresa.workers.replay import TailVariant

LONG = (3000, 2989, 1500, 640, 385, 129, 128, 1)
"""Lengths of eight prompts: up to 3,000 tokens, with both sides of a block boundary."""

SHORT = tuple(1 + 13 * index for index in range(24))
"""Lengths of 24 prompts: up to 300 tokens."""


def questions(agent_tokens: tuple[int, ...], lengths: Sequence[int]) -> list[Question]:
    """Prompts that start in different places, greedy and seeded, of every tail variant."""
    tokens = agent_tokens * 3
    tails = (TailVariant.FLOORED, TailVariant.FLOORED, TailVariant.LAYER_EXACT)
    return [
        Question(
            tokens[31 * index : 31 * index + length],
            max_tokens=8 + index % 5,
            temperature=0.0 if index % 2 else 0.8,
            top_k=None if index % 3 else 50,
            seed=index,
            tail=tails[index % 3],
        )
        for index, length in enumerate(lengths)
    ]


def ask_all(split: ServedCluster, asked: Sequence[Question]) -> list[Answer]:
    with ThreadPoolExecutor(len(asked)) as threads:
        return list(threads.map(split.ask, asked))


@pytest.mark.parametrize("lengths", [LONG, SHORT], ids=["8 long", "24 short"])
def test_streams_equal_their_solo_runs(
    split: ServedCluster,
    reference: ReferenceEngine,
    agent_tokens: tuple[int, ...],
    lengths: tuple[int, ...],
) -> None:
    asked = questions(agent_tokens, lengths)
    answers = ask_all(split, asked)
    assert [answer.tokens for answer in answers] == [reference.answer(q) for q in asked]
    if len(lengths) > 8:
        workers = {answer.started.worker_id for answer in answers if answer.started}
        assert len(workers) == 2  # both decode workers had a part
    split.assert_idle()


@pytest.mark.parametrize("seed", [1, 2])
def test_half_of_them_cancelled(
    split: ServedCluster, reference: ReferenceEngine, agent_tokens: tuple[int, ...], seed: int
) -> None:
    """At random points: before anything came, in the prefill or transfer, after some tokens."""
    draw = random.Random(seed)
    asked = questions(agent_tokens, LONG + SHORT)
    draw.shuffle(asked)
    half = len(asked) // 2
    points = [draw.choice((None, 0, 1, 1, 2, 5)) for _ in asked[:half]]

    def ask_and_cancel(question: Question, num_tokens: int | None) -> Answer:
        stream = split.open(question)
        if num_tokens is not None:
            stream.read(num_tokens)
        stream.cancel()
        return stream.end()

    with ThreadPoolExecutor(len(asked)) as threads:
        whole = [threads.submit(split.ask, question) for question in asked[half:]]
        cut = list(threads.map(ask_and_cancel, asked[:half], points))
        answers = [future.result() for future in whole]
    for answer, question in zip(cut, asked[:half], strict=True):
        assert answer.code is grpc.StatusCode.CANCELLED
        expected = reference.answer(question)
        assert tuple(answer.token_ids) == expected[: len(answer.token_ids)]
    assert [answer.tokens for answer in answers] == [reference.answer(q) for q in asked[half:]]
    split.assert_idle()
