"""Do full workers that keep blocks for each other evict like one cache, and come to rest?

Pools, caches, the keepers' sinks and the directory's index are real; only network and engines are
missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from hash_machine import GEOMETRY, HashMachine
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ripresa.cluster.directory.events import Accepted
from ripresa.cluster.directory.index import DirectorySettings, PrefixIndex
from ripresa.cluster.directory.outbox import Item, Outbox
from ripresa.cluster.placement import AGE_TOLERANCE
from ripresa.workers.address import WorkerKind
from ripresa.workers.block_moves import BlockKeeping, manifest_of
from ripresa.workers.cache.block_cache import BlockCache
from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.cache.block_pool import BlockPool, SlotPool
from ripresa.workers.cache.block_record import (
    BlockPublished,
    BlockRecord,
    BlockRemoved,
    CacheEvent,
    Producer,
    UnusedBlock,
)
from ripresa.workers.cache.block_table import PagePool
from ripresa.workers.cache.cache_events import HeldKind, Origin, Room, Tier, Unkept
from ripresa.workers.errors import ResourceExhausted
from ripresa.workers.transfer.base import Section, SectionKind

NAMES = [f"block {number}".encode() for number in range(30)]
WINDOW = GEOMETRY.window


class Worker:
    """A worker's cache, what it tells the directory, and what it takes from others."""

    def __init__(self, cluster: LastCopies, name: str, num_blocks: int) -> None:
        self.name = name
        self.cluster = cluster
        self.outbox = Outbox(name, 1)
        self.machine = HashMachine(num_blocks)
        self.blocks = BlockCache(
            BlockPool(num_blocks), WINDOW, on_event=self._tell, clock=lambda: cluster.now
        )
        self.pages = PagePool(
            self.blocks, num_blocks, SlotPool(1), WINDOW, forget_slot=lambda slot: None
        )
        self.keeping = BlockKeeping(self.blocks, self.pages, self.machine)

    def _tell(self, event: CacheEvent) -> None:
        item = Item(HeldKind.BLOCK, event.record.identity, Tier.DEVICE)
        if isinstance(event, BlockPublished):
            self.outbox.hold(item, event.record.origin)
        else:
            self.outbox.drop(item)
            self.cluster.gone(self, event)

    def report(self) -> None:
        """Until the directory knows everything; what it says of copies counts at once."""
        while True:
            room = Room(WorkerKind.DECODE, self.blocks.room_age_s)
            reply = self.cluster.index.report(self.outbox.next_report(room), self.cluster.now)
            self.outbox.take(reply)
            if isinstance(reply, Accepted):
                for identity in reply.advice.copied if reply.advice else ():
                    self.blocks.mark_copy(identity, is_copy=True)
                for identity in reply.advice.kept if reply.advice else ():
                    self.blocks.mark_copy(identity, is_copy=False)
                if not self.outbox.has_changes:
                    return

    def contents(self, name: bytes) -> torch.Tensor:
        """What a block of this name holds, wherever it is."""
        num_bytes = self.machine.block_bytes(1)
        return torch.full((num_bytes,), NAMES.index(name) + 1, dtype=torch.uint8)

    def use(self, name: bytes) -> None:
        identity = BlockIdentity(name, ())
        if identity in self.blocks:
            blocks = self.blocks.adopt((identity,))
            assert self.machine.export_blocks(blocks).tolist() == self.contents(name).tolist()
            self.blocks.release(blocks)
            return
        (block,) = self.blocks.allocate(1)
        self.machine.import_blocks((block,), self.contents(name))
        record = BlockRecord(identity, Producer.PREFILL, "w", Origin("t", name, None))
        self.blocks.acknowledge(self.blocks.offer(block, record), rank=0)
        self.blocks.release((block,))


@dataclass(frozen=True)
class Copy:
    """What a worker knows of a block that it holds."""

    used_at: float
    is_moved: bool


