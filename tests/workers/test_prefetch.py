"""Is what a session had to give up back in memory when its answer comes, at nobody's expense?"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest
import torch
from hash_machine import GEOMETRY, WINDOW, HashMachine
from hash_requests import ask, prompt, recipe_of
from histories import check
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from peer_cluster import outcome_of
from split_cluster import CONFIG, Stream, assert_idle, collect
from suspensions import Cancelling, for_every_wait

from ripresa.workers import prefetch as prefetch_module
from ripresa.workers.block_moves import BlockKeeping
from ripresa.workers.cache.block_cache import BlockCache
from ripresa.workers.cache.block_file import BlockFormat
from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.cache.block_pool import BlockPool, SlotPool
from ripresa.workers.cache.block_record import BlockRecord, Producer
from ripresa.workers.cache.block_store import StoredBlock
from ripresa.workers.cache.block_table import PageLoan, PagePool
from ripresa.workers.cache.cache_events import Origin, Unheard, tenant_digest
from ripresa.workers.cache.disk_store import DiskStore
from ripresa.workers.cache.expected_turns import ExpectedTurn, PrefetchOutcome
from ripresa.workers.cache.session_leases import Arrival, EndedTurn
from ripresa.workers.config import (
    DiskConfig,
    LeaseConfig,
    ParkConfig,
    TransferConfig,
    WindowConfig,
    WindowPolicy,
)
from ripresa.workers.decode_engine import DecodeEngine
from ripresa.workers.disk_tier import DiskTier
from ripresa.workers.errors import ResourceExhausted
from ripresa.workers.job import Job
from ripresa.workers.prefetch import Prefetch
from ripresa.workers.prefix_cache import PrefixCache
from ripresa.workers.prefix_supply import PrefixSupply
from ripresa.workers.replay import PlanKind
from ripresa.workers.request import GenerationRequest

NUM_NEW = 5
NUM_HEAD = 66 // WINDOW
"""Whole blocks of the session's first turn."""


class Away:
    """A session whose tool runs, all of whose blocks had to go and are on disk."""

    def __init__(self, folder: Path, max_bytes: int = 1 << 20) -> None:
        self.now = 1e9
        self.machine = HashMachine(num_blocks=40)
        config = replace(
            CONFIG,
            disk=DiskConfig(str(folder)),
            # Its pins are given up as soon as they are granted.
            leases=LeaseConfig(max_share=0.0, prefetch_lead_s=2.0, prefetch_max_bytes=max_bytes),
        )
        self.engine = DecodeEngine("d0", self.machine, config, lambda: self.now)
        self.core = self.engine._core
        self.request = replace(ask(prompt(1, 60), "s", max_tokens=7), session_id="s")
        self.brought = asyncio.Event()
        self.next: GenerationRequest | None = None

    @property
    def prefetch(self) -> Prefetch:
        assert self.core._prefetch is not None
        return self.core._prefetch

    @property
    def num_read(self) -> int:
        stats = self.engine.stats().disk
        assert stats is not None
        return stats.hits

    async def begin(self, *, has_room: bool = True) -> None:
        """The turn, and others after it that need all of the pool and end in a closed session."""
        await self.engine.start()
        stream = await collect(self.engine, self.request)
        assert self.engine.lease("s", ["search"])
        tokens = self.request.token_ids + stream.tokens + prompt(99, NUM_NEW)
        self.next = replace(ask(tokens, "next", max_tokens=7), session_id="s")
        await self.engine.flush_disk()
        for seed in range(10, 16):
            other = ask(prompt(seed, 12 * WINDOW), f"other {seed}")
            await collect(self.engine, replace(other, session_id=f"{seed}"))
        if has_room:
            self.engine.end_session(b"", "15")
        if self.core._prefetch is not None:
            self.prefetch._done = self.brought.set

    async def pass_time(self, seconds: float) -> None:
        """The step loop has seen that it is so much later."""
        self.now += seconds
        await collect(self.engine, ask((3,), f"at {self.now}", max_tokens=1))

    async def answer(self) -> Stream:
        """The session goes on, as its recipe says."""
        assert self.next is not None
        stream = await collect(self.engine, self.next)
        check(self.next, stream)
        return stream

    async def end(self) -> None:
        await self.engine.flush_disk()
        assert_idle(self.engine, self.machine)
        await self.engine.stop()

    def prefetched(self) -> dict[str, int]:
        return dict(self.engine.stats().leases.prefetched)


