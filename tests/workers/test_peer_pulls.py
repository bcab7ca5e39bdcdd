"""Does a worker that brings a prefix from its peers stream what one without any cache would?

Whatever a peer does: dead, slow, wrong, gone in the middle. The reference knows no cache; rows that
were really computed tell what was brought.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from await_points import numbers_of_turns
from hash_machine import REWIND, WINDOW, reference_stream
from hash_requests import ask, prompt, recipe_of
from hypothesis import given, settings
from hypothesis import strategies as st
from peer_cluster import PeerCluster, outcome_of, peer_cluster, turns_until
from split_cluster import CONFIG, IMPATIENT, PATIENT, StepGate, Stream

from ripresa.workers.address import WorkerAddress, WorkerKind
from ripresa.workers.config import TransferConfig, WindowConfig, WindowPolicy
from ripresa.workers.errors import ErrorCode, LeaderGone, RipresaError
from ripresa.workers.prefix_sources import (
    BlockSource,
    HitSegment,
    HitTier,
    LeaderSource,
    PrefixSources,
    WindowSource,
)
from ripresa.workers.replay import PlanKind, Recipe, ReplayMode
from ripresa.workers.request import CacheUse, GenerationRequest, RecipeFixed
from ripresa.workers.transfer.base import Pull
from ripresa.workers.transfer.faults import drop, kill, repeat

FULL = replace(CONFIG, windows=WindowConfig(WindowPolicy.FULL))
HASTY = replace(CONFIG, transfer=TransferConfig(2, pull_timeout_s=0.2, follow_timeout_s=0.4))
NOBODY = WorkerAddress("d9", WorkerKind.DECODE)
PROMPT = prompt(11, 61)
LONG = prompt(4, 90)
NUM_REUSED = (61 - WINDOW - REWIND) // WINDOW


def check(request: GenerationRequest, stream: Stream) -> Recipe:
    """The stream is what its recipe defines."""
    recipe = recipe_of(stream)
    stream.assert_equals(reference_stream(request, recipe=recipe))
    return recipe


def blocks_of(
    holder: WorkerAddress, first: int, stop: int, restarts: tuple[int, ...] = ()
) -> PrefixSources:
    return PrefixSources((BlockSource(holder, restarts, first, stop),))


def rows(cluster: PeerCluster, name: str) -> int:
    return cluster.workers[name].engine.stats().counters.encoder_rows


@pytest.mark.parametrize("transport", ["loopback", "gloo"])
@pytest.mark.parametrize(
    ("holder", "puller"), [("d0", "d1"), ("e0", "e1"), ("e0", "d1"), ("d1", "e0")]
)
async def test_a_prefix_of_another_worker_is_brought(
    holder: str, puller: str, transport: str
) -> None:
    request = ask(PROMPT, "second")
    async with peer_cluster(2, 2, transport=transport) as cluster:
        await cluster.compute(holder, ask(PROMPT, "first"))
        local = await cluster.compute(holder, request)
        sources = blocks_of(cluster.address(holder), 0, NUM_REUSED)
        before = rows(cluster, puller)
        stream = await cluster.compute(puller, replace(request, sources=sources))
        recipe = check(request, stream)
        assert stream.tokens == local.tokens
        assert (recipe.kind, recipe.write_floor) == (PlanKind.BOUNDED, NUM_REUSED * WINDOW)
        assert rows(cluster, puller) - before == len(PROMPT) - recipe.start
        outcome = outcome_of(stream)
        assert (outcome.num_planned, outcome.num_local, outcome.num_held) == (
            NUM_REUSED,
            0,
            NUM_REUSED,
        )
        assert outcome.from_peers == ((0, NUM_REUSED),)
        segments = outcome.segments(recipe.start, WINDOW, is_resumed=False)
        assert segments == (HitSegment(HitTier.PEER, 0, recipe.start),)
        assert cluster.ends(puller) == {"complete": 1}
        pulls = cluster.workers[puller].engine.stats().pulls
        served = cluster.workers[holder].engine.stats().pulls
        assert pulls.received_bytes == served.sent_bytes == NUM_REUSED * WINDOW * 8
        # They are the puller's own from now on.
        again = await cluster.compute(puller, replace(request, request_id="third"))
        assert check(request, again).write_floor == recipe.write_floor


@pytest.mark.parametrize("length", [17, 18, 25, 26, 33, 41, 50, 90])
async def test_any_length_and_any_local_part(length: int) -> None:
    tokens = prompt(2, length)
    usable = max(0, length - WINDOW - REWIND) // WINDOW
    for num_local in range(usable + 1):
        async with peer_cluster() as cluster:
            await cluster.run("d0", ask(tokens, "first"))
            # Somebody else's prompt with the same beginning left its blocks here.
            shared = tokens[: num_local * WINDOW] + prompt(3, 2 * WINDOW + REWIND)
            if num_local:
                await cluster.run("d1", ask(shared, "stranger"))
            sources = blocks_of(cluster.address("d0"), 0, length // WINDOW)
            stream = await cluster.run("d1", replace(ask(tokens), sources=sources))
            assert check(ask(tokens), stream).write_floor == usable * WINDOW
            expected = () if num_local == usable else ((num_local, usable),)
            assert outcome_of(stream).from_peers == expected


async def test_ranges_of_several_holders_make_one_chain() -> None:
    tokens = prompt(4, 90)
    async with peer_cluster(0, 4) as cluster:
        await cluster.run("d0", ask(tokens[:45], "short"))
        await cluster.run("d1", ask(tokens, "long"))
        sources = PrefixSources(
            (
                BlockSource(NOBODY, (), 3, 8),
                BlockSource(cluster.address("d0"), (), 0, 4),
                # Its holder has less than this.
                BlockSource(cluster.address("d2"), (), 3, 9),
                BlockSource(cluster.address("d1"), (), 3, 10),
            )
        )
        stream = await cluster.run("d3", replace(ask(tokens), sources=sources))
        check(ask(tokens), stream)
        assert outcome_of(stream).from_peers == ((0, 10),)
        # One range of each source that is named; "d1" sends what two others do not.
        assert cluster.ends("d3")["complete"] == 4


async def two_holders(cluster: PeerCluster) -> PrefixSources:
    """Blocks [0, 4) of `LONG` are named at one worker, [4, 10) at another."""
    for name in ("d0", "d1"):
        await cluster.run(name, ask(LONG, "first"))
    return PrefixSources(
        (
            BlockSource(cluster.address("d0"), (), 0, 4),
            BlockSource(cluster.address("d1"), (), 4, 10),
        )
    )


class Gate:
    """Holds back what is said to a worker until it is opened."""

    def __init__(self, cluster: PeerCluster, name: str) -> None:
        self.reached = asyncio.Event()
        self.opened = asyncio.Event()
        self._way = cluster.workers[name].way
        self._deliver = self._way.deliver
        self._way.deliver = self._wait  # type: ignore[method-assign]

    async def _wait(self, message: Any) -> None:
        self.reached.set()
        await self.opened.wait()
        await self._deliver(message)


async def test_ranges_of_several_holders_are_pulled_at_once_and_published_in_order() -> None:
    async with peer_cluster(0, 3) as cluster:
        sources = await two_holders(cluster)
        first, second = Gate(cluster, "d0"), Gate(cluster, "d1")
        task = asyncio.create_task(cluster.run("d2", replace(ask(LONG), sources=sources)))
        # Neither has been answered when the other one is asked.
        await first.reached.wait()
        await second.reached.wait()
        second.opened.set()
        await turns_until(lambda: "complete" in cluster.ends("d2"))
        blocks = cluster.decoder("d2")._core._prefixes.blocks
        assert not blocks._index
        first.opened.set()
        stream = await task
        assert check(ask(LONG), stream).write_floor == 10 * WINDOW
        assert outcome_of(stream).from_peers == ((0, 10),)
        assert cluster.ends("d2") == {"complete": 2}


async def test_a_range_that_fails_ends_the_prefix_there() -> None:
    async with peer_cluster(0, 3) as cluster:
        sources = await two_holders(cluster)
        gate = Gate(cluster, "d0")
        task = asyncio.create_task(cluster.run("d2", replace(ask(LONG), sources=sources)))
        await gate.reached.wait()
        await turns_until(lambda: "complete" in cluster.ends("d2"))
        cluster.kill("d0")
        gate.opened.set()
        stream = await task
        assert check(ask(LONG), stream).kind is PlanKind.COLD
        assert outcome_of(stream).num_held == 0
        assert outcome_of(stream).from_peers == ()


async def test_no_more_ranges_are_pulled_at_once_than_a_prompt_may() -> None:
    config = replace(CONFIG, transfer=TransferConfig(2, max_pulls_at_once=2))
    async with peer_cluster(0, 4, config=config) as cluster:
        gates = []
        for name in ("d0", "d1", "d2"):
            await cluster.run(name, ask(LONG, "first"))
            gates.append(Gate(cluster, name))
        ranges = (("d0", 0, 4), ("d1", 4, 8), ("d2", 8, 10))
        sources = PrefixSources(
            tuple(BlockSource(cluster.address(n), (), first, stop) for n, first, stop in ranges)
        )
        task = asyncio.create_task(cluster.run("d3", replace(ask(LONG), sources=sources)))
        await gates[0].reached.wait()
        await gates[1].reached.wait()
        for _ in range(100):
            await asyncio.sleep(0)
        assert not gates[2].reached.is_set()
        gates[1].opened.set()
        await gates[2].reached.wait()
        gates[0].opened.set()
        gates[2].opened.set()
        assert outcome_of(await task).from_peers == ((0, 10),)


async def test_what_comes_early_leaves_pages_for_what_comes_before_it() -> None:
    """While they are brought, another request takes all pages but four."""
    async with peer_cluster(0, 3, num_blocks=16) as cluster:
        sources = await two_holders(cluster)
        first, second = Gate(cluster, "d0"), Gate(cluster, "d1")
        task = asyncio.create_task(cluster.run("d2", replace(ask(LONG), sources=sources)))
        await second.reached.wait()
        pages = cluster.decoder("d2")._core._pages
        loan = pages.borrow_new(pages.num_available_blocks - 4)
        second.opened.set()
        await turns_until(lambda: "failed" in cluster.ends("d2"))
        assert pages.num_available_blocks == 4
        first.opened.set()
        await turns_until(lambda: "complete" in cluster.ends("d2"))
        loan.end()
        stream = await task
        assert check(ask(LONG), stream).write_floor == outcome_of(stream).num_held * WINDOW
        assert outcome_of(stream).num_held >= 4


async def test_a_cancel_at_every_await_of_two_pulls() -> None:
    for num_turns in numbers_of_turns(2):
        async with peer_cluster(0, 3) as cluster:
            sources = await two_holders(cluster)
            task = asyncio.create_task(cluster.run("d2", replace(ask(LONG), sources=sources)))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            is_through = cluster.ends("d2").get("complete") == 2
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await cluster.settle()
            check(ask(LONG), await cluster.run("d2", ask(LONG, "again")))
        if is_through:
            break


async def test_a_chain_of_a_replayed_lineage_is_brought_as_such() -> None:
    tokens = prompt(5, 90)
    async with peer_cluster() as cluster:
        await cluster.run("d0", ask(tokens[:45], "short"))
        first = recipe_of(await cluster.run("d0", ask(tokens, "long")))
        assert first.restarts
        sources = blocks_of(cluster.address("d0"), 0, 9, first.restarts)
        stream = await cluster.run("d1", replace(ask(tokens), sources=sources))
        recipe = check(ask(tokens), stream)
        assert recipe.restarts[:1] == first.restarts
        assert recipe.write_floor == 9 * WINDOW


async def test_a_window_of_another_worker_spares_the_replay() -> None:
    boundary = NUM_REUSED * WINDOW
    async with peer_cluster(config=FULL) as cluster:
        await cluster.run("d0", ask(PROMPT, "first"))
        holder = cluster.address("d0")
        sources = PrefixSources(
            (BlockSource(holder, (), 0, NUM_REUSED),), (WindowSource(holder, (), boundary),)
        )
        stream = await cluster.run("d1", replace(ask(PROMPT), sources=sources))
        recipe = check(ask(PROMPT), stream)
        assert (recipe.kind, recipe.start) == (PlanKind.WINDOW, boundary)
        assert outcome_of(stream).num_windows_from_peers == 1
        assert outcome_of(stream).missing_windows == ()


async def test_a_window_alone_is_brought_for_local_blocks() -> None:
    boundary = NUM_REUSED * WINDOW
    async with peer_cluster(config=FULL) as cluster:
        for name in ("d0", "d1"):
            await cluster.run(name, ask(PROMPT, "first"))
        cluster.decoder("d1")._core._prefixes.windows.clear()
        holder = cluster.address("d0")
        sources = PrefixSources(
            windows=(
                WindowSource(holder, (), boundary),
                WindowSource(NOBODY, (), boundary),
                WindowSource(holder, (WINDOW,), boundary - WINDOW),
            )
        )
        stream = await cluster.run("d1", replace(ask(PROMPT), sources=sources))
        assert check(ask(PROMPT), stream).kind is PlanKind.WINDOW
        outcome = outcome_of(stream)
        assert outcome.num_windows_from_peers == 1
        assert outcome.missing_windows == (NUM_REUSED - 1,)


Lie = Callable[[PeerCluster], PrefixSources]
LIES: dict[str, tuple[Lie, dict[str, int]]] = {
    "a dead worker": (lambda c: blocks_of(NOBODY, 0, 5), {"unreachable": 1}),
    "a worker of another kind": (
        lambda c: blocks_of(WorkerAddress("d0", WorkerKind.ENCODER), 0, 5),
        {"unreachable": 1},
    ),
    "a worker that holds nothing": (
        lambda c: blocks_of(c.address("d2"), 0, 5),
        {"refused": 1},
    ),
    "itself": (lambda c: blocks_of(c.address("d1"), 0, 5), {"refused": 1}),
    "a lineage that nobody holds": (
        lambda c: blocks_of(c.address("d0"), 0, 5, (2 * WINDOW,)),
        {"short": 1},
    ),
    "no boundary in the lineage": (
        lambda c: blocks_of(c.address("d0"), 0, 5, (3,)),
        {"refused": 1},
    ),
    "blocks beyond the prompt": (lambda c: blocks_of(c.address("d0"), 50, 90), {}),
    "an empty range": (lambda c: blocks_of(c.address("d0"), 3, 3), {}),
    "a gap before the range": (lambda c: blocks_of(c.address("d0"), 2, 5), {}),
    "a window outside the prompt": (
        lambda c: PrefixSources(windows=(WindowSource(c.address("d0"), (), 1000 * WINDOW),)),
        {},
    ),
    "a window off the grid": (
        lambda c: PrefixSources(windows=(WindowSource(c.address("d0"), (), WINDOW + 1),)),
        {},
    ),
    "a leader that does not run": (
        lambda c: PrefixSources(leader=LeaderSource(c.address("d2"), "nobody", 0, 5)),
        {"short": 1},
    ),
    "a leader on a dead worker": (
        lambda c: PrefixSources(leader=LeaderSource(NOBODY, "first", 0, 5)),
        {"unreachable": 1},
    ),
    "another layout": (lambda c: blocks_of(c.address("d3"), 0, 5), {"refused": 1}),
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_lie_costs_speed_only(lie: str) -> None:
    sources, ends = LIES[lie]
    async with peer_cluster(0, 4, layouts={"d3": b"another"}) as cluster:
        for name in ("d0", "d3"):
            await cluster.run(name, ask(PROMPT, "first"))
        request = replace(ask(PROMPT), sources=sources(cluster))
        if request.sources.leader is not None:
            with pytest.raises(LeaderGone):
                await cluster.run("d1", request)
            request = ask(PROMPT)
        stream = await cluster.run("d1", request)
        recipe = check(ask(PROMPT), stream)
        assert cluster.ends("d1") == ends
        held = outcome_of(stream).num_held
        assert recipe.write_floor == held * WINDOW
        # Two blocks lie before the lineage's lie.
        assert held == (2 if lie == "a lineage that nobody holds" else 0)


async def test_a_flipped_bit_is_a_counted_miss() -> None:
    sources = blocks_of(WorkerAddress("d0", WorkerKind.DECODE), 0, NUM_REUSED)
    async with peer_cluster() as cluster:
        await cluster.run("d0", ask(PROMPT, "first"))
        payloads = []

        def damage(payload):  # type: ignore[no-untyped-def]
            payloads.append(payload)
            if len(payloads) != 2:
                return payload
            flipped = payload.clone()
            flipped[3] ^= 16
            return flipped

        cluster.loopback.damage = damage
        stream = await cluster.run("d1", replace(ask(PROMPT), sources=sources))
        cluster.loopback.damage = None
        assert check(ask(PROMPT), stream).write_floor == 2 * WINDOW
        assert outcome_of(stream).from_peers == ((0, 2),)
        assert cluster.ends("d1") == {"failed": 1}
        assert cluster.workers["d1"].transfers.inbound.num_corrupt == 1


@pytest.mark.parametrize("number", range(9))
@pytest.mark.parametrize("fault", [drop, kill, repeat])
@pytest.mark.parametrize("end", ["holder", "puller"])
async def test_a_fault_at_any_message(fault: object, number: int, end: str) -> None:
    """What came before the fault is kept, the rest is computed."""
    victim = {"holder": "d0", "puller": "d1"}[end]
    config, lanes = (CONFIG, PATIENT) if fault is repeat else (HASTY, IMPATIENT)
    async with peer_cluster(config=config, lanes=lanes) as cluster:
        await cluster.run("d0", ask(PROMPT, "first"))
        cluster.fault(victim, {number: fault})  # type: ignore[dict-item]
        sources = blocks_of(cluster.address("d0"), 0, NUM_REUSED)
        stream = await cluster.run("d1", replace(ask(PROMPT), sources=sources))
        recipe = check(ask(PROMPT), stream)
        outcome = outcome_of(stream)
        assert recipe.write_floor == outcome.num_held * WINDOW
        # On a loaded machine a puller in a hurry may give up without any fault.
        if fault is repeat:
            assert outcome.num_held == NUM_REUSED
        cluster.fault(victim, {})


async def test_a_holder_that_dies_in_the_middle_leaves_what_it_sent() -> None:
    async with peer_cluster() as cluster:
        await cluster.run("d0", ask(PROMPT, "first"))
        worker = cluster.workers["d1"]
        land = worker.engine.exchange.supply.runner.import_blocks

        def dying(blocks, payload):  # type: ignore[no-untyped-def]
            land(blocks, payload)
            asyncio.get_running_loop().call_soon(cluster.kill, "d0")

        worker.machine.import_blocks = dying  # type: ignore[method-assign]
        sources = blocks_of(cluster.address("d0"), 0, NUM_REUSED)
        stream = await cluster.run("d1", replace(ask(PROMPT), sources=sources))
        recipe = check(ask(PROMPT), stream)
        assert 0 < recipe.write_floor < NUM_REUSED * WINDOW
        assert cluster.ends("d1") == {"failed": 1}


async def test_a_silent_holder_costs_one_timeout() -> None:
    config = replace(CONFIG, transfer=TransferConfig(2, pull_timeout_s=1.0))
    async with peer_cluster(0, 3, config=config) as cluster:
        for name in ("d0", "d1"):
            await cluster.run(name, ask(PROMPT, "first"))

        async def nothing(message: object) -> None:
            return None

        cluster.workers["d0"].way.deliver = nothing  # type: ignore[assignment,method-assign]
        sources = PrefixSources(
            (
                BlockSource(cluster.address("d0"), (), 0, 3),
                BlockSource(cluster.address("d0"), (), 0, 5),
                BlockSource(cluster.address("d1"), (), 0, 5),
            )
        )
        stream = await cluster.run("d2", replace(ask(PROMPT), sources=sources))
        assert check(ask(PROMPT), stream).write_floor == 5 * WINDOW
        assert cluster.ends("d2") == {"late": 1, "complete": 1}


async def test_a_request_that_reads_nothing_brings_nothing() -> None:
    async with peer_cluster() as cluster:
        await cluster.run("d0", ask(PROMPT, "first"))
        sources = blocks_of(cluster.address("d0"), 0, 5)
        request = replace(ask(PROMPT, cache=CacheUse(reads=False)), sources=sources)
        assert check(request, await cluster.run("d1", request)).kind is PlanKind.COLD
        assert cluster.ends("d1") == {}


async def test_tenants_bring_nothing_of_each_other() -> None:
    async with peer_cluster() as cluster:
        await cluster.run("d0", ask(PROMPT, "first", salt=b"one"))
        sources = blocks_of(cluster.address("d0"), 0, 5)
        request = replace(ask(PROMPT, salt=b"two"), sources=sources)
        assert check(request, await cluster.run("d1", request)).kind is PlanKind.COLD
        assert cluster.ends("d1") == {"refused": 1}


@pytest.mark.parametrize("num_pages", [9, 10, 12])
async def test_a_small_pool_takes_what_fits(num_pages: int) -> None:
    """Nine blocks are the request's own; what others left may be evicted, what runs may not."""
    async with peer_cluster(num_blocks=num_pages) as cluster:
        await cluster.run("d0", ask(PROMPT, "first"))
        await cluster.run("d1", ask(prompt(77, 61), "stranger"))
        sources = blocks_of(cluster.address("d0"), 0, NUM_REUSED)
        stream = await cluster.run("d1", replace(ask(PROMPT), sources=sources))
        assert check(ask(PROMPT), stream).write_floor == NUM_REUSED * WINDOW


