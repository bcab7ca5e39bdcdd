"""What has a worker still to tell one directory shard? The sender's half of the report protocol.

    hold, drop ──▶ pending ──▶ report n, n+1, ..      until `Accepted`, the same report again
    SendAll    ──▶ everything held, in parts from number 0; what changes meanwhile follows

Pure: it makes reports and takes replies; somebody else carries them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from ripresa.cluster.directory.events import (
    Accepted,
    Epoch,
    HeldKind,
    Refused,
    Reply,
    Report,
    Run,
    SendAll,
    Tier,
)
from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.cache.cache_events import Origin, Room


class Item(NamedTuple):
    """One way in which the worker holds one block or window.

    Attributes:
        identity: of the block; a window `swa@X` has that of the block that ends at X.
    """

    kind: HeldKind
    identity: BlockIdentity
    tier: Tier


class Outbox:
    """What one incarnation of a worker holds, and what a shard has been told of it.

    Args:
        max_items: blocks and windows in one report.
    """

    def __init__(self, worker: str, incarnation: int, max_items: int = 2_000) -> None:
        self._worker = worker
        self._max_items = max_items
        self._held: dict[Item, Origin] = {}
        self._led: dict[str, frozenset[bytes]] = {}
        self.restart(incarnation)

    def restart(self, incarnation: int) -> None:
        """Speak as another incarnation that holds the same."""
        self._incarnation = incarnation
        self._epoch: Epoch | None = None
        self._number = 0
        self._pending: dict[Item, None] = {}
        self._snapshot: Iterator[Item] | None = None
        self._report: Report | None = None
        self._ended: tuple[str, ...] = ()
        self._is_urgent = False

    @property
    def has_changes(self) -> bool:
        """Something is to be told beside that the worker lives."""
        return bool(self._pending or self._ended) or self.is_urgent

    @property
    def is_urgent(self) -> bool:
        """Others wait for the next report."""
        return self._is_urgent or self._snapshot is not None

    def __contains__(self, item: Item) -> bool:
        return item in self._held

    def hold(self, item: Item, origin: Origin) -> None:
        """The worker holds this from now on."""
        self._held[item] = origin
        self._pending[item] = None
        if any(item.identity.hash in hashes for hashes in self._led.values()):
            self._is_urgent = True

    def drop(self, item: Item) -> None:
        """The worker does not hold this any more, if it ever did."""
        if self._held.pop(item, None) is not None:
            self._pending[item] = None

    def lead(self, request: str, hashes: Iterable[bytes]) -> None:
        """The worker computes these blocks for a request that holds their claim."""
        self._led[request] = frozenset(hashes)
        self._is_urgent = True

    def finish(self, request: str) -> None:
        """It does not compute for this request any more, whatever the reason."""
        if self._led.pop(request, None) is not None:
            self._ended += (request,)
            self._is_urgent = True

    def next_report(self, room: Room | None = None) -> Report:
        """The report to send now: an empty one is a sign of life. Until a reply to it is taken,
        the same one.

        Args:
            room: for blocks that others have to evict.
        """
        if self._report is None:
            is_complete = True
            if self._snapshot is not None:
                items = list(islice(self._snapshot, self._max_items))
                is_complete = len(items) < self._max_items
                if is_complete:
                    self._snapshot = None
            else:
                items = list(islice(self._pending, self._max_items))
                for item in items:
                    del self._pending[item]
            self._report = Report(
                self._worker,
                self._incarnation,
                self._epoch,
                self._number,
                tuple(self._runs(items)),
                is_complete,
                tuple(self._led),
                self._ended,
                room,
            )
            self._ended = ()
            self._is_urgent = False
        return self._report

    def take(self, reply: Reply) -> None:
        """A reply to the last report."""
        report, self._report = self._report, None
        if report is None:
            raise ValueError("a reply came without a report")
        match reply:
            case Accepted(not_leading):
                self._number += 1
                for request in not_leading:
                    self._led.pop(request, None)
            case SendAll(epoch):
                self._epoch = epoch
                self._number = 0
                self._pending = {}
                self._snapshot = iter(list(self._held))
                self._ended = report.ended + self._ended
            case Refused():
                self._ended = report.ended + self._ended

    def _runs(self, items: Sequence[Item]) -> Iterator[Run]:
        """The items as they are now, neighbours of one chain together."""
        hashes: list[bytes] = []
        begun: Run | None = None
        for item in items:
            (kind, (block_hash, restarts), tier), origin = item, self._held.get(item)
            tenant, parent = (origin.tenant, origin.parent) if origin else ("", None)
            run = Run(origin is not None, kind, tier, tenant, restarts, parent, ())
            if begun is not None:
                goes_on = not run.is_held or parent == hashes[-1]
                if goes_on and run._replace(parent=begun.parent) == begun:
                    hashes.append(block_hash)
                    continue
                yield begun._replace(hashes=tuple(hashes))
            begun, hashes = run, [block_hash]
        if begun is not None:
            yield begun._replace(hashes=tuple(hashes))
