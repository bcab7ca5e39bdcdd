"""Do the modes exact and canonical, and tail exact, stream what their definitions say?

Whatever the cache held, whether encoder workers exist, and wherever an anchor falls: in the prompt,
at its end, in the answer.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from hash_machine import GEOMETRY, REWIND, WINDOW, HashMachine, reference_stream
from hash_requests import ask, prompt, recipe_of
from split_cluster import CONFIG, Stream, collect, local_engine, re_executed, split_cluster

from ripresa.workers.config import EngineConfig, WindowConfig, WindowPolicy
from ripresa.workers.errors import ConfigError
from ripresa.workers.replay import PlanKind, ReplayMode, TailVariant, canonical_restarts
from ripresa.workers.request import CacheUse, GenerationRequest

INTERVAL = 3 * WINDOW
WINDOWS = {
    "zero": WindowConfig(WindowPolicy.ZERO),
    "junction": WindowConfig(WindowPolicy.JUNCTION),
    "full": WindowConfig(WindowPolicy.FULL),
}
CANONICAL = CacheUse(ReplayMode.CANONICAL)
EXACT = CacheUse(ReplayMode.EXACT)
TAILS = (TailVariant.FLOORED, TailVariant.LAYER_EXACT, TailVariant.FULL)

Run = Callable[[GenerationRequest], Awaitable[Stream]]


def config(windows: str = "zero", budget: int = 3 * WINDOW) -> EngineConfig:
    return replace(
        CONFIG,
        windows=WINDOWS[windows],
        anchor_interval=INTERVAL,
        num_blocks=256,
        max_batched_tokens=budget,
    )


async def with_worker(
    where: str, engine_config: EngineConfig, use: Callable[[Run], Awaitable[None]]
) -> None:
    """Run a test over one decode worker, or over it and an encoder worker."""
    if where == "local":
        machine = HashMachine(num_blocks=256)
        async with local_engine(machine, engine_config) as (engine, _):
            await use(lambda request: collect(engine, request))
    else:
        async with split_cluster(config=engine_config, num_blocks=256) as cluster:
            await use(cluster.collect)


@pytest.mark.parametrize("where", ["local", "split"])
@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("tail", [TailVariant.FLOORED, TailVariant.LAYER_EXACT])
async def test_canonical_does_not_depend_on_what_is_cached(
    where: str, windows: str, tail: TailVariant
) -> None:
    tokens = prompt(11, 61)
    request = ask(tokens, tail=tail, cache=CANONICAL, max_tokens=40)

    for cached in (0, *range(WINDOW, 61, WINDOW)):

        async def use(run: Run, cached: int = cached) -> None:
            if cached:
                await run(ask(tokens[:cached], cache=CANONICAL, max_tokens=1))
            stream = await run(request)
            recipe = recipe_of(stream)
            held = min(cached, (61 - WINDOW - REWIND) // WINDOW * WINDOW)
            assert recipe.write_floor == held
            assert recipe.restarts == canonical_restarts(61, INTERVAL)
            cold = replace(recipe, kind=PlanKind.COLD, start=0, swa_floor=0, write_floor=0)
            if tail is TailVariant.LAYER_EXACT:
                cold = replace(cold, source_floor=61 - 2 * WINDOW + 1)
            stream.assert_equals(reference_stream(request, recipe=cold))

        await with_worker(where, config(windows), use)


@pytest.mark.parametrize("where", ["local", "split"])
@pytest.mark.parametrize("length", range(2 * INTERVAL - 4, 2 * INTERVAL + WINDOW + 4))
async def test_an_anchor_may_fall_anywhere(where: str, length: int) -> None:
    tokens = prompt(12, length)
    request = ask(tokens, cache=CANONICAL, max_tokens=2 * INTERVAL)

    async def use(run: Run) -> None:
        stream = await run(request)
        stream.assert_equals(reference_stream(request, recipe=recipe_of(stream)))
        longer = ask(tokens + stream.tokens + prompt(13, 5), "next", cache=CANONICAL)
        # Blocks that the answer filled are canonical, too.
        after = await run(longer)
        held = (longer.num_tokens - WINDOW - REWIND) // WINDOW * WINDOW
        if where == "local":
            assert recipe_of(after).write_floor == held
        after.assert_equals(reference_stream(longer, recipe=recipe_of(after)))

    await with_worker(where, config(budget=2 * WINDOW), use)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("streamed", [0, 1, 7, 20, 30])
async def test_a_canonical_re_execution_follows_the_recipe(
    tail: TailVariant, streamed: int
) -> None:
    tokens = prompt(14, 61)
    request = ask(tokens, tail=tail, cache=CANONICAL, max_tokens=40)
    async with local_engine(HashMachine(num_blocks=256), config("full")) as (engine, _):
        await collect(engine, ask(tokens[:35], cache=CANONICAL))
        first = await collect(engine, request)
        recipe = recipe_of(first)
        assert recipe.kind in (PlanKind.WINDOW, PlanKind.ANCHOR)
    expected = reference_stream(request, recipe=recipe)
    first.assert_equals(expected)
    again = re_executed(replace(request, recipe=recipe), first.tokens[:streamed])
    for windows in WINDOWS:
        async with local_engine(HashMachine(num_blocks=256), config(windows)) as (engine, _):
            for warm in (0, 35, 50):
                if warm:
                    await collect(engine, ask(tokens[:warm], "w", cache=CANONICAL))
                stream = await collect(engine, again)
                assert first.tokens[:streamed] + stream.tokens == expected.tokens


async def test_many_restarts_in_one_step_wait_for_the_budget() -> None:
    """Sequences that reach their anchors together: the budget bounds the rows of a step."""
    machine = HashMachine(num_blocks=256)
    rows: list[int] = []
    async with local_engine(machine, config(budget=3 * WINDOW)) as (engine, _):
        machine.before_step = lambda plan: rows.append(
            sum(step.num_encoder_rows for step in plan.sequences)
        )
        requests = [
            ask(prompt(20 + n, INTERVAL - 4), f"r{n}", cache=CANONICAL, max_tokens=12)
            for n in range(5)
        ]
        streams = await asyncio.gather(*(collect(engine, request) for request in requests))
        for request, stream in zip(requests, streams, strict=True):
            stream.assert_equals(reference_stream(request, recipe=recipe_of(stream)))
            assert stream.finished.counters.encoder_rows == INTERVAL - 4 + WINDOW
        assert max(rows) <= 3 * WINDOW


@pytest.mark.parametrize("where", ["local", "split"])
@pytest.mark.parametrize("windows", WINDOWS)
async def test_tail_exact_does_not_depend_on_what_is_cached(where: str, windows: str) -> None:
    tokens = prompt(15, 75)
    request = ask(tokens, tail=TailVariant.EXACT, cache=EXACT, max_tokens=9)
    first = 75 - 1 - (WINDOW - 1) * GEOMETRY.num_decoder_layers

    for cached in (0, *range(WINDOW, 75, WINDOW)):

        async def use(run: Run, cached: int = cached) -> None:
            if cached:
                await run(ask(tokens[:cached], cache=EXACT, max_tokens=1))
            stream = await run(request)
            recipe = recipe_of(stream)
            assert recipe.decoder_start == first
            assert recipe.restarts == ()
            assert recipe.write_floor == min(cached, (75 - WINDOW - REWIND) // WINDOW * WINDOW)
            stream.assert_equals(reference_stream(request, recipe=recipe))

        await with_worker(where, config(windows), use)


@pytest.mark.parametrize("streamed", [0, 3, 8])
async def test_tail_exact_is_re_executed_from_its_recipe(streamed: int) -> None:
    tokens = prompt(16, 75)
    request = ask(tokens, tail=TailVariant.EXACT, cache=EXACT, max_tokens=9)
    async with local_engine(HashMachine(num_blocks=256), config("full")) as (engine, _):
        await collect(engine, ask(tokens[:50], cache=EXACT))
        first = await collect(engine, request)
    again = re_executed(replace(request, recipe=recipe_of(first)), first.tokens[:streamed])
    async with split_cluster(config=config(), num_blocks=256) as cluster:
        assert first.tokens[:streamed] + (await cluster.collect(again)).tokens == first.tokens


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("where", ["local", "split"])
async def test_random_histories_of_all_modes(seed: int, where: str) -> None:
    """Requests of every mode over one cache; each stream is what its recipe defines."""
    rng = random.Random(f"{seed} {where}")
    roots = [prompt(30 + n, 120) for n in range(3)]

    async def use(run: Run) -> None:
        for number in range(25):
            mode = rng.choice(list(ReplayMode))
            tails = list(TAILS)
            if mode is ReplayMode.EXACT:
                # The first rows of tail full are not those of a cold run; the last one is, but
                # the machine's decoder half looks back without end.
                tails[-1] = TailVariant.EXACT
            length = rng.randint(1, 110)
            tokens = rng.choice(roots)[:length] + prompt(number, rng.randint(0, 12))
            request = ask(
                tokens,
                f"r{number}",
                tail=rng.choice(tails),
                cache=CacheUse(mode),
                max_tokens=rng.randint(1, 30),
            )
            stream = await run(request)
            recipe = recipe_of(stream)
            if mode is not ReplayMode.BOUNDED:
                assert recipe.restarts == (
                    () if mode is ReplayMode.EXACT else canonical_restarts(len(tokens), INTERVAL)
                )
            stream.assert_equals(reference_stream(request, recipe=recipe))

    windows = rng.choice(list(WINDOWS))
    await with_worker(where, config(windows, rng.choice((2, 3, 6)) * WINDOW), use)


@pytest.mark.parametrize("interval", [0, WINDOW + 2])
async def test_anchors_are_block_boundaries(interval: int) -> None:
    with pytest.raises(ConfigError, match="anchor_interval"):
        async with local_engine(config=replace(CONFIG, anchor_interval=interval)):
            pass
