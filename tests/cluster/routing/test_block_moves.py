"""Do last copies outlive the worker that has to evict them, and does moving them come to an end?

Router, directory, publishers, engines and transfers are the real ones; see `routed_cluster`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from await_points import numbers_of_turns
from hash_machine import WINDOW, reference_stream
from hash_requests import ask, prompt, recipe_of
from peer_cluster import turns_until
from routed_cluster import RoutedCluster, routed_cluster
from split_cluster import CONFIG, Stream

from ripresa.cluster.routing.prompt import Hold
from ripresa.workers import block_moves
from ripresa.workers.address import WorkerAddress
from ripresa.workers.block_moves import manifest_of
from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.cache.cache_events import Unkept
from ripresa.workers.config import DiskConfig, MoveConfig
from ripresa.workers.engine import EngineCore
from ripresa.workers.errors import ErrorCode, ResourceExhausted, RipresaError
from ripresa.workers.job import Job
from ripresa.workers.request import GenerationRequest, MoveCounters
from ripresa.workers.transfer.base import Section, SectionKind

EAGER = MoveConfig(ahead=0.25, blocks_a_move=2, interval_s=0.001)
MOVING = replace(CONFIG, moves=EAGER, reserved_output_tokens=8)
STILL = replace(MOVING, moves=MoveConfig(max_bytes_per_s=0, blocks_a_move=4))
"""Nothing moves by itself."""
NUM_BLOCKS = 24
LENGTH = 6 * WINDOW + 1


class Recorded:
    """An engine's live state, but for how blocks are read."""

    def __init__(
        self, core: EngineCore, read_blocks: Callable[..., Awaitable[torch.Tensor]]
    ) -> None:
        self._core = core
        self._read_blocks = read_blocks

    async def read_blocks(
        self, chain: tuple[BlockIdentity, ...], *, is_use: bool = True
    ) -> torch.Tensor:
        return await self._read_blocks(chain, is_use=is_use)

    async def leader(self, name: str) -> Job | None:
        return await self._core.leader(name)


async def run(cluster: RoutedCluster, worker: str, request: GenerationRequest) -> Stream:
    """A request that one worker serves from what it holds; the directory then knows."""
    events = [event async for event in cluster.calls.generate(worker, request, True, Hold())]
    await cluster.told()
    stream = Stream(tuple(events))
    stream.assert_equals(reference_stream(request, recipe=recipe_of(stream)))
    return stream


def moves(cluster: RoutedCluster, worker: str) -> MoveCounters:
    return cluster.workers_by_id[worker].engine.stats().moves


def num_held(cluster: RoutedCluster, worker: str, request: GenerationRequest) -> int:
    """Leading blocks of a prompt that a worker holds."""
    core = cluster.workers_by_id[worker].engine._core
    return len(core._prefixes.blocks.match(core._prefixes.open(request).hashes))


def prompts(num: int, first: int = 0) -> list[GenerationRequest]:
    return [ask(prompt(1000 + k, LENGTH), f"r{k}") for k in range(first, first + num)]


async def test_what_a_full_worker_evicts_is_kept_by_an_empty_one() -> None:
    asked = prompts(5)
    async with routed_cluster(0, 2, config=MOVING, num_blocks=NUM_BLOCKS) as cluster:
        blocks = cluster.workers_by_id["d0"].engine._core._prefixes.blocks
        for request in asked:
            await run(cluster, "d0", request)
            await turns_until(lambda: not blocks.at_risk(6))
        assert sum(num_held(cluster, "d0", request) for request in asked) < 5 * 6
        counters = moves(cluster, "d0")
        assert counters.num_moved == moves(cluster, "d1").num_taken > 0
        assert (counters.num_refused, counters.num_late) == (0, 0)
        assert counters.sent_bytes == counters.num_moved * WINDOW * 8
        # Each block is somewhere: the directory names all of every prompt.
        await cluster.told()
        for request in asked:
            hashes = cluster.workers_by_id["d0"].engine._core._prefixes.open(request).hashes
            found = cluster.directory.index.lookup(hashes, cluster.directory._now)
            assert max(chain.num_blocks for chain in found.chains) == len(hashes)


