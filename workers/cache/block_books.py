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
        is_demoted: unused, and the last session interested in it is over or overdue.
        is_copy: another worker holds the same, so that nothing is lost with this one.
        is_freed: these books are closed.
        record: what it is published as; None while it is private.
        offer: the one offer of its contents, whatever became of it.
    """

    __slots__ = (
        "block",
        "is_copy",
        "is_demoted",
        "is_freed",
        "num_leases",
        "num_pins",
        "num_users",
        "offer",
        "record",
    )

    def __init__(self, block: int) -> None:
        self.block = block
        self.num_users = 1
        self.num_leases = 0
        self.num_pins = 0
        self.is_copy = False
        self.is_demoted = False
        self.is_freed = False
        self.record: BlockRecord | None = None
        self.offer: Offer | None = None


class Offer:
    """A full block on its way to being published; made by `BlockCache.offer`.

    Attributes:
        record: what it will be published as.
        missing_ranks: ranks that have not acknowledged it.
        outcome: what became of it so far.
    """

    __slots__ = ("books", "missing_ranks", "outcome", "record")

    def __init__(self, books: BlockBooks, record: BlockRecord, num_ranks: int) -> None:
        self.books = books
        self.record = record
        self.missing_ranks = set(range(num_ranks))
        self.outcome = PublishOutcome.PENDING


class Lease:
    """A session's interest in a chain; made by `BlockCache.lease`.

    Attributes:
        is_pinned: its blocks are not evicted.
        is_over: redeemed or lapsed.
    """

    __slots__ = ("books", "is_over", "is_pinned")

    def __init__(self, books: tuple[BlockBooks, ...], is_pinned: bool) -> None:
        self.books = books
        self.is_pinned = is_pinned
        self.is_over = False