class LastCopies(RuleBasedStateMachine):
    """The newest use of every block is noted, and whether it has moved since."""

    @initialize(num_workers=st.integers(2, 4), num_blocks=st.integers(2, 6))
    def begin(self, num_workers: int, num_blocks: int) -> None:
        self.now = 0.0
        self.index = PrefixIndex(DirectorySettings(window=WINDOW, late_s=1e9, lease_s=2e9), "d")
        self.workers = {name: Worker(self, name, num_blocks) for name in "abcd"[:num_workers]}
        self.used_at: dict[bytes, float] = {}
        self.moved: Counter[bytes] = Counter()
        self.copies: dict[tuple[str, bytes], Copy] = {}
        self.num_uses = self.num_moves = 0
        self.is_looking_ahead = False
        self.report()

    def report(self) -> None:
        for _ in range(2):
            for worker in self.workers.values():
                worker.report()

    def holders(self, name: bytes) -> Iterator[Worker]:
        identity = BlockIdentity(name, ())
        return (worker for worker in self.workers.values() if identity in worker.blocks)

    def gone(self, worker: Worker, event: BlockRemoved) -> None:
        """What is lost is about the oldest there is, or has moved since its last use.

        As far as its worker knows: it does not hear of uses of another copy, which went before.
        """
        name = event.record.identity.hash
        copy = self.copies.pop((worker.name, name))
        if not self.is_looking_ahead or copy.is_moved or any(self.holders(name)):
            return
        held = [n for n, at in self.used_at.items() if any(self.holders(n)) and not self.moved[n]]
        oldest = min((self.used_at[n] for n in held), default=self.now)
        age = self.now - copy.used_at
        assert age >= (1 - AGE_TOLERANCE) * (self.now - oldest) - 1

    @rule(which=st.integers(0, 3), name=st.sampled_from(NAMES), looks_ahead=st.booleans())
    def use(self, which: int, name: bytes, looks_ahead: bool) -> None:
        worker = list(self.workers.values())[which % len(self.workers)]
        self.now += 1
        if looks_ahead:
            self.look_ahead(worker, 1)
        self.is_looking_ahead = looks_ahead
        worker.use(name)
        self.is_looking_ahead = False
        self.used_at[name] = self.now
        self.copies[worker.name, name] = Copy(self.now, is_moved=False)
        self.moved[name] = 0
        self.num_uses += 1
        self.report()

    @rule(which=st.integers(0, 3), num_ahead=st.integers(1, 6))
    def give(self, which: int, num_ahead: int) -> None:
        self.look_ahead(list(self.workers.values())[which % len(self.workers)], num_ahead)

    @rule()
    def come_to_rest(self) -> None:
        """However often everybody looks ahead, it ends."""
        for _ in range(self.num_uses + 1):
            if not sum(self.look_ahead(worker, 6) for worker in self.workers.values()):
                return
        raise AssertionError("blocks move on and on")

    def look_ahead(self, giver: Worker, num_ahead: int) -> int:
        """What an engine does in the background; how many blocks moved."""
        unused = giver.blocks.at_risk(num_ahead)
        asked = [Unkept(each.record.identity, each.record.origin, each.age_s) for each in unused]
        keepers = self.index.find_keepers(giver.name, asked, self.now)
        num_moved = 0
        for keeper in filter(None, dict.fromkeys(keepers)):
            offered = [each for each, k in zip(unused, keepers, strict=True) if k == keeper]
            num_moved += self.move(giver, self.workers[keeper.worker_id], offered)
        self.report()
        return num_moved

    def move(self, giver: Worker, keeper: Worker, offered: list[UnusedBlock]) -> int:
        manifest = manifest_of(giver.name, giver.machine.layout_digest, offered)
        assert keeper is not giver
        try:
            first = keeper.keeping.open(manifest)
        except ResourceExhausted:
            return 0
        moved = [each.record.identity for each in offered[first:]]
        loan = giver.pages.borrow(moved, is_use=False)
        payload = giver.machine.export_blocks(loan.blocks)
        loan.end()
        displaced = keeper.blocks.at_risk(len(moved))
        section = Section(0, SectionKind.BLOCKS, first, len(offered), payload.numel())
        assert keeper.keeping.section_bytes(manifest, section) == payload.numel()
        keeper.keeping.write(manifest, section, payload)
        keeper.keeping.complete(manifest)
        for identity in moved:
            giver.blocks.moved(identity)
            copy = replace(self.copies[giver.name, identity.hash], is_moved=True)
            self.copies[giver.name, identity.hash] = copy
            self.copies.setdefault((keeper.name, identity.hash), copy)
            self.moved[identity.hash] += 1
            # A block moves at most once after each use.
            assert self.moved[identity.hash] == 1
            self.num_moves += 1
        # The young stay: each that made room is older than all that came for it.
        youngest_displaced = min((each.age_s for each in displaced), default=float("inf"))
        assert all(each.age_s < youngest_displaced for each in offered[first:])
        return len(moved)

    @invariant()
    def at_most_one_move_a_use(self) -> None:
        if hasattr(self, "workers"):
            assert self.num_moves <= self.num_uses
            for worker in self.workers.values():
                worker.blocks.check_integrity()
                worker.pages.check_integrity()
            self.index.check_integrity()


TestLastCopies = LastCopies.TestCase
TestLastCopies.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