async def test_nothing_is_brought_for_a_request_without_room() -> None:
    async with peer_cluster(num_blocks=12) as cluster:
        await cluster.run("d0", ask(PROMPT, "first"))
        running = cluster.decoder("d1").generate(ask(prompt(8, 60), "running"), local=True)
        await anext(running)
        sources = blocks_of(cluster.address("d0"), 0, NUM_REUSED)
        with pytest.raises(RipresaError) as caught:
            await cluster.run("d1", replace(ask(PROMPT), sources=sources))
        assert caught.value.code is ErrorCode.RESOURCE_EXHAUSTED
        assert cluster.ends("d1") == {}
        await running.aclose()


async def test_blocks_evicted_between_plan_and_pull_are_computed() -> None:
    async with peer_cluster(num_blocks=10) as cluster:
        await cluster.run("d0", ask(PROMPT, "first"))
        held: list[bool] = []
        worker = cluster.workers["d0"]
        deliver = worker.transfers.deliver

        async def evicting(message):  # type: ignore[no-untyped-def]
            if isinstance(message, Pull) and not held:
                held.append(True)
                await cluster.run("d0", ask(prompt(9, 70), "evictor"))
            return await deliver(message)

        worker.transfers.deliver = evicting  # type: ignore[method-assign]
        sources = blocks_of(cluster.address("d0"), 0, NUM_REUSED)
        stream = await cluster.run("d1", replace(ask(PROMPT), sources=sources))
        recipe = check(ask(PROMPT), stream)
        outcome = outcome_of(stream)
        assert outcome.num_planned == NUM_REUSED > outcome.num_held
        assert recipe.write_floor == outcome.num_held * WINDOW