@asynccontextmanager
async def away(
    folder: Path, max_bytes: int = 1 << 20, *, has_room: bool = True
) -> AsyncIterator[Away]:
    session = Away(folder, max_bytes)
    async with asyncio.timeout(150):
        await session.begin(has_room=has_room)
        try:
            yield session
        finally:
            await session.end()


def from_disk(stream: Stream) -> tuple[tuple[int, int], ...]:
    return outcome_of(stream).from_disk


@pytest.mark.parametrize("is_on", [True, False])
async def test_the_answer_reads_nothing_from_disk_and_computes_its_new_rows_only(
    tmp_path: Path, is_on: bool
) -> None:
    async with away(tmp_path, 1 << 20 if is_on else 0) as session:
        await session.pass_time(6.5)
        if is_on:
            await session.brought.wait()
        assert session.num_read == (NUM_HEAD if is_on else 0)
        stream = await session.answer()
        assert recipe_of(stream).kind is PlanKind.RESUME
        # The last sampled token had no row yet.
        assert stream.finished.counters.encoder_rows == NUM_NEW + 1
        assert from_disk(stream) == (() if is_on else ((0, NUM_HEAD),))
        assert session.num_read == NUM_HEAD
        used = NUM_HEAD if is_on else 0
        assert session.prefetched() == {"used": used, "unused": 0}


async def test_nothing_is_read_before_it_is_time(tmp_path: Path) -> None:
    async with away(tmp_path) as session:
        await session.pass_time(5.5)
        assert session.prefetch.next_start == 1e9 + 6.0
        assert session.num_read == 0
        await session.pass_time(0.5)
        await session.brought.wait()
        assert session.num_read == NUM_HEAD


async def test_nobody_who_was_later_makes_room(tmp_path: Path) -> None:
    async with away(tmp_path, has_room=False) as session:
        await session.pass_time(6.5)
        assert session.prefetch.next_start is None
        assert session.num_read == 0
        assert session.prefetched() == {"used": 0, "unused": 0}


async def test_only_so_many_bytes_of_a_session_are_read(tmp_path: Path) -> None:
    async with away(tmp_path, 3 * 8 * WINDOW) as session:
        await session.pass_time(6.5)
        await session.brought.wait()
        assert session.num_read == 3
        assert from_disk(await session.answer()) == ((3, NUM_HEAD),)
        assert session.prefetched() == {"used": 3, "unused": 0}


async def test_a_session_that_is_closed_meanwhile_gets_nothing(tmp_path: Path) -> None:
    async with away(tmp_path) as session:
        reading, may_read = hold_up(session)
        await session.pass_time(6.5)
        await reading.wait()
        session.engine.end_session(b"", "s")
        may_read.set()
        await session.brought.wait()
        assert session.prefetched() == {"used": 0, "unused": 0}
        assert session.core._prefixes.blocks.match(hashes(session)) == ()


async def test_what_is_flushed_meanwhile_does_not_come_back(tmp_path: Path) -> None:
    async with away(tmp_path) as session:
        reading, may_read = hold_up(session)
        await session.pass_time(6.5)
        await reading.wait()
        flush = asyncio.create_task(session.engine.flush(tenant_digest(b"")))
        await asyncio.sleep(0)
        may_read.set()
        await flush
        await session.brought.wait()
        assert session.core._prefixes.blocks.num_published == 0
        stream = await session.answer()
        assert recipe_of(stream).kind is PlanKind.COLD


async def test_an_answer_that_comes_meanwhile_waits_and_reads_nothing_twice(
    tmp_path: Path,
) -> None:
    async with away(tmp_path) as session:
        reading, may_read = hold_up(session)
        await session.pass_time(6.5)
        await reading.wait()
        supply = session.core.exchange.supply
        join, waits = supply._join, asyncio.Event()

        async def joining(block_hash: bytes, joined: set[bytes]) -> bool:
            waits.set()
            return await join(block_hash, joined)

        supply._join = joining  # type: ignore[method-assign]
        answer = asyncio.create_task(session.answer())
        await waits.wait()
        may_read.set()
        assert from_disk(await answer) == ()
        assert session.num_read == NUM_HEAD
        assert session.prefetched() == {"used": NUM_HEAD, "unused": 0}


