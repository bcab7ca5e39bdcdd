"""Do leases keep what will be needed, never more than their share, and end exactly once?"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ripresa.workers.cache.block_cache import BlockCache
from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.cache.block_pool import BlockPool
from ripresa.workers.cache.block_record import (
    BlockRecord,
    BlockRemoved,
    CacheEvent,
    Producer,
)
from ripresa.workers.cache.cache_events import Origin
from ripresa.workers.cache.parked_states import ParkedState, ParkedStates
from ripresa.workers.cache.session_leases import Arrival, EndedTurn, LeaseOutcome, SessionLeases
from ripresa.workers.errors import ResourceExhausted
from ripresa.workers.replay import TailVariant, cold_recipe

W = 4
NUM_BLOCKS = 16
MAX_PINNED = 8
LONGEST_S = 100.0
SESSIONS = (None, "s", "t")


def hashes_of(tokens: tuple[int, ...]) -> tuple[bytes, ...]:
    """Chained names of the full blocks."""
    return tuple(repr(tokens[: (k + 1) * W]).encode() for k in range(len(tokens) // W))


@dataclass
class Worker:
    """A pool, its cache and its leases, driven as an engine does."""

    max_pinned: int = MAX_PINNED
    max_blocks: int = 4 * NUM_BLOCKS
    num_blocks: int = NUM_BLOCKS
    now: float = 0.0
    events: list[CacheEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.blocks = BlockCache(
            BlockPool(self.num_blocks), W, 1, self.events.append, self.max_pinned
        )
        self.parked: ParkedStates[torch.Tensor] = ParkedStates(1 << 20)
        self.leases = SessionLeases(self.blocks, self.parked, self.max_blocks, LONGEST_S)

    def turn(
        self,
        name: str,
        tokens: tuple[int, ...],
        session: str | None = None,
        expected_s: float | None = None,
    ) -> None:
        """A request from its arrival to its end."""
        hashes = hashes_of(tokens)
        cached = self.blocks.match(hashes)
        adopted = self.blocks.adopt(cached)
        try:
            own = self.blocks.allocate(-(-len(tokens) // W) - len(adopted))
        except ResourceExhausted:
            self.blocks.release(adopted)
            raise
        self.leases.arrived(Arrival(b"", session, tokens, hashes, W), self.now)
        chain = tuple(BlockIdentity(h, ()) for h in hashes)
        for number in range(len(adopted), len(hashes)):
            record = BlockRecord(chain[number], Producer.PREFILL, "w", Origin("t", b"a", None))
            offer = self.blocks.offer(own[number - len(adopted)], record)
            self.blocks.acknowledge(offer, 0)
        if session is not None:
            payload = torch.zeros(1, dtype=torch.uint8)
            recipe = cold_recipe(len(tokens), W, TailVariant.FLOORED, 0)
            state = ParkedState(tokens, recipe, payload, self.now + 10)
            self.parked.put(b"", session, state)
        tail = tokens[len(hashes) * W :]
        last = hashes[-1] if hashes else None
        turn = EndedTurn(name, b"", session, chain, len(hashes), last, tail, expected_s)
        self.leases.turn_over(turn, self.now)
        self.blocks.release((*adopted, *own))

    def held(self, tokens: tuple[int, ...]) -> int:
        return len(self.blocks.match(hashes_of(tokens)))

    def press(self, num_blocks: int) -> None:
        """Somebody needs so many blocks for a moment."""
        self.blocks.release(self.blocks.allocate(num_blocks))

    def evicted(self) -> list[bytes]:
        removed = [e for e in self.events if isinstance(e, BlockRemoved)]
        return [event.record.identity.hash for event in removed]

    def outcome(self, outcome: LeaseOutcome) -> int:
        return self.leases.outcomes[outcome]

    def check(self) -> None:
        self.blocks.check_integrity()
        self.leases.check_integrity()


def text(seed: int, length: int) -> tuple[int, ...]:
    return tuple(100 * seed + k for k in range(length))


def test_a_leased_turn_stays_under_pressure_and_another_one_goes() -> None:
    worker = Worker()
    leased, other = text(1, 17), text(2, 17)
    worker.turn("a", leased, "s")
    worker.turn("b", other, "t")
    assert worker.leases.grant("a", ["tool"], 0.0)
    worker.press(12)
    assert (worker.held(leased), worker.held(other)) == (4, 0)
    worker.turn("c", leased + text(3, 8), "s")
    assert worker.outcome(LeaseOutcome.REDEEMED) == 1
    assert worker.blocks.num_pinned == 0
    worker.check()


def test_an_overdue_lease_is_demoted_and_not_dropped() -> None:
    worker = Worker()
    worker.turn("a", text(1, 17), "s")
    worker.leases.grant("a", ["tool"], 0.0)
    worker.now = 29.0
    worker.turn("b", text(2, 17), "t")
    assert worker.leases.next_lapse == 30.0
    worker.leases.lapse(29.9)
    assert len(worker.leases) == 1
    worker.leases.lapse(30.0)
    assert worker.outcome(LeaseOutcome.LAPSED) == 1
    assert worker.held(text(1, 17)) == 4
    worker.press(10)
    assert worker.evicted() == [*reversed(hashes_of(text(1, 17)))][:2]
    worker.check()


def test_a_late_answer_teaches_how_long_to_wait() -> None:
    worker = Worker(num_blocks=200, max_pinned=200, max_blocks=10_000)
    tokens = text(1, 9)
    for number in range(12):
        worker.turn(str(number), tokens, "s")
        worker.leases.grant(str(number), ["slow"], worker.now)
        worker.now += 60.0
        worker.leases.lapse(worker.now)
        tokens += text(2 + number, 4)
    worker.turn("last", tokens, "s")
    worker.leases.grant("last", ["slow"], worker.now)
    assert worker.leases.next_lapse == worker.now + 60.0
    worker.check()


def test_a_client_s_hint_needs_no_tool_and_is_bounded() -> None:
    worker = Worker()
    worker.turn("a", text(1, 9), "s", expected_s=7.0)
    assert worker.leases.next_lapse == 7.0
    assert worker.leases.grant("a", ["tool"], 0.0)
    assert worker.leases.next_lapse == 7.0
    worker.turn("b", text(2, 9), "t", expected_s=1e9)
    worker.leases.lapse(7.0)
    assert worker.leases.next_lapse == LONGEST_S
    worker.check()


def test_a_compacted_or_closed_session_is_released_at_once_and_goes_first() -> None:
    for end in ("compacted", "closed"):
        worker = Worker(num_blocks=20)
        worker.turn("a", text(1, 17), "s")
        worker.turn("b", text(2, 17), "t")
        worker.leases.grant("a", ["tool"], 0.0)
        if end == "compacted":
            worker.turn("c", text(1, 8) + text(9, 5), "s")
        else:
            worker.leases.end_session(b"", "s")
        assert worker.outcome(LeaseOutcome.RELEASED) == 1
        worker.press(20 - worker.blocks.num_published + 2)
        gone = hashes_of(text(1, 17))[::-1][:2]
        assert worker.evicted() == [*gone]
        assert worker.held(text(2, 17)) == 4
        worker.leases.end_session(b"", "s")
        worker.check()


def test_without_a_session_the_prefix_redeems() -> None:
    worker = Worker(num_blocks=40)
    worker.turn("a", text(1, 10))
    worker.turn("b", text(1, 8) + text(2, 2))
    worker.leases.grant("a", ["tool"], 0.0)
    worker.leases.grant("b", ["tool"], 0.0)
    worker.turn("c", text(1, 8) + text(2, 2) + text(3, 5))
    assert worker.outcome(LeaseOutcome.REDEEMED) == 1
    assert not worker.leases.grant("b", ["tool"], 0.0)
    assert len(worker.leases) == 1
    worker.turn("d", text(1, 10) + text(4, 9))
    assert worker.outcome(LeaseOutcome.REDEEMED) == 2
    worker.check()


def test_a_session_that_moved_away_pins_nothing() -> None:
    worker = Worker()
    worker.turn("a", text(1, 9), "s")
    worker.leases.grant("a", ["tool"], 0.0)
    worker.leases.moved(b"", "s")
    assert worker.blocks.num_pinned == 0
    assert worker.outcome(LeaseOutcome.REDEEMED) == 1
    worker.leases.moved(b"", "s")
    worker.check()


def test_a_grant_that_comes_too_late_does_nothing() -> None:
    worker = Worker()
    worker.turn("a", text(1, 9), "s")
    worker.turn("b", text(1, 13), "s")
    assert not worker.leases.grant("a", ["tool"], 0.0)
    assert not worker.leases.grant("unknown", ["tool"], 0.0)
    assert worker.leases.grant("b", ["tool"], 31.0)
    assert worker.leases.next_lapse is None
    worker.check()


def test_a_leased_state_outlives_its_own_time_and_newer_ones() -> None:
    worker = Worker()
    tokens = text(1, 9)
    worker.turn("a", tokens, "s")
    worker.leases.grant("a", ["tool"], 0.0)
    assert worker.parked.find(b"", "s", (*tokens, 1), 20.0) is not None
    worker.leases.lapse(30.0)
    assert worker.parked.find(b"", "s", (*tokens, 1), 31.0) is None


class LeaseHistory(RuleBasedStateMachine):
    """Turns of three clients over shared heads, under a pool that is always short."""

    def __init__(self) -> None:
        super().__init__()
        self.worker = Worker(max_blocks=20)
        self.number = 0
        self.ended: list[str] = []
        self.said: dict[str | None, tuple[int, ...]] = dict.fromkeys(SESSIONS, text(0, 5))
        self.running: list[tuple[int, ...]] = []

    @rule(
        session=st.sampled_from(SESSIONS),
        kept=st.integers(0, 40),
        new=st.integers(1, 9),
        hint=st.none() | st.floats(0, 200),
    )
    def turn(self, session: str | None, kept: int, new: int, hint: float | None) -> None:
        self.number += 1
        tokens = self.said[session][:kept] + text(self.number, new)
        if len(tokens) > 40:
            tokens = text(0, 5)
        name = f"r{self.number}"
        try:
            self.worker.turn(name, tokens, session, hint)
        except ResourceExhausted:
            assert self.running
            return
        self.said[session] = tokens
        self.ended.append(name)

    @precondition(lambda self: self.ended)
    @rule(which=st.integers(1, 3), tools=st.lists(st.sampled_from("xyz"), min_size=1))
    def grant(self, which: int, tools: list[str]) -> None:
        self.worker.leases.grant(self.ended[-min(which, len(self.ended))], tools, self.worker.now)

    @rule(num_blocks=st.integers(1, NUM_BLOCKS))
    def begin_other_work(self, num_blocks: int) -> None:
        """Whatever is leased, a request may have every block that none uses."""
        if num_blocks <= NUM_BLOCKS - sum(map(len, self.running)):
            self.running.append(self.worker.blocks.allocate(num_blocks))

    @precondition(lambda self: self.running)
    @rule()
    def end_other_work(self) -> None:
        self.worker.blocks.release(self.running.pop())

    @rule(seconds=st.floats(0, 60))
    def wait(self, seconds: float) -> None:
        self.worker.now += seconds
        self.worker.leases.lapse(self.worker.now)
        due = self.worker.leases.next_lapse
        assert due is None or due > self.worker.now

    @rule(session=st.sampled_from("st"))
    def close(self, session: str) -> None:
        self.worker.leases.end_session(b"", session)

    @rule(session=st.sampled_from("st"))
    def move(self, session: str) -> None:
        self.worker.leases.moved(b"", session)

    @rule(path=st.integers(0, 30))
    def withdraw(self, path: int) -> None:
        self.worker.blocks.withdraw(lambda record: len(record.identity.hash) == path)

    @invariant()
    def agree(self) -> None:
        self.worker.check()

    def teardown(self) -> None:
        while self.running:
            self.end_other_work()
        for session in "st":
            self.worker.leases.end_session(b"", session)
        self.worker.leases.lapse(self.worker.now + LONGEST_S)
        assert self.worker.blocks.num_pinned == len(self.worker.leases) == 0
        assert self.worker.blocks.num_available == NUM_BLOCKS
        self.worker.check()


LeaseHistory.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestLeaseHistory = LeaseHistory.TestCase
