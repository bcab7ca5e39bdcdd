"""Does the split over two workers give the stream of one, whatever fails on the way?"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from dataclasses import replace

import pytest
from hash_machine import NUM_ENCODER_LAYERS, WINDOW, reference_stream
from hash_requests import make_request
from split_cluster import (
    CONFIG,
    IMPATIENT,
    PATIENT,
    SplitCluster,
    StepGate,
    Stream,
    re_executed,
    split_cluster,
)

from ripresa.workers.errors import ErrorCode, InvalidArgument, ResourceExhausted, RipresaError
from ripresa.workers.replay import TailVariant
from ripresa.workers.request import (
    EngineEvent,
    GenerationRequest,
    PrefillDone,
    Reserved,
    WorkCounters,
)
from ripresa.workers.scheduling.step_plan import StepPlan
from ripresa.workers.transfer.base import (
    Accept,
    Complete,
    ControlMessage,
    SectionKind,
    SendSection,
)
from ripresa.workers.transfer.faults import (
    Deliver,
    Fault,
    FaultyPeer,
    delay,
    drop,
    drop_answer,
    kill,
    repeat,
)

# Offer, OpenLane, three sections (blocks [0, 2), [2, 3), state), Complete.
PROMPT = 30
NUM_MESSAGES = 6


async def miscount(message: ControlMessage, deliver: Deliver) -> Accept | None:
    """The last message arrives with a checksum that the payloads do not have."""
    assert isinstance(message, Complete)
    return await deliver(replace(message, checksum=message.checksum ^ 1))


def sections(cluster: SplitCluster) -> list[SendSection]:
    peer = cluster.peers["d0"]
    assert isinstance(peer, FaultyPeer)
    return [message for message in peer.delivered if isinstance(message, SendSection)]


async def reserve(
    cluster: SplitCluster, request: GenerationRequest
) -> tuple[asyncio.Event, asyncio.Task[Stream]]:
    """A request that waits on d0 for whatever prefill the test starts."""
    reserved = asyncio.Event()

    async def read() -> Stream:
        events: list[EngineEvent] = []
        async for event in cluster.decoder.generate(request, local=False):
            events.append(event)
            if isinstance(event, Reserved):
                reserved.set()
        return Stream(tuple(events))

    return reserved, asyncio.create_task(read())


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 24, 43])
@pytest.mark.parametrize("tail", [TailVariant.FLOORED, TailVariant.LAYER_EXACT, TailVariant.FULL])
async def test_the_split_gives_the_stream_of_the_definition(length: int, tail: TailVariant) -> None:
    request = make_request(length, tail=tail)
    counters: list[WorkCounters] = []
    async with split_cluster() as cluster:
        events = cluster.generate(request, on_counters=counters.append)
        stream = Stream(tuple([event async for event in events]))
        stream.assert_equals(reference_stream(request))
        tail_rows = length if tail is TailVariant.FULL else min(WINDOW, length)
        source_rows = min(WINDOW - 1, request.recipe.decoder_start)
        source_rows = source_rows if tail is TailVariant.LAYER_EXACT else 0
        num_bytes = 8 * (
            length + NUM_ENCODER_LAYERS * min(WINDOW, length) + 1 + source_rows + tail_rows
        )
        assert stream.finished.counters == WorkCounters(
            decoder_prefill_rows=tail_rows, decoder_rows=5, transfer_bytes=num_bytes
        )
        assert counters == [WorkCounters(encoder_rows=length, transfer_bytes=num_bytes)]
        encoder, decoder = cluster.encoder.stats(), cluster.decoder.stats()
        assert (encoder.num_encoder_rows, encoder.num_decoder_rows) == (length, 0)
        assert (decoder.num_encoder_rows, decoder.num_decoder_rows) == (5, tail_rows + 5)
        assert encoder.counters.transfer_bytes == num_bytes
        assert decoder.counters.transfer_bytes == num_bytes
        assert (encoder.num_cut_short_tokens, decoder.num_cut_short_tokens) == (0, 0)


async def test_rows_of_a_prompt_that_was_cut_short_are_counted() -> None:
    """Those of the step that ran at that moment too."""
    async with split_cluster() as cluster:
        gate = StepGate(cluster.encoder_machine, 3)
        running = asyncio.create_task(cluster.collect(make_request(80)))
        await gate.reached.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        gate.open()
        # It waits for the step.
        await cluster.encoder.stop()
        assert cluster.encoder.stats().num_cut_short_tokens == 3 * 3 * WINDOW


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))]
)
async def test_24_streams_at_once_half_of_them_cancelled(seed: int) -> None:
    rng = random.Random(seed)
    tails = (TailVariant.FLOORED, TailVariant.LAYER_EXACT, TailVariant.FULL)
    requests = [
        make_request(
            rng.randint(1, 60),
            request_id=f"r{i}",
            max_tokens=rng.randint(2, 12),
            tail=rng.choice(tails),
        )
        for i in range(24)
    ]
    cancelled_at = {index: rng.randint(1, 25) for index in rng.sample(range(24), 12)}
    config = replace(CONFIG, max_num_seqs=24)

    async with split_cluster(config=config, num_blocks=256) as cluster:
        loop = asyncio.get_running_loop()
        tasks = [
            asyncio.create_task(cluster.collect(request, f"d{index % 2}"))
            for index, request in enumerate(requests)
        ]

        def cancel_those_due(plan: StepPlan) -> None:
            for index, step in cancelled_at.items():
                if step == plan.step:
                    loop.call_soon_threadsafe(tasks[index].cancel)

        cluster.encoder_machine.before_step = cancel_those_due
        for machine in cluster.machines.values():
            machine.before_step = cancel_those_due
        streams = await asyncio.gather(*tasks, return_exceptions=True)
        for index, stream in enumerate(streams):
            if isinstance(stream, Stream):
                stream.assert_equals(reference_stream(requests[index]))
            else:
                assert index in cancelled_at
                assert isinstance(stream, asyncio.CancelledError)
        assert any(isinstance(stream, BaseException) for stream in streams)


async def test_blocks_leave_while_later_chunks_compute() -> None:
    stored, may_store = asyncio.Event(), asyncio.Event()
    may_store.set()
    # Message 2 is the first section; step 3 of the encoder waits until it is under way.
    async with split_cluster({2: delay(stored, may_store)}) as cluster:
        gate = StepGate(cluster.encoder_machine, 3)
        request = make_request(80)
        running = asyncio.create_task(cluster.collect(request))
        await gate.reached.wait()
        await stored.wait()
        assert cluster.encoder.stats().num_encoder_rows == 2 * 3 * WINDOW
        gate.open()
        (await running).assert_equals(reference_stream(request))
        kinds = [message.section.kind for message in sections(cluster)]
        assert kinds == [SectionKind.BLOCKS] * (len(kinds) - 1) + [SectionKind.STATE]
        blocks = [(m.section.first_block, m.section.last_block) for m in sections(cluster)[:-1]]
        assert [first for first, _ in blocks] == [0, *(last for _, last in blocks[:-1])]
        assert blocks[-1][1] == 10


async def test_a_slow_receiver_delays_its_own_requests_only() -> None:
    reached, release = asyncio.Event(), asyncio.Event()
    async with split_cluster({0: delay(reached, release)}) as cluster:
        slow = asyncio.create_task(cluster.collect(make_request(PROMPT, request_id="slow")))
        await reached.wait()
        fast = make_request(PROMPT, request_id="fast")
        (await cluster.collect(fast, "d1")).assert_equals(reference_stream(fast))
        release.set()
        (await slow).assert_equals(reference_stream(make_request(PROMPT, request_id="slow")))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        *itertools.product((drop, drop_answer, kill, repeat), range(NUM_MESSAGES)),
        (miscount, NUM_MESSAGES - 1),
    ],
)
async def test_a_transfer_fails_at_every_message_and_the_next_one_succeeds(
    fault: Fault, message: int
) -> None:
    request = make_request(PROMPT)
    lanes = IMPATIENT if fault in (drop, drop_answer) else PATIENT
    async with split_cluster({message: fault}, lanes=lanes) as cluster:
        reserved, reading = await reserve(cluster, request)
        await reserved.wait()
        results = await asyncio.gather(
            cluster.encoder.prefill(request, "d0"), return_exceptions=True
        )
        if isinstance(results[0], BaseException):
            assert isinstance(results[0], RipresaError)
            assert results[0].code in (ErrorCode.UNAVAILABLE, ErrorCode.DATA_LOSS)
            assert fault is not repeat
            # A lost answer to the last message fails the sender of a hand-over that succeeded.
            if fault is not drop_answer or message < NUM_MESSAGES - 1:
                cluster.revive("d0")
                await cluster.encoder.prefill(re_executed(request), "d0")
        (await reading).assert_equals(reference_stream(request))


async def test_an_old_generation_is_refused() -> None:
    request = make_request(PROMPT, generation=5)
    async with split_cluster() as cluster:
        reserved, reading = await reserve(cluster, request)
        await reserved.wait()
        with pytest.raises(RipresaError, match="generation 4 is stale"):
            await cluster.encoder.prefill(replace(request, generation=4), "d0")
        await cluster.encoder.prefill(request, "d0")
        (await reading).assert_equals(reference_stream(request))
        with pytest.raises(RipresaError) as caught:
            await cluster.encoder.prefill(re_executed(request), "d0")
        assert caught.value.code is ErrorCode.NOT_FOUND


async def test_a_prefill_without_a_reservation_computes_nothing() -> None:
    async with split_cluster() as cluster:
        with pytest.raises(RipresaError) as caught:
            await cluster.encoder.prefill(make_request(), "d0")
        assert caught.value.code is ErrorCode.NOT_FOUND
        assert cluster.encoder.stats().num_encoder_rows == 0


async def test_another_recipe_or_length_is_refused() -> None:
    request = make_request(PROMPT)
    async with split_cluster() as cluster:
        reserved, reading = await reserve(cluster, request)
        await reserved.wait()
        for other in (
            make_request(PROMPT + 1),
            make_request(PROMPT, tail=TailVariant.FULL),
            make_request(PROMPT, seed=8),
        ):
            with pytest.raises(RipresaError) as caught:
                await cluster.encoder.prefill(other, "d0")
            assert caught.value.code is ErrorCode.FAILED_PRECONDITION
        cluster.encoder_machine.layout_digest = b"another layout"
        with pytest.raises(RipresaError, match="layout differs"):
            await cluster.encoder.prefill(request, "d0")
        cluster.encoder_machine.layout_digest = cluster.machines["d0"].layout_digest
        await cluster.encoder.prefill(request, "d0")
        (await reading).assert_equals(reference_stream(request))


@pytest.mark.parametrize("step", range(1, 5))
@pytest.mark.parametrize("how", ["cancel", "abort", "replace"])
async def test_an_ended_prefill_stops_within_a_step(step: int, how: str) -> None:
    request = make_request(80)
    async with split_cluster() as cluster:
        reserved, reading = await reserve(cluster, request)
        await reserved.wait()
        gate = StepGate(cluster.encoder_machine, step)
        prefill = asyncio.create_task(cluster.encoder.prefill(request, "d0"))
        await gate.reached.wait()
        again: asyncio.Task[WorkCounters] | None = None
        if how == "cancel":
            prefill.cancel()
        elif how == "abort":
            assert cluster.encoder.abort("r")
        else:
            again = asyncio.create_task(cluster.encoder.prefill(re_executed(request), "d0"))
        result = (await asyncio.gather(prefill, return_exceptions=True))[0]
        if how == "cancel":
            assert isinstance(result, asyncio.CancelledError)
        else:
            assert isinstance(result, RipresaError)
            assert result.code is ErrorCode.CANCELLED
        stats = cluster.encoder.stats()
        assert stats.num_free_blocks < stats.num_blocks
        gate.open()
        await (again or cluster.encoder.prefill(re_executed(request), "d0"))
        (await reading).assert_equals(reference_stream(request))
        assert cluster.encoder.stats().counters.encoder_rows == min(80, step * 3 * WINDOW) + 80


@pytest.mark.parametrize("step", range(1, 5))
async def test_a_failed_encoder_step_reaches_the_caller(step: int) -> None:
    def fail(plan: StepPlan) -> None:
        if plan.step == step:
            raise ValueError("a planted fault")

    request = make_request(80)
    async with split_cluster() as cluster:
        reserved, reading = await reserve(cluster, request)
        await reserved.wait()
        cluster.encoder_machine.before_step = fail
        with pytest.raises(RipresaError, match=f"step {step} .* a planted fault") as caught:
            await cluster.encoder.prefill(request, "d0")
        assert caught.value.code is ErrorCode.INTERNAL
        await cluster.encoder.prefill(re_executed(request), "d0")
        (await reading).assert_equals(reference_stream(request))


async def test_a_failed_export_reaches_the_caller() -> None:
    request = make_request(PROMPT)
    async with split_cluster() as cluster:
        reserved, reading = await reserve(cluster, request)
        await reserved.wait()
        export = cluster.encoder_machine.export_state

        def broken(*args: object) -> None:
            raise RipresaError(ErrorCode.INTERNAL, "a planted fault")

        cluster.encoder_machine.export_state = broken  # type: ignore[assignment, method-assign]
        with pytest.raises(RipresaError, match="a planted fault"):
            await cluster.encoder.prefill(request, "d0")
        cluster.encoder_machine.export_state = export  # type: ignore[method-assign]
        await cluster.encoder.prefill(re_executed(request), "d0")
        (await reading).assert_equals(reference_stream(request))


@pytest.mark.parametrize("message", range(NUM_MESSAGES))
async def test_cancelling_the_stream_at_every_message_ends_the_prefill(message: int) -> None:
    reached, release = asyncio.Event(), asyncio.Event()
    request = make_request(PROMPT)
    async with split_cluster({message: delay(reached, release)}) as cluster:
        reserved, reading = await reserve(cluster, request)
        await reserved.wait()
        prefill = asyncio.create_task(cluster.encoder.prefill(request, "d0"))
        await reached.wait()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        stats = cluster.decoder.stats()
        assert stats.num_free_blocks == stats.num_blocks
        release.set()
        result = (await asyncio.gather(prefill, return_exceptions=True))[0]
        assert isinstance(result, RipresaError)
        assert result.code in (ErrorCode.NOT_FOUND, ErrorCode.UNAVAILABLE)


@pytest.mark.parametrize("message", range(NUM_MESSAGES))
async def test_cancelling_the_prefill_at_every_message_leaves_the_stream_waiting(
    message: int,
) -> None:
    reached, release = asyncio.Event(), asyncio.Event()
    request = make_request(PROMPT)
    async with split_cluster({message: delay(reached, release)}) as cluster:
        reserved, reading = await reserve(cluster, request)
        await reserved.wait()
        prefill = asyncio.create_task(cluster.encoder.prefill(request, "d0"))
        await reached.wait()
        prefill.cancel()
        assert isinstance(
            (await asyncio.gather(prefill, return_exceptions=True))[0], asyncio.CancelledError
        )
        release.set()
        await cluster.encoder.prefill(re_executed(request), "d0")
        (await reading).assert_equals(reference_stream(request))


async def test_a_deadline_ends_a_prefill_that_waits_for_its_receiver() -> None:
    reached, release = asyncio.Event(), asyncio.Event()
    async with split_cluster({0: delay(reached, release)}) as cluster:
        late = make_request(PROMPT, deadline=time.time() + 0.15)
        with pytest.raises(RipresaError) as caught:
            await cluster.encoder.prefill(late, "d0")
        assert caught.value.code is ErrorCode.DEADLINE_EXCEEDED


async def test_a_full_encoder_refuses() -> None:
    async with split_cluster() as cluster:
        requests = [make_request(200, request_id=f"r{i}") for i in range(3)]
        waiting = [await reserve(cluster, requests[0])]
        await waiting[0][0].wait()
        gate = StepGate(cluster.encoder_machine, 1)
        running = [
            asyncio.create_task(cluster.encoder.prefill(requests[0], "d0")),
            asyncio.create_task(cluster.encoder.prefill(requests[1], "d1")),
        ]
        await gate.reached.wait()
        late = make_request(400, request_id="late")
        with pytest.raises(ResourceExhausted):
            await cluster.encoder.prefill(late, "d0")
        with pytest.raises(InvalidArgument):
            await cluster.encoder.prefill(make_request(512, request_id="long"), "d0")
        gate.open()
        done, refused = await asyncio.gather(*running, return_exceptions=True)
        assert isinstance(done, WorkCounters)
        assert isinstance(refused, RipresaError)
        stream = await waiting[0][1]
        assert isinstance(stream.events[1], PrefillDone)
        stream.assert_equals(reference_stream(requests[0]))


async def test_stopping_the_encoder_fails_its_prefills() -> None:
    request = make_request(80)
    async with split_cluster() as cluster:
        reserved, reading = await reserve(cluster, request)
        await reserved.wait()
        gate = StepGate(cluster.encoder_machine, 2)
        prefill = asyncio.create_task(cluster.encoder.prefill(request, "d0"))
        await gate.reached.wait()
        stopping = asyncio.create_task(cluster.encoder.stop())
        with pytest.raises(RipresaError, match="stopping"):
            await prefill
        gate.open()
        await stopping
        assert cluster.decoder.stats().num_waiting == 1
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