async def test_two_requests_bring_a_block_once() -> None:
    async with peer_cluster() as cluster:
        await cluster.run("d0", ask(PROMPT, "first"))
        sources = blocks_of(cluster.address("d0"), 0, NUM_REUSED)
        names = [f"r{k}" for k in range(4)]
        streams = await asyncio.gather(
            *(cluster.run("d1", replace(ask(PROMPT, name), sources=sources)) for name in names)
        )
        for stream in streams:
            assert check(ask(PROMPT), stream).write_floor == NUM_REUSED * WINDOW
        pulls = cluster.workers["d1"].engine.stats().pulls
        assert pulls.received_bytes == NUM_REUSED * WINDOW * 8


async def test_who_waits_for_another_s_pull_goes_on_when_that_is_cancelled() -> None:
    async with peer_cluster(0, 3) as cluster:
        await cluster.run("d0", ask(PROMPT, "first"))
        reached = asyncio.Event()

        async def nothing(message: object) -> None:
            reached.set()

        cluster.workers["d1"].way.deliver = nothing  # type: ignore[assignment,method-assign]
        stuck = asyncio.create_task(
            cluster.run(
                "d2", replace(ask(PROMPT, "a"), sources=blocks_of(cluster.address("d1"), 0, 5))
            )
        )
        await reached.wait()
        other = asyncio.create_task(
            cluster.run(
                "d2", replace(ask(PROMPT, "b"), sources=blocks_of(cluster.address("d0"), 0, 5))
            )
        )
        await asyncio.sleep(0)
        stuck.cancel()
        assert check(ask(PROMPT), await other).write_floor == 5 * WINDOW
        await asyncio.gather(stuck, return_exceptions=True)