def hold_up(session: Away) -> tuple[asyncio.Event, asyncio.Event]:
    """Told when the read ahead has read, and that it may land what it read."""
    reading, may_land = asyncio.Event(), asyncio.Event()
    disk = session.prefetch._disk

    class Held:
        async def read(self, chain: Sequence[BlockIdentity]) -> list[StoredBlock] | None:
            found = await disk.read(chain)
            reading.set()
            await may_land.wait()
            return found

    session.prefetch._disk = Held()  # type: ignore[assignment]
    return reading, may_land


def hashes(session: Away) -> tuple[bytes, ...]:
    return session.core._prefixes.open(session.request).hashes


async def test_it_may_be_cancelled_at_every_await(tmp_path: Path) -> None:
    number = 0

    async def scenario(cancelling: Cancelling[bool]) -> bool:
        nonlocal number
        number += 1
        async with away(tmp_path / str(number)) as session:
            turn = session.core._prefixes.leases.expected.take()

            async def bring() -> bool:
                await session.prefetch._run(turn)
                return True

            found = await cancelling(bring)
            session.engine.check_integrity()
            stream = await session.answer()
            assert stream.finished.counters.encoder_rows == NUM_NEW + 1
            assert session.num_read >= NUM_HEAD
        return found is not None

    assert await for_every_wait(scenario) >= 1


# -- any history of one worker's pools, over a real directory --------------------------------

NUM_BLOCKS = 12
MAX_BLOCKS = 5
LEAD_S = 2.0
SESSIONS = ("s", "t", "u")
FILLER = "filler"
TENANT = tenant_digest(b"")


def payload_of(identity: BlockIdentity) -> torch.Tensor:
    content = blake2b(identity.hash, digest_size=8 * WINDOW).digest()
    # Entries are positive numbers to the machine.
    return torch.frombuffer(bytearray(byte & 0x7F for byte in content), dtype=torch.uint8)


