"""How do tests run workers whose caches reach each other? Over hash machines, in one process."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from hash_machine import HashMachine
from split_cluster import CONFIG, Stream, assert_idle

from ripresa.workers.address import WorkerAddress, WorkerKind
from ripresa.workers.cache.cache_events import CacheListener
from ripresa.workers.config import EngineConfig
from ripresa.workers.decode_engine import DecodeEngine
from ripresa.workers.encoder_engine import EncoderEngine
from ripresa.workers.errors import Unavailable
from ripresa.workers.prefix_sources import PrefixOutcome, PrefixSources
from ripresa.workers.request import GenerationRequest, RecipeFixed, Reserved, WorkCounters
from ripresa.workers.transfer.base import LaneConfig, Peer, Pull, Transport
from ripresa.workers.transfer.faults import Fault, FaultyPeer
from ripresa.workers.transfer.loopback import LoopbackTransport
from ripresa.workers.transfer.registry import create_transport
from ripresa.workers.worker_transfers import WorkerTransfers


def outcome_of(stream: Stream) -> PrefixOutcome:
    """What the worker that ran the encoder rows says that it brought."""
    fixed = [event for event in stream.events if isinstance(event, RecipeFixed)]
    reserved = [event for event in stream.events if isinstance(event, Reserved)]
    return (fixed or reserved)[0].prefix


async def turns_until(condition: Callable[[], bool]) -> None:
    """Let the event loop turn until something holds; a test's own limit ends it otherwise."""
    for _ in itertools.count():
        if condition():
            return
        await asyncio.sleep(0)


@dataclass
class PeerWorker:
    """One worker with both directions of its transfers.

    Attributes:
        way: how the others reach it; its faults are counted over all their messages.
    """

    address: WorkerAddress
    machine: HashMachine
    transfers: WorkerTransfers
    engine: DecodeEngine | EncoderEngine
    way: FaultyPeer = field(init=False)

    def __post_init__(self) -> None:
        self.way = FaultyPeer(self.transfers, {})

    def is_unused(self) -> bool:
        stats = self.engine.stats()
        return stats.num_free_blocks == stats.num_blocks and not self.machine.num_live_slots