def leader_of(cluster: PeerCluster, holder: str, name: str, stop: int) -> PrefixSources:
    return PrefixSources(leader=LeaderSource(cluster.address(holder), name, 0, stop))


LEADER_STEP_ROWS = 3 * WINDOW


@pytest.mark.parametrize("holder", ["d0", "e0"])
@pytest.mark.parametrize("puller", ["d1", "e1"])
@pytest.mark.parametrize("step", [1, 2, 3])
async def test_a_follower_gets_blocks_as_they_are_computed(
    holder: str, puller: str, step: int
) -> None:
    async with peer_cluster(2, 2) as cluster:
        gate = StepGate(cluster.workers[holder].machine, step)
        leading = asyncio.create_task(cluster.compute(holder, ask(PROMPT, "leader")))
        await gate.reached.wait()
        sources = leader_of(cluster, holder, "leader", NUM_REUSED)
        following = asyncio.create_task(
            cluster.compute(puller, replace(ask(PROMPT), sources=sources))
        )
        await turns_until(lambda: cluster.was_asked(holder))
        gate.open()
        stream = await following
        assert check(ask(PROMPT), stream).write_floor == NUM_REUSED * WINDOW
        assert outcome_of(stream).gone_at is None
        assert outcome_of(stream).from_peers == ((0, NUM_REUSED),)
        assert cluster.ends(puller) == {"complete": 1}
        check(ask(PROMPT, "leader"), await leading)


