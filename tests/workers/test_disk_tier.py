"""Does a worker keep its blocks on disk, and find there the same chains that memory would hold?"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from block_files import ORIGIN
from hash_machine import WINDOW, HashMachine
from hypothesis import given
from hypothesis import strategies as st

from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.cache.block_record import BlockRecord, Producer, PublishedBlock
from ripresa.workers.cache.block_store import StoredBlock, StoreStats
from ripresa.workers.cache.lineage_index import LineageIndex
from ripresa.workers.disk_tier import RETRY_S, DiskTier
from ripresa.workers.errors import ResourceExhausted
from ripresa.workers.prefix_place import WantedPrefix
from ripresa.workers.prefix_sources import PrefixSources
from ripresa.workers.replay import PlanKind, Recipe, ReplayMode, TailVariant, cold_recipe

HASHES = [bytes([number]) * 16 for number in range(6)]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class MemoryStore:
    """A store that a test can fill and hold up."""

    def __init__(self, held: Sequence[BlockIdentity] = ()) -> None:
        self.held = {identity: block_of(identity) for identity in held}
        self.open = threading.Event()
        self.open.set()
        self.num_looks = 0

    def contains(self, identity: BlockIdentity) -> bool:
        self.open.wait()
        self.num_looks += 1
        return identity in self.held

    def get(self, identity: BlockIdentity) -> StoredBlock | None:
        self.open.wait()
        return self.held.get(identity)

    def put(self, block: StoredBlock, used_at: float) -> None:
        self.held.setdefault(block.record.identity, block)

    def touch(self, identity: BlockIdentity, used_at: float) -> bool:
        return identity in self.held

    def maintain(self) -> None:
        return None

    def stats(self) -> StoreStats:
        return StoreStats()


def block_of(identity: BlockIdentity) -> StoredBlock:
    record = BlockRecord(identity, Producer.DECODE, "w", ORIGIN)
    return StoredBlock(record, repr(identity).encode())


@dataclass
class FakeLanding:
    room: int = 100
    landed: list[tuple[int, BlockIdentity]] = field(default_factory=list)

    def land(
        self,
        first: int,
        identities: Sequence[BlockIdentity],
        producers: Sequence[Producer],
        payload: torch.Tensor,
    ) -> None:
        if len(self.landed) == self.room:
            raise ResourceExhausted("no pages are left")
        (identity,) = identities
        assert tuple(producers) == (Producer.DECODE,)
        assert bytes(payload.numpy()) == repr(identity).encode()
        self.landed.append((first, identity))

    def land_image(self, num_tokens: int, recipe: Recipe, payload: torch.Tensor) -> None:
        raise AssertionError("a disk holds no sessions")

    def land_window(self, identity: BlockIdentity, payload: torch.Tensor) -> None:
        raise AssertionError("a disk holds no windows")


def wanted(
    local: Sequence[BlockIdentity] = (),
    mode: ReplayMode = ReplayMode.BOUNDED,
    interval: int | None = None,
    restarts: tuple[int, ...] | None = None,
) -> WantedPrefix:
    recipe = None
    if restarts is not None:
        cold = cold_recipe(6 * WINDOW, WINDOW, TailVariant.FLOORED, 0)
        recipe = replace(cold, kind=PlanKind.BOUNDED, restarts=restarts)
    return WantedPrefix(
        request_id="r",
        window=WINDOW,
        hashes=HASHES,
        mode=mode,
        recipe=recipe,
        sources=PrefixSources(),
        blocks=frozenset(local),
        windows=frozenset(),
        interval=interval,
    )


def chain_of(length: int, restarts: tuple[int, ...] = ()) -> tuple[BlockIdentity, ...]:
    return tuple(
        BlockIdentity(HASHES[n], tuple(r for r in restarts if r < (n + 1) * WINDOW))
        for n in range(length)
    )


def tier(store: MemoryStore, clock: Clock | None = None, timeout_s: float = 30.0) -> DiskTier:
    return DiskTier(store, HashMachine(), timeout_s, clock or Clock())


LINEAGES = [(), (8,), (16,), (8, 16), (24,), (8, 32), (40,), (16, 32)]
MODES = [(ReplayMode.BOUNDED, None), (ReplayMode.EXACT, None), (ReplayMode.CANONICAL, 16)]
IDENTITIES = st.sets(
    st.builds(
        lambda number, restarts: chain_of(6, restarts)[number],
        st.integers(0, 5),
        st.sampled_from(LINEAGES),
    )
)


@given(IDENTITIES, IDENTITIES, st.sampled_from(MODES))
def test_the_chain_is_that_of_a_memory_that_held_everything(
    local: set[BlockIdentity], on_disk: set[BlockIdentity], how: tuple[ReplayMode, int | None]
) -> None:
    mode, interval = how
    index: LineageIndex[None] = LineageIndex(WINDOW)
    for identity in local | on_disk:
        index.add(identity, None)
    expected = index.match(HASHES, mode, interval)

    async def find() -> None:
        found = tier(MemoryStore(tuple(on_disk)))
        for _ in range(2):
            assert await found.chain(wanted(tuple(local), mode, interval)) == expected
        await found.close()

    asyncio.run(find())


async def test_a_recipe_finds_its_own_lineage_only() -> None:
    store = MemoryStore((*chain_of(3), *chain_of(5, (16,))))
    found = tier(store)
    assert await found.chain(wanted(restarts=())) == chain_of(3)
    assert await found.chain(wanted(restarts=(16,))) == chain_of(5, (16,))
    assert await found.chain(wanted(restarts=(8,))) == chain_of(1)
    await found.close()


async def test_other_endings_of_a_held_chain_are_looked_for_once_in_a_while() -> None:
    store, clock = MemoryStore(), Clock()
    found = tier(store, clock)
    held = chain_of(6)
    assert await found.chain(wanted(held)) == held
    assert store.num_looks == 5
    assert await found.chain(wanted(held)) == held
    assert store.num_looks == 5
    clock.now += 61
    await found.chain(wanted(held))
    assert store.num_looks == 10
    await found.close()


async def test_what_is_there_lands_in_order_up_to_the_first_gap() -> None:
    chain = chain_of(6, (16,))
    store = MemoryStore(chain)
    found, landing = tier(store), FakeLanding()
    del store.held[chain[4]]
    await found.bring(wanted(), chain, 1, 6, landing)
    assert landing.landed == [(number, chain[number]) for number in (1, 2, 3)]
    await found.close()


async def test_nothing_more_lands_without_pages() -> None:
    chain = chain_of(6)
    found, landing = tier(MemoryStore(chain)), FakeLanding(room=2)
    await found.bring(wanted(), chain, 0, 6, landing)
    assert [number for number, _ in landing.landed] == [0, 1]
    await found.close()


async def test_a_store_that_hangs_holds_requests_up_once() -> None:
    chain = chain_of(6)
    store, clock = MemoryStore(chain), Clock()
    found = tier(store, clock, timeout_s=0.05)
    store.open.clear()
    assert await found.chain(wanted()) == ()
    assert found.num_timeouts == 1
    # From now on it is not even asked.
    landing = FakeLanding()
    await found.bring(wanted(), chain, 0, 6, landing)
    assert (landing.landed, found.num_timeouts) == ([], 1)
    store.open.set()
    assert await found.chain(wanted()) == ()
    clock.now += RETRY_S
    patient = DiskTier(store, HashMachine(), 30.0, clock)
    assert await patient.chain(wanted()) == chain
    await patient.close()
    await found.close()


async def test_blocks_are_copied_once_and_while_there_is_room() -> None:
    store, machine = MemoryStore(), HashMachine()
    found = DiskTier(store, machine, 30.0, Clock())
    identities = chain_of(3)
    blocks = [
        PublishedBlock(n, n, BlockRecord(identity, Producer.PREFILL, "w", ORIGIN))
        for n, identity in enumerate(identities)
    ]
    copied: list[int] = []
    machine.import_blocks(range(3), torch.zeros(3 * machine.block_bytes(1), dtype=torch.uint8))
    export = machine.export_blocks

    def copy(block_ids: Sequence[int]) -> torch.Tensor:
        copied.extend(block_ids)
        return export(block_ids)

    machine.export_blocks = copy  # type: ignore[method-assign]
    found.keep(await found.missing(blocks[:2], 0.0), 0.0)
    await found.flush()
    found.keep(await found.missing(blocks, 0.0), 0.0)
    await found.flush()
    assert copied == [0, 1, 2]
    assert set(store.held) == set(identities)
    assert found.stats().dropped == 0
    await found.close()
    found.keep(blocks[:1], 0.0)
    assert copied == [0, 1, 2]
    assert found.stats().dropped == 1


async def test_a_store_that_hangs_is_given_nothing() -> None:
    store = MemoryStore()
    found = tier(store, timeout_s=0.05)
    (identity,) = chain_of(1)
    block = PublishedBlock(0, 0, BlockRecord(identity, Producer.PREFILL, "w", ORIGIN))
    store.open.clear()
    assert await found.missing([block], 0.0) == []
    assert (found.num_timeouts, found.stats().dropped) == (1, 1)
    store.open.set()
    await found.close()
