"""Does every stream of a random history equal the reference, whatever happened before it?

A few hundred histories in the fast suite, thousands in the slow one.
"""

from __future__ import annotations

import pytest
from hinted_histories import over_hinted_peers
from histories import on_one_worker, over_a_cluster

TOGETHER = 20
"""Histories of one test."""


def batches(num_fast: int, num_slow: int) -> list[object]:
    fast = range(num_fast // TOGETHER)
    slow = range(num_fast // TOGETHER, (num_fast + num_slow) // TOGETHER)
    return [*fast, *(pytest.param(batch, marks=pytest.mark.slow) for batch in slow)]


@pytest.mark.parametrize("batch", batches(120, 1_080))
async def test_on_one_worker(batch: int) -> None:
    for seed in range(TOGETHER * batch, TOGETHER * (batch + 1)):
        await on_one_worker(seed)


@pytest.mark.parametrize("batch", batches(40, 560))
async def test_over_an_encoder_and_two_decode_workers(batch: int) -> None:
    for seed in range(TOGETHER * batch, TOGETHER * (batch + 1)):
        await over_a_cluster(seed)


@pytest.mark.parametrize("batch", batches(40, 560))
async def test_over_workers_that_pull_from_each_other(batch: int) -> None:
    for seed in range(TOGETHER * batch, TOGETHER * (batch + 1)):
        await over_hinted_peers(seed)
