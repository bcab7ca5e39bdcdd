"""Which encoder windows does a worker keep, so that a hit can go on without a replay?

`swa@X` is the window rows of positions [X-W, X) of every encoder layer, as one payload: all or
nothing, of one lineage, and never of replayed rows. It is named by the block that ends at X.
"""

from __future__ import annotations

from collections import OrderedDict

import torch

from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.cache.cache_events import CacheListener, HeldKind, Origin, Tier, Unheard
from ripresa.workers.errors import ErrorCode, RipresaError

_MAX_REMEMBERED_MISSES = 4096


class WindowPool:
    """Windows in host memory; the least recently used ones make room.

    Args:
        capacity_bytes: most bytes of payloads; 0 keeps nothing.
        listener: hears of every window that comes or goes.
    """

    def __init__(self, capacity_bytes: int, listener: CacheListener | None = None) -> None:
        if capacity_bytes < 0:
            raise ValueError(f"a pool cannot hold {capacity_bytes} bytes")
        self._capacity_bytes = capacity_bytes
        self._listener: CacheListener = listener or Unheard()
        self._held: OrderedDict[BlockIdentity, torch.Tensor] = OrderedDict()
        self._tenants: dict[BlockIdentity, str] = {}
        self._missed: OrderedDict[BlockIdentity, None] = OrderedDict()
        self._num_bytes = 0
        self._num_hits = 0
        self._num_misses = 0

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, identity: object) -> bool:
        return identity in self._held

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def num_hits(self) -> int:
        """Windows that a request went on from."""
        return self._num_hits

    @property
    def num_misses(self) -> int:
        """Replays that a window would have spared."""
        return self._num_misses

    def put(self, identity: BlockIdentity, payload: torch.Tensor, origin: Origin) -> None:
        """Keep a window (uint8 [num_bytes]); the first one of an identity stays.

        One that is larger than the whole pool is not kept.
        """
        if identity in self._held:
            self._held.move_to_end(identity)
            return
        if payload.nbytes > self._capacity_bytes:
            return
        while self._num_bytes + payload.nbytes > self._capacity_bytes:
            gone, oldest = self._held.popitem(last=False)
            self._num_bytes -= oldest.nbytes
            del self._tenants[gone]
            self._listener.dropped(gone, HeldKind.WINDOW, Tier.HOST)
        self._held[identity] = payload
        self._tenants[identity] = origin.tenant
        self._num_bytes += payload.nbytes
        self._missed.pop(identity, None)
        self._listener.held(identity, origin, HeldKind.WINDOW, Tier.HOST)

    def take(self, identity: BlockIdentity) -> torch.Tensor:
        """The payload of a window that is held, which counts as used now.

        Raises:
            RipresaError: NOT_FOUND; it is gone since it was planned. Plan again.
        """
        payload = self._held.get(identity)
        if payload is None:
            raise RipresaError(ErrorCode.NOT_FOUND, "the planned window is not held; plan again")
        self._held.move_to_end(identity)
        self._num_hits += 1
        return payload

    def get(self, identity: BlockIdentity) -> torch.Tensor | None:
        """The payload of a window, for another worker; None if it is not held."""
        return self._held.get(identity)

    def miss(self, identity: BlockIdentity) -> None:
        """A request replayed for want of this window."""
        self._num_misses += 1
        self._missed[identity] = None
        if len(self._missed) > _MAX_REMEMBERED_MISSES:
            self._missed.popitem(last=False)

    def was_missed(self, identity: BlockIdentity) -> bool:
        """Whether two prompts parted here, and no window has been kept since."""
        return identity in self._missed

    def drop(self, identity: BlockIdentity) -> None:
        """Forget a window. Idempotent."""
        payload = self._held.pop(identity, None)
        if payload is not None:
            self._num_bytes -= payload.nbytes
            del self._tenants[identity]
            self._listener.dropped(identity, HeldKind.WINDOW, Tier.HOST)

    def drop_tenant(self, tenant: str) -> None:
        """Forget every window of a tenant (`tenant_digest`)."""
        for identity in [each for each, owner in self._tenants.items() if owner == tenant]:
            self.drop(identity)

    def clear(self) -> None:
        """Forget every window."""
        for identity in self._held:
            self._listener.dropped(identity, HeldKind.WINDOW, Tier.HOST)
        self._held.clear()
        self._tenants.clear()
        self._num_bytes = 0

    def check_integrity(self) -> None:
        """Raise RipresaError (INTERNAL) unless the bytes add up and fit."""
        num_bytes = sum(payload.nbytes for payload in self._held.values())
        if self._tenants.keys() != self._held.keys():
            raise RipresaError(ErrorCode.INTERNAL, "windows are held for no tenant, or for none")
        if num_bytes != self._num_bytes or num_bytes > self._capacity_bytes:
            raise RipresaError(
                ErrorCode.INTERNAL,
                f"the window pool counts {self._num_bytes} bytes, holds {num_bytes} and may hold "
                f"{self._capacity_bytes}",
            )
