"""What does a worker exchange with its peers' caches, both ways? One object an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ripresa.workers.block_moves import (
    BlockGiving,
    BlockKeeping,
    Store,
    Stored,
    stored_nowhere,
)
from ripresa.workers.cache.block_table import PagePool
from ripresa.workers.cache.cache_events import FindKeepers
from ripresa.workers.config import MoveConfig, TransferConfig
from ripresa.workers.errors import ErrorCode, RipresaError
from ripresa.workers.models.base import ModelRunner
from ripresa.workers.prefix_cache import PrefixCache
from ripresa.workers.prefix_place import PrefixPlace
from ripresa.workers.prefix_pulls import PeerAccess, PeerPulls
from ripresa.workers.prefix_serving import LiveState, PrefixServing
from ripresa.workers.prefix_supply import PrefixSupply
from ripresa.workers.request import MoveCounters, PullCounters
from ripresa.workers.transfer.base import AnyManifest, EndPull, Manifest, Pull, Sink
from ripresa.workers.transfer.sinks import SinkByManifest


class PrefixExchange:
    """Brings cached state before requests are admitted, sends what others pull, moves last copies.

    Args:
        prefixes, pages: the worker's local cache.
        runner: stores payloads.
        config: limits and timeouts.
        clock: seconds since the epoch.
        live: what the engine runs.
        peers: the way to other workers; None for a worker that reaches none.
        places: where else cached blocks are, before peers are asked.
        moves: how last copies go to other workers.
        find_keepers: asks who should keep them; None if nobody knows.
        stored: which blocks need no other worker; None if they all do.
        store: keeps beyond memory what others had to evict.

    Attributes:
        supply: what is brought for requests.
        keeping: what comes in unasked.
        giving: what other workers keep instead of this one; None for a worker that reaches none.
    """

    def __init__(
        self,
        prefixes: PrefixCache,
        pages: PagePool,
        runner: ModelRunner,
        config: TransferConfig,
        clock: Callable[[], float],
        live: LiveState,
        peers: PeerAccess | None,
        places: Sequence[PrefixPlace] = (),
        moves: MoveConfig | None = None,
        find_keepers: FindKeepers | None = None,
        stored: Stored | None = None,
        store: Store = stored_nowhere,
    ) -> None:
        self._pulls = None if peers is None else PeerPulls(peers, runner)
        self._serving = None if peers is None else PrefixServing(prefixes, live, peers, config)
        self.keeping = BlockKeeping(prefixes.blocks, pages, runner, store)
        self.giving = (
            None
            if peers is None
            else BlockGiving(
                peers.own.worker_id,
                prefixes.blocks,
                pages.num_blocks,
                peers.backend,
                runner,
                moves or MoveConfig(),
                live,
                find_keepers,
                stored,
            )
        )
        self.supply = PrefixSupply(
            pages,
            prefixes,
            runner,
            config,
            clock,
            places=places,
            pulls=self._pulls,
            own=None if peers is None else peers.own,
            leader=live.leader,
        )

    def sink(self, hand_overs: Sink[Manifest] | None = None) -> Sink[AnyManifest]:
        """Where a worker's inbound transfers go.

        Args:
            hand_overs: takes prompts' states.

        Raises RipresaError (FAILED_PRECONDITION) for a worker without peers.
        """
        if self._pulls is None:
            raise RipresaError(ErrorCode.FAILED_PRECONDITION, "this worker was given no peers")
        return SinkByManifest(self._pulls, self.keeping, hand_overs)

    def connect(self, abandon: Callable[[str, str], None]) -> None:
        """See `PeerPulls.connect`."""
        if self._pulls is not None:
            self._pulls.connect(abandon)

    def serve(self, message: Pull | EndPull) -> None:
        """See `PrefixServing.serve`."""
        if self._serving is None:
            raise RipresaError(ErrorCode.NOT_FOUND, "this worker sends no cached blocks")
        self._serving.serve(message)

    def peer_lost(self, worker_id: str) -> None:
        """See `PeerPulls.peer_lost`."""
        if self._pulls is not None:
            self._pulls.peer_lost(worker_id)

    @property
    def counters(self) -> PullCounters:
        """What was pulled and sent so far."""
        if self._pulls is None or self._serving is None:
            return PullCounters()
        return PullCounters(
            ends=tuple(sorted((str(end), count) for end, count in self._pulls.ends.items())),
            received_bytes=self._pulls.num_bytes,
            num_served=self._serving.num_served,
            sent_bytes=self._serving.num_bytes,
        )

    @property
    def move_counters(self) -> MoveCounters:
        """What became of last copies so far."""
        giving = self.giving
        if giving is None:
            return MoveCounters()
        return MoveCounters(
            num_moved=giving.num_moved,
            num_refused=giving.num_refused,
            num_late=giving.num_late,
            num_taken=self.keeping.num_taken,
            sent_bytes=giving.num_bytes,
        )

    async def drain(self) -> None:
        """Wait until pulls that are answered, and words that none is wanted, have ended."""
        if self._pulls is not None and self._serving is not None:
            await self._pulls.drain()
            await self._serving.drain()
        if self.giving is not None:
            await self.giving.drain()

    async def close(self, error: RipresaError) -> None:
        """Give up what is brought, by `error`, and what is sent. Idempotent."""
        if self.giving is not None:
            await self.giving.close()
        self.supply.abort_all(error)
        await self.supply.ended()
        if self._serving is not None:
            await self._serving.close()
        await self.drain()

    def check_integrity(self) -> None:
        """Raise RipresaError (INTERNAL) if anything is under way for nobody."""
        self.supply.check_integrity()
        if self._pulls is not None:
            self._pulls.check_integrity(self.supply.num_holds)
