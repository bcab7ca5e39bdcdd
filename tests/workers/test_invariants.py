"""Do workers keep the invariants of the replay rules in whatever history of requests?

Here are those that show in what a worker computes, step by step; others are tested, under their
names, beside the pool or the planner that keeps them. The last test says which is where.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hash_machine import (
    NUM_ENCODER_LAYERS,
    REWIND,
    WINDOW,
    HashMachine,
    ReferenceEncoder,
    digest,
    reference_stream,
)
from hash_requests import ask, prompt, recipe_of
from hinted_histories import over_hinted_peers
from histories import TAILS, check, on_one_worker, over_a_cluster
from split_cluster import CONFIG, collect, local_engine, split_cluster

from ripresa.workers.address import WorkerAddress, WorkerKind
from ripresa.workers.cache.block_cache import BlockCache
from ripresa.workers.cache.block_record import PublishOutcome
from ripresa.workers.cache.block_table import BlockTable
from ripresa.workers.config import WindowConfig, WindowPolicy
from ripresa.workers.demo.checkpoint import DEMO_MODEL
from ripresa.workers.engine import EngineCore
from ripresa.workers.model_runner import kv_layout
from ripresa.workers.models.deepseek_v41.config import ModelConfig
from ripresa.workers.prefix_cache import RequestPrefix
from ripresa.workers.prefix_sources import BlockSource, PrefixSources, WindowSource
from ripresa.workers.replay import TailVariant, cold_recipe
from ripresa.workers.scheduling.step_plan import SequenceStep, StepPlan
from ripresa.workers.sequence import Sequence
from ripresa.workers.transfer.base import TransferState

SEEDS = range(200, 204)
FULL = replace(CONFIG, windows=WindowConfig(WindowPolicy.FULL))
Look = Callable[[EngineCore, HashMachine, SequenceStep], None]
Around = Callable[[HashMachine, SequenceStep], Callable[[], None]]


def see_nothing(core: EngineCore, machine: HashMachine, step: SequenceStep) -> None:
    """For tests that patch what they look at."""


async def histories(look: Look = see_nothing, around: Around | None = None) -> None:
    """Random histories whose steps are watched, sequence by sequence.

    Args:
        look: sees a step on the event loop, when no step runs.
        around: sees it in the step thread, before its rows; what it returns, after them.
    """
    num_seen = 0

    def watch(core: EngineCore, machine: HashMachine) -> None:
        schedule, run = core._scheduler.schedule, machine._run

        def scheduled() -> StepPlan | None:
            nonlocal num_seen
            plan = schedule()
            for step in () if plan is None else plan.sequences:
                num_seen += 1
                look(core, machine, step)
            return plan

        def ran(step: SequenceStep, *rest: object) -> None:
            after = None if around is None else around(machine, step)
            run(step, *rest)  # type: ignore[arg-type]
            if after is not None:
                after()

        core._scheduler.schedule = scheduled  # type: ignore[method-assign]
        machine._run = ran  # type: ignore[method-assign]

    for seed in SEEDS:
        await on_one_worker(seed, 6, watch)
        await over_a_cluster(seed, 4, watch)
        await over_hinted_peers(seed, 4, watch)
    assert num_seen > 500


def slot_of(machine: HashMachine, step: SequenceStep) -> list[dict[int, int]]:
    """The encoder's rings before the step; empty ones for a new sequence."""
    slot = machine._slots.get(step.slot)
    return [{} for _ in range(NUM_ENCODER_LAYERS)] if slot is None else slot.encoder


