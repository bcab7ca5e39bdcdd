"""Who computes a missing block, so that everybody else waits for it instead of computing it too?

    A: blocks 0..9 missing ──▶ Lead(0, 10)         claims of A: 0 1 2 3 4 5 6 7 8 9
    B: shares the first 4  ──▶ Follow(A, 0, 4)                  ✓ ✓        computed: no claim
    A cancels or falls silent for a second: its claims are free; B, who hears `gone at 2`, calls
    again and leads from 2.

A request leads or follows, never both: asking again gives up what it led before. So nobody waits
while others wait for it. Pure: time is an argument.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ripresa.cluster.directory.chains import may_serve
from ripresa.cluster.directory.events import Follow, Lead, Lineage
from ripresa.workers.replay import ReplayMode

Flavour = tuple[ReplayMode, int | None]
"""Mode and anchor interval: requests of another flavour may not be able to use the blocks."""


class _Claim:
    """What one request computes.

    Attributes:
        expires_at: nobody follows it from then on, unless it is confirmed before.
    """

    __slots__ = ("expires_at", "flavour", "hashes", "incarnation", "request", "worker")

    def __init__(
        self, request: str, flavour: Flavour, hashes: Sequence[bytes], expires_at: float
    ) -> None:
        self.request = request
        self.flavour = flavour
        self.hashes = hashes
        self.expires_at = expires_at
        self.worker: str | None = None
        self.incarnation: int | None = None


class SingleFlight:
    """Claims by request and by missing block.

    Args:
        claim_s: seconds that a claim holds after it was made or confirmed.
        max_blocks: blocks in all claims together; beyond, requests go uncoordinated.
    """

    def __init__(self, claim_s: float, max_blocks: int) -> None:
        if claim_s <= 0:
            raise ValueError(f"claim_s must be positive, got {claim_s}")
        self._claim_s = claim_s
        self._max_blocks = max_blocks
        self._num_blocks = 0
        self._by_request: dict[str, _Claim] = {}
        self._by_block: dict[Flavour, dict[bytes, _Claim]] = {}
        self._expiry_check_at = float("-inf")

    def __len__(self) -> int:
        return len(self._by_request)

    def __iter__(self) -> Iterator[str]:
        """Requests that hold claims, some perhaps expired."""
        return iter(self._by_request)

    @property
    def num_blocks(self) -> int:
        """Blocks on the books of all claims."""
        return self._num_blocks

    def enter(
        self, hashes: Sequence[bytes], first: int, request: str, flavour: Flavour, now: float
    ) -> Lead | Follow | None:
        """Lead from block `first`, the first missing one, or follow who leads it already.

        Args:
            request: unique in the cluster.

        Returns:
            None if nothing is missing, or if there are too many claims to keep another one.
        """
        self.release(request)
        if first >= len(hashes):
            return None
        self.expire(now)
        claims = self._by_block.get(flavour, {})
        leader = claims.get(hashes[first])
        stop = first + 1
        if leader is not None:
            while stop < len(hashes) and claims.get(hashes[stop]) is leader:
                stop += 1
            return Follow(leader.request, first, stop, leader.worker, leader.incarnation)
        while stop < len(hashes) and hashes[stop] not in claims:
            stop += 1
        missing = hashes[first:stop]
        if self._num_blocks + len(missing) > self._max_blocks:
            return None
        claim = _Claim(request, flavour, missing, now + self._claim_s)
        self._by_request[request] = claim
        self._by_block.setdefault(flavour, {}).update(dict.fromkeys(missing, claim))
        self._num_blocks += len(missing)
        return Lead(first, stop, self._claim_s)

    def confirm(self, request: str, worker: str, incarnation: int, now: float) -> bool:
        """The leader's worker is computing; whether the request (still) holds a claim."""
        claim = self._by_request.get(request)
        if claim is None:
            return False
        if claim.expires_at <= now:
            self._drop(claim)
            return False
        claim.worker, claim.incarnation = worker, incarnation
        claim.expires_at = now + self._claim_s
        return True

    def is_claimed(self, request: str, now: float) -> bool:
        """Whether the request leads."""
        claim = self._by_request.get(request)
        return claim is not None and claim.expires_at > now

    def leader(self, request: str, now: float) -> tuple[str, int] | None:
        """Worker and incarnation that compute for a request that leads; None before it is told."""
        claim = self._by_request.get(request)
        if claim is None or claim.expires_at <= now:
            return None
        if claim.worker is None or claim.incarnation is None:
            return None
        return claim.worker, claim.incarnation

    def computed(self, block_hash: bytes, restarts: Lineage) -> None:
        """A block is there: nobody computes it any more."""
        for flavour, claims in self._by_block.items():
            if block_hash in claims and may_serve(restarts, *flavour):
                del claims[block_hash]

    def release(self, request: str) -> None:
        """The request leads no more: done, cancelled, or never begun. Idempotent."""
        claim = self._by_request.get(request)
        if claim is not None:
            self._drop(claim)

    def release_worker(self, worker: str, incarnation: int) -> None:
        """What this incarnation of a worker was computing will not come."""
        lost = [
            claim
            for claim in self._by_request.values()
            if claim.worker == worker and claim.incarnation == incarnation
        ]
        for claim in lost:
            self._drop(claim)

    def expire(self, now: float) -> None:
        """Free the claims that nobody confirmed in time."""
        if now < self._expiry_check_at:
            return
        for claim in [c for c in self._by_request.values() if c.expires_at <= now]:
            self._drop(claim)
        # Claims made or confirmed later expire later than this.
        self._expiry_check_at = min(
            (claim.expires_at for claim in self._by_request.values()),
            default=now + self._claim_s,
        )

    def _drop(self, claim: _Claim) -> None:
        del self._by_request[claim.request]
        claims = self._by_block.get(claim.flavour, {})
        for block_hash in claim.hashes:
            if claims.get(block_hash) is claim:
                del claims[block_hash]
        if not claims:
            self._by_block.pop(claim.flavour, None)
        self._num_blocks -= len(claim.hashes)
