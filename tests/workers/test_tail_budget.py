"""Is the memory of handed-over tail rows bounded, and given back?"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hash_machine import GEOMETRY, WINDOW
from hash_requests import ask, make_request, prompt
from split_cluster import CONFIG, collect, local_engine, split_cluster

from ripresa.workers.errors import InvalidArgument, ResourceExhausted
from ripresa.workers.replay import ReplayMode, TailVariant
from ripresa.workers.request import CacheUse
from ripresa.workers.tail_budget import TailBudget

EXACT_ROWS = 1 + (WINDOW - 1) * GEOMETRY.num_decoder_layers


@pytest.mark.parametrize(
    ("tail", "num_rows"),
    [
        (TailVariant.FLOORED, WINDOW),
        (TailVariant.LAYER_EXACT, WINDOW),
        (TailVariant.EXACT, EXACT_ROWS),
        (TailVariant.FULL, 60),
    ],
)
def test_rows_are_counted_before_they_exist(tail: TailVariant, num_rows: int) -> None:
    budget = TailBudget(1000, 10, GEOMETRY)
    assert budget.take(ask(prompt(1, 60), tail=tail)) == 10 * num_rows
    assert budget.held_bytes == 10 * num_rows
    while budget.held_bytes + 10 * num_rows <= 1000:
        budget.take(ask(prompt(1, 60), tail=tail))
    with pytest.raises(ResourceExhausted):
        budget.take(ask(prompt(1, 60), tail=tail))
    with pytest.raises(InvalidArgument) as caught:
        TailBudget(10 * num_rows - 1, 10, GEOMETRY).take(ask(prompt(1, 60), tail=tail))
    assert caught.value.field == "tail"


def test_a_re_execution_has_more_rows() -> None:
    budget = TailBudget(1000, 10, GEOMETRY)
    assert budget.take(make_request(20, streamed=(5, 6, 7))) == 10 * (WINDOW + 3)


async def test_tails_beyond_the_budget_are_refused_and_local_ones_are_not() -> None:
    transfer = replace(CONFIG.transfer, max_tail_bytes=8 * EXACT_ROWS)
    config = replace(CONFIG, transfer=transfer)
    exact = CacheUse(ReplayMode.EXACT)
    good = ask(prompt(2, 60), tail=TailVariant.EXACT, cache=exact)
    bad = ask(prompt(2, 60), tail=TailVariant.FULL)
    async with split_cluster(config=config) as cluster:
        for _ in range(3):
            stream = await cluster.collect(good)
            assert len(stream.tokens) == 6
            assert cluster.decoder._core._tails.held_bytes == 0
        with pytest.raises(InvalidArgument):
            await cluster.collect(bad)
    async with local_engine(config=config) as (engine, _):
        assert len((await collect(engine, bad)).tokens) == 6


async def test_rows_leave_the_decode_worker_with_the_prefill() -> None:
    async with split_cluster() as cluster:
        request = ask(
            prompt(3, 60), tail=TailVariant.EXACT, cache=CacheUse(ReplayMode.EXACT), max_tokens=9
        )
        events = cluster.generate(request)
        num_seen = 0
        async for _ in events:
            num_seen += 1
            if num_seen == 4:
                (stream,) = cluster.decoder._streams.values()
                assert stream.inbound is not None
                assert stream.inbound._outputs == []
                assert cluster.decoder._core._tails.held_bytes == 0