async def test_two_full_workers_keep_more_young_prompts_than_fit_one() -> None:
    asked = prompts(9)
    async with routed_cluster(0, 2, config=STILL, num_blocks=NUM_BLOCKS) as cluster:
        cores = [worker.engine._core for worker in cluster.workers_by_id.values()]
        now = [0.0]
        for core in cores:
            core._prefixes.blocks._clock = lambda: now[0]
        for number, request in enumerate(asked):
            now[0] += 1
            if number < 3:
                await run(cluster, "d1", request)
                continue
            giving = cores[0].exchange.giving
            assert giving is not None
            while await giving.give(cores[0]._prefixes.blocks.at_risk(7)):
                await cluster.told()
            await run(cluster, "d0", request)
        assert all(core._prefixes.blocks.num_available == NUM_BLOCKS for core in cores)
        for request in asked[-5:]:
            hashes = cores[0]._prefixes.open(request).hashes
            found = cluster.directory.index.lookup(hashes, cluster.directory._now)
            assert max(chain.num_blocks for chain in found.chains) == len(hashes)
        # Each prompt of d0 made room for the next one once.
        assert 0 < moves(cluster, "d0").num_moved <= 6 * len(asked)


@pytest.mark.parametrize("dies", ["before", "while"])
async def test_a_keeper_that_dies_costs_the_copies_alone(dies: str) -> None:
    asked = prompts(5)
    async with routed_cluster(0, 2, config=MOVING, num_blocks=NUM_BLOCKS) as cluster:
        if dies == "before":
            # The directory still names it.
            await cluster.kill("d1")
        for number, request in enumerate(asked):
            await run(cluster, "d0", request)
            if number == 2 and dies == "while":
                await turns_until(lambda: moves(cluster, "d0").num_moved > 0)
                await cluster.kill("d1")
        again = await run(cluster, "d0", replace(asked[-1], request_id="again"))
        assert recipe_of(again).start > 0
        counters = moves(cluster, "d0")
        assert (counters.num_moved > 0) is (dies == "while")


async def test_a_move_is_refused_by_younger_blocks_and_by_another_layout() -> None:
    async with routed_cluster(0, 2, config=STILL, num_blocks=NUM_BLOCKS) as cluster:
        for number, request in enumerate(prompts(8)):
            await run(cluster, "d0" if number < 4 else "d1", request)
        keeper = cluster.workers_by_id["d1"]
        blocks = cluster.workers_by_id["d0"].engine._core._prefixes.blocks
        unused = blocks.at_risk(8)[:4]
        assert len(unused) == 4
        sink = keeper.engine.exchange.sink()
        # The one free page takes the youngest.
        assert sink.open(manifest_of("d0", keeper.machine.layout_digest, unused)) == 3
        loan = keeper.engine._core._pages.borrow_new(1)
        with pytest.raises(ResourceExhausted, match="older"):
            sink.open(manifest_of("d0", keeper.machine.layout_digest, unused))
        loan.end()
        with pytest.raises(RipresaError, match="KV layout") as refused:
            sink.open(manifest_of("d0", b"another", unused))
        assert refused.value.code is ErrorCode.FAILED_PRECONDITION
        young = [each._replace(age_s=0.0) for each in unused]
        manifest = manifest_of("d0", keeper.machine.layout_digest, young)
        assert sink.open(manifest) == 0
        # Room that is gone when the payload comes ends the move, and nothing was displaced.
        await run(cluster, "d1", ask(prompt(77, LENGTH), "late"))
        old = [each._replace(age_s=1e6) for each in unused]
        section = Section(0, SectionKind.BLOCKS, 0, 4, keeper.machine.block_bytes(4))
        held = keeper.engine._core._prefixes.blocks.num_published
        with pytest.raises(ResourceExhausted, match="meanwhile"):
            sink.write(
                manifest_of("d0", keeper.machine.layout_digest, old),
                section,
                torch.zeros(section.num_bytes, dtype=torch.uint8),
            )
        assert keeper.engine._core._prefixes.blocks.num_published == held


