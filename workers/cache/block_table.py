"""Which pages does one sequence use, and when may they be given back?

    reserve ──▶ held by the request ──▶ retired ──▶ given back (exactly once)
                      └─ hold / drop around every use in another thread ─┘

The leading blocks may be cached ones, shared with other sequences and only read; the rest are the
sequence's own.

Retiring says that the request is over; pages go back when the last use in flight is over too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from ripresa.workers.cache.block_cache import BlockCache
from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.cache.block_pool import SlotPool
from ripresa.workers.errors import ErrorCode, RipresaError


class BlockTable:
    """The blocks and the slot of one sequence; block k holds positions [k*W, (k+1)*W).

    Attributes:
        blocks: block ids in order of position.
        num_adopted: leading blocks that were cached when the sequence took them.
        slot: the sequence's slot.
    """

    __slots__ = (
        "_give_back",
        "_is_freed",
        "_is_retired",
        "_num_holds",
        "blocks",
        "num_adopted",
        "slot",
    )

    def __init__(
        self,
        blocks: tuple[int, ...],
        num_adopted: int,
        slot: int,
        give_back: Callable[[BlockTable], None],
    ) -> None:
        self.blocks = blocks
        self.num_adopted = num_adopted
        self.slot = slot
        self._give_back = give_back
        self._num_holds = 0
        self._is_retired = False
        self._is_freed = False

    @property
    def is_retired(self) -> bool:
        return self._is_retired

    @property
    def is_freed(self) -> bool:
        return self._is_freed

    @property
    def num_holds(self) -> int:
        return self._num_holds

    def hold(self) -> None:
        """Keep the pages until `drop`: something outside the event loop is about to use them.

        Raises RipresaError (INTERNAL) on pages that were freed.
        """
        if self._is_freed:
            raise RipresaError(ErrorCode.INTERNAL, f"slot {self.slot} is used after it was freed")
        self._num_holds += 1

    def drop(self) -> None:
        """End one `hold`; frees the pages if they are retired and this was the last one."""
        if self._num_holds == 0:
            raise RipresaError(ErrorCode.INTERNAL, f"slot {self.slot} has no hold to drop")
        self._num_holds -= 1
        self._free_if_unused()

    def retire(self) -> None:
        """The request is over: free the pages now, or with the last `drop`. Idempotent."""
        self._is_retired = True
        self._free_if_unused()

    def _free_if_unused(self) -> None:
        if self._is_retired and self._num_holds == 0 and not self._is_freed:
            self._is_freed = True
            self._give_back(self)


class PageLoan:
    """Blocks that no sequence owns: read for another worker, or filled by it. No slot."""

    __slots__ = ("_end", "blocks", "is_use")

    def __init__(
        self, blocks: tuple[int, ...], is_use: bool, end: Callable[[PageLoan], None]
    ) -> None:
        self.blocks = blocks
        self.is_use = is_use
        self._end = end

    def end(self) -> None:
        """Give the blocks back. Raises RipresaError (INTERNAL) the second time."""
        self._end(self)


class PagePool:
    """Blocks and slots of a worker, reserved together and given back together.

    Args:
        blocks: the worker's blocks; no other part of it takes any.
        num_blocks: how many there are.
        slots: the worker's slots.
        window: W, tokens a block holds.
        forget_slot: called before a slot is given back, so that its next owner finds nothing.
        freed: called after blocks were given back, whoever had them.
    """

    def __init__(
        self,
        blocks: BlockCache,
        num_blocks: int,
        slots: SlotPool,
        window: int,
        forget_slot: Callable[[int], None],
        freed: Callable[[], None] = lambda: None,
    ) -> None:
        self._blocks = blocks
        self._num_blocks = num_blocks
        self._slots = slots
        self._window = window
        self._forget_slot = forget_slot
        self._freed = freed
        self._tables: dict[int, BlockTable] = {}
        self._loans: set[PageLoan] = set()

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def num_tokens(self) -> int:
        """Positions that all blocks together hold."""
        return self._num_blocks * self._window

    @property
    def num_available_blocks(self) -> int:
        """Blocks that are free, or cached and unused."""
        return self._blocks.num_available

    @property
    def num_slots(self) -> int:
        return self._slots.num_slots

    @property
    def num_free_slots(self) -> int:
        return self._slots.num_free

    @property
    def num_owned_slots(self) -> int:
        """Slots of requests that are not over; retired ones still in use are not among them."""
        return sum(not table.is_retired for table in self._tables.values())

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` positions occupy."""
        return -(-num_tokens // self._window)

    def reserve(self, num_tokens: int, chain: Sequence[BlockIdentity] = ()) -> BlockTable:
        """Take a slot and the blocks of `num_tokens` positions, or nothing at all.

        Args:
            chain: cached blocks that become the leading ones.

        Raises:
            ResourceExhausted: too few blocks, or no slot, are free.
            RipresaError: NOT_FOUND; a block of the chain is gone.
        """
        slot = self._slots.allocate()
        try:
            blocks = self._take(self.blocks_for(num_tokens), chain)
        except BaseException:
            self._slots.free(slot)
            raise
        table = BlockTable(blocks, len(chain), slot, self._free)
        self._tables[slot] = table
        return table

    def borrow(self, chain: Sequence[BlockIdentity], *, is_use: bool = True) -> PageLoan:
        """Keep cached blocks from being evicted until the loan ends.

        Args:
            is_use: False if the loan should leave no trace in the blocks' age.

        Raises RipresaError: NOT_FOUND; one of them is gone, and none was borrowed.
        """
        return self._lend(self._blocks.adopt(chain, is_use=is_use), is_use)

    def borrow_new(self, num_blocks: int, *, is_use: bool = True) -> PageLoan:
        """Blocks to be filled; they are freed with the loan unless they were published.

        Args:
            is_use: False for what is as old as another worker says.

        Raises ResourceExhausted: too few are free; none was borrowed.
        """
        return self._lend(self._blocks.allocate(num_blocks), is_use)

    def _lend(self, blocks: tuple[int, ...], is_use: bool) -> PageLoan:
        loan = PageLoan(blocks, is_use, self._end_loan)
        self._loans.add(loan)
        return loan

    def _end_loan(self, loan: PageLoan) -> None:
        if loan not in self._loans:
            raise RipresaError(ErrorCode.INTERNAL, "borrowed KV blocks are given back twice")
        self._loans.discard(loan)
        self._blocks.release(loan.blocks, is_use=loan.is_use)
        self._freed()

    def extend(self, table: BlockTable) -> None:
        """Give a live sequence one block more.

        Raises ResourceExhausted: none is free.
        """
        table.blocks = (*table.blocks, *self._blocks.allocate(1))

    def exchange(self, table: BlockTable, chain: Sequence[BlockIdentity]) -> None:
        """Make the cached blocks of `chain` the leading ones, and all others the sequence's own.

        For a table that nothing reads or writes at the moment and none of whose own blocks was
        offered to the cache. Raises as `reserve` does; then nothing has changed.
        """
        old, num_own = table.blocks, table.num_adopted
        adopted = self._blocks.adopt(chain)
        try:
            own = self._blocks.allocate(max(0, num_own - len(chain)))
        except BaseException:
            self._blocks.release(adopted)
            raise
        first = max(num_own, len(chain))
        self._blocks.release(old[:first])
        table.blocks = (*adopted, *own, *old[first:])
        table.num_adopted = len(chain)
        self._freed()

    def _take(self, num_blocks: int, chain: Sequence[BlockIdentity]) -> tuple[int, ...]:
        adopted = self._blocks.adopt(chain)
        try:
            return (*adopted, *self._blocks.allocate(num_blocks - len(adopted)))
        except BaseException:
            self._blocks.release(adopted)
            raise

    def _free(self, table: BlockTable) -> None:
        del self._tables[table.slot]
        try:
            self._forget_slot(table.slot)
        finally:
            self._blocks.release(table.blocks)
            self._slots.free(table.slot)
            self._freed()

    def check_integrity(self) -> None:
        """Raise RipresaError (INTERNAL) unless every use of a page is a live table's or loan's."""
        self._blocks.check_integrity()
        self._slots.check_integrity()
        uses = Counter(block for table in self._tables.values() for block in table.blocks)
        uses.update(block for loan in self._loans for block in loan.blocks)
        if uses != self._blocks.uses():
            raise RipresaError(
                ErrorCode.INTERNAL, "the sequences' KV blocks are not those that the cache counts"
            )
        if len(self._tables) != self.num_slots - self.num_free_slots:
            raise RipresaError(
                ErrorCode.INTERNAL,
                f"{self.num_slots - self.num_free_slots} slots are taken but "
                f"{len(self._tables)} are owned by sequences",
            )
