"""Does a worker that reuses cached blocks stream what a worker without a cache would?

The reference knows no cache: it computes the prompt with the restarts that the stream reports.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hash_machine import (
    NUM_ENCODER_LAYERS,
    REWIND,
    WINDOW,
    HashMachine,
    reference_stream,
)
from hash_requests import ask, make_request, prompt, recipe_of
from histories import TAILS, WINDOWS, check
from split_cluster import (
    CONFIG,
    StepGate,
    Stream,
    collect,
    local_engine,
    re_executed,
    split_cluster,
)

from ripresa.workers.config import WindowConfig, WindowPolicy
from ripresa.workers.errors import ErrorCode, RipresaError
from ripresa.workers.replay import PlanKind, Recipe, ReplayMode, TailVariant
from ripresa.workers.request import CacheUse

FULL = WindowConfig(WindowPolicy.FULL)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("length", [17, 18, 25, 26, 33, 34, 43, 50, 90])
async def test_a_second_request_reuses_what_the_first_one_left(
    length: int, tail: TailVariant
) -> None:
    tokens = prompt(1, length)
    async with local_engine() as (engine, _):
        first = check(ask(tokens, tail=tail), await collect(engine, ask(tokens, tail=tail)))
        assert first.kind is PlanKind.COLD
        before = engine.stats().num_encoder_rows
        stream = await collect(engine, ask(tokens, tail=tail))
        recipe = check(ask(tokens, tail=tail), stream)
        reused = max(0, length - WINDOW - REWIND) // WINDOW * WINDOW
        assert recipe.write_floor == reused
        assert recipe.start == max(0, reused - WINDOW)
        assert recipe.kind is (
            PlanKind.COLD
            if not reused
            else PlanKind.BOUNDED
            if reused > WINDOW
            else PlanKind.FROM_ZERO
        )
        assert recipe.restarts == ((reused,) if reused > WINDOW else ())
        assert stream.finished.counters.encoder_rows == length - recipe.start
        assert engine.stats().num_encoder_rows - before == length - recipe.start + 5


async def test_restarts_stack_over_turns_and_decode_blocks_are_reused() -> None:
    tokens = prompt(2, 40)
    restarts: tuple[int, ...] = ()
    async with local_engine(HashMachine(num_blocks=256)) as (engine, _):
        for turn in range(6):
            request = ask(tokens, f"r{turn}", max_tokens=11)
            stream = await collect(engine, request)
            recipe = check(request, stream)
            if turn:
                # Every full block of the last turn, less those that the cap keeps for computing.
                assert recipe.write_floor == (len(tokens) - WINDOW - REWIND) // WINDOW * WINDOW
                restarts = (*restarts, recipe.write_floor)
                new = len(tokens) - recipe.write_floor
                assert stream.finished.counters.encoder_rows == new + WINDOW
            assert recipe.restarts == restarts
            tokens = tokens + stream.tokens + prompt(100 + turn, 5)


async def test_evicting_everything_between_turns_only_costs_rows() -> None:
    tokens = prompt(3, 60)
    machine = HashMachine(num_blocks=16)
    async with local_engine(machine) as (engine, _):
        check(ask(tokens), await collect(engine, ask(tokens)))
        big = ask(prompt(4, 120), "big", max_tokens=8)
        check(big, await collect(engine, big))
        recipe = check(ask(tokens), await collect(engine, ask(tokens)))
        assert recipe.write_floor < 40


async def test_a_request_keeps_its_blocks_when_the_pool_is_full() -> None:
    tokens = prompt(5, 60)
    machine = HashMachine(num_blocks=18)
    async with local_engine(machine) as (engine, _):
        await collect(engine, ask(tokens))
        gate = StepGate(machine, engine.stats().num_steps + 1)
        running = asyncio.create_task(collect(engine, ask(tokens, "a")))
        await gate.reached.wait()
        with pytest.raises(RipresaError) as caught:
            await collect(engine, ask(prompt(6, 80), "b"))
        assert caught.value.code is ErrorCode.RESOURCE_EXHAUSTED
        gate.open()
        assert check(ask(tokens), await running).kind is PlanKind.BOUNDED
        check(ask(prompt(6, 80)), await collect(engine, ask(prompt(6, 80), "b")))


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("num_streamed", [0, 3, 11])
@pytest.mark.parametrize("what", ["same", "empty", "other lineage"])
async def test_a_re_execution_follows_the_recipe_whatever_is_held(
    what: str, num_streamed: int, tail: TailVariant
) -> None:
    tokens = prompt(7, 70)
    async with local_engine(HashMachine(num_blocks=256)) as (engine, _):
        for length in (40, 55):
            await collect(engine, ask(tokens[:length], tail=tail, max_tokens=1))
        request = ask(tokens, max_tokens=16, tail=tail)
        first = await collect(engine, request)
        recipe = check(request, first)
        assert len(recipe.restarts) == 2
        again = re_executed(replace(request, recipe=recipe), first.tokens[:num_streamed])
        if what == "same":
            stream = await collect(engine, again)
            assert stream.finished.counters.encoder_rows == 70 + num_streamed - recipe.start
    if what != "same":
        async with local_engine(HashMachine(num_blocks=256)) as (engine, _):
            if what == "other lineage":
                check(ask(tokens), await collect(engine, ask(tokens)))
            stream = await collect(engine, again)
            assert stream.finished.counters.encoder_rows > 70 + num_streamed - recipe.start
    assert recipe_of(stream) == recipe
    assert first.tokens[:num_streamed] + stream.tokens == first.tokens
    async with split_cluster() as cluster:
        # An encoder that holds nothing computes the rows behind every restart.
        assert (await cluster.collect(again)).tokens == stream.tokens


async def test_exact_mode_takes_exact_blocks_only_and_equals_a_cold_run() -> None:
    tokens = prompt(8, 90)
    exact = CacheUse(ReplayMode.EXACT)
    async with local_engine(HashMachine(num_blocks=256)) as (engine, _):
        cold = await collect(engine, ask(tokens[:50], max_tokens=1))
        assert recipe_of(cold).kind is PlanKind.COLD
        bounded = recipe_of(await collect(engine, ask(tokens)))
        assert (bounded.kind, bounded.write_floor) == (PlanKind.BOUNDED, 48)
        stream = await collect(engine, ask(tokens, cache=exact))
        recipe = check(ask(tokens), stream)
        assert (recipe.kind, recipe.write_floor, recipe.restarts) == (PlanKind.REBUILD, 48, ())
        assert recipe.start == 48 - 2 * (WINDOW - 1)
        async with local_engine() as (other, _):
            assert (await collect(other, ask(tokens))).tokens == stream.tokens
        longer = recipe_of(await collect(engine, ask(tokens, cache=exact)))
        assert longer.write_floor == 80


async def test_reading_and_writing_can_be_switched_off() -> None:
    tokens = prompt(9, 60)
    async with local_engine() as (engine, _):
        silent = CacheUse(writes=False)
        for _ in range(2):
            recipe = recipe_of(await collect(engine, ask(tokens, cache=silent)))
            assert recipe.kind is PlanKind.COLD
        await collect(engine, ask(tokens))
        blind = CacheUse(reads=False)
        assert recipe_of(await collect(engine, ask(tokens, cache=blind))).kind is PlanKind.COLD
        assert recipe_of(await collect(engine, ask(tokens))).kind is PlanKind.BOUNDED


async def test_tenants_share_nothing() -> None:
    tokens = prompt(10, 60)
    async with local_engine() as (engine, _):
        for salt in (b"a", b"b"):
            recipe = recipe_of(await collect(engine, ask(tokens, salt=salt)))
            assert recipe.kind is PlanKind.COLD
        recipe = recipe_of(await collect(engine, ask(tokens, salt=b"a")))
        assert recipe.kind is PlanKind.BOUNDED


@pytest.mark.parametrize("step", range(1, 8))
async def test_a_cancel_publishes_committed_full_blocks_only(step: int) -> None:
    tokens = prompt(11, 60)
    async with local_engine() as (engine, machine):
        gate = StepGate(machine, step)
        reader = asyncio.create_task(collect(engine, ask(tokens)))
        await gate.reached.wait()
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        gate.open()
        recipe = check(ask(tokens), await collect(engine, ask(tokens, "after")))
        # Chunks end at 24, 48 and 60; the step under way is not committed.
        committed = (0, 24, 48, 60, 61, 62, 63)[step - 1]
        assert recipe.write_floor == min(committed // WINDOW * WINDOW, 48)


async def test_a_hit_on_the_encoder_and_on_the_decode_worker() -> None:
    tokens = prompt(12, 60)
    async with split_cluster() as cluster:
        first = await cluster.collect(ask(tokens))
        check(ask(tokens), first)
        longer = tokens + first.tokens + prompt(13, 9)
        stream = await cluster.collect(ask(longer))
        recipe = check(ask(longer), stream)
        # The encoder holds the prompt's blocks, not those of the answer.
        assert (recipe.kind, recipe.write_floor, recipe.restarts) == (PlanKind.BOUNDED, 56, (56,))
        # The decode worker holds its copies: one block, its own chunk of the answer, travels.
        assert stream.finished.counters.transfer_bytes < first.finished.counters.transfer_bytes
        # The other decode worker holds nothing: everything travels.
        other = await cluster.collect(ask(longer), "d1")
        check(ask(longer), other)
        more = other.finished.counters.transfer_bytes - stream.finished.counters.transfer_bytes
        assert more >= 7 * 8 * WINDOW


async def test_a_local_turn_after_a_handed_over_one_hits() -> None:
    tokens = prompt(14, 60)
    async with split_cluster() as cluster:
        await cluster.collect(ask(tokens))
        recipe = check(ask(tokens), await collect(cluster.decoder, ask(tokens)))
        assert (recipe.kind, recipe.write_floor) == (PlanKind.BOUNDED, 48)


async def test_a_foreign_recipe_is_refused_on_re_execution() -> None:
    tokens = prompt(15, 60)
    async with split_cluster() as cluster:
        cold = await cluster.collect(ask(tokens))
        events = cluster.decoder.generate(replace(ask(tokens), recipe=recipe_of(cold)), local=False)
        await anext(events)
        with pytest.raises(RipresaError, match="recipe differs"):
            await cluster.encoder.prefill(ask(tokens), "d0")
        await cluster.encoder.prefill(
            replace(ask(tokens), recipe=recipe_of(cold), generation=1), "d0"
        )
        await events.aclose()


def test_the_reference_depends_on_restarts() -> None:
    """Otherwise none of the comparisons above could fail."""
    request = make_request(60)
    assert request.recipe is not None
    streams = {
        reference_stream(request, recipe=replace(request.recipe, restarts=restarts)).tokens
        for restarts in ((), (16,), (32,), (16, 32))
    }
    assert len(streams) == 4


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("length", [18, 26, 33, 43, 50, 90])
async def test_a_held_window_spares_the_replay(length: int, tail: TailVariant) -> None:
    tokens = prompt(20, length)
    async with local_engine(config=replace(CONFIG, windows=FULL)) as (engine, _):
        cold = await collect(engine, ask(tokens, tail=tail))
        stream = await collect(engine, ask(tokens, tail=tail))
        recipe = check(ask(tokens, tail=tail), stream)
        reused = (length - WINDOW - REWIND) // WINDOW * WINDOW
        assert (recipe.kind, recipe.start) == (PlanKind.WINDOW, reused)
        assert (recipe.write_floor, recipe.restarts) == (reused, ())
        assert stream.finished.counters.encoder_rows == length - reused
        # Other tails read decoder-half rows that begin with the first computed one.
        if tail is TailVariant.FLOORED:
            assert stream.tokens == cold.tokens


@pytest.mark.parametrize("num_new", range(1, 40, 3))
@pytest.mark.parametrize("answer", [1, 4, 9, 30])
async def test_an_append_to_a_finished_turn_finds_a_window(answer: int, num_new: int) -> None:
    tokens = prompt(21, 70)
    junction = replace(CONFIG, windows=WindowConfig(WindowPolicy.JUNCTION))
    async with local_engine(config=junction) as (engine, _):
        first = await collect(engine, ask(tokens, max_tokens=answer))
        longer = tokens + first.tokens + prompt(22, num_new)
        recipe = check(ask(longer), await collect(engine, ask(longer)))
        assert recipe.kind is PlanKind.WINDOW
        assert recipe.restarts == ()


async def test_a_junction_is_kept_once_somebody_computes_it_natively() -> None:
    tokens = prompt(23, 90)
    junction = replace(CONFIG, windows=WindowConfig(WindowPolicy.JUNCTION))
    async with local_engine(HashMachine(num_blocks=256), junction) as (engine, _):
        branches = [tokens[:43] + prompt(30 + k, 40) for k in range(4)]
        await collect(engine, ask(branches[0]))
        # Two prompts part at 40, and the second one replays: nothing native ends at 40.
        assert check(ask(branches[1]), await collect(engine, ask(branches[1]))).restarts == (40,)
        exact = CacheUse(ReplayMode.EXACT, reads=False)
        await collect(engine, ask(branches[2], cache=exact))
        recipe = check(ask(branches[3]), await collect(engine, ask(branches[3])))
        assert (recipe.kind, recipe.start, recipe.restarts) == (PlanKind.WINDOW, 40, ())


def counted_rows(stream: Stream, recipe: Recipe, num_tokens: int) -> int:
    """Encoder rows that the turn computed, which are those of its plan."""
    rows = stream.finished.counters.encoder_rows
    assert rows == num_tokens - recipe.start
    return rows


@pytest.mark.parametrize("windows", [WINDOWS[0], WINDOWS[1]], ids=["zero", "junction"])
@pytest.mark.parametrize("evict", [False, True], ids=["kept", "evicted"])
async def test_a_tool_loop_computes_only_what_its_plans_say(
    windows: WindowConfig, evict: bool
) -> None:
    tokens = prompt(40, 60)
    machine = HashMachine(num_blocks=80, max_model_len=640)
    async with local_engine(machine, replace(CONFIG, windows=windows)) as (engine, _):
        end = 0
        for turn in range(20):
            before = engine.stats().num_encoder_rows
            request = ask(tokens, f"t{turn}", max_tokens=7)
            stream = await collect(engine, request)
            recipe = recipe_of(stream)
            stream.assert_equals(reference_stream(request, 640, recipe))
            rows = counted_rows(stream, recipe, len(tokens))
            assert engine.stats().num_encoder_rows - before == rows + 6
            new = len(tokens) - end
            if turn and not evict:
                assert rows <= max(3 * WINDOW + REWIND - 1, new + 2 * WINDOW)
                assert windows is WINDOWS[0] or recipe.kind is PlanKind.WINDOW
            # The last token of an answer has no row yet.
            end = len(tokens) + 6
            tokens = tokens + stream.tokens + prompt(50 + turn, 5 + turn % 13)
            if evict:
                flood = ask(prompt(99 + turn, 600), "flood", max_tokens=30)
                await collect(engine, flood)


@pytest.mark.parametrize("windows", [WINDOWS[0], WINDOWS[1]], ids=["zero", "junction"])
async def test_a_tool_loop_over_an_encoder_computes_only_what_its_plans_say(
    windows: WindowConfig,
) -> None:
    tokens = prompt(41, 60)
    async with split_cluster(config=replace(CONFIG, windows=windows), num_blocks=160) as cluster:
        end = 0
        for turn in range(20):
            request = ask(tokens, f"t{turn}", max_tokens=7)
            before = cluster.encoder.stats().num_encoder_rows
            received = cluster.decoder.stats().counters.transfer_bytes
            stream = await cluster.collect(request)
            recipe = check(request, stream)
            rows = cluster.encoder.stats().num_encoder_rows - before
            assert rows == len(tokens) - recipe.start
            # The encoder holds the blocks of the last prompt; its answer is new to it.
            new = len(tokens) - end
            assert not turn or rows <= max(3 * WINDOW + REWIND - 1, new + 2 * WINDOW)
            sent = cluster.decoder.stats().counters.transfer_bytes - received
            # The decode worker holds what it received and decoded in the same lineage.
            most = (len(tokens) - recipe.write_floor + WINDOW) // WINDOW + 2
            assert not turn or sent <= 8 * WINDOW * (most + 1 + NUM_ENCODER_LAYERS + 1) + 8
            end = len(tokens)
            tokens = tokens + stream.tokens + prompt(50 + turn, 5 + turn % 13)
