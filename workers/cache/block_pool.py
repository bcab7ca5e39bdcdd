"""Which KV blocks and which sequence slots of a worker are free?"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

from ripresa.workers.errors import ErrorCode, ResourceExhausted, RipresaError


class BlockPool:
    """A fixed number of KV blocks, each either free or owned by exactly one caller.

    Ids are 0 .. num_blocks - 1. An allocation takes the first run of consecutive free ids that is
    long enough, and the lowest free ids where no run is: neighbours make copies contiguous.

    Args:
        num_blocks: capacity, at least 1.
        noun: what one id stands for, in error messages.
    """

    def __init__(self, num_blocks: int, noun: str = "KV block") -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one {noun}, got {num_blocks}")
        self._num_blocks = num_blocks
        self._noun = noun
        self._free = list(range(num_blocks))
        self._is_free = [True] * num_blocks

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, num_blocks: int) -> tuple[int, ...]:
        """Take `num_blocks` blocks, all or none, in ascending order.

        Raises:
            ResourceExhausted: fewer are free; nothing was taken.
        """
        if num_blocks < 0:
            raise ValueError(f"cannot allocate {num_blocks} {self._noun}s")
        if num_blocks > len(self._free):
            raise ResourceExhausted(
                f"{num_blocks} {self._noun}s are needed and {len(self._free)} of "
                f"{self._num_blocks} are free; retry when running requests have finished"
            )
        first = _first_run(self._free, num_blocks)
        taken = tuple(self._free[first : first + num_blocks])
        del self._free[first : first + num_blocks]
        for block in taken:
            self._is_free[block] = False
        return taken

    def free(self, blocks: Sequence[int]) -> None:
        """Give blocks back.

        Raises:
            RipresaError: INTERNAL; a block is free already, unknown or named twice. Nothing was
                given back: the caller's books are wrong and its other claims cannot be trusted.
        """
        for block in blocks:
            if not 0 <= block < self._num_blocks:
                raise RipresaError(ErrorCode.INTERNAL, f"{self._noun} {block} does not exist")
            if self._is_free[block]:
                raise RipresaError(ErrorCode.INTERNAL, f"{self._noun} {block} was freed twice")
        if len(set(blocks)) != len(blocks):
            raise RipresaError(ErrorCode.INTERNAL, f"a {self._noun} was freed twice in one call")
        for block in blocks:
            self._is_free[block] = True
            self._free.insert(bisect_left(self._free, block), block)

    def check_integrity(self) -> None:
        """Raise RipresaError (INTERNAL) unless the free list and the ownership marks agree."""
        ascending = all(low < high for low, high in pairwise(self._free))
        marked = [block for block in range(self._num_blocks) if self._is_free[block]]
        if not ascending or marked != self._free:
            raise RipresaError(
                ErrorCode.INTERNAL, f"the {self._noun} pool's free list and marks disagree"
            )


class SlotPool:
    """Sequence slots (rings, open pairs), each free or owned by exactly one sequence."""

    def __init__(self, num_slots: int) -> None:
        self._slots = BlockPool(num_slots, noun="sequence slot")

    @property
    def num_slots(self) -> int:
        return self._slots.num_blocks

    @property
    def num_free(self) -> int:
        return self._slots.num_free

    def allocate(self) -> int:
        """Take the lowest free slot; raises ResourceExhausted when there is none."""
        return self._slots.allocate(1)[0]

    def free(self, slot: int) -> None:
        """Give a slot back; raises RipresaError (INTERNAL) if it is free already or unknown."""
        self._slots.free((slot,))

    def check_integrity(self) -> None:
        """Raise RipresaError (INTERNAL) unless the free list and the ownership marks agree."""
        self._slots.check_integrity()


def _first_run(free: list[int], length: int) -> int:
    """Index in the ascending list `free` of the first run of `length` consecutive ids, else 0."""
    start = 0
    for index in range(len(free)):
        if free[index] - free[start] != index - start:
            start = index
        if index - start + 1 >= length:
            return start
    return 0
