"""How do tests get a directory that knows who holds what? A real index, told by real outboxes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ripresa.cluster.directory.events import Accepted, HeldKind, Tier
from ripresa.cluster.directory.index import DirectorySettings, PrefixIndex
from ripresa.cluster.directory.outbox import Item, Outbox
from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.cache.cache_events import origin


@dataclass(frozen=True)
class Held:
    """Blocks [first, stop) of a prompt in one lineage, and windows by their number of blocks."""

    hashes: Sequence[bytes]
    stop: int
    first: int = 0
    restarts: tuple[int, ...] = ()
    windows: tuple[int, ...] = ()


def told_index(window: int, held: Mapping[str, Iterable[Held]], now: float = 0.0) -> PrefixIndex:
    """An index that was told all of this."""
    index = PrefixIndex(DirectorySettings(window=window), "told")
    for worker, parts in held.items():
        outbox = Outbox(worker, 1)
        for part in parts:
            for number in range(part.first, part.stop):
                _hold(outbox, part, number, HeldKind.BLOCK, Tier.DEVICE, window)
            for num_blocks in part.windows:
                _hold(outbox, part, num_blocks - 1, HeldKind.WINDOW, Tier.HOST, window)
        while True:
            reply = index.report(outbox.next_report(), now)
            outbox.take(reply)
            if isinstance(reply, Accepted) and not outbox.has_changes:
                break
    return index


def _hold(outbox: Outbox, part: Held, number: int, kind: HeldKind, tier: Tier, window: int) -> None:
    restarts = tuple(r for r in part.restarts if r < (number + 1) * window)
    item = Item(kind, BlockIdentity(part.hashes[number], restarts), tier)
    outbox.hold(item, origin("tenant", part.hashes, number))
