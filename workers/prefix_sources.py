"""From which other workers can a request's cached prefix be brought? Plain values it carries.

       local cache ─▶ disk ─▶ peers                 tried in this order, before admission
    blocks 0 ........... first ═══════ stop ─ ─ ─ ─ ▶
      held here            └ a holder's    └ followed: sent as the leader completes them

All of it is a hint (invariant I20): a wrong or late one costs time, never a result. Pure values:
no torch, ray or clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from ripresa.workers.address import WorkerAddress


@dataclass(frozen=True, slots=True)
class BlockSource:
    """A worker that probably holds blocks [first, stop) of the prompt, in one lineage.

    Attributes:
        holder: whom to ask.
        restarts: lineage of the range's last block; every block of the chain up to it, from block
            0 on, has those of them that lie below its own end.
        first, stop: block numbers, half-open.
    """

    holder: WorkerAddress
    restarts: tuple[int, ...]
    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class WindowSource:
    """A worker that probably holds the native window `swa@boundary` of the prompt.

    Attributes:
        holder: whom to ask.
        restarts: lineage of the block that ends at `boundary`.
        boundary: position, a multiple of the window.
    """

    holder: WorkerAddress
    restarts: tuple[int, ...]
    boundary: int


@dataclass(frozen=True, slots=True)
class ImageSource:
    """A decode worker that probably keeps the parked state of the request's session.

    Attributes:
        holder: whom to ask.
        num_tokens: processed positions of the state, a true prefix of the prompt.
    """

    holder: WorkerAddress
    num_tokens: int


@dataclass(frozen=True, slots=True)
class LeaderSource:
    """A running request that computes blocks [first, stop) of the same prompt.

    Its worker sends them in order as they are committed and stops at the first that will not come
    (`PrefixOutcome.gone_at`). Its recipe decides their lineage.

    Attributes:
        holder: the worker that computes its encoder rows.
        request_id: the leader. The request's own id is allowed: a prefill that is taken over
            goes on from what the decode worker has received.
        first, stop: block numbers, half-open.
    """

    holder: WorkerAddress
    request_id: str
    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class PrefixSources:
    """Where the worker that plans the request may bring what it lacks from.

    Attributes:
        blocks: any order; several for one block are tried in this one.
        windows: brought only if the chain reaches them.
        leader: followed last; None for nobody.
        image: brought first; None for none.
    """

    blocks: tuple[BlockSource, ...] = ()
    windows: tuple[WindowSource, ...] = ()
    leader: LeaderSource | None = None
    image: ImageSource | None = None

    def __bool__(self) -> bool:
        """Whether there is anything to bring."""
        return bool(self.blocks or self.windows or self.leader or self.image)


class PullEnd(StrEnum):
    """How a pull ended.

    COMPLETE: everything came. SHORT: the holder had not all of it. REFUSED: the holder had nothing
    of it, or would not send it. UNREACHABLE: no way to the holder. LATE: nothing came for too long.
    FAILED: the transfer broke, was corrupt, or was no answer to the pull.
    """

    COMPLETE = "complete"
    SHORT = "short"
    REFUSED = "refused"
    UNREACHABLE = "unreachable"
    LATE = "late"
    FAILED = "failed"


class HitTier(StrEnum):
    """Where cached state of a prompt was when its request came.

    DEVICE: in the KV pages of the worker that computes it. HOST: in its host memory. PEER: in
    another worker. DISK: on its disk.
    """

    DEVICE = "device"
    HOST = "host"
    PEER = "peer"
    DISK = "disk"


class HitSegment(NamedTuple):
    """Tokens [first, stop) of a prompt, whose state was in one tier."""

    tier: HitTier
    first: int
    stop: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.first


@dataclass(frozen=True, slots=True)
class PrefixOutcome:
    """What became of a request's sources; all counts are blocks of its prompt.

    Attributes:
        num_planned: leading blocks that would be held if every source had kept its word.
        num_local: leading blocks that were held before anything was brought.
        num_held: leading blocks of one lineage that were held when the request was planned.
        from_peers, from_disk: ranges [first, stop) of blocks that were brought, ascending.
        num_windows_from_peers: windows brought.
        missing_windows: planned windows that were not there, each by the number of blocks before
            it.
        gone_at: first followed block that did not come; None if nobody was followed, or all came.
        has_image: the session's parked state was brought from another worker.
    """

    num_planned: int = 0
    num_local: int = 0
    num_held: int = 0
    from_peers: tuple[tuple[int, int], ...] = ()
    from_disk: tuple[tuple[int, int], ...] = ()
    num_windows_from_peers: int = 0
    missing_windows: tuple[int, ...] = ()
    gone_at: int | None = None
    has_image: bool = False

    @property
    def num_from_peers(self) -> int:
        return sum(stop - first for first, stop in self.from_peers)

    @property
    def num_from_disk(self) -> int:
        return sum(stop - first for first, stop in self.from_disk)

    def segments(self, start: int, window: int, *, is_resumed: bool) -> tuple[HitSegment, ...]:
        """Where the state of the skipped tokens [0, start) was, ascending and without a gap.

        Args:
            start: of the recipe.
            window: W.
            is_resumed: the request goes on from a session's parked state, which is what is known
                of the tokens behind the last whole block.
        """
        stop = start // window * window if is_resumed else start
        brought = [(first, end, HitTier.PEER) for first, end in self.from_peers]
        brought += [(first, end, HitTier.DISK) for first, end in self.from_disk]
        segments: list[HitSegment] = []
        reached = 0
        for first_block, end_block, tier in sorted(brought):
            first, end = min(stop, first_block * window), min(stop, end_block * window)
            segments.append(HitSegment(HitTier.DEVICE, reached, first))
            segments.append(HitSegment(tier, first, end))
            reached = end
        segments.append(HitSegment(HitTier.DEVICE, reached, stop))
        parked_in = HitTier.PEER if self.has_image else HitTier.HOST
        segments.append(HitSegment(parked_in, stop, start))
        return tuple(segment for segment in segments if segment.first < segment.stop)
