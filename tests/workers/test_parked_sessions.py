"""Does a session that goes on where it paused stream what an uninterrupted request would?"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hash_machine import REWIND, WINDOW, HashMachine, reference_stream
from hash_requests import ask, prompt, recipe_of
from split_cluster import CONFIG, assert_idle, collect, local_engine, re_executed, split_cluster

from ripresa.workers.config import ParkConfig
from ripresa.workers.decode_engine import DecodeEngine
from ripresa.workers.replay import PlanKind, ReplayMode, TailVariant
from ripresa.workers.request import CacheUse, GenerationRequest

TAILS = (TailVariant.FLOORED, TailVariant.LAYER_EXACT, TailVariant.FULL)


def turn(
    tokens: tuple[int, ...],
    *,
    tail: TailVariant = TailVariant.FLOORED,
    max_tokens: int = 7,
    cache: CacheUse | None = None,
    session_id: str | None = "s",
    salt: bytes = b"",
) -> GenerationRequest:
    request = ask(tokens, max_tokens=max_tokens, tail=tail, cache=cache, salt=salt)
    return replace(request, session_id=session_id)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("num_new", [1, 2, 5, 8, 9, 17, 30])
async def test_every_turn_computes_new_rows_only(num_new: int, tail: TailVariant) -> None:
    tokens = prompt(60, 41)
    async with local_engine(HashMachine(num_blocks=256, max_model_len=900)) as (engine, _):
        processed = 0
        for number in range(20):
            request = turn(tokens, tail=tail)
            stream = await collect(engine, request)
            recipe = recipe_of(stream)
            stream.assert_equals(reference_stream(request, 900, recipe))
            assert recipe.kind is (PlanKind.RESUME if number else PlanKind.COLD)
            assert recipe.start == recipe.write_floor == processed
            assert stream.finished.counters.encoder_rows == len(tokens) - processed
            engine.check_integrity()
            processed = len(tokens) + 6
            tokens = tokens + stream.tokens + prompt(61 + number, num_new)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("num_new", [1, 9, 30])
@pytest.mark.parametrize("is_replayed", [False, True])
async def test_a_resumed_turn_is_re_executed_without_its_image(
    num_new: int, is_replayed: bool, tail: TailVariant
) -> None:
    tokens = prompt(62, 60)
    async with local_engine(HashMachine(num_blocks=256)) as (engine, _):
        if is_replayed:
            await collect(engine, ask(tokens[:40]))
        first = await collect(engine, turn(tokens, tail=tail))
        longer = tokens + first.tokens + prompt(63, num_new)
        request = turn(longer, tail=tail, max_tokens=12)
        whole = await collect(engine, request)
        recipe = recipe_of(whole)
        assert recipe.kind is PlanKind.RESUME
        assert bool(recipe.restarts) is is_replayed
        again = re_executed(replace(request, recipe=recipe), whole.tokens[:5])
        assert (await collect(engine, again)).tokens == whole.tokens[5:]
    async with local_engine() as (engine, _):
        assert (await collect(engine, again)).tokens == whole.tokens[5:]
    async with split_cluster() as cluster:
        assert (await cluster.collect(again)).tokens == whole.tokens[5:]


async def test_a_turn_after_a_handed_over_one_resumes_on_its_decode_worker() -> None:
    tokens = prompt(64, 60)
    async with split_cluster() as cluster:
        first = await cluster.collect(turn(tokens))
        longer = tokens + first.tokens + prompt(65, 4)
        stream = await collect(cluster.decoder, turn(longer))
        recipe = recipe_of(stream)
        stream.assert_equals(reference_stream(turn(longer), recipe=recipe))
        assert (recipe.kind, recipe.start) == (PlanKind.RESUME, 66)
        other = await collect(cluster.decoders["d1"], turn(longer))
        assert recipe_of(other).kind is PlanKind.COLD


async def test_what_does_not_resume() -> None:
    tokens = prompt(66, 60)
    async with local_engine(HashMachine(num_blocks=256)) as (engine, _):
        first = await collect(engine, turn(tokens))
        longer = tokens + first.tokens + prompt(67, 4)
        changed = (*longer[:50], longer[50] ^ 1, *longer[51:])
        for request in (
            turn(longer, session_id="another"),
            turn(longer, session_id=None),
            turn(longer, salt=b"x"),
            turn(longer, cache=CacheUse(resumes=False)),
            turn(longer, cache=CacheUse(reads=False, writes=False)),
            turn(longer, cache=CacheUse(ReplayMode.EXACT, writes=False)),
            turn(changed, cache=CacheUse(writes=False)),
            turn(longer[:60], cache=CacheUse(writes=False)),
        ):
            stream = await collect(engine, request)
            stream.assert_equals(reference_stream(request, recipe=recipe_of(stream)))
            assert recipe_of(stream).kind is not PlanKind.RESUME


async def test_without_its_blocks_a_state_is_worthless() -> None:
    tokens = prompt(68, 60)
    async with local_engine(HashMachine(num_blocks=16)) as (engine, _):
        first = await collect(engine, turn(tokens))
        await collect(engine, ask(prompt(69, 110), max_tokens=10))
        request = turn(tokens + first.tokens + prompt(70, 4))
        stream = await collect(engine, request)
        stream.assert_equals(reference_stream(request, recipe=recipe_of(stream)))
        assert recipe_of(stream).kind is not PlanKind.RESUME


async def test_a_state_is_overdue_after_its_time() -> None:
    clock = [time.time()]
    machine = HashMachine()
    config = replace(CONFIG, parked=ParkConfig(time_to_live_s=10.0))
    engine = DecodeEngine("d0", machine, config, lambda: clock[0])
    await engine.start()
    tokens = prompt(71, 40)
    kinds = []
    for pause in (0.0, 9.0, 11.0):
        clock[0] += pause
        stream = await collect(engine, turn(tokens))
        kinds.append(recipe_of(stream).kind)
        tokens = tokens + stream.tokens + prompt(72, 3)
    assert kinds[:2] == [PlanKind.COLD, PlanKind.RESUME]
    assert kinds[2] is not PlanKind.RESUME
    assert_idle(engine, machine)
    await engine.stop()


async def test_a_budget_of_nothing_parks_nothing() -> None:
    tokens = prompt(73, 40)
    config = replace(CONFIG, parked=ParkConfig(capacity_bytes=0))
    async with local_engine(config=config) as (engine, _):
        first = await collect(engine, turn(tokens))
        longer = tokens + first.tokens + prompt(74, WINDOW + REWIND)
        assert recipe_of(await collect(engine, turn(longer))).kind is PlanKind.BOUNDED
