"""Which unused block goes first? Demoted ones before all others, then the longest unused.

Blocks whose sessions are over or overdue are demoted; recency speaks about the rest. Those that a
lease pins do not go at all until it gives them up.
"""

from __future__ import annotations

from collections.abc import Iterator


class EvictionOrder:
    """Unused blocks in the order in which they will be evicted. All operations take O(1)."""

    def __init__(self) -> None:
        # Dicts keep insertion order; re-inserting moves to the end.
        self._demoted: dict[int, None] = {}
        self._recent: dict[int, None] = {}
        self._pinned: dict[int, None] = {}

    def __len__(self) -> int:
        """Pinned ones included: whoever needs them may end their leases."""
        return len(self._demoted) + len(self._recent) + len(self._pinned)

    def __contains__(self, block: int) -> bool:
        return block in self._recent or block in self._demoted or block in self._pinned

    @property
    def has_next(self) -> bool:
        """Whether there is a block that is not pinned."""
        return bool(self._demoted or self._recent)

    def __iter__(self) -> Iterator[int]:
        """First to go first, without the pinned ones."""
        yield from self._demoted
        yield from self._recent

    @property
    def oldest(self) -> int | None:
        """The longest unused block that is not demoted: what the pool loses next of value."""
        return next(iter(self._recent), None)

    def put(self, block: int, *, is_demoted: bool, is_pinned: bool = False) -> None:
        """Enter a block, or move it, behind all others of its class."""
        self.discard(block)
        unpinned = self._demoted if is_demoted else self._recent
        (self._pinned if is_pinned else unpinned)[block] = None

    def discard(self, block: int) -> None:
        self._demoted.pop(block, None)
        self._recent.pop(block, None)
        self._pinned.pop(block, None)

    def pop(self) -> int:
        """Take the block that goes first; raises KeyError when there is none."""
        queue = self._demoted or self._recent
        block = next(iter(queue), None)
        if block is None:
            raise KeyError("no block can be evicted")
        del queue[block]
        return block
