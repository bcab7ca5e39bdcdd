"""What does the cache note of a block, of an offered block and of a session's interest?

Only the block cache writes these notes; others hold an `Offer` or a `Lease` and read it.
"""

from __future__ import annotations

from ripresa.workers.cache.block_record import BlockRecord, PublishOutcome


class BlockBooks:
    """One allocated block; a block that was freed and allocated again has new books.

    Attributes:
        block: its id.
        num_users: running requests that read or write it.
        num_leases, num_pins: sessions interested in it, and those of them that pin it.
        adopted_at: number of the call by which a request took it up last; 0 for none.
        is_demoted: unused, and the last session interested in it is over or overdue.
        is_copy: another worker holds the same, so that nothing is lost with this one.
        is_moved: it came from another worker, or went to one, since it was last used.
        used_at: when its last use began or ended, by the cache's clock.
        is_freed: these books are closed.
        record: what it is published as; None while it is private.
        offer: the one offer of its contents, whatever became of it.
    """

    __slots__ = (
        "adopted_at",
        "block",
        "is_copy",
        "is_demoted",
        "is_freed",
        "is_moved",
        "num_leases",
        "num_pins",
        "num_users",
        "offer",
        "record",
        "used_at",
    )

    def __init__(self, block: int, used_at: float) -> None:
        self.block = block
        self.used_at = used_at
        self.num_users = 1
        self.adopted_at = 0
        self.num_leases = 0
        self.num_pins = 0
        self.is_copy = False
        self.is_demoted = False
        self.is_moved = False
        self.is_freed = False
        self.record: BlockRecord | None = None
        self.offer: Offer | None = None


class Offer:
    """A full block on its way to being published; made by `BlockCache.offer`.

    Attributes:
        record: what it will be published as.
        used_at: when it was last used by whoever gave it; None for a block of this worker's own.
        missing_ranks: ranks that have not acknowledged it.
        outcome: what became of it so far.
    """

    __slots__ = ("books", "missing_ranks", "outcome", "record", "used_at")

    def __init__(
        self, books: BlockBooks, record: BlockRecord, num_ranks: int, used_at: float | None
    ) -> None:
        self.books = books
        self.record = record
        self.used_at = used_at
        self.missing_ranks = set(range(num_ranks))
        self.outcome = PublishOutcome.PENDING


class Lease:
    """A session's interest in a chain; made by `BlockCache.lease`.

    Attributes:
        began_at: number of the call that made it; who adopts a block later uses it for himself.
        pinned_until: its blocks are not evicted, unless the pool needs those of the lease that ends
            first; seconds on the clock of whoever pinned it. None while it is not pinned.
        is_over: redeemed, lapsed or forgotten.
    """

    __slots__ = ("began_at", "books", "is_over", "pinned_until")

    def __init__(self, books: tuple[BlockBooks, ...], began_at: int) -> None:
        self.books = books
        self.began_at = began_at
        self.pinned_until: float | None = None
        self.is_over = False
