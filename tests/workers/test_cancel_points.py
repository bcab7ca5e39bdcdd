"""Is nothing lost or published early, wherever a request is cancelled?

Every await of admission, prefill, hand-over and decode is counted, and a run is cancelled at each
of them. Hits are part of all: the prompts share a prefix that was computed before.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace

import observed_model
import pytest
import torch
from hash_machine import WINDOW, HashMachine
from hash_requests import ask, prompt
from histories import check
from split_cluster import (
    CONFIG,
    SplitCluster,
    StepGate,
    Stream,
    collect,
    local_engine,
    split_cluster,
)
from suspensions import Cancelling, for_every_wait

from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.cache.block_table import PagePool
from ripresa.workers.config import WindowConfig, WindowPolicy
from ripresa.workers.decode_engine import DecodeEngine
from ripresa.workers.encoder_engine import EncoderEngine
from ripresa.workers.errors import ErrorCode, RipresaError
from ripresa.workers.prefix_cache import PrefixCache
from ripresa.workers.replay import PlanKind, Recipe, ReplayMode
from ripresa.workers.request import (
    CacheUse,
    EngineEvent,
    GenerationRequest,
    RecipeFixed,
    Reserved,
    WorkCounters,
)

FULL = replace(CONFIG, windows=WindowConfig(WindowPolicy.FULL), anchor_interval=4 * WINDOW)
SHARED = prompt(60, 40)
FIRST = ask(SHARED + prompt(61, 20), "first")
REQUESTS = {
    "bounded": ask(SHARED + prompt(62, 27), "r", max_tokens=12),
    "canonical": ask(
        SHARED + prompt(62, 27), "r", max_tokens=12, cache=CacheUse(ReplayMode.CANONICAL)
    ),
    "session": replace(ask(SHARED + prompt(62, 27), "r", max_tokens=12), session_id="s"),
}


def caches(*engines: DecodeEngine | EncoderEngine) -> list[PrefixCache]:
    return [engine._core._prefixes for engine in engines]


def assert_published_only_what_was_committed(
    found: Sequence[PrefixCache], most: Sequence[set[BlockIdentity]]
) -> None:
    """A cancelled run publishes blocks that a whole run publishes, and no others."""
    for cache, whole in zip(found, most, strict=True):
        assert set(cache.blocks._index) <= whole


async def published_by_a_whole_run(request: GenerationRequest) -> list[set[BlockIdentity]]:
    async with split_cluster(config=FULL) as cluster:
        await cluster.collect(FIRST)
        await cluster.collect(request)
        engines = (cluster.encoder, *cluster.decoders.values())
        return [set(cache.blocks._index) for cache in caches(*engines)]


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_local_request_may_be_cancelled_at_every_await(name: str) -> None:
    request = REQUESTS[name]

    async def scenario(cancelling: Cancelling[Stream]) -> bool:
        async with local_engine(config=FULL) as (engine, _):
            await collect(engine, FIRST)
            stream = await cancelling(lambda: collect(engine, request))
            engine.check_integrity()
            again = await collect(engine, replace(request, request_id="again"))
            check(request, again)
            engine.check_integrity()
        return stream is not None

    # Every event of the stream is waited for, and the admission.
    assert await for_every_wait(scenario) >= 12


@pytest.mark.parametrize("name", ["bounded", "canonical"])
async def test_a_reader_of_a_handed_over_prompt_may_be_cancelled_at_every_await(name: str) -> None:
    request = REQUESTS[name]
    whole = await published_by_a_whole_run(request)

    async def scenario(cancelling: Cancelling[Stream]) -> bool:
        async with split_cluster(config=FULL) as cluster:
            await cluster.collect(FIRST)
            stream = await cancelling(lambda: cluster.collect(request))
            engines = (cluster.encoder, *cluster.decoders.values())
            for engine in engines:
                engine.check_integrity()
            assert_published_only_what_was_committed(caches(*engines), whole)
            check(request, await cluster.collect(replace(request, request_id="again")))
        return stream is not None

    assert await for_every_wait(scenario) >= 12


async def test_a_real_model_s_next_answer_equals_a_cold_one_wherever_one_was_cancelled() -> None:
    """In mode exact, whose hits equal cold runs bit for bit; the hit is what the cancel left."""
    tokens = tuple(random.Random(63).choices(range(2, 60), k=60))
    question = observed_model.ask(tokens, mode=ReplayMode.EXACT, max_tokens=6)
    observed = observed_model.Observed()
    logits: list[torch.Tensor] = []
    for warm in (False, True):

        async def scenario(cancelling: Cancelling[Recipe], warm: bool = warm) -> bool:
            engine = DecodeEngine("d0", observed.runner, observed_model.CONFIG)
            await engine.start()
            was_whole = True
            if warm:
                recipe = await cancelling(lambda: observed_model.run(engine, question))
                was_whole = recipe is not None
            with observed.watched() as rows:
                await observed_model.run(engine, replace(question, request_id="next"))
            engine.check_integrity()
            logits.append(observed_model.stacked(rows))
            await engine.stop()
            return was_whole

        num_waits = await for_every_wait(scenario)
        assert num_waits >= 6 or not warm
    assert all(torch.equal(logits[0], others) for others in logits[1:])


class Reader:
    """Reads the stream of a request whose prefill somebody else runs once it is reserved."""

    def __init__(self, cluster: SplitCluster, request: GenerationRequest) -> None:
        self.reserved = asyncio.Event()
        self.recipe: Recipe | None = None
        self.task = asyncio.create_task(self._read(cluster, request))

    async def _read(self, cluster: SplitCluster, request: GenerationRequest) -> Stream:
        events: list[EngineEvent] = []
        async for event in cluster.decoder.generate(request, local=False):
            events.append(event)
            if isinstance(event, Reserved):
                self.reserved.set()
            if isinstance(event, RecipeFixed):
                self.recipe = event.recipe
        return Stream(tuple(events))


@pytest.mark.parametrize("name", ["bounded", "canonical"])
async def test_a_prefill_may_be_cancelled_at_every_await_and_taken_over(name: str) -> None:
    request = REQUESTS[name]

    async def scenario(cancelling: Cancelling[WorkCounters]) -> bool:
        async with split_cluster(config=FULL) as cluster:
            await cluster.collect(FIRST)
            reader = Reader(cluster, request)
            await reader.reserved.wait()
            counters = await cancelling(lambda: cluster.encoder.prefill(request, "d0"))
            cluster.encoder.check_integrity()
            cluster.decoder.check_integrity()
            if counters is None and not reader.task.done():
                # Another execution goes on by the recipe; if the state had arrived, it hears so.
                again = replace(request, generation=1, recipe=reader.recipe)
                second = cluster.encoder.prefill(again, "d0")
                (refused,) = await asyncio.gather(second, return_exceptions=True)
                if isinstance(refused, RipresaError):
                    assert refused.code in (ErrorCode.ALREADY_EXISTS, ErrorCode.NOT_FOUND)
                elif isinstance(refused, BaseException):
                    raise refused
            check(request, await reader.task)
        return counters is not None

    # The offer, its answers, each section, the checksum.
    assert await for_every_wait(scenario) >= 6


@pytest.mark.parametrize("step", range(1, 9))
async def test_a_request_whose_id_runs_already_is_refused_or_takes_its_place(step: int) -> None:
    request = REQUESTS["bounded"]
    async with local_engine(config=FULL) as (engine, machine):
        await collect(engine, FIRST)
        gate = StepGate(machine, engine.stats().num_steps + step)
        first = asyncio.create_task(collect(engine, request))
        await gate.reached.wait()
        with pytest.raises(RipresaError) as caught:
            await collect(engine, request)
        assert caught.value.code is ErrorCode.ALREADY_EXISTS
        engine.check_integrity()
        second = asyncio.create_task(collect(engine, replace(request, generation=1)))
        await asyncio.sleep(0)
        gate.open()
        assert (await first).failed.error.code is ErrorCode.CANCELLED
        check(request, await second)
        engine.check_integrity()


async def test_blocks_and_windows_that_go_between_plan_and_start_are_missed_without_harm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first reservation finds everything gone that its plan counted on."""
    request = REQUESTS["bounded"]
    async with local_engine(HashMachine(num_blocks=256), FULL) as (engine, _):
        await collect(engine, FIRST)
        reserve, evicted = PagePool.reserve, []

        def evicting(
            pool: PagePool, num_positions: int, chain: tuple[BlockIdentity, ...]
        ) -> object:
            if not evicted:
                (cache,) = caches(engine)
                evicted.append(cache.blocks.withdraw(lambda record: True))
                cache.windows.clear()
            return reserve(pool, num_positions, chain)

        monkeypatch.setattr(PagePool, "reserve", evicting)
        with pytest.raises(RipresaError) as caught:
            await collect(engine, request)
        assert caught.value.code is ErrorCode.NOT_FOUND
        assert evicted[0] > 0
        engine.check_integrity()
        stream = await collect(engine, request)
        assert check(request, stream).kind is PlanKind.COLD
        engine.check_integrity()
