"""Does a live run send what the trace says, in its order, and count what the cluster answers?"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from ripresa.cluster.simulation.arrivals import Workload
from ripresa.cluster.simulation.live_bench import (
    TOKEN_IDS,
    Answered,
    LiveFigures,
    percentile,
    replay_live,
    scaled_tokens,
)
from ripresa.cluster.simulation.trace import Conversation, TraceRequest
from ripresa.workers.errors import Unavailable
from ripresa.workers.replay_query import ReplayGeometry

GEOMETRY = ReplayGeometry(8, 2, 2, 1)
SCALE = 4


def workload() -> Workload:
    """Three conversations of four prompts, each longer by one id of 32 tokens."""
    conversations = [
        Conversation(
            name,
            32,
            10.0 * start,
            (
                tuple(
                    TraceRequest(7.0 * turn, 32 * (turn + 3) + 20, 9, turn + 2 if turn else 0,
                                 (turn + 2,) if turn else (0, 1, 2))
                    for turn in range(4)
                ),
            ),
        )
        for start, name in enumerate("abc")
    ]  # fmt: skip
    return Workload(conversations, 8 * SCALE, 0.0, 0)


class Cluster:
    """Remembers every prompt's blocks; the first token comes when the rest is computed."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []
        self.running = self.most = 0
        self.lock = threading.Lock()

    def __call__(self, tokens: Sequence[int], max_tokens: int) -> Answered:
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)
            cap = max(0, len(tokens) - 10) // 8 * 8
            known = max((_common(tokens[:cap], before) for before in self.asked), default=0)
            self.asked.append(tuple(tokens))
            self.running -= 1
        cached = known // 8 * 8
        return Answered(len(tokens), cached, float(len(tokens) - cached))


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    number = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        number += 1
    return number


def run(ask: Cluster, concurrency: int = 1, max_prompt_tokens: int = 1000) -> LiveFigures:
    return replay_live(
        workload(),
        GEOMETRY,
        ask,
        max_prompts=100,
        max_prompt_tokens=max_prompt_tokens,
        max_tokens=3,
        concurrency=concurrency,
    )


def test_lengths_shrink_and_equal_prefixes_stay_equal() -> None:
    prompts = list(workload())
    tokens = [scaled_tokens(prompt, GEOMETRY, 8 * SCALE) for prompt in prompts]
    assert [len(one) for one in tokens] == [prompt.num_tokens // SCALE for prompt in prompts]
    assert all(token in TOKEN_IDS for one in tokens for token in one)
    for left, a in zip(prompts, tokens, strict=True):
        for right, b in zip(prompts, tokens, strict=True):
            shared = _common(left.blocks, right.blocks)
            if left is not right:
                assert shared * 8 <= _common(a, b) < (shared + 1) * 8


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_cluster_that_keeps_everything_reaches_the_bound(concurrency: int) -> None:
    cluster = Cluster()
    figures = run(cluster, concurrency)
    assert figures.num_prompts == len(cluster.asked) == 12
    assert figures.hit_ratio == pytest.approx(figures.best_ratio)
    assert figures.hit_ratio > 0.5
    assert figures.cold_s == 29.0
    assert figures.first_token_s == (13.0, 13.0, 13.0)
    assert cluster.most <= concurrency


def test_long_prompts_are_cut_and_counted() -> None:
    cluster = Cluster()
    figures = run(cluster, max_prompt_tokens=40)
    assert max(map(len, cluster.asked)) == 40
    assert figures.num_cut == 6


def test_a_refusal_ends_the_run() -> None:
    def refuse(tokens: Sequence[int], max_tokens: int) -> Answered:
        raise Unavailable("nobody is there")

    with pytest.raises(Unavailable, match="nobody"):
        replay_live(
            workload(), GEOMETRY, refuse, max_prompts=5, max_prompt_tokens=100, max_tokens=1,
            concurrency=2,
        )  # fmt: skip


def test_percentiles() -> None:
    assert [percentile(range(1, 101), p) for p in (50, 90, 99)] == [50, 90, 99]
    assert percentile([3.0], 99) == 3.0
