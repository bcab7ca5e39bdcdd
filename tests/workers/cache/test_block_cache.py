"""Does the block cache agree with a naive model, through any history of requests and sessions?"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
)

from ripresa.workers.cache.block_books import Lease, Offer
from ripresa.workers.cache.block_cache import BlockCache
from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.cache.block_pool import BlockPool
from ripresa.workers.cache.block_record import (
    BlockPublished,
    BlockRecord,
    BlockRemoved,
    CacheEvent,
    Producer,
    PublishOutcome,
)
from ripresa.workers.cache.cache_events import Origin
from ripresa.workers.errors import ErrorCode, ResourceExhausted, RipresaError

WINDOW = 8
NUM_BLOCKS = 12
NUM_RANKS = 2
LONGEST = 5
MAX_PINNED = 7
PATHS = ["a", "aa", "aab", "aabb", "aabab", "ab", "abba", "abbab", "b", "ba", "bab"]


def identity(path: str, restarts: tuple[int, ...] = ()) -> BlockIdentity:
    """The block at the end of a path of tokens: "ab" is the second block after "a"."""
    return BlockIdentity(path.encode(), restarts)


def record(name: BlockIdentity, producer: Producer = Producer.PREFILL) -> BlockRecord:
    return BlockRecord(name, producer, weights="w1", origin=Origin("t", b"a", None))


def publish(cache: BlockCache, block: int, name: BlockIdentity) -> PublishOutcome:
    offer = cache.offer(block, record(name))
    return [cache.acknowledge(offer, rank) for rank in range(NUM_RANKS)][-1]


@dataclass(eq=False)
class Request:
    """One running request: its blocks in order, and the name of each, published or not."""

    names: list[BlockIdentity]
    blocks: list[int]
    offers: dict[int, tuple[Offer, set[int]]] = field(default_factory=dict)


@dataclass(eq=False)
class Session:
    lease: Lease
    names: list[BlockIdentity]
    began: int
    until: int | None = None
    is_over: bool = False


class CacheHistory(RuleBasedStateMachine):
    """The model keeps plain lists; `order` is every published block, next to be evicted first.

    Blocks that a lease pins stand behind all others, whenever they were used, and have their age
    again when they are given up; `adopted` and `Session.began` are numbers of calls.
    """

    requests = Bundle("requests")
    sessions = Bundle("sessions")

    def __init__(self) -> None:
        super().__init__()
        self.events: list[CacheEvent] = []
        self.cache = BlockCache(
            BlockPool(NUM_BLOCKS), WINDOW, NUM_RANKS, self.events.append, MAX_PINNED
        )
        self.published: dict[BlockIdentity, int] = {}
        self.order: list[BlockIdentity] = []
        self.demoted: set[BlockIdentity] = set()
        self.running: list[Request] = []
        self.open: list[Session] = []
        self.offered: set[int] = set()
        self.num_calls = 0
        self.adopted: dict[BlockIdentity, int] = {}

    def users(self, block: int) -> int:
        return sum(request.blocks.count(block) for request in self.running)

    def sessions_of(self, name: BlockIdentity) -> list[Session]:
        return [session for session in self.open if name in session.names]

    def pinned(self) -> set[BlockIdentity]:
        return {name for s in self.open if s.until is not None for name in s.names}

    def evictable(self) -> list[BlockIdentity]:
        """Unused blocks that no lease pins, next to be evicted first."""
        pinned = self.pinned()
        free = [n for n in self.order if not self.users(self.published[n]) and n not in pinned]
        return sorted(free, key=lambda name: name not in self.demoted)

    def unused(self) -> list[BlockIdentity]:
        return [name for name in self.order if not self.users(self.published[name])]

    def yield_pins(self) -> None:
        """The pinned session that ends first loses its pins; ties go by who was pinned first."""
        pinned = [s for s in self.open if s.until is not None]
        first = min(pinned, key=lambda s: s.until or 0)
        self.drop_pins(first)

    def drop_pins(self, session: Session) -> None:
        session.until = None

    def evict(self, num_blocks: int) -> list[BlockIdentity]:
        """The next so many blocks to go, forgotten by the model."""
        gone = []
        for _ in range(num_blocks):
            while not self.evictable():
                self.yield_pins()
            gone.append(self.evictable()[0])
            self.forget(gone[-1])
        return gone

    def touch(self, name: BlockIdentity) -> None:
        self.order.remove(name)
        self.order.append(name)

    def forget(self, name: BlockIdentity) -> None:
        block = self.published.pop(name)
        if not self.users(block):
            self.offered.discard(block)
        self.order.remove(name)
        self.demoted.discard(name)
        self.adopted.pop(name, None)
        for session in self.open:
            if name in session.names:
                session.names.remove(name)

    def removed(self, is_evicted: bool) -> list[BlockIdentity]:
        return [
            event.record.identity
            for event in self.events
            if isinstance(event, BlockRemoved) and event.is_evicted is is_evicted
        ]

    @rule(
        target=requests, path=st.sampled_from(PATHS), cap=st.integers(0, LONGEST), cut=st.booleans()
    )
    def start(self, path: str, cap: int, cut: bool) -> object:
        request = self.begin(path, cap, cut)
        return multiple() if request is None else request

    @rule(
        target=sessions,
        path=st.sampled_from(PATHS),
        cap=st.integers(0, LONGEST),
        cut=st.booleans(),
        is_pinned=st.booleans(),
    )
    def turn(self, path: str, cap: int, cut: bool, is_pinned: bool) -> object:
        """A request from its start to its end, with a lease of what it leaves, pinned or not."""
        request = self.begin(path, cap, cut)
        if request is None:
            return multiple()
        self.acknowledge_every(request)
        session = self.take_lease(request)
        self.end(request)
        if is_pinned:
            self.pin(session, self.next_end())
        return session

    def begin(self, path: str, cap: int, cut: bool) -> Request | None:
        """Adopt at most `cap` blocks and allocate the rest, behind a new restart if `cut`."""
        hashes = [path[: k + 1].encode() for k in range(len(path))]
        chain = list(self.cache.match(hashes, max_blocks=cap))
        assert chain == self.expected_chain(path[:cap])
        lineage = chain[-1].restarts if chain else ()
        if cut and chain:
            lineage = (*lineage, len(chain) * WINDOW)
        names = chain + [identity(path[: k + 1], lineage) for k in range(len(chain), len(path))]
        adopted = list(self.cache.adopt(chain))
        self.num_calls += 1
        self.adopted.update(dict.fromkeys(chain, self.num_calls))
        request = Request(names[: len(chain)], adopted)
        self.running.append(request)
        self.demoted -= set(chain)
        needed = len(path) - len(chain)
        candidates = self.unused()
        free = NUM_BLOCKS - len(set(self.published.values()) | self.private_blocks())
        self.events.clear()
        if needed > free + len(candidates):
            with pytest.raises(ResourceExhausted):
                self.cache.allocate(needed)
            assert not self.events
            self.end(request)
            return None
        allocated = self.cache.allocate(needed)
        assert self.removed(is_evicted=True) == self.evict(max(0, needed - free))
        request.blocks += allocated
        request.names = names
        return request

    def private_blocks(self) -> set[int]:
        return {block for request in self.running for block in request.blocks}

    def expected_chain(self, path: str) -> list[BlockIdentity]:
        """Every chain of one lineage, by trying all; the longest, then the least restarted."""
        chains: list[list[BlockIdentity]] = [[]]
        for chain in chains:
            number = len(chain)
            if number == len(path):
                continue
            before = chain[-1].restarts if chain else ()
            for restarts in {before, (*before, number * WINDOW)}:
                name = identity(path[: number + 1], restarts)
                if name in self.published:
                    chains.append([*chain, name])
        longest = max(len(chain) for chain in chains)
        best = [chain for chain in chains if len(chain) == longest]
        return min(best, key=lambda c: (len(c[-1].restarts), c[-1].restarts) if c else (0, ()))

    @rule(request=requests, number=st.integers(0, LONGEST - 1), rank=st.integers(0, NUM_RANKS - 1))
    def acknowledge(self, request: Request, number: int, rank: int) -> None:
        self.acknowledge_one(request, number, rank)

    @rule(request=requests)
    def acknowledge_all(self, request: Request) -> None:
        self.acknowledge_every(request)

    def acknowledge_every(self, request: Request) -> None:
        for number in range(len(request.blocks)):
            for rank in range(NUM_RANKS):
                self.acknowledge_one(request, number, rank)

    def acknowledge_one(self, request: Request, number: int, rank: int) -> None:
        if number >= len(request.blocks):
            return
        if request in self.running:
            block, name = request.blocks[number], request.names[number]
            if number not in request.offers:
                if block in self.published.values():
                    with pytest.raises(RipresaError, match="cannot be offered"):
                        self.cache.offer(block, record(name))
                    return
                try:
                    offer = self.cache.offer(block, record(name))
                except RipresaError:
                    return  # It was published once, and withdrawn.
                request.offers[number] = (offer, set())
        elif number not in request.offers:
            return
        offer, ranks = request.offers[number]
        self.events.clear()
        outcome = self.cache.acknowledge(offer, rank)
        was_complete = len(ranks) == NUM_RANKS
        ranks.add(rank)
        if len(ranks) < NUM_RANKS or was_complete or request not in self.running:
            assert not self.events
            return
        name = request.names[number]
        self.offered.add(request.blocks[number])
        if name in self.published:
            assert outcome is PublishOutcome.DUPLICATE
            assert not self.events
        else:
            assert outcome is PublishOutcome.PUBLISHED
            assert self.events == [BlockPublished(record(name))]
            self.published[name] = request.blocks[number]
            self.order.append(name)

    @rule(request=consumes(requests))
    def finish(self, request: Request) -> None:
        self.end(request)

    def end(self, request: Request) -> None:
        self.cache.release(request.blocks)
        self.running.remove(request)
        for number in reversed(range(len(request.blocks))):
            name, block = request.names[number], request.blocks[number]
            if self.published.get(name) == block:
                self.touch(name)
            elif not self.users(block):
                if block in self.offered and name in self.published:
                    self.num_calls += 1
                    self.adopted[name] = self.num_calls
                    self.demoted.discard(name)
                    self.touch(name)
                self.offered.discard(block)

    @rule(target=sessions, request=requests)
    def lease(self, request: Request) -> Session:
        return self.take_lease(request)

    def take_lease(self, request: Request) -> Session:
        names = []
        for name in request.names:
            if name not in self.published:
                break
            names.append(name)
        lease = self.cache.lease(names)
        self.num_calls += 1
        session = Session(lease, names, self.num_calls)
        self.open.append(session)
        for name in reversed(names):
            self.demoted.discard(name)
            self.touch(name)
        return session

    def next_end(self) -> int:
        """Later than all so far, so that no two sessions end at once."""
        return max((s.until or 0 for s in self.open), default=0) + 1

    @rule(session=sessions, is_soon=st.booleans())
    def pin_one(self, session: Session, is_soon: bool) -> None:
        ends = [s.until for s in self.open if s.until is not None]
        self.pin(session, min(ends, default=0) - 1 if is_soon else self.next_end())

    def pin(self, session: Session, until: int) -> None:
        self.cache.pin(session.lease, float(until))
        if session.is_over:
            return
        session.until = until
        while len(self.pinned()) > MAX_PINNED:
            self.yield_pins()

    @rule(session=sessions)
    def unpin(self, session: Session) -> None:
        self.cache.unpin(session.lease)
        if not session.is_over and session.until is not None:
            self.drop_pins(session)

    @rule(session=sessions, how=st.sampled_from(("lapse", "redeem", "forget")))
    def end_session(self, session: Session, how: str) -> None:
        getattr(self.cache, how)(session.lease)
        if session.is_over:
            return
        if session.until is not None:
            self.drop_pins(session)
        session.is_over = True
        self.open.remove(session)
        for name in reversed(session.names):
            is_idle = not self.sessions_of(name) and not self.users(self.published[name])
            if how == "redeem":
                self.demoted.discard(name)
                self.touch(name)
            elif how == "lapse" and is_idle and self.adopted.get(name, 0) <= session.began:
                self.demoted.add(name)
                self.touch(name)

    @rule(path=st.sampled_from(PATHS), token=st.sampled_from("cccccab"))
    def withdraw(self, path: str, token: str) -> None:
        """Mostly one block in all its lineages, seldom those that begin with a token."""
        gone = [
            n for n in self.published if n.hash == path.encode() or n.hash[:1] == token.encode()
        ]
        self.events.clear()
        assert self.cache.withdraw(lambda r: r.identity in gone) == len(gone)
        assert sorted(self.removed(is_evicted=False)) == sorted(gone)
        for name in gone:
            self.forget(name)

    @invariant()
    def agree(self) -> None:
        self.cache.check_integrity()
        assert self.cache.num_published == len(self.published)
        for name in self.published:
            assert name in self.cache
        taken = len(set(self.published.values()) | self.private_blocks())
        assert self.cache.num_available == NUM_BLOCKS - taken + len(self.unused())
        assert self.cache.num_pinned == len(self.pinned()) <= MAX_PINNED

    def teardown(self) -> None:
        for request in list(self.running):
            self.end(request)
        for session in list(self.open):
            self.cache.lapse(session.lease)
        self.cache.check_integrity()
        assert self.cache.num_available == NUM_BLOCKS


CacheHistory.TestCase.settings = settings(max_examples=100, stateful_step_count=60)
TestCacheHistory = CacheHistory.TestCase


def cache_of(num_blocks: int, events: list[CacheEvent] | None = None) -> BlockCache:
    hear = None if events is None else events.append
    return BlockCache(BlockPool(num_blocks), WINDOW, NUM_RANKS, hear)


def test_i8_a_block_is_found_when_every_rank_has_acknowledged_it_and_not_before() -> None:
    events: list[CacheEvent] = []
    cache = cache_of(2, events)
    (block,) = cache.allocate(1)
    assert cache.match([b"a"]) == ()
    offer = cache.offer(block, record(identity("a")))
    assert cache.match([b"a"]) == ()
    assert cache.acknowledge(offer, 1) is PublishOutcome.PENDING
    assert cache.acknowledge(offer, 1) is PublishOutcome.PENDING
    assert cache.match([b"a"]) == ()
    assert not events
    assert cache.acknowledge(offer, 0) is PublishOutcome.PUBLISHED
    assert cache.match([b"a"]) == (identity("a"),)
    assert cache.acknowledge(offer, 0) is PublishOutcome.PUBLISHED
    assert events == [BlockPublished(record(identity("a")))]
    with pytest.raises(RipresaError, match="rank 2 is none of the 2 ranks"):
        cache.acknowledge(offer, 2)


def test_i14_the_first_writer_wins_and_the_second_keeps_its_own_block() -> None:
    cache = cache_of(2)
    first, second = cache.allocate(2)
    assert publish(cache, second, identity("a")) is PublishOutcome.PUBLISHED
    assert publish(cache, first, identity("a")) is PublishOutcome.DUPLICATE
    assert cache.adopt([identity("a")]) == (second,)
    cache.release((first,))
    assert cache.num_available == 1
    assert cache.match([b"a"]) == (identity("a"),)


def test_i19_a_cancelled_request_publishes_nothing_afterwards_and_frees_every_page_once() -> None:
    cache = cache_of(2)
    (block,) = cache.allocate(1)
    offer = cache.offer(block, record(identity("a")))
    cache.acknowledge(offer, 0)
    cache.release((block,))
    assert cache.num_available == 2
    (again,) = cache.allocate(1)
    assert again == block
    assert cache.acknowledge(offer, 1) is PublishOutcome.VOID
    assert cache.match([b"a"]) == ()
    with pytest.raises(RipresaError) as caught:
        cache.release((block, block))
    assert caught.value.code is ErrorCode.INTERNAL
    cache.release((block,))
    cache.check_integrity()


def test_i18_blocks_of_a_plan_are_kept_from_adoption_to_release() -> None:
    events: list[CacheEvent] = []
    cache = cache_of(3, events)
    blocks = cache.allocate(3)
    for block, path in zip(blocks, ("a", "ab", "abc"), strict=True):
        publish(cache, block, identity(path))
    cache.release(blocks)
    cache.adopt([identity("a"), identity("ab")])
    with pytest.raises(ResourceExhausted, match="0 of 3 are free and 1 can be evicted"):
        cache.allocate(2)
    cache.allocate(1)
    assert events[-1] == BlockRemoved(record(identity("abc")), is_evicted=True)
    with pytest.raises(RipresaError, match="block 2 of the chain is not cached; plan again"):
        cache.adopt([identity("a"), identity("ab"), identity("abc")])
    cache.check_integrity()


def test_the_end_of_a_chain_goes_first_and_old_chains_before_recent_ones() -> None:
    events: list[CacheEvent] = []
    cache = cache_of(4, events)
    for path in ("x", "y"):
        blocks = cache.allocate(2)
        publish(cache, blocks[0], identity(path))
        publish(cache, blocks[1], identity(path + "z"))
        cache.release(blocks)
    cache.release(cache.adopt([identity("x")]))
    events.clear()
    cache.allocate(4)
    assert [event.record.identity.hash for event in events] == [b"xz", b"yz", b"y", b"x"]


def test_blocks_of_lapsed_sessions_go_before_recency_speaks() -> None:
    events: list[CacheEvent] = []
    cache = cache_of(4, events)
    blocks = cache.allocate(4)
    for block, path in zip(blocks, ("old", "shared", "mine", "new"), strict=True):
        publish(cache, block, identity(path))
        cache.release((block,))
    leased = cache.lease([identity("shared"), identity("mine")])
    other = cache.lease([identity("shared")])
    cache.pin(leased, until=1.0)
    cache.lapse(leased)
    events.clear()
    cache.allocate(2)
    assert [event.record.identity.hash for event in events] == [b"mine", b"old"]
    cache.redeem(other)
    cache.lapse(other)
    cache.check_integrity()
    assert cache.num_available == 2


def test_what_somebody_took_up_since_is_not_demoted_with_a_lease() -> None:
    events: list[CacheEvent] = []
    cache = cache_of(2, events)
    for path in ("head", "tail"):
        (block,) = cache.allocate(1)
        publish(cache, block, identity(path))
        cache.release((block,))
    lease = cache.lease([identity("head"), identity("tail")])
    cache.pin(lease, until=1.0)
    cache.release(cache.adopt([identity("head")]))
    cache.lapse(lease)
    events.clear()
    cache.allocate(2)
    assert [event.record.identity.hash for event in events] == [b"tail", b"head"]


def test_pinned_blocks_go_last_and_those_first_whose_lease_ends_first() -> None:
    events: list[CacheEvent] = []
    cache = cache_of(4, events)
    for path in ("late", "soon", "old", "new"):
        (block,) = cache.allocate(1)
        publish(cache, block, identity(path))
        cache.release((block,))
    late, soon = cache.lease([identity("late")]), cache.lease([identity("soon")])
    cache.pin(late, until=2.0)
    cache.pin(soon, until=1.0)
    assert (cache.num_pinned, cache.num_available) == (2, 4)
    events.clear()
    cache.allocate(3)
    assert [event.record.identity.hash for event in events] == [b"old", b"new", b"soon"]
    assert soon.pinned_until is None
    assert late.pinned_until == 2.0
    assert cache.num_yielded == 1
    cache.check_integrity()


def test_leases_pin_no_more_than_their_share() -> None:
    cache = BlockCache(BlockPool(4), WINDOW, 1, max_pinned=2)
    leases = []
    for number, path in enumerate("abc"):
        (block,) = cache.allocate(1)
        cache.acknowledge(cache.offer(block, record(identity(path))), 0)
        cache.release((block,))
        leases.append(cache.lease([identity(path)]))
        cache.pin(leases[-1], until=float(-number))
    assert [lease.pinned_until for lease in leases] == [0.0, -1.0, None]
    cache.pin(leases[2], until=5.0)
    assert [lease.pinned_until for lease in leases] == [0.0, None, 5.0]
    assert cache.num_pinned == 2
    cache.check_integrity()


def test_withdrawn_blocks_are_found_no_more_and_freed_with_their_last_user() -> None:
    events: list[CacheEvent] = []
    cache = cache_of(3, events)
    blocks = cache.allocate(2)
    for block, path in zip(blocks, ("a", "b"), strict=True):
        publish(cache, block, identity(path))
    cache.release(blocks[1:])
    lease = cache.lease([identity("a"), identity("b")])
    cache.pin(lease, until=1.0)
    assert cache.withdraw(lambda r: r.weights == "w2") == 0
    assert cache.withdraw(lambda r: r.weights == "w1") == 2
    assert cache.num_available == 2
    assert cache.num_published == 0
    cache.release(blocks[:1])
    assert cache.num_available == 3
    cache.lapse(lease)
    cache.check_integrity()


def test_a_private_block_is_offered_once() -> None:
    cache = cache_of(1)
    (block,) = cache.allocate(1)
    cache.offer(block, record(identity("a")))
    with pytest.raises(RipresaError, match="cannot be offered"):
        cache.offer(block, record(identity("b")))
    with pytest.raises(RipresaError, match="cannot be offered"):
        cache.offer(7, record(identity("b")))


def test_check_integrity_sees_a_page_taken_behind_the_cache() -> None:
    pool = BlockPool(2)
    cache = BlockCache(pool, WINDOW)
    pool.allocate(1)
    with pytest.raises(RipresaError, match="1 KV blocks are taken but 0 are on the cache's books"):
        cache.check_integrity()


def test_who_computed_a_block_beside_its_first_writer_has_used_it() -> None:
    events: list[CacheEvent] = []
    cache = cache_of(3, events)
    first, second, third = cache.allocate(3)
    publish(cache, first, identity("a"))
    publish(cache, second, identity("b"))
    publish(cache, third, identity("a"))
    cache.release((first,))
    cache.release((second,))
    cache.lapse(cache.lease([identity("a")]))
    cache.release((third,))
    events.clear()
    cache.allocate(2)
    assert [event.record.identity.hash for event in events] == [b"b"]


def test_what_another_worker_holds_too_makes_room_first() -> None:
    events: list[CacheEvent] = []
    cache = cache_of(4, events)
    for path in ("a", "b", "c", "d"):
        (block,) = cache.allocate(1)
        publish(cache, block, identity(path))
        cache.release([block])
    for path in ("c", "d"):
        cache.mark_copy(identity(path), is_copy=True)
    cache.mark_copy(identity("d"), is_copy=False)
    cache.mark_copy(identity("unknown"), is_copy=True)
    cache.check_integrity()
    events.clear()
    cache.allocate(2)
    assert [event.record.identity.hash for event in events] == [b"c", b"a"]
    # A copy that is used is kept here from now on, and whoever listens hears of it.
    cache.mark_copy(identity("d"), is_copy=True)
    events.clear()
    cache.release(cache.adopt([identity("d")], is_use=False), is_use=False)
    assert not events
    cache.release(cache.adopt([identity("d")]))
    assert events == [BlockPublished(record(identity("d")))]
    events.clear()
    cache.allocate(1)
    assert [event.record.identity.hash for event in events] == [b"b"]


def test_what_is_lost_next_is_named_once_until_it_is_used() -> None:
    now = [0.0]
    cache = BlockCache(BlockPool(5), WINDOW, NUM_RANKS, clock=lambda: now[0])
    assert cache.room_age_s == float("inf")
    blocks = cache.allocate(5)
    assert cache.room_age_s == 0.0
    for block, path in zip(blocks, "abcde", strict=True):
        publish(cache, block, identity(path))
        now[0] += 1
        cache.release([block])
    now[0] = 10.0
    cache.mark_copy(identity("a"), is_copy=True)
    assert cache.room_age_s == float("inf")
    cache.mark_copy(identity("b"), is_copy=True)
    cache.mark_copy(identity("b"), is_copy=False)

    def named(num_blocks: int) -> list[tuple[bytes, float]]:
        return [(each.record.identity.hash, each.age_s) for each in cache.at_risk(num_blocks)]

    # The copy takes the first of these places; "b" is as old as before.
    assert named(3) == [(b"b", 8.0), (b"c", 7.0)]
    assert cache.room_for([9.0, 8.5, 7.5, 1.0]) == 2
    cache.moved(identity("b"))
    assert named(3) == [(b"c", 7.0)]
    cache.release(cache.adopt([identity("b")], is_use=False), is_use=False)
    assert named(3) == [(b"c", 7.0)]
    cache.release(cache.adopt([identity("b")]))
    now[0] = 11.0
    assert named(5) == [(b"c", 8.0), (b"d", 7.0), (b"e", 6.0), (b"b", 1.0)]


def test_a_block_from_another_worker_is_as_old_as_it_was_there() -> None:
    now = [100.0]
    cache = BlockCache(BlockPool(3), WINDOW, NUM_RANKS, clock=lambda: now[0])
    for path, age_s in (("a", None), ("b", 50.0), ("c", 20.0)):
        (block,) = cache.allocate(1)
        offer = cache.offer(block, record(identity(path)), age_s)
        for rank in range(NUM_RANKS):
            cache.acknowledge(offer, rank)
        cache.release([block], is_use=age_s is None)
    assert cache.room_age_s == 50.0
    # It has moved already.
    assert [each.record.identity for each in cache.at_risk(3)] == [identity("a")]
    cache.allocate(1)
    assert identity("b") not in cache
    assert cache.room_age_s == 20.0