def names(tokens: tuple[int, ...]) -> tuple[bytes, ...]:
    """Chained names of the full blocks."""
    return tuple(
        blake2b(repr(tokens[: (k + 1) * WINDOW]).encode(), digest_size=16).digest()
        for k in range(len(tokens) // WINDOW)
    )


class Standing(NamedTuple):
    """How a block stood before a read ahead."""

    used_at: float
    is_pinned: bool
    is_spare: bool


class SpiedPrefetch(Prefetch):
    """Remembers whose blocks it brings."""

    turn: ExpectedTurn | None = None

    async def _run(self, turn: ExpectedTurn) -> None:
        self.turn = turn
        await super()._run(turn)


class StepwiseTier(DiskTier):
    """Reads, and then waits until it may tell."""

    may_tell: asyncio.Event
    has_read: asyncio.Event

    async def read(self, chain: Sequence[BlockIdentity]) -> list[StoredBlock] | None:
        found = await super().read(chain)
        self.has_read.set()
        await self.may_tell.wait()
        self.may_tell.clear()
        return found


async def nobody(name: str) -> Job | None:
    return None


class PrefetchHistory(RuleBasedStateMachine):
    """Sessions with and without leases in a pool that is short; time passes as the rules say."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.number = 0
        self.said: dict[str, tuple[int, ...]] = {}
        self.ended: list[str] = []
        self.running: list[PageLoan] = []
        self.flushed: set[BlockIdentity] = set()
        self.num_landed = self.num_brought = 0
        self.folder = TemporaryDirectory()
        self.runner = asyncio.Runner()
        self.machine = HashMachine(NUM_BLOCKS)
        form = BlockFormat(
            self.machine.layout_digest,
            self.machine.layout_digest.hex(),
            self.machine.block_bytes(1),
        )
        self.store = DiskStore(Path(self.folder.name), form, 1 << 20, 1e9, self.clock)
        self.blocks = BlockCache(BlockPool(NUM_BLOCKS), WINDOW, max_pinned=6, clock=self.clock)
        config = LeaseConfig(
            prefetch_lead_s=LEAD_S, prefetch_max_bytes=MAX_BLOCKS * self.machine.block_bytes(1)
        )
        prefixes = PrefixCache(
            self.blocks,
            GEOMETRY,
            self.machine.layout_digest,
            WindowConfig(WindowPolicy.ZERO),
            ParkConfig(),
            replace(config, max_time_s=50.0),
            NUM_BLOCKS,
            self.clock,
            Unheard(),
            8 * WINDOW,
        )
        self.leases = prefixes.leases
        self.pages = PagePool(
            self.blocks, NUM_BLOCKS, SlotPool(1), WINDOW, self.machine.release_slot
        )
        self.disk = StepwiseTier(self.store, self.machine, 30.0, self.clock)
        self.supply = PrefixSupply(
            self.pages,
            prefixes,
            self.machine,
            TransferConfig(),
            self.clock,
            (self.disk,),
            own=None,
            leader=nobody,
        )
        self.prefetch = SpiedPrefetch(
            self.leases,
            self.blocks,
            self.pages,
            self.machine,
            BlockKeeping(self.blocks, self.pages, self.machine),
            self.supply,
            self.disk,
            config,
            self.clock,
            lambda: None,
        )
        self.read_size = prefetch_module.BLOCKS_A_READ
        prefetch_module.BLOCKS_A_READ = 2  # type: ignore[misc]

    def clock(self) -> float:
        return self.now

    @property
    def is_bringing(self) -> bool:
        return self.prefetch._task is not None

    @rule(
        session=st.sampled_from(SESSIONS),
        num_new=st.integers(WINDOW, 3 * WINDOW),
        hint=st.none() | st.floats(1, 100),
        is_stored=st.sampled_from((True, True, True, False)),
    )
    def turn(self, session: str, num_new: int, hint: float | None, is_stored: bool) -> None:
        self.number += 1
        said = self.said.get(session, ())
        tokens = (*(said if len(said) < 7 * WINDOW else ()), *[self.number] * num_new)
        hashes = names(tokens)
        cached = self.blocks.match(hashes)
        adopted = self.pages.borrow(cached)
        try:
            own = self.pages.borrow_new(len(hashes) - len(cached))
        except ResourceExhausted:
            adopted.end()
            return
        self.leases.arrived(Arrival(b"", session, tokens, hashes, WINDOW), self.now)
        chain = tuple(BlockIdentity(name, ()) for name in hashes)
        for block, identity in zip(own.blocks, chain[len(cached) :], strict=True):
            record = BlockRecord(
                identity,
                Producer.DECODE,
                self.machine.layout_digest.hex(),
                Origin(TENANT, hashes[0], None),
            )
            payload = payload_of(identity)
            self.machine.import_blocks((block,), payload)
            self.blocks.acknowledge(self.blocks.offer(block, record), 0)
            if is_stored:
                self.store.put(StoredBlock(record, payload.numpy().tobytes()), self.now)
        self.flushed.difference_update(chain)
        tail = tokens[len(hashes) * WINDOW :]
        name = f"r{self.number}"
        self.leases.turn_over(
            EndedTurn(name, b"", session, chain, len(hashes), hashes[-1], tail, hint), self.now
        )
        adopted.end()
        own.end()
        self.said[session] = tokens
        self.ended.append(name)

    @rule(
        session=st.sampled_from(SESSIONS),
        num_new=st.integers(WINDOW, 5 * WINDOW),
        hint=st.floats(5, 100),
        num_left=st.integers(0, 4),
        fill=st.sampled_from((None, "open", "closed")),
        num_landings=st.integers(0, 3),
    )
    def lose_and_bring(
        self,
        session: str,
        num_new: int,
        hint: float,
        num_left: int,
        fill: str | None,
        num_landings: int,
    ) -> None:
        """The way in which a leased session comes to lack blocks that are on disk."""
        self.turn(session, num_new, hint, True)
        self.press(num_left)
        if fill is not None and self.blocks._pool.num_free:
            # What is left is of a session that came later.
            self.now += 1.0
            self.said.pop(FILLER, None)
            self.turn(FILLER, self.blocks._pool.num_free * WINDOW, None, False)
            if fill == "closed":
                self.leases.end_session(b"", FILLER)
        if self.prefetch.next_start is not None:
            self.advance()
        while self.is_bringing and num_landings:
            num_landings -= 1
            self.go_on(False)

    @precondition(lambda self: self.ended)
    @rule(which=st.integers(1, 3))
    def grant(self, which: int) -> None:
        self.leases.grant(self.ended[-min(which, len(self.ended))], ["tool"], self.now)

    def press(self, num_left: int) -> None:
        """Somebody needs nearly all that there is for a moment."""
        self.pages.borrow_new(max(0, self.pages.num_available_blocks - num_left)).end()

    @rule(num_blocks=st.integers(1, NUM_BLOCKS // 2))
    def other_work(self, num_blocks: int) -> None:
        """It begins, or the one before ends."""
        if self.running:
            self.running.pop().end()
        elif num_blocks <= self.pages.num_available_blocks:
            self.running.append(self.pages.borrow_new(num_blocks))

    @rule(seconds=st.floats(0, 20))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.leases.lapse(self.now)

    @rule(session=st.sampled_from(SESSIONS), has_moved=st.booleans())
    def close(self, session: str, has_moved: bool) -> None:
        if has_moved:
            self.leases.moved(b"", session)
        else:
            self.leases.end_session(b"", session)

    @precondition(lambda self: self.is_bringing)
    @rule()
    def flush(self) -> None:
        self.flushed |= {each for each in self.blocks._index}
        self.flushed |= {
            BlockIdentity(name, ()) for tokens in self.said.values() for name in names(tokens)
        }
        self.blocks.withdraw(lambda record: True)
        self.leases.end_turns(lambda tenant_salt: True)
        self.store.forget(None)

    @precondition(lambda self: self.prefetch.next_start is not None)
    @rule()
    def advance(self) -> None:
        """What is due next begins, up to where it has read."""
        self.wait(max(0.0, (self.prefetch.next_start or 0.0) - self.now))
        self.runner.run(self._advance())
        assert self.is_bringing or (self.prefetch.next_start or math.inf) > self.now

    async def _advance(self) -> None:
        self.disk.has_read, self.disk.may_tell = asyncio.Event(), asyncio.Event()
        self.prefetch.advance()
        self.num_brought = 0
        if self.is_bringing:
            await self.disk.has_read.wait()

    @precondition(lambda self: self.is_bringing)
    @rule(is_cancelled=st.sampled_from((False, False, True)))
    def go_on(self, is_cancelled: bool) -> None:
        """What was read lands, and more is read; or it is cancelled there."""
        turn = self.prefetch.turn
        assert turn is not None
        before = self.standing()
        was_awaited = self.leases.expected.awaits(turn)
        self.runner.run(self.prefetch.close() if is_cancelled else self._go_on())
        after = self.standing()
        landed = after.keys() - before.keys()
        assert landed <= set(turn.chain)
        assert not landed or (was_awaited and not is_cancelled)
        self.num_landed += len(landed)
        self.num_brought += len(landed)
        assert self.num_brought <= MAX_BLOCKS
        for identity in before.keys() - after.keys():
            evicted = before[identity]
            assert not evicted.is_pinned
            assert evicted.is_spare or evicted.used_at < turn.ended_at
            assert identity not in turn.chain

    async def _go_on(self) -> None:
        task = self.prefetch._task
        assert task is not None
        self.disk.has_read.clear()
        self.disk.may_tell.set()
        again = asyncio.create_task(self.disk.has_read.wait())
        await asyncio.wait({task, again}, return_when=asyncio.FIRST_COMPLETED)
        again.cancel()

    def standing(self) -> dict[BlockIdentity, Standing]:
        return {
            books.record.identity: Standing(
                books.used_at, books.num_pins > 0, books.is_demoted or books.is_copy
            )
            for books in self.blocks._books.values()
            if books.record is not None
        }

    @invariant()
    def agree(self) -> None:
        self.pages.check_integrity()
        self.leases.check_integrity()
        self.supply.check_integrity()
        expected = self.leases.expected
        num_open = sum(len(awaited.brought) for awaited in expected._awaited.values())
        assert sum(expected.outcomes.values()) + num_open <= self.num_landed
        for block, books in self.blocks._books.items():
            if books.record is not None:
                identity = books.record.identity
                assert identity not in self.flushed
                assert torch.equal(self.machine.export_blocks((block,)), payload_of(identity))

    def teardown(self) -> None:
        prefetch_module.BLOCKS_A_READ = self.read_size  # type: ignore[misc]
        self.runner.run(self.prefetch.close())
        if self.running:
            self.other_work(1)
        for session in (*SESSIONS, FILLER):
            self.leases.end_session(b"", session)
        self.agree()
        assert not self.supply._arriving
        assert self.leases.expected.next_at is None
        assert set(self.leases.expected.outcomes) == set(PrefetchOutcome)
        assert self.pages.num_available_blocks == NUM_BLOCKS
        self.runner.run(self.disk.close())
        self.runner.close()
        self.folder.cleanup()


PrefetchHistory.TestCase.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestPrefetchHistory = PrefetchHistory.TestCase