@pytest.mark.parametrize(
    ("how", "num_blocks"), [("abort", 3), ("cancel", 3), ("fail", 3), ("die", 0)]
)
async def test_a_leader_that_ends_is_gone_at_its_last_block(how: str, num_blocks: int) -> None:
    async with peer_cluster() as cluster:
        gate = StepGate(cluster.workers["d0"].machine, 2)
        leading = asyncio.create_task(cluster.run("d0", ask(PROMPT, "leader")))
        await gate.reached.wait()
        sources = leader_of(cluster, "d0", "leader", NUM_REUSED)
        following = asyncio.create_task(cluster.run("d1", replace(ask(PROMPT), sources=sources)))
        await turns_until(lambda: cluster.was_asked("d0"))
        match how:
            case "abort":
                cluster.decoder("d0").abort("leader")
            case "cancel":
                leading.cancel()
                await asyncio.gather(leading, return_exceptions=True)
            case "fail":
                gate.open(ValueError("out of memory"))
            case "die":
                cluster.kill("d0")
        gate.open()
        with pytest.raises(LeaderGone, match=f"block {num_blocks} "):
            await following
        leading.cancel()
        await asyncio.gather(leading, return_exceptions=True)
        # What had come stays.
        stream = await cluster.run("d1", ask(PROMPT, "again"))
        assert check(ask(PROMPT), stream).write_floor == num_blocks * WINDOW


