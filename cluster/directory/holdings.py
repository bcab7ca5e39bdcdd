"""Who holds a block? Sets of holders as bit masks, shared by all blocks that have the same ones.

block ──▶ Holdings ◀── block        the blocks of a turn have the same holders: one object
             │                      (kind, lineage, tier) -> bits of workers
             ╳ bit of a dead worker: leaves the shared objects, not block after block
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple
from weakref import WeakSet, WeakValueDictionary

from ripresa.cluster.directory.events import HeldKind, Holding, Lineage, Tier


class Row(NamedTuple):
    """One way of holding a block."""

    kind: HeldKind
    restarts: Lineage
    tier: Tier


class Holdings:
    """Who holds a block, in which ways. Only the table that made it changes it.

    Attributes:
        masks: bits of the holders by way; no mask is 0.
        chains: bits of the holders of block KV by lineage, whatever the tier.
        resolved: the same with names, once somebody asked for them.
    """

    __slots__ = ("__weakref__", "chains", "masks", "resolved")

    def __init__(self, masks: dict[Row, int]) -> None:
        self.set(masks)

    def set(self, masks: dict[Row, int]) -> None:
        chains: dict[Lineage, int] = {}
        for (kind, restarts, _), mask in masks.items():
            if kind is HeldKind.BLOCK:
                chains[restarts] = chains.get(restarts, 0) | mask
        self.masks: Mapping[Row, int] = masks
        self.chains: tuple[tuple[Lineage, int], ...] = tuple(chains.items())
        self.resolved: tuple[Holding, ...] | None = None


class HoldingsTable:
    """Makes holdings, one object for equal ones as far as it can."""

    def __init__(self) -> None:
        self.empty = Holdings({})
        self._all: WeakSet[Holdings] = WeakSet()
        self._by_masks: WeakValueDictionary[frozenset[tuple[Row, int]], Holdings] = (
            WeakValueDictionary()
        )

    def __len__(self) -> int:
        """Objects in use."""
        return len(self._all)

    def add(self, holdings: Holdings, row: Row, bits: int) -> Holdings:
        mask = holdings.masks.get(row, 0)
        if mask | bits == mask:
            return holdings
        return self._get({**holdings.masks, row: mask | bits})

    def remove(self, holdings: Holdings, row: Row, bits: int) -> Holdings:
        mask = holdings.masks.get(row, 0)
        if not mask & bits:
            return holdings
        return self._get(_without(holdings.masks, bits, row))

    def discard(self, bits: int) -> bool:
        """Take `bits` from every block there is, at once; whether any block had one."""
        changed = [h for h in self._all if any(mask & bits for mask in h.masks.values())]
        for holdings in changed:
            holdings.set(_without(holdings.masks, bits))
        if changed:
            # Objects that became equal stay apart; from now on one of them is given out.
            self._by_masks = WeakValueDictionary(
                {frozenset(h.masks.items()): h for h in self._all if h.masks}
            )
        return bool(changed)

    def _get(self, masks: dict[Row, int]) -> Holdings:
        if not masks:
            return self.empty
        key = frozenset(masks.items())
        found = self._by_masks.get(key)
        if found is None:
            found = Holdings(masks)
            self._by_masks[key] = found
            self._all.add(found)
        return found


def _without(masks: Mapping[Row, int], bits: int, row: Row | None = None) -> dict[Row, int]:
    """The masks without `bits`, in one row or in all."""
    left = {r: mask & ~bits if row is None or r == row else mask for r, mask in masks.items()}
    return {r: mask for r, mask in left.items() if mask}