async def test_a_block_that_went_before_it_was_read_is_late() -> None:
    async with routed_cluster(0, 2, config=STILL, num_blocks=NUM_BLOCKS) as cluster:
        for request in prompts(4):
            await run(cluster, "d0", request)
        core = cluster.workers_by_id["d0"].engine._core
        giving, unused = core.exchange.giving, core._prefixes.blocks.at_risk(8)[:4]
        assert giving is not None
        read = core.read_blocks

        async def evicted(chain: tuple[BlockIdentity, ...], *, is_use: bool = True) -> torch.Tensor:
            core._prefixes.blocks.withdraw(lambda record: record.identity in chain)
            return await read(chain, is_use=is_use)

        giving._live = Recorded(core, evicted)
        assert await giving.give(unused) == 0
        counters = moves(cluster, "d0")
        assert (counters.num_moved, counters.num_late) == (0, 4)
        assert moves(cluster, "d1").num_taken == 0


async def test_the_directory_is_asked_for_few_blocks_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However large the cache is that a worker leaves with."""
    monkeypatch.setattr(block_moves, "MAX_ASKED", 3)
    async with routed_cluster(0, 2, config=STILL, num_blocks=NUM_BLOCKS) as cluster:
        for request in prompts(4):
            await run(cluster, "d0", request)
        core = cluster.workers_by_id["d0"].engine._core
        giving, unused = core.exchange.giving, core._prefixes.blocks.at_risk(NUM_BLOCKS)
        assert giving is not None
        find_keepers = giving._find_keepers
        asked: list[int] = []

        async def counted(blocks: Sequence[Unkept]) -> Sequence[WorkerAddress | None]:
            asked.append(len(blocks))
            assert find_keepers is not None
            return await find_keepers(blocks)

        giving._find_keepers = counted
        assert await giving.give(unused) == moves(cluster, "d1").num_taken > 3
        assert sum(asked) == len(unused) > 6
        assert max(asked) == 3


async def test_what_is_on_disk_does_not_move() -> None:
    async with routed_cluster(0, 2, config=STILL, num_blocks=NUM_BLOCKS) as cluster:
        for request in prompts(4):
            await run(cluster, "d0", request)
        core = cluster.workers_by_id["d0"].engine._core
        giving, unused = core.exchange.giving, core._prefixes.blocks.at_risk(8)[:4]
        assert giving is not None

        async def stored(identities: Sequence[BlockIdentity]) -> Sequence[bool]:
            return [identity != unused[1].record.identity for identity in identities]

        giving._stored = stored
        assert await giving.give(unused) == 1
        assert moves(cluster, "d1").num_taken == 1


async def test_a_last_copy_goes_to_its_keeper_s_disk_too(tmp_path: Path) -> None:
    """The giver's disk has lost it."""
    config = replace(STILL, disk=DiskConfig(str(tmp_path / "blocks")))
    async with routed_cluster(0, 2, config=config, num_blocks=NUM_BLOCKS) as cluster:
        asked = prompts(4)
        for request in asked:
            await run(cluster, "d0", request)
        giver, keeper = (worker.engine for worker in cluster.workers_by_id.values())
        await giver.flush_disk()
        assert giver._core._disk is not None
        await giver._core._disk.forget(None)
        giving, unused = giver._core.exchange.giving, giver._core._prefixes.blocks.at_risk(8)
        assert giving is not None
        num_moved = await giving.give(unused)
        assert num_moved == len(unused) > 4
        await turns_until(lambda: not keeper._core._keeping)
        await keeper.flush_disk()
        disk = keeper._core._disk
        assert disk is not None
        assert all(await disk.holds([each.record.identity for each in unused]))
        assert disk.stats().written == num_moved


async def test_a_move_that_is_cancelled_anywhere_leaves_nothing() -> None:
    async with routed_cluster(0, 2, config=STILL, num_blocks=NUM_BLOCKS) as cluster:
        for request in prompts(4):
            await run(cluster, "d0", request)
        core = cluster.workers_by_id["d0"].engine._core
        giving = core.exchange.giving
        assert giving is not None
        for num_turns in numbers_of_turns():
            unused = core._prefixes.blocks.at_risk(8)[:4]
            task = asyncio.create_task(giving.give(unused))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            is_through = not task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            # An export that was under way is over by then.
            await turns_until(lambda: core._pages.num_available_blocks == NUM_BLOCKS)
            await cluster.settle()
            if is_through:
                break
        assert num_turns > 4
        # What a cancelled move had delivered already is not sent again.
        held = cluster.workers_by_id["d1"].engine._core._prefixes.blocks
        assert all(each.record.identity in held for each in unused)
