"""Which unused block goes first? Demoted ones before all others, then the longest unused.

Blocks whose sessions are over or overdue, and copies of what another worker keeps, are demoted; the
time of the last use speaks about the rest, also of blocks that came from another worker. Those that
a lease pins do not go at all until it gives them up.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from heapq import merge
from itertools import chain, islice, repeat, takewhile

LONG_AGO = float("-inf")


class EvictionOrder:
    """Unused blocks in the order in which they will be evicted.

    All operations take O(1), but for blocks that come in after others that were used later: those
    wait in a sorted list.
    """

    def __init__(self) -> None:
        # Dicts keep insertion order; re-inserting moves to the end.
        self._demoted: dict[int, None] = {}
        self._recent: dict[int, float] = {}
        self._late: list[tuple[float, int, int]] = []
        self._late_keys: dict[int, tuple[float, int, int]] = {}
        self._num_late_ever = 0
        self._pinned: dict[int, None] = {}

    def __len__(self) -> int:
        """Pinned ones included: whoever needs them may end their leases."""
        return len(self._demoted) + len(self._recent) + len(self._late) + len(self._pinned)

    def __contains__(self, block: int) -> bool:
        return (
            block in self._recent
            or block in self._demoted
            or block in self._late_keys
            or block in self._pinned
        )

    @property
    def has_next(self) -> bool:
        """Whether there is a block that is not pinned."""
        return bool(self._demoted or self._recent or self._late)

    def __iter__(self) -> Iterator[int]:
        """First to go first, without the pinned ones."""
        yield from self._demoted
        for _, block in self._by_age():
            yield block

    @property
    def num_demoted(self) -> int:
        """Blocks that go before those of which the time of use speaks."""
        return len(self._demoted)

    @property
    def oldest(self) -> float | None:
        """When the longest unused block that is not demoted was used; None if there is none."""
        if self._late:
            return min(self._late[0][0], next(iter(self._recent.values()), float("inf")))
        return next(iter(self._recent.values()), None)

    def room_for(self, used_at: Sequence[float], num_free: int) -> int:
        """How many blocks of another worker may come in: the youngest of those that it offers.

        Each takes a free page, or the place of a demoted block, or that of one that is older than
        itself; blocks of equal age stay where they are.

        Args:
            used_at: when the offered blocks were last used; ascending.
            num_free: pages that nothing has to leave for these.
        """
        ready = repeat(LONG_AGO, num_free + len(self._demoted))
        displaced = chain(ready, (at for at, _ in self._by_age()))
        pairs = zip(reversed(used_at), displaced, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[1] < pair[0], pairs))

    def put(self, block: int, used_at: float, *, is_demoted: bool, is_pinned: bool = False) -> None:
        """Enter a block, or move it, behind all of its class that were used before.

        Args:
            used_at: when it was last used.
        """
        self.discard(block)
        if is_pinned:
            self._pinned[block] = None
        elif is_demoted:
            self._demoted[block] = None
        elif used_at >= next(reversed(self._recent.values()), LONG_AGO):
            self._recent[block] = used_at
        else:
            self._num_late_ever += 1
            key = self._late_keys[block] = (used_at, self._num_late_ever, block)
            insort(self._late, key)

    def discard(self, block: int) -> None:
        self._demoted.pop(block, None)
        self._recent.pop(block, None)
        self._pinned.pop(block, None)
        key = self._late_keys.pop(block, None)
        if key is not None:
            del self._late[bisect_left(self._late, key)]

    def pop(self) -> int:
        """Take the block that goes first; raises KeyError when there is none."""
        block = next(iter(self), None)
        if block is None:
            raise KeyError("no block can be evicted")
        self.discard(block)
        return block

    def first(self, num_blocks: int) -> list[int]:
        """The blocks that go first, at most so many."""
        return list(islice(self, max(0, num_blocks)))

    def _by_age(self) -> Iterator[tuple[float, int]]:
        """Time of use and block of all that are neither demoted nor pinned, oldest first."""
        recent = ((used_at, block) for block, used_at in self._recent.items())
        if not self._late:
            return recent
        late = ((used_at, block) for used_at, _, block in self._late)
        return merge(late, recent, key=lambda entry: entry[0])
