"""What does a simulated worker keep? Numbers of blocks, in a worker's own eviction order."""

from __future__ import annotations

from collections.abc import Sequence

from ripresa.workers.cache.eviction_order import EvictionOrder

NEVER = float("-inf")


class WorkerMemory:
    """Blocks by number, of which the oldest make room for new ones.

    A prompt takes its blocks out of the order, makes room, and puts all of them back, the last
    one of the chain first: so a prefix is evicted from its end, as on a worker.

    Args:
        capacity_blocks: blocks that fit.
    """

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self._order = EvictionOrder()
        self._used_at: dict[int, float] = {}
        self._num_taken = 0
        self._has_evicted = False

    def __contains__(self, block: int) -> bool:
        return block in self._order

    def __len__(self) -> int:
        return len(self._order) + self._num_taken

    @property
    def oldest(self) -> float:
        """When the oldest block that is no copy was last used; NEVER before the first eviction.

        Copies and room that a prompt is about to fill do not count: they are used up first, and
        the next prompt then takes what this tells.
        """
        block = self._order.oldest if self._has_evicted else None
        return NEVER if block is None else self._used_at[block]

    def keeps(self, block: int) -> bool:
        """Whether it is held here and is no copy."""
        return block in self._used_at

    def num_held(self, blocks: Sequence[int]) -> int:
        """How many blocks of a chain are held without a gap from its beginning."""
        for number, block in enumerate(blocks):
            if block not in self._order:
                return number
        return len(blocks)

    def take(self, blocks: Sequence[int]) -> None:
        """Use held blocks: they make no room until they are put back."""
        for block in blocks:
            self._order.discard(block)
        self._num_taken += len(blocks)

    def make_room(self, num_blocks: int) -> list[int]:
        """Evict until so many more blocks fit; which ones went. Fewer fit if all are in use."""
        gone = []
        while len(self) + num_blocks > self.capacity_blocks and len(self._order):
            block = self._order.pop()
            self._used_at.pop(block, None)
            gone.append(block)
            self._has_evicted = True
        return gone

    def put_back(self, blocks: Sequence[int], at: float) -> None:
        """End the use of blocks that were taken."""
        self._num_taken -= len(blocks)
        self.put(blocks, at)

    def put_back_copies(self, blocks: Sequence[int]) -> None:
        """End the use of copies that were taken."""
        self._num_taken -= len(blocks)
        self.put_copies(blocks)

    def put(self, blocks: Sequence[int], at: float) -> None:
        """Keep blocks, used at `at`; room was made for those that were not held."""
        for block in reversed(blocks):
            self._order.put(block, is_demoted=False)
            self._used_at[block] = at

    def put_copies(self, blocks: Sequence[int]) -> None:
        """Keep copies of what another worker keeps: they are the first to go."""
        for block in reversed(blocks):
            self._order.put(block, is_demoted=True)
            self._used_at.pop(block, None)
