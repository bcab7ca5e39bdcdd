"""How does one worker send and receive? Both directions of its transfers, over one transport."""

from __future__ import annotations

from collections.abc import Callable

from ripresa.workers.address import WorkerAddress
from ripresa.workers.prefix_exchange import PrefixExchange
from ripresa.workers.prefix_pulls import PeerAccess
from ripresa.workers.transfer.base import (
    Accept,
    ControlMessage,
    LaneConfig,
    Manifest,
    Peer,
    Sink,
    Transport,
)
from ripresa.workers.transfer.inbound import InboundTransfers
from ripresa.workers.transfer.outbound import OutboundTransfers


class WorkerTransfers:
    """Everything that goes to and comes from other workers. Used on one event loop.

    Make it, then the engine with its `peers`, then call `receive`.

    Args:
        own: this worker.
        resolve: the control way to another worker.
        transport: makes the lanes of both directions; closed with this object.
        lanes: limits and timeouts.

    Attributes:
        outbound: what is sent.
        peers: for the engine.
    """

    def __init__(
        self,
        own: WorkerAddress,
        resolve: Callable[[WorkerAddress], Peer],
        transport: Transport,
        lanes: LaneConfig | None = None,
    ) -> None:
        self._transport = transport
        self._lanes = lanes or LaneConfig()
        self.outbound = OutboundTransfers(own.worker_id, resolve, transport, self._lanes)
        self.peers = PeerAccess(own, self.outbound, resolve, self._lanes.control_timeout_s)
        self._exchange: PrefixExchange | None = None
        self._inbound: InboundTransfers | None = None

    def receive(self, exchange: PrefixExchange, hand_overs: Sink[Manifest] | None = None) -> None:
        """Take pulls and their answers, and prompts' states if `hand_overs` is given."""
        self._exchange = exchange
        sink = exchange.sink(hand_overs)
        self._inbound = InboundTransfers(sink, self._transport, self._lanes, exchange.serve)
        exchange.connect(self._inbound.abandon)

    @property
    def inbound(self) -> InboundTransfers:
        """What arrives."""
        assert self._inbound is not None, "call receive first"
        return self._inbound

    async def deliver(self, message: ControlMessage) -> Accept | None:
        """Take one control message; see `Peer`."""
        return await self.inbound.deliver(message)

    def peer_lost(self, worker_id: str) -> None:
        """A worker died: what it sends and receives fails now."""
        assert self._exchange is not None, "call receive first"
        self.outbound.peer_lost(worker_id)
        self.inbound.peer_lost(worker_id)
        self._exchange.peer_lost(worker_id)

    async def drain(self) -> None:
        """Wait until what ended has also let go of its threads, sockets and messages."""
        assert self._exchange is not None, "call receive first"
        await self._exchange.drain()
        await self.outbound.drain()
        await self.inbound.drain()

    def check_integrity(self) -> None:
        """Raise RipresaError (INTERNAL) if anything is left; call when idle and drained."""
        self.outbound.check_integrity()
        self.inbound.check_integrity()

    async def close(self) -> None:
        """Fail what runs, close every lane; after the engine has stopped. Idempotent."""
        await self.outbound.close()
        await self.inbound.close()
