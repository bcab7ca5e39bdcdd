"""What does a worker need of a place that keeps block KV when its memory does not?

Block KV alone: windows and parked states have no way in. A store is soft state: a block that it
lost, or cannot vouch for, is not there. Identities carry the tenant's salt inside their hashes, so
tenants share nothing in a store either.

`DiskStore` implements it over a directory; an object store can do so as well. `WriteBehind` keeps
either of them off the request path.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from threading import Lock
from typing import Protocol

from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.cache.block_record import BlockRecord


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block with where it comes from.

    Attributes:
        record: identity, producer, weights, rules version.
        payload: the block as the runner's `export_blocks` makes it.
    """

    record: BlockRecord
    payload: bytes


class BlockStore(Protocol):
    """Blocks by identity. Calls block, and come from several threads at once."""

    def contains(self, identity: BlockIdentity) -> bool:
        """Whether `get` would probably find it. Cheap: nothing is read or verified."""

    def get(self, identity: BlockIdentity) -> StoredBlock | None:
        """The block, verified byte by byte, or None. Never raises: what is bad is not there."""

    def put(self, block: StoredBlock, used_at: float) -> None:
        """Keep a block; the first one of an identity stays.

        Args:
            used_at: seconds since the epoch, by which the least recently used block makes room.

        One that could never be kept is counted and forgotten.

        Raises:
            RipresaError: UNAVAILABLE; nothing can be kept now. Nothing is half kept.
        """

    def touch(self, identity: BlockIdentity, used_at: float) -> bool:
        """Note a use of a block; False if it is not held."""

    def forget(self, tenant: str | None) -> int:
        """Remove a tenant's blocks (`tenant_digest`; None for everybody's); how many went.

        Raises:
            RipresaError: UNAVAILABLE; the store cannot be reached.
        """

    def maintain(self) -> None:
        """Remove what is too old or too much; called now and then, never on the request path.

        Raises:
            RipresaError: UNAVAILABLE; the store cannot be reached.
        """

    def stats(self) -> StoreStats: ...


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What one process has done with its store so far; plain numbers that a report carries.

    Attributes:
        hits, misses: blocks asked for and found, or not. A bad one is a miss as well.
        bad: blocks found damaged or mislabelled, and removed.
        written, known: blocks offered and kept, or held already.
        dropped: blocks offered and not kept: the queue was full, or the store unavailable.
        failures: writes and clean-ups that the store refused.
        evicted: blocks removed for lack of room, or for their age.
        bytes_read, bytes_written: of whole entries.
        num_bytes: held by all processes, as far as this one knows.
    """

    hits: int = 0
    misses: int = 0
    bad: int = 0
    written: int = 0
    known: int = 0
    dropped: int = 0
    failures: int = 0
    evicted: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    num_bytes: int = 0


class StoreCounters:
    """`StoreStats` under way, counted by several threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._counts = {field.name: 0 for field in fields(StoreStats)}

    def add(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                self._counts[name] += count

    def set_num_bytes(self, num_bytes: int) -> None:
        with self._lock:
            self._counts["num_bytes"] = num_bytes

    def snapshot(self) -> StoreStats:
        with self._lock:
            return StoreStats(**self._counts)