async def test_followers_on_one_worker_follow_once_and_one_cancels() -> None:
    async with peer_cluster() as cluster:
        gate = StepGate(cluster.workers["d0"].machine, 2)
        leading = asyncio.create_task(cluster.run("d0", ask(PROMPT, "leader")))
        await gate.reached.wait()
        sources = leader_of(cluster, "d0", "leader", NUM_REUSED)
        following = [
            asyncio.create_task(cluster.run("d1", replace(ask(PROMPT, f"f{k}"), sources=sources)))
            for k in range(4)
        ]
        await turns_until(lambda: cluster.was_asked("d0"))
        following[0].cancel()
        await asyncio.gather(following[0], return_exceptions=True)
        gate.open()
        for task in following[1:]:
            stream = await task
            assert check(ask(PROMPT), stream).write_floor == NUM_REUSED * WINDOW
        await leading


async def test_a_follower_of_a_claim_waits_for_a_leader_that_is_admitted_soon() -> None:
    """The leader itself still brings its own beginning from a third worker."""
    async with peer_cluster(0, 3) as cluster:
        await cluster.run("d2", ask(PROMPT[:30], "first"))
        leader = replace(
            ask(PROMPT, "leader"), claim="c", sources=blocks_of(cluster.address("d2"), 0, 2)
        )
        leading = asyncio.create_task(cluster.run("d0", leader))
        supply = cluster.workers["d0"].engine.exchange.supply
        await turns_until(lambda: supply.find("c") is not None)
        sources = leader_of(cluster, "d0", "c", NUM_REUSED)
        stream = await cluster.run("d1", replace(ask(PROMPT), sources=sources))
        recipe = check(ask(PROMPT), stream)
        assert recipe.write_floor == NUM_REUSED * WINDOW
        assert outcome_of(stream).from_peers == ((0, NUM_REUSED),)
        await leading


