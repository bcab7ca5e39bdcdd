"""Are streams that had to give up their pages parked, and do they then say what they would have?"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest
from hash_machine import WINDOW, HashMachine, reference_stream
from hash_requests import ask, prompt, recipe_of
from split_cluster import CONFIG, Stream, collect, local_engine, split_cluster

from ripresa.workers.config import EngineConfig, ParkConfig
from ripresa.workers.decode_engine import DecodeEngine
from ripresa.workers.errors import ErrorCode, ResourceExhausted, RipresaError
from ripresa.workers.replay import ReplayMode, TailVariant
from ripresa.workers.request import CacheUse, Failed, GenerationRequest, Tokens


def config(*, parked_bytes: int = 1 << 20, interval: int = 4 * WINDOW) -> EngineConfig:
    """Pages of the prompt only are set aside."""
    return replace(
        CONFIG,
        reserved_output_tokens=1,
        parked=ParkConfig(capacity_bytes=parked_bytes),
        anchor_interval=interval,
    )


def check(request: GenerationRequest, stream: Stream) -> None:
    stream.assert_equals(reference_stream(request, recipe=recipe_of(stream)))


async def parked(engine: DecodeEngine, num_requests: int = 1) -> None:
    """Return once so many requests are parked."""
    while engine.stats().num_parked < num_requests:  # noqa: ASYNC110 -- engines tell nobody of it
        await asyncio.sleep(0)


@pytest.mark.parametrize("parked_bytes", [1 << 20, 0])
@pytest.mark.parametrize("mode", list(ReplayMode))
@pytest.mark.parametrize("tail", [TailVariant.FLOORED, TailVariant.LAYER_EXACT, TailVariant.FULL])
async def test_streams_that_outgrow_the_pool_are_parked_and_go_on(
    parked_bytes: int, mode: ReplayMode, tail: TailVariant
) -> None:
    """With a kept state, and with none: then the recipe is executed again."""
    machine = HashMachine(num_blocks=20)
    async with local_engine(machine, config(parked_bytes=parked_bytes)) as (engine, _):
        requests = [
            ask(prompt(n, 20 + 3 * n), f"r{n}", max_tokens=60, tail=tail, cache=CacheUse(mode))
            for n in range(4)
        ]
        streams = await asyncio.gather(*(collect(engine, request) for request in requests))
        for request, stream in zip(requests, streams, strict=True):
            check(request, stream)
        assert engine.stats().num_preemptions >= 2
        rows = sum(stream.finished.counters.encoder_rows for stream in streams)
        anchors = 0
        if mode is ReplayMode.CANONICAL:
            anchors = sum((r.num_tokens + 58) // (4 * WINDOW) * WINDOW for r in requests)
        prompts = sum(request.num_tokens for request in requests)
        assert (rows == prompts + anchors) is (parked_bytes > 0)


async def test_a_stream_may_be_parked_twice() -> None:
    """The oldest one never is, and the youngest gives way to both others."""
    machine = HashMachine(num_blocks=12)
    async with local_engine(machine, config()) as (engine, _):
        requests = [
            ask(prompt(n, 10), f"r{n}", max_tokens=max_tokens)
            for n, max_tokens in enumerate((50, 40, 60))
        ]
        order: list[str] = []

        async def run(request: GenerationRequest) -> Stream:
            stream = await collect(engine, request)
            order.append(request.request_id)
            return stream

        streams = await asyncio.gather(*(run(request) for request in requests))
        for request, stream in zip(requests, streams, strict=True):
            check(request, stream)
        assert engine.stats().num_preemptions >= 2
        assert order == ["r0", "r1", "r2"] or order[-1] == "r2"


async def test_handed_over_streams_are_parked_too() -> None:
    async with split_cluster(config=config(), num_blocks=24) as cluster:
        requests = [ask(prompt(n, 30), f"r{n}", max_tokens=80) for n in range(4)]
        streams = await asyncio.gather(*(cluster.collect(request) for request in requests))
        for request, stream in zip(requests, streams, strict=True):
            check(request, stream)
        assert cluster.decoder.stats().num_preemptions > 0


@pytest.mark.parametrize("end", ["abort", "close", "deadline"])
async def test_a_parked_stream_may_end(end: str) -> None:
    machine = HashMachine(num_blocks=12)
    now = [0.0]
    async with local_engine(machine, config()) as (engine, _):
        engine._core._clock = lambda: now[0]
        first = ask(prompt(1, 10), "old", max_tokens=70)
        old = asyncio.create_task(collect(engine, first))
        young = replace(ask(prompt(2, 10), "young", max_tokens=70), deadline=5.0)
        task = asyncio.create_task(collect(engine, young))
        await parked(engine)
        engine.check_integrity()
        with pytest.raises(RipresaError) as caught:
            await collect(engine, ask(prompt(3, 10), "new"))
        assert caught.value.code is ErrorCode.RESOURCE_EXHAUSTED
        match end:
            case "abort":
                assert engine.abort("young")
            case "close":
                task.cancel()
            case _:
                now[0] = 10.0
        await asyncio.wait([task])
        if end != "close":
            assert isinstance(task.result().failed, Failed)
        assert engine.stats().num_parked == 0
        engine.check_integrity()
        check(first, await old)


async def test_a_parked_stream_goes_on_when_borrowed_pages_come_back() -> None:
    """Nothing else may be running by then: a disk copy or a pull had the pages that it lacks."""
    async with local_engine(HashMachine(num_blocks=12), config()) as (engine, _):
        short = ask(prompt(1, 10), "old", max_tokens=40)
        old = asyncio.create_task(collect(engine, short))
        long = ask(prompt(2, 50), "young", max_tokens=40)
        young = asyncio.create_task(collect(engine, long))
        await parked(engine)
        loan = engine._core._pages.borrow_new(engine.stats().num_free_blocks - 3)
        check(short, await old)
        for _ in range(20):
            await asyncio.sleep(0)
        assert engine.stats().num_parked == 1
        assert engine.stats().num_running == 0
        loan.end()
        check(long, await young)


async def test_a_parked_stream_goes_on_when_the_one_before_it_is_cancelled() -> None:
    """The one before it waited for more pages than there are."""
    async with local_engine(HashMachine(num_blocks=16), config()) as (engine, _):
        requests = [
            ask(prompt(n, length), f"r{n}", max_tokens=40) for n, length in enumerate((10, 60, 20))
        ]
        tasks = [asyncio.create_task(collect(engine, request)) for request in requests]
        await parked(engine, 2)
        loan = engine._core._pages.borrow_new(engine.stats().num_free_blocks - 3)
        await tasks[0]
        for _ in range(20):
            await asyncio.sleep(0)
        assert engine.stats().num_parked == 2
        assert engine.abort("r1")
        check(requests[2], await tasks[2])
        await tasks[1]
        loan.end()


@pytest.mark.parametrize("seed", range(8))
async def test_random_histories_over_a_small_pool(seed: int) -> None:
    """Requests of all modes, some with one prefix, some cancelled, over too few pages."""
    rng = random.Random(seed)
    roots = [prompt(40 + n, 60) for n in range(2)]
    machine = HashMachine(num_blocks=rng.choice((14, 18, 26)), num_slots=4)
    engine_config = replace(
        config(parked_bytes=rng.choice((0, 4000, 1 << 20))),
        max_num_seqs=4,
        reserved_output_tokens=rng.choice((1, 5, 12)),
    )

    async def run(number: int) -> None:
        mode = rng.choice(list(ReplayMode))
        tokens = rng.choice(roots)[: rng.randint(1, 50)] + prompt(number, rng.randint(0, 9))
        cache = CacheUse(mode, reads=rng.random() < 0.8, writes=rng.random() < 0.8)
        request = ask(tokens, f"r{number}", max_tokens=rng.randint(1, 40), cache=cache)
        cancel_after = rng.randint(0, 30) if rng.random() < 0.3 else None
        for _ in range(rng.randint(0, 60)):
            await asyncio.sleep(0)
        while True:
            try:
                events = engine.generate(request, local=True)
                seen = []
                async for event in events:
                    seen.append(event)
                    num_tokens = sum(isinstance(e, Tokens) for e in seen)
                    if cancel_after is not None and num_tokens > cancel_after:
                        await events.aclose()
                        return
            except ResourceExhausted:
                await asyncio.sleep(0.002)
                continue
            check(request, Stream(tuple(seen)))
            return

    async with local_engine(machine, engine_config) as (engine, _):
        tasks = [asyncio.create_task(run(number)) for number in range(14)]
        while not all(task.done() for task in tasks):
            engine.check_integrity()
            await asyncio.sleep(0.001)
        for task in tasks:
            task.result()
