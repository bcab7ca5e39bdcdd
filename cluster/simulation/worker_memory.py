"""What does a simulated worker keep? Numbers of blocks, in a worker's own eviction order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ripresa.workers.cache.eviction_order import EvictionOrder


class Evicted(NamedTuple):
    """A block that has to go.

    Attributes:
        is_last: no other worker is known to hold it, and it has not moved since its last use.
    """

    block: int
    used_at: float
    is_last: bool


class WorkerMemory:
    """Blocks by number, of which copies and the oldest make room for new ones.

    A prompt takes its blocks out of the order, makes room, and puts all of them back, the last
    one of the chain first: so a prefix is evicted from its end, as on a worker.

    Args:
        capacity_blocks: blocks that fit.
    """

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self._order = EvictionOrder()
        self._used_at: dict[int, float] = {}
        self._copies: set[int] = set()
        self._moved: set[int] = set()
        self._num_taken = 0

    def __contains__(self, block: int) -> bool:
        return block in self._used_at

    def __len__(self) -> int:
        return len(self._order) + self._num_taken

    def age(self, now: float) -> float:
        """For how long the next block to go has not been used; infinity while room is left."""
        oldest = self._order.oldest
        if self._num_free or self._order.num_demoted or oldest is None:
            return float("inf") if len(self._order) or self._num_free else 0.0
        return now - oldest

    @property
    def _num_free(self) -> int:
        return self.capacity_blocks - len(self)

    def num_held(self, blocks: Sequence[int]) -> int:
        """How many blocks of a chain are held without a gap from its beginning."""
        for number, block in enumerate(blocks):
            if block not in self._used_at:
                return number
        return len(blocks)

    def take(self, blocks: Sequence[int]) -> None:
        """Use held blocks: they make no room until they are put back."""
        for block in blocks:
            self._order.discard(block)
        self._num_taken += len(blocks)

    def make_room(self, num_blocks: int) -> list[Evicted]:
        """Evict until so many more blocks fit; which ones went. Fewer fit if all are in use."""
        gone = []
        while len(self) + num_blocks > self.capacity_blocks and len(self._order):
            block = self._order.pop()
            is_last = block not in self._copies and block not in self._moved
            gone.append(Evicted(block, self._used_at.pop(block), is_last))
            self._copies.discard(block)
            self._moved.discard(block)
        return gone

    def put_back(self, blocks: Sequence[int], at: float) -> None:
        """End the use of blocks that were taken."""
        self._num_taken -= len(blocks)
        self.put(blocks, at)

    def put(self, blocks: Sequence[int], at: float) -> None:
        """Keep blocks, used at `at`; room was made for those that were not held."""
        for block in reversed(blocks):
            self._moved.discard(block)
            self._used_at[block] = at
            self._order.put(block, at, is_demoted=block in self._copies)

    def room_for(self, offered: Sequence[Evicted]) -> int:
        """How many of these, from the last one on, may come in; see `EvictionOrder.room_for`."""
        return self._order.room_for([block.used_at for block in offered], self._num_free)

    def take_in(self, moved: Sequence[Evicted]) -> None:
        """Keep what another worker had to evict, as old as it is; room was made."""
        for block, used_at, _ in moved:
            self._moved.add(block)
            self._used_at[block] = used_at
            self._order.put(block, used_at, is_demoted=False)

    def claim(self, block: int) -> bool:
        """Keep a block that is used here from now on; whether it was a copy."""
        was_copy = block in self._copies
        self._copies.discard(block)
        return was_copy

    def mark_copy(self, block: int, *, is_copy: bool) -> None:
        """Another worker keeps the block too, or does not any more."""
        if block not in self._used_at:
            return
        (self._copies.add if is_copy else self._copies.discard)(block)
        if block in self._order:
            self._order.put(block, self._used_at[block], is_demoted=is_copy)
