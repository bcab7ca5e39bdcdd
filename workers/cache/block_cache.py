"""Which published KV blocks does a worker hold, who uses them, and which one makes room?

    allocate ──▶ private ── offer, every rank acknowledges ──▶ published ◀── adopt
                    │  (identity taken: stays private)             │
                    └── release ──▶ free                           └── last release ──▶ unused
                                      ▲                                                   │
                                      └──────────────────── evicted ──────────────────────┘

A block that a running request uses is never evicted; one that a lease pins only when nothing else
is left, and then those of the lease that ends first. Of blocks that several workers hold one keeps
it and the others have copies: those go first. Pure: blocks are ids, and what happens is told to a
callback.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from ripresa.workers.cache.block_books import BlockBooks, Lease, Offer
from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.cache.block_pool import BlockPool
from ripresa.workers.cache.block_record import (
    BlockPublished,
    BlockRecord,
    BlockRemoved,
    CacheEvent,
    PublishOutcome,
    UnusedBlock,
)
from ripresa.workers.cache.eviction_order import EvictionOrder
from ripresa.workers.cache.lineage_index import LineageIndex
from ripresa.workers.errors import ErrorCode, ResourceExhausted, RipresaError
from ripresa.workers.replay import ReplayMode


class BlockCache:
    """The blocks of one worker's pool, published or private.

    Args:
        pool: all allocation and freeing of its blocks goes through this cache.
        window: W, tokens in a block.
        num_ranks: ranks that must acknowledge a block before it is published.
        on_event: hears of every published and removed block, in order.
        max_pinned: most blocks that leases may pin; None for all of them.
        clock: seconds, never falling.

    Attributes:
        num_yielded: leases that gave up their pins before they ended, for want of room.
    """

    def __init__(
        self,
        pool: BlockPool,
        window: int,
        num_ranks: int = 1,
        on_event: Callable[[CacheEvent], None] | None = None,
        max_pinned: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if num_ranks < 1:
            raise ValueError(f"a worker has at least one rank, got {num_ranks}")
        self._pool = pool
        self._num_ranks = num_ranks
        self._on_event = on_event
        self._clock = clock
        self._books: dict[int, BlockBooks] = {}
        self._index: LineageIndex[BlockBooks] = LineageIndex(window)
        self._unused = EvictionOrder()
        self._max_pinned = pool.num_blocks if max_pinned is None else max_pinned
        self._pinned: set[Lease] = set()
        self._num_pinned = 0
        self._num_calls = 0
        self.num_yielded = 0

    @property
    def num_pinned(self) -> int:
        """Blocks that leases pin."""
        return self._num_pinned

    @property
    def num_pinning_leases(self) -> int:
        """Leases that pin their blocks."""
        return len(self._pinned)

    @property
    def num_published(self) -> int:
        return len(self._index)

    @property
    def num_available(self) -> int:
        """Blocks that an `allocate` could have now."""
        return self._pool.num_free + len(self._unused)

    @property
    def room_age_s(self) -> float:
        """For how long the block that an `allocate` takes next has not been used; infinity while
        free pages and copies are left, 0 while everything is in use."""
        if self._pool.num_free or self._unused.num_demoted:
            return float("inf")
        oldest = self._unused.oldest
        return 0.0 if oldest is None else self._clock() - oldest

    def at_risk(self, num_blocks: int) -> tuple[UnusedBlock, ...]:
        """What would be lost if so many blocks were allocated now, the longest unused first.

        Copies and demoted blocks are no loss. A block that moved from one worker to another since
        its last use has had its chance.
        """
        books = map(self._books.__getitem__, self._unused.first(num_blocks - self._pool.num_free))
        return tuple(
            UnusedBlock(each.record, self._clock() - each.used_at)
            for each in books
            if each.record is not None and not (each.is_copy or each.is_demoted or each.is_moved)
        )

    def room_for(self, ages_s: Sequence[float]) -> int:
        """How many blocks that another worker has to evict may come in, from the last one on.

        Args:
            ages_s: for how long each has not been used; falling. See `EvictionOrder.room_for`.
        """
        now = self._clock()
        return self._unused.room_for([now - age for age in ages_s], self._pool.num_free)

    def moved(self, identity: BlockIdentity) -> None:
        """Another worker keeps the block from now on. Nothing for one that is not held."""
        books = self._index.get(identity)
        if books is not None:
            books.is_moved = True

    def __contains__(self, identity: object) -> bool:
        return isinstance(identity, BlockIdentity) and identity in self._index

    def record(self, identity: BlockIdentity) -> BlockRecord | None:
        """Of a published block; None if it is not held."""
        books = self._index.get(identity)
        return None if books is None else books.record

    def uses(self) -> Counter[int]:
        """How many running requests use each block; unused ones are left out."""
        return Counter({block: b.num_users for block, b in self._books.items() if b.num_users})

    def match(
        self,
        hashes: Sequence[bytes],
        mode: ReplayMode = ReplayMode.BOUNDED,
        interval: int | None = None,
        max_blocks: int | None = None,
    ) -> tuple[BlockIdentity, ...]:
        """The longest published chain of one lineage; see `LineageIndex.match`.

        Nothing is reserved and no recency changes: `adopt` what the plan really reuses.
        """
        return self._index.match(hashes, mode, interval, max_blocks)

    def allocate(self, num_blocks: int) -> tuple[int, ...]:
        """Take private blocks for one user, evicting unused ones for lack of free ones.

        Raises:
            ResourceExhausted: too few are free or unused; nothing was taken or evicted.
        """
        if num_blocks > self.num_available:
            raise ResourceExhausted(
                f"{num_blocks} KV blocks are needed; {self._pool.num_free} of "
                f"{self._pool.num_blocks} are free and {len(self._unused)} can be evicted; retry "
                "when running requests have finished"
            )
        events: list[CacheEvent] = []
        for _ in range(num_blocks - self._pool.num_free):
            while not self._unused.has_next:
                self._yield_pins()
            books = self._books[self._unused.pop()]
            events.append(self._unpublish(books, is_evicted=True))
            self._free(books)
        blocks = self._pool.allocate(num_blocks)
        for block in blocks:
            self._books[block] = BlockBooks(block, self._clock())
        self._tell(events)
        return blocks

    def adopt(self, chain: Sequence[BlockIdentity], *, is_use: bool = True) -> tuple[int, ...]:
        """Become a user of published blocks, all or none; their ids in order.

        Copies among them are kept by this worker from now on (`BlockPublished`, once more).

        Args:
            is_use: False to hold them without a change of their age and standing.

        Raises:
            RipresaError: NOT_FOUND; one is gone since it was planned. Plan again.
        """
        found = self._find(chain)
        for books in found:
            books.num_users += 1
            self._unused.discard(books.block)
        if is_use:
            self._use(found)
        return tuple(books.block for books in found)

    def _use(self, found: Sequence[BlockBooks]) -> None:
        now, claimed = self._clock(), []
        self._num_calls += 1
        for books in found:
            books.adopted_at = self._num_calls
            books.is_demoted = books.is_moved = False
            books.used_at = now
            if books.is_copy and books.record is not None:
                books.is_copy = False
                claimed.append(BlockPublished(books.record))
        self._tell(claimed)

    def release(self, blocks: Sequence[int], *, is_use: bool = True) -> None:
        """End one use of each block, given in order of position.

        Published blocks without users stay until they make room, the last of the chain first;
        private ones are free at once, and what was offered of them is void.

        Args:
            is_use: as it was adopted; False for allocated blocks to which others gave their age.

        Raises:
            RipresaError: INTERNAL; a block is not in use (so often). Nothing was released.
        """
        for block, count in Counter(blocks).items():
            books = self._books.get(block)
            if books is None or books.num_users < count:
                raise RipresaError(ErrorCode.INTERNAL, f"KV block {block} is released unused")
        for block in reversed(blocks):
            books = self._books[block]
            books.num_users -= 1
            if is_use:
                books.used_at = self._clock()
            if books.num_users == 0:
                self._end_use(books)

    def offer(self, block: int, record: BlockRecord, age_s: float | None = None) -> Offer:
        """Announce that a private block is full and committed; nobody finds it yet.

        Args:
            age_s: for how long another worker that gave it has not used it; None for a block of
                this worker's own.

        Raises:
            RipresaError: INTERNAL; the block is not in use, or was offered before.
        """
        books = self._books.get(block)
        if books is None or books.num_users == 0 or books.offer is not None:
            raise RipresaError(ErrorCode.INTERNAL, f"KV block {block} cannot be offered")
        used_at = None if age_s is None else self._clock() - age_s
        offer = Offer(books, record, self._num_ranks, used_at)
        books.offer = offer
        return offer

    def acknowledge(self, offer: Offer, rank: int) -> PublishOutcome:
        """A rank has written all of the block. The last one's word publishes it. Idempotent.

        The first writer of an identity stays: a later one keeps its own block for itself, so that
        nothing is swapped under a running request.
        """
        if not 0 <= rank < self._num_ranks:
            raise RipresaError(
                ErrorCode.INTERNAL, f"rank {rank} is none of the {self._num_ranks} ranks"
            )
        offer.missing_ranks.discard(rank)
        if offer.outcome is not PublishOutcome.PENDING or offer.missing_ranks:
            return offer.outcome
        books, identity = offer.books, offer.record.identity
        if identity in self._index:
            offer.outcome = PublishOutcome.DUPLICATE
            return offer.outcome
        self._index.add(identity, books)
        books.record = offer.record
        if offer.used_at is not None:
            books.used_at, books.is_moved = offer.used_at, True
        offer.outcome = PublishOutcome.PUBLISHED
        self._tell([BlockPublished(offer.record)])
        return offer.outcome

    def lease(self, chain: Sequence[BlockIdentity]) -> Lease:
        """Register a session's interest in published blocks, all or none.

        It keeps them from being demoted when another session that shares them ends.

        Raises:
            RipresaError: NOT_FOUND; one of them is gone.
        """
        found = self._find(chain)
        self._num_calls += 1
        for books in found:
            books.num_leases += 1
            books.is_demoted = False
        for books in reversed(found):
            self._touch(books)
        return Lease(tuple(found), self._num_calls)

    def renew(self, lease: Lease, chain: Sequence[BlockIdentity]) -> Lease:
        """Let an open lease cover these published blocks, all or none; what it is from now on.

        They count as used now, and for a lease as if it had covered them from its beginning.

        Raises:
            RipresaError: NOT_FOUND; one of them is gone.
        """
        renewed = self.lease(chain)
        renewed.began_at = lease.began_at
        until = lease.pinned_until
        self._end(lease)
        if until is not None:
            self.pin(renewed, until)
        return renewed

    def pin(self, lease: Lease, until: float) -> None:
        """Keep the blocks of an open lease from being evicted, or keep them longer.

        If more are pinned then than may be, the leases that end first give up their pins.
        """
        if lease.is_over:
            return
        if lease.pinned_until is None:
            for books in self._alive(lease):
                self._count_pin(books, 1)
                self._place(books)
            self._pinned.add(lease)
        lease.pinned_until = until
        while self._num_pinned > self._max_pinned:
            self._yield_pins()

    def unpin(self, lease: Lease) -> None:
        """The session stays open, its blocks may be evicted, by their age. Idempotent."""
        if lease.pinned_until is None:
            return
        lease.pinned_until = None
        self._pinned.discard(lease)
        for books in self._alive(lease):
            self._count_pin(books, -1)
            self._place(books)

    def redeem(self, lease: Lease) -> None:
        """The session goes on: the lease is over, its blocks count as used now. Idempotent."""
        if lease.is_over:
            return
        self._end(lease)
        for books in self._alive(lease):
            books.is_demoted = False
            self._touch(books)

    def forget(self, lease: Lease) -> None:
        """Nothing more will be heard of the session; its blocks stay where they are. Idempotent."""
        self._end(lease)

    def lapse(self, lease: Lease) -> None:
        """The session is overdue, compacted or closed. Idempotent.

        Its blocks will be the first to go, but for those that somebody uses, that another session
        is interested in, or that a request took up since the lease began.
        """
        if lease.is_over:
            return
        self._end(lease)
        for books in self._alive(lease):
            if books.num_leases == books.num_users == 0 and books.adopted_at <= lease.began_at:
                books.is_demoted = True
                self._place(books)

    def mark_copy(self, identity: BlockIdentity, *, is_copy: bool) -> None:
        """Another worker keeps the block, or this one does: copies make room first.

        Nothing for a block that is not published here.
        """
        books = self._index.get(identity)
        if books is None or books.is_copy is is_copy:
            return
        books.is_copy = is_copy
        self._place(books)

    def forget_copies(self) -> None:
        """It is not known any more which blocks others hold too."""
        for identity in list(self._index):
            self.mark_copy(identity, is_copy=False)

    def withdraw(self, condition: Callable[[BlockRecord], bool]) -> int:
        """Unpublish every block whose record fulfils `condition`, pinned or not; how many.

        Users keep theirs until they release them.
        """
        gone = [self._index.get(identity) for identity in self._index]
        events: list[CacheEvent] = []
        for books in gone:
            if books is None or books.record is None or not condition(books.record):
                continue
            events.append(self._unpublish(books, is_evicted=False))
            self._unused.discard(books.block)
            if books.num_users == 0:
                self._free(books)
        self._tell(events)
        return len(events)

    def _find(self, chain: Sequence[BlockIdentity]) -> list[BlockBooks]:
        found = []
        for number, identity in enumerate(chain):
            books = self._index.get(identity)
            if books is None:
                raise RipresaError(
                    ErrorCode.NOT_FOUND, f"block {number} of the chain is not cached; plan again"
                )
            found.append(books)
        return found

    def _end_use(self, books: BlockBooks) -> None:
        if books.record is not None:
            self._place(books)
            return
        if books.offer is not None:
            self._end_offer(books.offer)
        self._free(books)

    def _end_offer(self, offer: Offer) -> None:
        if offer.outcome is PublishOutcome.PENDING:
            offer.outcome = PublishOutcome.VOID
            return
        # The twin that was first has served as this one's continuation in the chain: as recent.
        twin = self._index.get(offer.record.identity)
        if twin is not None:
            self._num_calls += 1
            twin.adopted_at = self._num_calls
            twin.is_demoted = False
            self._touch(twin)

    def _end(self, lease: Lease) -> None:
        if lease.is_over:
            return
        self.unpin(lease)
        lease.is_over = True
        for books in self._alive(lease):
            books.num_leases -= 1

    def _yield_pins(self) -> None:
        """The lease that ends first gives up its pins; there must be one."""
        self.unpin(min(self._pinned, key=lambda lease: lease.pinned_until or 0.0))
        self.num_yielded += 1

    def _count_pin(self, books: BlockBooks, change: int) -> None:
        was_pinned = books.num_pins > 0
        books.num_pins += change
        self._num_pinned += (books.num_pins > 0) - was_pinned

    @staticmethod
    def _alive(lease: Lease) -> list[BlockBooks]:
        """Blocks of a lease that are still published; the last of the chain first."""
        return [books for books in reversed(lease.books) if books.record is not None]

    def _touch(self, books: BlockBooks) -> None:
        """Enter a published block as used now."""
        books.used_at = self._clock()
        self._place(books)

    def _place(self, books: BlockBooks) -> None:
        """Enter a published block by its age, or take it out if it is not unused."""
        self._unused.discard(books.block)
        if books.num_users == 0 and books.record is not None:
            self._unused.put(
                books.block,
                books.used_at,
                is_demoted=books.is_demoted or books.is_copy,
                is_pinned=books.num_pins > 0,
            )

    def _unpublish(self, books: BlockBooks, *, is_evicted: bool) -> BlockRemoved:
        assert books.record is not None
        record, books.record = books.record, None
        self._num_pinned -= books.num_pins > 0
        books.num_pins = books.num_leases = 0
        self._index.remove(record.identity)
        return BlockRemoved(record, is_evicted)

    def _free(self, books: BlockBooks) -> None:
        books.is_freed = True
        del self._books[books.block]
        self._pool.free((books.block,))

    def _tell(self, events: Sequence[CacheEvent]) -> None:
        if self._on_event is not None:
            for event in events:
                self._on_event(event)

    def check_integrity(self) -> None:
        """Raise RipresaError (INTERNAL) unless pool, index, books and eviction order agree."""
        self._pool.check_integrity()
        if len(self._books) != self._pool.num_blocks - self._pool.num_free:
            raise RipresaError(
                ErrorCode.INTERNAL,
                f"{self._pool.num_blocks - self._pool.num_free} KV blocks are taken but "
                f"{len(self._books)} are on the cache's books",
            )
        for identity in self._index:
            books = self._index.get(identity)
            record = None if books is None else books.record
            if record is None or record.identity != identity:
                raise RipresaError(
                    ErrorCode.INTERNAL, "the index names a block of another identity"
                )
        for block, books in self._books.items():
            self._check(block, books)
        pinned = {b for lease in self._pinned for b in lease.books if b.record is not None}
        if {b for b in self._books.values() if b.num_pins} != pinned:
            raise RipresaError(ErrorCode.INTERNAL, "the leases' pins are not those of the blocks")
        if self._num_pinned != len(pinned) or len(pinned) > self._max_pinned:
            raise RipresaError(
                ErrorCode.INTERNAL,
                f"{len(pinned)} KV blocks are pinned, {self._num_pinned} are counted and "
                f"{self._max_pinned} may be",
            )

    def _check(self, block: int, books: BlockBooks) -> None:
        published = books.record is not None and self._index.get(books.record.identity) is books
        unused = published and books.num_users == 0
        faults = {
            "is on the books of another block or was freed": books.block != block or books.is_freed,
            "has a negative count": min(books.num_users, books.num_pins) < 0,
            "has more pins than leases": books.num_pins > books.num_leases,
            "has a record but is not in the index": books.record is not None and not published,
            "has neither a user nor a record": not published and books.num_users == 0,
            "can be evicted though it is used, or cannot though it is not": (
                (block in self._unused) is not unused
            ),
        }
        for fault, is_present in faults.items():
            if is_present:
                raise RipresaError(ErrorCode.INTERNAL, f"KV block {block} {fault}")