async def test_a_follower_does_not_take_a_lineage_that_its_mode_refuses() -> None:
    tokens = prompt(6, 90)
    async with peer_cluster(num_decoders=2) as cluster:
        await cluster.run("d0", ask(tokens[:45], "short"))
        gate = StepGate(cluster.workers["d0"].machine, 9)
        leading = asyncio.create_task(cluster.run("d0", ask(tokens, "leader")))
        await asyncio.sleep(0)
        exact = ask(tokens, cache=CacheUse(ReplayMode.EXACT))
        sources = leader_of(cluster, "d0", "leader", 9)
        gate.open()
        with pytest.raises(LeaderGone, match="block 0 "):
            await cluster.run("d1", replace(exact, sources=sources))
        assert cluster.ends("d1") == {"failed": 1}
        await leading


@pytest.mark.parametrize("puller", ["d1", "e0"])
async def test_a_cancel_at_every_await_point(puller: str) -> None:
    """The puller is cancelled after n turns of the event loop, for every n until it is through."""
    for num_turns in numbers_of_turns():
        async with peer_cluster(1, 2) as cluster:
            await cluster.run("d0", ask(PROMPT, "first"))
            sources = blocks_of(cluster.address("d0"), 0, NUM_REUSED)
            task = asyncio.create_task(
                cluster.compute(puller, replace(ask(PROMPT), sources=sources))
            )
            for _ in range(num_turns):
                await asyncio.sleep(0)
            is_through = "complete" in cluster.ends(puller)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await cluster.settle()
            again = await cluster.compute(puller, ask(PROMPT, "again"))
            check(ask(PROMPT), again)
        if is_through:
            break


async def test_a_holder_that_stops_at_every_await_point() -> None:
    for num_turns in range(0, 60, 3):
        async with peer_cluster(config=HASTY, lanes=IMPATIENT) as cluster:
            await cluster.run("d0", ask(PROMPT, "first"))
            sources = blocks_of(cluster.address("d0"), 0, NUM_REUSED)
            task = asyncio.create_task(cluster.run("d1", replace(ask(PROMPT), sources=sources)))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            await cluster.workers["d0"].engine.stop()
            stream = await task
            recipe = check(ask(PROMPT), stream)
            assert recipe.write_floor == outcome_of(stream).num_held * WINDOW


async def test_an_abort_and_a_newer_generation_end_the_bringing() -> None:
    async with peer_cluster() as cluster:
        await cluster.run("d0", ask(PROMPT, "first"))
        reached = asyncio.Event()

        async def nothing(message: object) -> None:
            reached.set()

        way = cluster.workers["d0"].way
        deliver = way.deliver
        way.deliver = nothing  # type: ignore[assignment,method-assign]
        sources = blocks_of(cluster.address("d0"), 0, NUM_REUSED)
        request = replace(ask(PROMPT), sources=sources)
        first = asyncio.create_task(cluster.run("d1", request))
        await reached.wait()
        with pytest.raises(RipresaError) as caught:
            await cluster.run("d1", request)
        assert caught.value.code is ErrorCode.ALREADY_EXISTS
        way.deliver = deliver  # type: ignore[method-assign]
        second = await cluster.run("d1", replace(request, generation=1))
        assert check(request, second).write_floor == NUM_REUSED * WINDOW
        with pytest.raises(RipresaError) as caught:
            await first
        assert caught.value.code is ErrorCode.CANCELLED

        way.deliver = nothing  # type: ignore[assignment,method-assign]
        reached.clear()
        tokens = prompt(12, 61)
        await cluster.run("d0", ask(tokens, "other"))
        third = asyncio.create_task(cluster.run("d1", replace(ask(tokens, "x"), sources=sources)))
        await reached.wait()
        assert cluster.decoder("d1").abort("x")
        with pytest.raises(RipresaError) as caught:
            await third
        assert caught.value.code is ErrorCode.CANCELLED