class PeerCluster:
    """Encoder workers e0.. and decode workers d0.. .

    Args:
        transport: loopback, or gloo, which crosses sockets.
        layouts: layout digests of workers whose layout differs.
        listener: makes of a worker's name what hears of its cache; None for nobody.
        num_drafts: see `HashMachine`.
    """

    def __init__(
        self,
        num_encoders: int,
        num_decoders: int,
        config: EngineConfig,
        num_blocks: int,
        lanes: LaneConfig | None,
        transport: str,
        layouts: Mapping[str, bytes],
        listener: Callable[[str], CacheListener | None],
        num_drafts: int,
    ) -> None:
        self.loopback = LoopbackTransport(lanes)
        self._transport_name = transport
        self._lanes = lanes
        self.workers: dict[str, PeerWorker] = {}
        kinds = [(f"e{k}", WorkerKind.ENCODER) for k in range(num_encoders)]
        kinds += [(f"d{k}", WorkerKind.DECODE) for k in range(num_decoders)]
        for name, kind in kinds:
            machine = HashMachine(num_blocks, config.max_num_seqs, num_drafts=num_drafts)
            machine.layout_digest = layouts.get(name, machine.layout_digest)
            address = WorkerAddress(name, kind)
            resolve = partial(self._resolve, name)
            transfers = WorkerTransfers(address, resolve, self._transport(), lanes)
            engine: DecodeEngine | EncoderEngine
            if kind is WorkerKind.ENCODER:
                engine = EncoderEngine(
                    name,
                    machine,
                    transfers.outbound,
                    config,
                    listener=listener(name),
                    peers=transfers.peers,
                )
                transfers.receive(engine.exchange)
            else:
                engine = DecodeEngine(
                    name, machine, config, listener=listener(name), peers=transfers.peers
                )
                transfers.receive(engine.exchange, engine)
            self.workers[name] = PeerWorker(address, machine, transfers, engine)
        self.dead: set[str] = set()

    def _transport(self) -> Transport:
        if self._transport_name == "loopback":
            return self.loopback
        cpu = torch.device("cpu")
        return create_transport(self._transport_name, "127.0.0.1", cpu, self._lanes)

    def _resolve(self, caller: str, address: WorkerAddress) -> Peer:
        worker = self.workers.get(address.worker_id)
        is_dead = bool(self.dead & {caller, address.worker_id})
        if worker is None or worker.address != address or is_dead:
            raise Unavailable(f"worker {address.worker_id} is gone")
        return worker.way

    def address(self, name: str) -> WorkerAddress:
        return self.workers[name].address

    def decoder(self, name: str) -> DecodeEngine:
        engine = self.workers[name].engine
        assert isinstance(engine, DecodeEngine)
        return engine

    def encoder(self, name: str) -> EncoderEngine:
        engine = self.workers[name].engine
        assert isinstance(engine, EncoderEngine)
        return engine

    def fault(self, name: str, faults: Mapping[int, Fault]) -> None:
        """From now on the n-th message to a worker, from 0, meets a fault."""
        worker = self.workers[name]
        worker.way = FaultyPeer(worker.transfers, faults)

    def kill(self, name: str) -> None:
        """No message reaches or leaves the worker any more, and nobody waits for it."""
        self.dead.add(name)
        for other, worker in self.workers.items():
            if other != name:
                worker.transfers.peer_lost(name)
                self.workers[name].transfers.peer_lost(other)

    def was_asked(self, name: str) -> bool:
        """Whether a pull has reached a worker."""
        return any(isinstance(message, Pull) for message in self.workers[name].way.delivered)

    def ends(self, name: str) -> dict[str, int]:
        """How the pulls of a worker ended."""
        return dict(self.workers[name].engine.stats().pulls.ends)

    async def run(self, name: str, request: GenerationRequest, encoder: str = "") -> Stream:
        """A request's whole stream on a decode worker, its prefill there or on an encoder.

        Raises what the encoder raised.
        """
        events = []
        prefill: asyncio.Task[WorkCounters] | None = None
        # Sources are those of the worker that plans the encoder rows.
        reserved = replace(request, sources=PrefixSources()) if encoder else request
        stream = self.decoder(name).generate(reserved, local=not encoder)
        try:
            async for event in stream:
                events.append(event)
                if isinstance(event, Reserved) and encoder:
                    work = self.encoder(encoder).prefill(request, name)
                    prefill = asyncio.create_task(work)
                    prefill.add_done_callback(partial(self._abort_without_prefill, name, request))
        except BaseException:
            if prefill is not None:
                prefill.cancel()
            raise
        finally:
            if prefill is not None:
                await asyncio.gather(prefill, return_exceptions=True)
            await stream.aclose()
        if prefill is not None:
            prefill.result()
        return Stream(tuple(events))

    def _abort_without_prefill(
        self, name: str, request: GenerationRequest, prefill: asyncio.Task[WorkCounters]
    ) -> None:
        if prefill.cancelled() or prefill.exception() is not None:
            self.decoder(name).abort(request.request_id)

    async def compute(self, name: str, request: GenerationRequest) -> Stream:
        """Run a request so that worker `name` computes its encoder rows."""
        if self.workers[name].address.kind is WorkerKind.DECODE:
            return await self.run(name, request)
        helper = next(n for n, w in self.workers.items() if w.address.kind is WorkerKind.DECODE)
        return await self.run(helper, request, name)

    async def settle(self) -> None:
        """Nothing is left of any request on any worker or lane."""
        for worker in self.workers.values():
            await worker.transfers.drain()
        for worker in self.workers.values():
            await worker.transfers.drain()
            # A step or an export that was under way when its request ended is over by then.
            await turns_until(worker.is_unused)
            worker.transfers.check_integrity()
            assert_idle(worker.engine, worker.machine)

    async def start(self) -> None:
        for worker in self.workers.values():
            await worker.engine.start()

    async def stop(self) -> None:
        for worker in self.workers.values():
            await worker.engine.stop()
        for worker in self.workers.values():
            await worker.transfers.close()


@asynccontextmanager
async def peer_cluster(
    num_encoders: int = 0,
    num_decoders: int = 2,
    *,
    config: EngineConfig = CONFIG,
    num_blocks: int = 64,
    lanes: LaneConfig | None = None,
    transport: str = "loopback",
    layouts: Mapping[str, bytes] | None = None,
    listener: Callable[[str], CacheListener | None] = lambda name: None,
    num_drafts: int = 0,
) -> AsyncIterator[PeerCluster]:
    """A running cluster that must be idle at the end, and after 150 s at the latest."""
    cluster = PeerCluster(
        num_encoders,
        num_decoders,
        config,
        num_blocks,
        lanes,
        transport,
        layouts or {},
        listener,
        num_drafts,
    )
    await cluster.start()
    async with asyncio.timeout(150):
        try:
            yield cluster
            await cluster.settle()
        finally:
            await cluster.stop()
