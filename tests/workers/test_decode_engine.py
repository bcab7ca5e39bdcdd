"""Does a decode worker stream what it should, and is it empty again after every kind of end?"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import replace

import pytest
from hash_machine import WINDOW, HashMachine, reference_stream
from hash_requests import make_request
from split_cluster import CONFIG, StepGate, Stream, assert_idle, collect, local_engine, re_executed

from ripresa.workers.config import EngineConfig, TransferConfig
from ripresa.workers.decode_engine import DecodeEngine
from ripresa.workers.errors import (
    ConfigError,
    ErrorCode,
    InvalidArgument,
    ResourceExhausted,
    RipresaError,
    Unavailable,
)
from ripresa.workers.replay import TailVariant
from ripresa.workers.request import (
    EngineEvent,
    Failed,
    FinishReason,
    GenerationRequest,
    Reserved,
    StreamTicket,
    Tokens,
    WorkCounters,
)
from ripresa.workers.scheduling.step_plan import StepPlan


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 24, 43])
@pytest.mark.parametrize("tail", [TailVariant.FLOORED, TailVariant.LAYER_EXACT, TailVariant.FULL])
async def test_a_stream_is_what_the_definition_gives(length: int, tail: TailVariant) -> None:
    async with local_engine() as (engine, _):
        request = make_request(length, tail=tail)
        stream = await collect(engine, request)
        stream.assert_equals(reference_stream(request))
        assert stream.events[0] == Reserved("d0", local=True, recipe=request.recipe)
        tail_rows = length if tail is TailVariant.FULL else min(WINDOW, length)
        counters = WorkCounters(encoder_rows=length, decoder_prefill_rows=tail_rows, decoder_rows=5)
        assert stream.finished.counters == counters
        assert engine.stats().counters == counters
        assert engine.stats().num_encoder_rows == length + 5
        assert engine.stats().num_decoder_rows == tail_rows + 5


async def test_a_stop_token_is_named_and_counted_but_not_streamed() -> None:
    tokens = reference_stream(make_request(20, max_tokens=9)).tokens
    request = make_request(20, max_tokens=9, stop_token_ids=(tokens[6],))
    async with local_engine() as (engine, _):
        stream = await collect(engine, request)
    stream.assert_equals(reference_stream(request))
    assert stream.finished.reason is FinishReason.STOP
    assert stream.finished.num_generated_tokens == len(stream.tokens) + 1


async def test_a_stream_goes_on_after_tokens_that_were_streamed_before() -> None:
    request = make_request(20, max_tokens=25)
    tokens = reference_stream(request).tokens
    async with local_engine() as (engine, _):
        stream = await collect(engine, re_executed(request, tokens[:14]))
    assert stream.tokens == tokens[14:]
    assert stream.finished.num_generated_tokens == 25
    assert stream.finished.counters.decoder_prefill_rows == WINDOW + 14


async def test_half_of_24_streams_are_cancelled_and_the_others_do_not_notice() -> None:
    rng = random.Random(5)
    requests = [
        make_request(rng.randint(1, 60), request_id=f"r{i}", max_tokens=rng.randint(1, 12))
        for i in range(24)
    ]
    cancelled = set(rng.sample(range(24), 12))

    async def one(engine: DecodeEngine, index: int) -> Stream | None:
        if index not in cancelled:
            return await collect(engine, requests[index])
        stream = engine.generate(requests[index], local=True)
        for _ in range(rng.randint(1, 4)):
            if await anext(stream, None) is None:
                break
        await stream.aclose()
        return None

    machine = HashMachine(num_blocks=256, num_slots=24)
    async with local_engine(machine, replace(CONFIG, max_num_seqs=24)) as (engine, _):
        streams = await asyncio.gather(*(one(engine, index) for index in range(24)))
        for request, stream in zip(requests, streams, strict=True):
            if stream is not None:
                stream.assert_equals(reference_stream(request))


@pytest.mark.parametrize("num_events", range(9))
async def test_closing_after_every_event(num_events: int) -> None:
    async with local_engine() as (engine, machine):
        stream = engine.generate(make_request(30), local=True)
        for _ in range(num_events):
            await anext(stream)
        await stream.aclose()
        await collect(engine, make_request(3, request_id="after"))
        assert_idle(engine, machine)


@pytest.mark.parametrize("step", range(1, 8))
@pytest.mark.parametrize("how", ["close", "cancel", "abort"])
async def test_pages_outlive_the_step_that_uses_them(step: int, how: str) -> None:
    async with local_engine() as (engine, machine):
        gate = StepGate(machine, step)
        request = make_request(30, max_tokens=8)
        events: list[EngineEvent] = []
        arrived = asyncio.Event()
        stream = engine.generate(request, local=True)

        async def read() -> None:
            async for event in stream:
                events.append(event)
                arrived.set()

        reader = asyncio.create_task(read())
        await gate.reached.wait()
        # Let the reader take what earlier steps streamed, so that it waits for the next event.
        while len(events) < 1 + (step > 2) + max(0, step - 2):
            await arrived.wait()
            arrived.clear()
        if how == "abort":
            assert engine.abort("r")
            await reader
            assert isinstance(events[-1], Failed)
            assert events[-1].error.code is ErrorCode.CANCELLED
        else:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            await stream.aclose()
        assert engine.stats().num_free_blocks < engine.stats().num_blocks
        engine.check_integrity()
        gate.open()
        await collect(engine, make_request(3, request_id="after", max_tokens=1))
        assert engine.stats().num_steps == step + 1
        rows = engine.stats().counters
        assert rows.encoder_rows == min(30, step * 16) + 3
    assert not engine.abort("r")


async def test_a_stream_that_was_never_started_holds_nothing() -> None:
    async with local_engine() as (engine, _):
        stream = engine.generate(make_request(), local=True)
        assert engine.stats().num_waiting == 0
        await stream.aclose()


@pytest.mark.parametrize("step", range(1, 7))
async def test_a_failed_step_fails_its_requests_and_no_other(step: int) -> None:
    machine = HashMachine()

    def fail(plan: StepPlan) -> None:
        if plan.step == step:
            raise ValueError("a planted fault")

    machine.before_step = fail
    async with local_engine(machine) as (engine, _):
        requests = [make_request(20, request_id=f"r{i}", max_tokens=20) for i in range(2)]
        streams = await asyncio.gather(*(collect(engine, request) for request in requests))
        failures = [s for s in streams if isinstance(s.events[-1], Failed)]
        assert failures
        for stream in failures:
            error = stream.failed.error
            assert error.code is ErrorCode.INTERNAL
            assert f"step {step} " in error.message
            assert "a planted fault" in error.message
        after = make_request(20, request_id="after")
        (await collect(engine, after)).assert_equals(reference_stream(after))


async def test_a_runner_that_is_gone_ends_the_engine() -> None:
    machine = HashMachine()

    def die(plan: StepPlan) -> None:
        if plan.step == 3:
            raise Unavailable("a rank of the gang is gone")

    machine.before_step = die
    async with local_engine(machine) as (engine, _):
        stream = await collect(engine, make_request(20))
        assert stream.failed.error.message == "a rank of the gang is gone"
        with pytest.raises(Unavailable, match="a rank of the gang"):
            await collect(engine, make_request(20))


async def test_a_request_id_runs_once() -> None:
    async with local_engine() as (engine, machine):
        gate = StepGate(machine, 3)
        first = asyncio.create_task(collect(engine, make_request(20, generation=3)))
        await gate.reached.wait()
        for generation in (2, 3):
            with pytest.raises(RipresaError) as caught:
                await collect(engine, make_request(20, generation=generation))
            assert caught.value.code is ErrorCode.ALREADY_EXISTS
            assert caught.value.field == "request_id"
        gate.open()
        (await first).assert_equals(reference_stream(make_request(20)))
        (await collect(engine, make_request(20))).assert_equals(reference_stream(make_request(20)))


async def test_a_request_of_another_gateway_is_another_one_but_for_its_stream() -> None:
    async with local_engine() as (engine, machine):
        gate = StepGate(machine, 3)
        ticket = StreamTicket("s", 0, b"")
        mine = replace(make_request(20), gateway="a", stream=ticket)
        first = asyncio.create_task(collect(engine, mine))
        await gate.reached.wait()
        others = replace(mine, gateway="b", generation=7, stream=StreamTicket("t", 0, b""))
        for other in (others, replace(others, stream=None)):
            with pytest.raises(RipresaError) as caught:
                await collect(engine, other)
            assert caught.value.code is ErrorCode.ALREADY_EXISTS
        resumed = asyncio.create_task(collect(engine, replace(others, stream=ticket)))
        assert (await first).failed.error.code is ErrorCode.CANCELLED
        gate.open()
        (await resumed).assert_equals(reference_stream(mine))


async def test_a_higher_generation_replaces_a_lower_one_in_a_full_pool() -> None:
    machine = HashMachine(num_blocks=4)
    async with local_engine(machine) as (engine, _):
        gate = StepGate(machine, 2)
        first = asyncio.create_task(collect(engine, make_request(20)))
        await gate.reached.wait()
        newer = [
            asyncio.create_task(collect(engine, make_request(20, generation=generation)))
            for generation in (1, 2)
        ]
        old = await first
        assert old.failed.error.code is ErrorCode.CANCELLED
        gate.open()
        middle, newest = await asyncio.gather(*newer)
        assert middle.failed.error.code is ErrorCode.CANCELLED
        newest.assert_equals(reference_stream(make_request(20)))


async def test_a_deadline_stops_a_running_and_refuses_a_late_request() -> None:
    now = time.time()
    clock = [now]
    machine = HashMachine()
    engine = DecodeEngine("d0", machine, CONFIG, lambda: clock[0])
    await engine.start()
    gate = StepGate(machine, 4)
    late = asyncio.create_task(collect(engine, make_request(20, deadline=now + 9.0)))
    await gate.reached.wait()
    clock[0] = now + 10.0
    gate.open()
    assert (await late).failed.error.code is ErrorCode.DEADLINE_EXCEEDED
    assert engine.stats().num_steps == 4
    with pytest.raises(RipresaError) as caught:
        await collect(engine, make_request(20, deadline=now + 9.0))
    assert caught.value.code is ErrorCode.DEADLINE_EXCEEDED
    assert_idle(engine, machine)
    await engine.stop()


@pytest.mark.parametrize(
    ("deadline_s", "hand_over_timeout_s", "code"),
    [(30.0, 0.2, ErrorCode.UNAVAILABLE), (0.2, 30.0, ErrorCode.DEADLINE_EXCEEDED)],
    ids=["hand_over_timeout", "deadline"],
)
async def test_nothing_arrives_in_time(
    deadline_s: float, hand_over_timeout_s: float, code: ErrorCode
) -> None:
    config = replace(CONFIG, transfer=TransferConfig(hand_over_timeout_s=hand_over_timeout_s))
    async with local_engine(config=config) as (engine, _):
        request = make_request(20, deadline=time.time() + deadline_s)
        events = [event async for event in engine.generate(request, local=False)]
        assert events[0] == Reserved("d0", local=False, recipe=request.recipe)
        assert Stream(tuple(events)).failed.error.code is code


async def test_a_full_pool_refuses_and_serves_later() -> None:
    machine = HashMachine(num_blocks=4)
    async with local_engine(machine) as (engine, _):
        stream = engine.generate(make_request(20), local=True)
        await anext(stream)
        with pytest.raises(ResourceExhausted) as caught:
            await collect(engine, make_request(20, request_id="second"))
        assert caught.value.retryable
        with pytest.raises(InvalidArgument):
            await collect(engine, make_request(40, request_id="third"))
        await stream.aclose()
        await collect(engine, make_request(20, request_id="second"))


async def test_stopping_fails_what_runs() -> None:
    machine = HashMachine()
    engine = DecodeEngine("d0", machine, CONFIG)
    with pytest.raises(Unavailable, match="not started"):
        await collect(engine, make_request())
    await engine.start()
    gate = StepGate(machine, 3)
    running = asyncio.create_task(collect(engine, make_request()))
    await gate.reached.wait()
    stopping = asyncio.create_task(engine.stop())
    stream = await running
    assert stream.failed.error.code is ErrorCode.UNAVAILABLE
    assert not stopping.done()
    gate.open()
    await stopping
    assert_idle(engine, machine)
    with pytest.raises(Unavailable, match="stopping"):
        await collect(engine, make_request())


async def test_tokens_arrive_one_step_after_the_other() -> None:
    async with local_engine() as (engine, machine):
        gate = StepGate(machine, 4)
        stream = engine.generate(make_request(20), local=True)
        events = [await anext(stream) for _ in range(4)]
        assert isinstance(events[-1], Tokens)
        await gate.reached.wait()
        gate.open()
        async for _ in stream:
            pass


def test_more_sequences_than_slots_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        DecodeEngine("d0", HashMachine(num_slots=4), EngineConfig(max_batched_tokens=16))
    assert caught.value.field == "engine.max_num_seqs"


@pytest.mark.parametrize(
    "request_",
    [make_request(512), replace(make_request(), num_prompt_tokens=0)],
    ids=["too_long", "no_prompt"],
)
async def test_bad_requests_reserve_nothing(request_: GenerationRequest) -> None:
    async with local_engine() as (engine, _):
        with pytest.raises(InvalidArgument):
            await collect(engine, request_)