async def test_a_deadline_ends_the_bringing() -> None:
    async with peer_cluster() as cluster:
        await cluster.run("d0", ask(PROMPT, "first"))

        async def nothing(message: object) -> None:
            return None

        cluster.workers["d0"].way.deliver = nothing  # type: ignore[assignment,method-assign]
        request = replace(
            ask(PROMPT),
            sources=blocks_of(cluster.address("d0"), 0, NUM_REUSED),
            deadline=time.time() + 0.2,
        )
        with pytest.raises(RipresaError) as caught:
            await cluster.run("d1", request)
        assert caught.value.code is ErrorCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("num_sections", [1, 2, 3])
async def test_an_encoder_takes_over_from_what_the_decode_worker_received(
    num_sections: int,
) -> None:
    """The first encoder dies between two sections; the next one pulls what was handed over."""
    async with peer_cluster(2, 1) as cluster:
        request = ask(PROMPT)
        stream = cluster.decoder("d0").generate(request, local=False)
        events = [await anext(stream)]
        machine, worker = cluster.workers["d0"].machine, cluster.workers["d0"]
        stored = asyncio.Event()
        imports, store = [], machine.import_blocks

        def counting(blocks, payload):  # type: ignore[no-untyped-def]
            store(blocks, payload)
            imports.append(blocks)
            if len(imports) == num_sections:
                asyncio.get_running_loop().call_soon(stored.set)

        machine.import_blocks = counting  # type: ignore[method-assign]
        first = asyncio.create_task(cluster.encoder("e0").prefill(request, "d0"))
        await stored.wait()
        cluster.kill("e0")
        worker.transfers.inbound.peer_lost("e0")
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        fixed = await anext(stream)
        assert isinstance(fixed, RecipeFixed)
        events.append(fixed)
        sources = leader_of(cluster, "d0", "r", 100)
        again = replace(request, generation=1, recipe=fixed.recipe, sources=sources)
        second = asyncio.create_task(cluster.encoder("e1").prefill(again, "d0"))
        events += [event async for event in stream]
        await second
        check(request, Stream(tuple(events)))
        assert cluster.workers["e1"].engine.stats().pulls.received_bytes == (
            2 * num_sections * WINDOW * 8
        )


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["e0", "e1", "d0", "d1"]),  # who computes
        st.integers(0, 2),  # which prompt
        st.integers(0, 3),  # how much of it
        st.lists(  # sources: holder, restarts, first block, number of blocks
            st.tuples(
                st.sampled_from(["e0", "e1", "d0", "d1", "d9"]),
                st.sampled_from([(), (24,), (40,), (24, 40)]),
                st.integers(0, 4),
                st.integers(0, 8),
            ),
            max_size=3,
        ),
        st.one_of(  # leader
            st.none(),
            st.tuples(st.sampled_from(["e0", "e1", "d0", "d1", "d9"]), st.integers(0, 8)),
        ),
        st.one_of(st.none(), st.integers(0, 40)),  # turns until it is cancelled
        st.integers(0, 10),  # turns until the next one
    ),
    min_size=1,
    max_size=8,
)


@given(ACTIONS)
@settings(max_examples=60, deadline=None)
def test_whatever_peers_are_named_streams_are_right_and_pools_intact(actions: list[Any]) -> None:
    async def run() -> None:
        config = replace(HASTY, windows=WindowConfig(WindowPolicy.FULL))
        async with peer_cluster(2, 2, config=config, num_blocks=24) as cluster:
            tasks: list[tuple[GenerationRequest, asyncio.Task[Stream], bool]] = []
            for number, (name, seed, part, ranges, leader, cancel, pause) in enumerate(actions):
                request = ask(prompt(seed, 80)[: 20 + 15 * part], f"r{number}", max_tokens=2)
                holders = {n: w.address for n, w in cluster.workers.items()} | {"d9": NOBODY}
                window = WindowSource(holders[name], (), 2 * WINDOW)
                sources = PrefixSources(
                    tuple(
                        BlockSource(holders[holder], restarts, first, first + count)
                        for holder, restarts, first, count in ranges
                    ),
                    (window,) if number % 2 else (),
                    None
                    if leader is None
                    else LeaderSource(holders[leader[0]], f"r{number - 1}", 0, leader[1]),
                )
                work = cluster.compute(name, replace(request, sources=sources))
                task = asyncio.create_task(work)
                tasks.append((request, task, cancel is not None))
                for _ in range(pause if cancel is None else cancel):
                    await asyncio.sleep(0)
                if cancel is not None:
                    task.cancel()
            done = await asyncio.gather(*(t for _, t, _ in tasks), return_exceptions=True)
            for number, ((request, _, is_cancelled), stream) in enumerate(
                zip(tasks, done, strict=True)
            ):
                if isinstance(stream, Stream):
                    check(request, stream)
                elif isinstance(stream, LeaderGone):
                    assert actions[number][4] is not None
                elif isinstance(stream, RipresaError):
                    # Pools are small on purpose.
                    assert stream.code is ErrorCode.RESOURCE_EXHAUSTED, stream
                else:
                    assert is_cancelled, stream
                    assert isinstance(stream, asyncio.CancelledError), stream

    asyncio.run(run())
