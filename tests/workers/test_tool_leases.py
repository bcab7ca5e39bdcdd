"""Does a session whose tools run find all of its state again, however full the worker is?"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from hash_machine import WINDOW, HashMachine
from hash_requests import ask, prompt, recipe_of
from histories import check
from split_cluster import CONFIG, Stream, assert_idle, collect, local_engine
from suspensions import Cancelling, for_every_wait

from ripresa.workers.config import LeaseConfig
from ripresa.workers.decode_engine import DecodeEngine
from ripresa.workers.replay import PlanKind
from ripresa.workers.request import GenerationRequest

NUM_NEW = 5


def turn(
    tokens: tuple[int, ...], name: str, session: str | None, expected_s: float | None = None
) -> GenerationRequest:
    request = ask(tokens, name, max_tokens=7)
    return replace(request, session_id=session, expect_next_within_s=expected_s)


def outcomes(engine: DecodeEngine) -> dict[str, int]:
    return dict(engine.stats().leases.outcomes)


async def next_turn(
    engine: DecodeEngine, before: GenerationRequest, stream: Stream
) -> tuple[GenerationRequest, Stream]:
    """The session goes on with a few tokens; its stream is what its recipe defines."""
    tokens = before.token_ids + stream.tokens + prompt(99, NUM_NEW)
    request = turn(tokens, before.request_id + "+", before.session_id)
    stream = await collect(engine, request)
    check(request, stream)
    return request, stream


async def fill(engine: DecodeEngine, seeds: range) -> None:
    """Other requests, one after the other, that want more blocks than there are."""
    for seed in seeds:
        await collect(engine, ask(prompt(seed, 12 * WINDOW), f"other {seed}"))


async def test_a_leased_session_computes_its_new_rows_only_and_another_one_is_evicted() -> None:
    async with local_engine(HashMachine(num_blocks=40)) as (engine, _):
        leased, other = (turn(prompt(k, 60), name, name) for k, name in enumerate("st"))
        first, second = await collect(engine, leased), await collect(engine, other)
        assert engine.lease("s", ["search"])
        assert engine.stats().leases.num_pinned_blocks == 66 // WINDOW
        await fill(engine, range(10, 16))
        _, stream = await next_turn(engine, leased, first)
        assert recipe_of(stream).kind is PlanKind.RESUME
        # The last sampled token had no row yet.
        assert stream.finished.counters.encoder_rows == NUM_NEW + 1
        _, stream = await next_turn(engine, other, second)
        assert stream.finished.counters.encoder_rows == 60 + 7 + NUM_NEW
        found = outcomes(engine)
        assert (found["granted"], found["redeemed"], found["yielded"]) == (1, 1, 0)
        assert engine.stats().leases.num_pinned_blocks == 0


async def test_without_a_session_the_blocks_stay_too() -> None:
    async with local_engine(HashMachine(num_blocks=40)) as (engine, _):
        request = turn(prompt(1, 60), "r", None)
        stream = await collect(engine, request)
        assert engine.lease("r", ["search"])
        await fill(engine, range(10, 16))
        _, stream = await next_turn(engine, request, stream)
        assert stream.finished.counters.encoder_rows < 60 / 2
        assert outcomes(engine)["redeemed"] == 1


async def test_what_a_client_expects_needs_no_word_of_its_tools() -> None:
    async with local_engine(HashMachine(num_blocks=40)) as (engine, _):
        request = turn(prompt(1, 60), "r", "s", expected_s=60.0)
        stream = await collect(engine, request)
        await fill(engine, range(10, 16))
        _, stream = await next_turn(engine, request, stream)
        assert recipe_of(stream).kind is PlanKind.RESUME


async def test_leases_never_keep_a_request_out() -> None:
    config = replace(CONFIG, leases=LeaseConfig(max_share=1.0))
    async with local_engine(HashMachine(num_blocks=20), config) as (engine, _):
        for name in "ab":
            await collect(engine, turn(prompt(ord(name), 60), name, name))
            assert engine.lease(name, ["search"])
        assert engine.stats().leases.num_pinned_blocks == 16
        assert engine.stats().num_free_blocks == 20
        big = ask(prompt(7, 140), "big", max_tokens=7)
        check(big, await collect(engine, big))
        assert outcomes(engine)["yielded"] == 2


async def test_an_overdue_session_is_the_first_to_go_and_still_there_until_then() -> None:
    now = [time.time()]
    machine = HashMachine(num_blocks=40)
    engine = DecodeEngine("d0", machine, CONFIG, lambda: now[0])
    await engine.start()
    late, gone, used = (turn(prompt(k, 60), name, name) for k, name in enumerate("lgu"))
    streams = {r.request_id: await collect(engine, r) for r in (used, gone, late)}
    for name in "lg":
        assert engine.lease(name, ["search"])
    now[0] += 40.0
    await collect(engine, ask((3,), "something else"))
    _, stream = await next_turn(engine, late, streams["l"])
    assert outcomes(engine)["lapsed"] == 2
    assert stream.finished.counters.encoder_rows == NUM_NEW + 1
    # Of those that nobody comes back to, the overdue one makes room before the older one.
    await collect(engine, ask(prompt(50, 14 * WINDOW), "other"))
    _, stream = await next_turn(engine, used, streams["u"])
    assert stream.finished.counters.encoder_rows == NUM_NEW + 1
    _, stream = await next_turn(engine, gone, streams["g"])
    assert stream.finished.counters.encoder_rows > NUM_NEW + 1
    assert_idle(engine, machine)
    await engine.stop()


async def test_a_lease_lapses_while_the_worker_is_idle() -> None:
    async with local_engine() as (engine, _):
        lapsed = asyncio.Event()
        leases = engine._core._prefixes.leases
        lapse = leases.lapse

        def watched(now: float) -> None:
            lapse(now)
            if outcomes(engine)["lapsed"]:
                lapsed.set()

        leases.lapse = watched  # type: ignore[method-assign]
        await collect(engine, turn(prompt(1, 60), "r", "s", expected_s=0.01))
        await lapsed.wait()
        assert engine.stats().leases.num_pinned_blocks == 0


async def test_a_closed_session_keeps_nothing() -> None:
    async with local_engine() as (engine, _):
        request = turn(prompt(1, 60), "r", "s")
        stream = await collect(engine, request)
        engine.lease("r", ["search"])
        for _ in range(2):
            engine.end_session(b"", "s")
        assert outcomes(engine)["released"] == 1
        assert engine.stats().leases.num_pinned_blocks == 0
        _, stream = await next_turn(engine, request, stream)
        assert recipe_of(stream).kind is not PlanKind.RESUME


async def test_the_next_turn_may_be_cancelled_at_every_await() -> None:
    """A lease ends with the admission of the next turn, or stays."""

    async def scenario(cancelling: Cancelling[Stream]) -> bool:
        async with local_engine(HashMachine(num_blocks=40)) as (engine, _):
            request = turn(prompt(1, 60), "r", "s")
            stream = await collect(engine, request)
            assert engine.lease("r", ["search"])
            tokens = request.token_ids + stream.tokens + prompt(99, NUM_NEW)
            longer = turn(tokens, "next", "s")
            found = await cancelling(lambda: collect(engine, longer))
            engine.check_integrity()
            counts = outcomes(engine)
            is_pinned = engine.stats().leases.num_pinned_blocks > 0
            assert counts["granted"] == 1
            assert is_pinned is (counts["redeemed"] == 0)
            again = replace(longer, request_id="again")
            check(again, await collect(engine, again))
        return found is not None

    assert await for_every_wait(scenario) >= 7