async def test_i01_rows_below_the_write_floor_write_no_block_kv() -> None:
    num_compared = 0

    def around(machine: HashMachine, step: SequenceStep) -> Callable[[], None]:
        def entries() -> list[int | None]:
            table, below = step.block_table, range(min(step.write_floor, step.encoder_stop))
            return [machine._blocks[table[p // WINDOW]][p % WINDOW] for p in below]

        before = entries()

        def after() -> None:
            nonlocal num_compared
            assert entries() == before
            num_compared += step.encoder_start < step.write_floor

        return after

    await histories(around=around)
    assert num_compared > 20


async def test_i02_no_query_reads_a_window_row_below_its_floor() -> None:
    """Every row below the floors is poison, and all streams stay what the recipes define."""
    num_poisoned = 0

    def poison(core: EngineCore, machine: HashMachine, step: SequenceStep) -> None:
        nonlocal num_poisoned
        slot = machine._slots.get(step.slot)
        if slot is None:
            return
        floors = [(ring, step.swa_floor) for ring in slot.encoder if step.num_encoder_rows]
        floors += [(slot.source, step.source_floor), (slot.decoder, step.decoder_floor)]
        if not step.num_decoder_rows:
            floors = floors[:-2]
        for ring, floor in floors:
            for position in ring:
                if position < floor:
                    ring[position] = digest("poison", position)
                    num_poisoned += 1

    await histories(poison)
    assert num_poisoned > 100


@pytest.mark.parametrize("length", [19, 41, 43, 57])
async def test_i05_an_odd_length_travels_with_its_open_pair(length: int) -> None:
    tokens = prompt(70, length)
    request = replace(ask(tokens, max_tokens=4), session_id="s")
    async with split_cluster() as cluster:
        stream = await cluster.collect(request)
        check(request, stream)
        # The turn is parked at an odd or an even length; the next one goes on from there.
        for extra in (1, 2):
            longer = replace(ask(tokens + stream.tokens + prompt(71, extra)), session_id="s")
            stream = await collect(cluster.decoder, longer)
            check(longer, stream)
            tokens = longer.token_ids


async def test_i06_no_decoder_row_is_in_a_window_a_block_or_a_transfer() -> None:
    decoder: set[int] = set()
    num_found = 0

    def look(core: EngineCore, machine: HashMachine, step: SequenceStep) -> None:
        for slot in machine._slots.values():
            decoder.update(slot.decoder.values())

    def after(core: EngineCore, machine: HashMachine, step: SequenceStep) -> None:
        nonlocal num_found
        look(core, machine, step)
        for payload in core._prefixes.windows._held.values():
            values = payload.clone().view(torch.int64).tolist()
            assert len(values) == NUM_ENCODER_LAYERS * WINDOW
            assert decoder.isdisjoint(values)
            num_found += 1
        for block in machine._blocks:
            assert decoder.isdisjoint(entry for entry in block if entry is not None)

    # One worker, one request after the other: looking at everything after each step is slow.
    async with local_engine(config=FULL) as (engine, machine):
        run = machine._run

        def watched(step: SequenceStep, *rest: object) -> None:
            run(step, *rest)  # type: ignore[arg-type]
            after(engine._core, machine, step)

        machine._run = watched  # type: ignore[method-assign]
        for number in range(4):
            request = ask(prompt(72, 40) + prompt(73 + number, 20), max_tokens=20)
            check(request, await collect(engine, request))
    assert num_found > 100


async def test_i07_a_window_is_whole_native_and_of_the_lineage_of_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put = RequestPrefix._put
    num_put = 0

    def checked(
        prefix: RequestPrefix, sequence: Sequence, boundary: int, payload: torch.Tensor
    ) -> None:
        nonlocal num_put
        num_put += 1
        restarts = tuple(x for x in sequence.recipe.restarts if x < boundary)
        recipe = replace(
            cold_recipe(boundary, WINDOW, TAILS[0], 0),
            restarts=restarts,
            anchor_interval=sequence.recipe.anchor_interval,
        )
        reference = ReferenceEncoder(recipe)
        reference.extend(sequence.token_ids[:boundary])
        rows = range(boundary - WINDOW, boundary)
        assert payload.clone().view(torch.int64).tolist() == [
            ring[j] for ring in reference._rings for j in rows
        ]
        put(prefix, sequence, boundary, payload)

    monkeypatch.setattr(RequestPrefix, "_put", checked)
    await histories()
    assert num_put > 50


async def test_i08_a_published_block_holds_every_committed_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When others may find it, the worker has booked the step that wrote its last row."""
    publish, acknowledge = RequestPrefix.publish, BlockCache.acknowledge
    committed: list[int] = []
    num_published = 0

    def publishing(prefix: RequestPrefix, sequence: Sequence) -> object:
        committed.append(sequence.committed)
        try:
            return publish(prefix, sequence)
        finally:
            committed.pop()

    def acknowledging(cache: BlockCache, offer: object, rank: int) -> PublishOutcome:
        nonlocal num_published
        outcome = acknowledge(cache, offer, rank)  # type: ignore[arg-type]
        num_published += outcome is PublishOutcome.PUBLISHED
        return outcome

    monkeypatch.setattr(RequestPrefix, "publish", publishing)
    monkeypatch.setattr(BlockCache, "acknowledge", acknowledging)

    def look(core: EngineCore, machine: HashMachine, step: SequenceStep) -> None:
        """While its rows are computed, no block of a step is found."""
        cache = core._prefixes.blocks
        first, last = step.encoder_start // WINDOW, (step.encoder_stop - 1) // WINDOW
        for number in range(max(first, step.write_floor // WINDOW), last + 1):
            books = cache._books.get(step.block_table[number])
            assert books is None or books.record is None, "a block is found before its rows exist"

    await histories(look)
    assert num_published > 100


async def test_i09_i10_rows_start_when_all_they_read_is_there() -> None:
    """Block KV and windows: before a step runs, nothing of what it reads is missing."""
    num_tails = num_replays = 0

    def look(core: EngineCore, machine: HashMachine, step: SequenceStep) -> None:
        nonlocal num_tails, num_replays
        first = step.decoder_start if step.inbound else step.encoder_start
        below = min(first, step.write_floor) if not step.inbound else first
        for position in range(below):
            entry = machine._blocks[step.block_table[position // WINDOW]][position % WINDOW]
            assert entry is not None, f"block KV of position {position} is missing"
        if step.inbound:
            num_tails += 1
            job = core._by_slot[step.slot]
            inbound = job.listener.inbound  # type: ignore[attr-defined]
            assert inbound.state is TransferState.COMPLETE
        num_replays += step.encoder_start < step.write_floor
        if step.num_encoder_rows:
            starts = machine.layer_starts(step)
            for ring, first in zip(slot_of(machine, step), starts, strict=True):
                needed = range(max(step.swa_floor, first - WINDOW + 1), step.encoder_start)
                assert all(position in ring for position in needed), "a window is not rebuilt"

    await histories(look)
    assert min(num_tails, num_replays) > 20


@pytest.mark.parametrize("tail", TAILS)
async def test_i11_chunks_and_batch_mates_change_no_result(tail: TailVariant) -> None:
    requests = [ask(prompt(80 + n, 37 + 9 * n), f"r{n}", tail=tail) for n in range(4)]
    expected = None
    for num_rows in (2 * WINDOW, 3 * WINDOW + 1, 8 * WINDOW, 40 * WINDOW):
        config = replace(CONFIG, max_batched_tokens=num_rows)
        for together in (False, True):
            async with local_engine(HashMachine(num_blocks=256), config) as (engine, _):
                if together:
                    streams = await asyncio.gather(*(collect(engine, r) for r in requests))
                else:
                    streams = [await collect(engine, request) for request in requests]
            found = [stream.tokens for stream in streams]
            expected = expected or found
            assert found == expected


async def test_i12_rings_hold_the_window_and_all_rejected_drafts() -> None:
    model = ModelConfig.from_file(DEMO_MODEL / "config.json")
    layout = kv_layout(model, CONFIG.kv_format, "")
    assert layout.ring_rows == model.sliding_window + 6
    tokens = prompt(90, 30)
    request = ask(tokens, max_tokens=30)
    for rows, is_enough in ((WINDOW + REWIND, True), (WINDOW, False)):
        machine = HashMachine(num_drafts=REWIND)
        machine.ring_rows = rows
        async with local_engine(machine) as (engine, _):
            stream = await collect(engine, request)
        if is_enough:
            check(request, stream)
        else:
            assert "KeyError" in str(stream.failed.error)


async def test_i13_looking_back_finds_the_true_tokens() -> None:
    num_replays = 0

    def look(core: EngineCore, machine: HashMachine, step: SequenceStep) -> None:
        nonlocal num_replays
        tokens = core._by_slot[step.slot].sequence.token_ids
        start = step.encoder_start
        if step.num_encoder_rows:
            assert list(step.lookback_ids) == tokens[max(0, start - 3) : start]
            assert list(step.token_ids) == tokens[start : step.encoder_stop]
            num_replays += 0 < start < step.write_floor

    await histories(look)
    assert num_replays > 20


async def test_i14_a_running_request_keeps_its_blocks() -> None:
    """Others publish the same keys meanwhile: a sequence's blocks only ever grow in number."""
    tables: dict[BlockTable, tuple[int, ...]] = {}

    def look(core: EngineCore, machine: HashMachine, step: SequenceStep) -> None:
        pages = core._by_slot[step.slot].sequence.pages
        known = tables.setdefault(pages, step.block_table)
        assert step.block_table[: len(known)] == known
        tables[pages] = step.block_table

    await histories(look)
    assert len(tables) > 50


async def test_i18_blocks_of_a_running_request_are_in_use() -> None:
    def look(core: EngineCore, machine: HashMachine, step: SequenceStep) -> None:
        uses = core._prefixes.blocks.uses()
        assert all(uses[block] > 0 for block in step.block_table)

    await histories(look)


NOBODY = WorkerAddress("nobody", WorkerKind.DECODE)


@pytest.mark.parametrize("restarts", [(), (16,)])
async def test_i20_wrong_hints_change_no_result(restarts: tuple[int, ...]) -> None:
    """Sources that do not exist, for blocks that nobody has."""
    tokens = prompt(95, 60)
    sources = PrefixSources(
        blocks=(BlockSource(NOBODY, restarts, 0, 5),),
        windows=(WindowSource(NOBODY, restarts, 40),),
    )
    async with local_engine(config=FULL) as (engine, _):
        plain = ask(tokens)
        expected = await collect(engine, replace(plain, cache=replace(plain.cache, writes=False)))
        misled = replace(plain, sources=sources)
        stream = await collect(engine, misled)
        assert recipe_of(stream) == recipe_of(expected)
        assert stream.tokens == reference_stream(plain, recipe=recipe_of(stream)).tokens


def test_every_invariant_has_a_test_of_its_name() -> None:
    tests = Path(__file__).resolve().parents[1]
    names = re.compile(r"def test_((?:i\d+_)+)")
    found = {
        int(number)
        for file in tests.rglob("test_*.py")
        for group in names.findall(file.read_text())
        for number in re.findall(r"\d+", group)
    }
    assert found == set(range(1, 21))
