"""How do tests run the real router over real workers and a real directory, all in one process?

Only the network is missing: engines run on hash machines, lanes are loopback, and the directory's
index is called where an actor would be.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

from hash_machine import GEOMETRY, HashMachine
from split_cluster import CONFIG, assert_idle

from ripresa.cluster.directory.events import Answer, Lookup, PlanByLoad, Receipt, Reply, Report
from ripresa.cluster.directory.index import DirectorySettings, PrefixIndex
from ripresa.cluster.directory.publisher import DirectoryPublisher
from ripresa.cluster.routing.prefix_hints import PrefixHints
from ripresa.cluster.routing.prompt import Hold, Placed, Planned, PromptRequest, RouterEvent, Waste
from ripresa.cluster.routing.router import ClusterRouter
from ripresa.cluster.routing.worker_load import PlannerSettings
from ripresa.cluster.worker_registry import SessionMoves
from ripresa.workers.address import WorkerAddress, WorkerKind
from ripresa.workers.cache.cache_events import Unkept
from ripresa.workers.config import EngineConfig
from ripresa.workers.decode_engine import DecodeEngine
from ripresa.workers.departure import Departure
from ripresa.workers.detached_calls import DetachedCalls
from ripresa.workers.encoder_engine import EncoderEngine
from ripresa.workers.errors import ErrorCode, RipresaError, Unavailable, Unreachable
from ripresa.workers.kept_streams import KeptPrompt, KeptStreams
from ripresa.workers.replay import Recipe, ReplayMode
from ripresa.workers.report import SessionMove, WorkerReport
from ripresa.workers.request import (
    EngineEvent,
    Failed,
    Finished,
    GenerationRequest,
    Tokens,
    WorkCounters,
)
from ripresa.workers.transfer.base import Peer
from ripresa.workers.transfer.loopback import LoopbackTransport
from ripresa.workers.worker_transfers import WorkerTransfers

W = GEOMETRY.window
INTERVAL = 4 * W
"""Anchors of mode canonical, for the router and for configurations that say so."""


class LocalDirectory:
    """The directory as gateway and workers see it, without an actor; implements `Directory`.

    Attributes:
        index: the real one; `restart` begins with an empty one.
        is_down: nothing is answered.
        receipts: what gateways told.
    """

    def __init__(self) -> None:
        self._incarnation = 0
        self._changed = asyncio.Event()
        self.is_down = False
        self.receipts: list[Receipt] = []
        self.restart()

    def restart(self) -> None:
        self._incarnation += 1
        # Claims do not lapse within a test, however slow its machine is.
        settings = DirectorySettings(window=W, late_s=30.0, lease_s=60.0, claim_s=30.0)
        self.index = PrefixIndex(settings, f"incarnation {self._incarnation}")

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def lookup_or_claim(
        self,
        hashes: Sequence[bytes],
        request: str,
        mode: ReplayMode = ReplayMode.BOUNDED,
        interval: int | None = None,
        gone: str | None = None,
    ) -> Answer | PlanByLoad:
        if self.is_down:
            return PlanByLoad("it is down")
        return self.index.lookup_or_claim(hashes, request, self._now, mode, interval, gone)

    async def lookup(self, hashes: Sequence[bytes]) -> Lookup | None:
        return None if self.is_down else self.index.lookup(hashes, self._now)

    async def leader(self, hashes: Sequence[bytes], request: str) -> tuple[str, int] | None:
        while self.index.is_claimed(request, self._now):
            found = self.index.leader(request, self._now)
            if found is not None:
                return found
            await self._changed.wait()
        return None

    def release(self, hashes: Sequence[bytes], request: str) -> None:
        self.index.release(request)
        self._tell()

    def receipt(self, receipt: Receipt) -> None:
        self.receipts.append(receipt)
        self.index.receipt(receipt, self._now)

    def lost(self, worker: str, incarnation: int) -> None:
        self.index.lost(worker, incarnation)
        self._tell()

    async def report(self, report: Report) -> Reply:
        """Take a worker's report; a `Send` of publishers."""
        if self.is_down:
            raise Unavailable("the directory is down")
        reply = self.index.report(report, self._now)
        self._tell()
        return reply

    async def find_keepers(
        self, worker: str, blocks: Sequence[Unkept]
    ) -> Sequence[WorkerAddress | None]:
        """Who should keep a worker's blocks; an `Ask` of publishers."""
        if self.is_down:
            raise Unavailable("the directory is down")
        return self.index.find_keepers(worker, blocks, self._now)

    async def changed(self) -> None:
        """Return after the next report."""
        await self._changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


@dataclass
class Worker:
    address: WorkerAddress
    machine: HashMachine
    transfers: WorkerTransfers
    engine: DecodeEngine | EncoderEngine
    publisher: DirectoryPublisher
    departure: Departure
    streams: KeptStreams | None = None
    calls: DetachedCalls = field(default_factory=DetachedCalls)


@dataclass
class Answered:
    """What one request's events say."""

    events: list[RouterEvent] = field(default_factory=list)

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(t for e in self.events if isinstance(e, Tokens) for t in e.token_ids)

    @property
    def placed(self) -> Placed:
        return next(e for e in self.events if isinstance(e, Placed))

    @property
    def planned(self) -> Placed | Planned:
        """The event that brought the recipe."""
        return next(
            e for e in self.events if isinstance(e, Placed | Planned) and e.recipe is not None
        )

    @property
    def recipe(self) -> Recipe:
        recipe = self.planned.recipe
        assert recipe is not None
        return recipe

    @property
    def finished(self) -> Finished:
        last = self.events[-1]
        assert isinstance(last, Finished), last
        return last


class GatewayCalls:
    """One gateway's way to the workers; implements `WorkerCalls`.

    Attributes:
        is_dead: its process was killed, or it is detached: its calls end, and it tells nobody.
    """

    def __init__(self, cluster: RoutedCluster) -> None:
        self._cluster = cluster
        self.is_dead = False

    def detach(self) -> None:
        self.is_dead = True

    async def generate(
        self, worker_id: str, request: GenerationRequest, local: bool, hold: Hold
    ) -> AsyncGenerator[EngineEvent]:
        reader, streams = uuid.uuid4().hex, self._streams(worker_id)
        is_over = False
        try:
            async with aclosing(streams.generate(request, local=local, reader=reader)) as events:
                async for event in events:
                    is_over |= isinstance(event, Finished | Failed)
                    yield event
        finally:
            if hold.ends_work and not is_over and not self.is_dead:
                streams.let_go(reader)

    async def prefill(
        self, worker_id: str, request: GenerationRequest, receiver: str, hold: Hold
    ) -> WorkCounters:
        worker, caller, is_over = self._cluster.worker(worker_id), uuid.uuid4().hex, False
        assert isinstance(worker.engine, EncoderEngine)
        try:
            work = worker.engine.prefill(request, receiver)
            counters = await worker.calls.run(caller, work)
            is_over = True
            return counters
        finally:
            if hold.ends_work and not is_over and not self.is_dead:
                worker.calls.let_go(caller)

    async def abort(self, worker_id: str, request_id: str) -> bool:
        return self._cluster.worker(worker_id).engine.abort(request_id)

    async def lease(self, worker_id: str, request_id: str, tools: tuple[str, ...]) -> bool:
        engine = self._cluster.worker(worker_id).engine
        assert isinstance(engine, DecodeEngine)
        return engine.lease(request_id, tools)

    async def end_session(self, worker_id: str, tenant_salt: bytes, session_id: str) -> None:
        engine = self._cluster.worker(worker_id).engine
        assert isinstance(engine, DecodeEngine)
        engine.end_session(tenant_salt, session_id)

    async def find_stream(self, worker_id: str, stream_id: str, choice: int) -> KeptPrompt | None:
        return self._streams(worker_id).find(stream_id, choice)

    async def resume(
        self, worker_id: str, stream_id: str, choice: int, hold: Hold
    ) -> AsyncGenerator[tuple[EngineEvent, ...]]:
        reader, streams = uuid.uuid4().hex, self._streams(worker_id)
        is_over = False
        try:
            async with aclosing(streams.resume(stream_id, choice, reader=reader)) as batches:
                async for batch in batches:
                    is_over |= any(isinstance(event, Finished | Failed) for event in batch)
                    yield batch
        finally:
            if hold.ends_work and not is_over and not self.is_dead:
                streams.let_go(reader)

    def _streams(self, worker_id: str) -> KeptStreams:
        streams = self._cluster.worker(worker_id).streams
        assert streams is not None
        return streams


class RoutedCluster:
    """Encoder workers e0.. and decode workers d0.. behind one router.

    It is the routers' view of workers.

    Attributes:
        calls, router: those of the first gateway.
        wasted: what the router says was computed in vain.
        busy: rows that workers say are queued, whatever they really have.
        moves: of sessions, away from workers that left.
    """

    def __init__(
        self,
        num_encoders: int,
        num_decoders: int,
        config: EngineConfig,
        num_blocks: int,
        settings: PlannerSettings,
        max_model_len: int,
    ) -> None:
        self.directory = LocalDirectory()
        self.moves = SessionMoves()
        self.sought = asyncio.Event()
        self.workers_by_id: dict[str, Worker] = {}
        self.dead: set[str] = set()
        self.busy: dict[str, int] = {}
        self._died = asyncio.Event()
        self._numbers = count()
        transport = LoopbackTransport(None)
        addresses = [WorkerAddress(f"e{k}", WorkerKind.ENCODER) for k in range(num_encoders)]
        addresses += [WorkerAddress(f"d{k}", WorkerKind.DECODE) for k in range(num_decoders)]
        for address in addresses:
            self._add(
                address,
                HashMachine(num_blocks, config.max_num_seqs, max_model_len),
                transport,
                config,
            )
        self.wasted: list[tuple[Waste, int]] = []
        self._settings = settings
        self.calls, self.router = self.gateway()

    def gateway(self) -> tuple[GatewayCalls, ClusterRouter]:
        """A gateway's own way to the workers, and its router."""
        hints = PrefixHints(self.directory, GEOMETRY, self._address, INTERVAL)
        calls = GatewayCalls(self)
        router = ClusterRouter(
            self, calls, hints, self._settings, on_waste=lambda *what: self.wasted.append(what)
        )
        return calls, router

    def _add(
        self,
        address: WorkerAddress,
        machine: HashMachine,
        transport: LoopbackTransport,
        config: EngineConfig,
    ) -> None:
        name = address.worker_id
        transfers = WorkerTransfers(address, self._resolve, transport)
        publisher = DirectoryPublisher(
            name,
            1,
            [self.directory.report],
            lambda lowest: publisher.restart(lowest),
            asks=[partial(self.directory.find_keepers, name)],
            interval_s=0.001,
            heartbeat_s=0.02,
        )
        engine: DecodeEngine | EncoderEngine
        if address.kind is WorkerKind.ENCODER:
            engine = EncoderEngine(
                name,
                machine,
                transfers.outbound,
                config,
                listener=publisher,
                peers=transfers.peers,
                find_keepers=publisher.find_keepers,
            )
            transfers.receive(engine.exchange)
        else:
            engine = DecodeEngine(
                name,
                machine,
                config,
                listener=publisher,
                peers=transfers.peers,
                find_keepers=publisher.find_keepers,
            )
            transfers.receive(engine.exchange, engine)
        publisher.advise(engine.advise)
        publisher.describe(engine.room)
        departure = engine.departure(
            address, self._adopt, self._tell, partial(self._has_other, name), lambda: None
        )
        streams = KeptStreams(engine) if isinstance(engine, DecodeEngine) else None
        self.workers_by_id[name] = Worker(
            address, machine, transfers, engine, publisher, departure, streams
        )

    async def _adopt(self, address: WorkerAddress, request: GenerationRequest) -> bool:
        engine = self.worker(address.worker_id).engine
        assert isinstance(engine, DecodeEngine)
        return await engine.adopt(request)

    async def _has_other(self, leaving: str) -> bool:
        self.sought.set()
        return any(
            worker.kind is WorkerKind.DECODE
            and worker.worker_id != leaving
            and not worker.is_leaving
            for worker in self.workers()
        )

    async def _tell(self, moves: Sequence[SessionMove]) -> None:
        self.moves.note(moves)

    # -- what the router asks for ------------------------------------------------------------

    def workers(self) -> tuple[WorkerReport, ...]:
        """Each look finds newer reports."""
        number = next(self._numbers)
        return tuple(
            WorkerReport(
                name,
                worker.address.kind,
                "node",
                1,
                1,
                replace(worker.engine.stats(), num_queued_rows=self.busy.get(name, 0)),
                worker.machine.layout_digest,
                100,
                100,
                100,
                100,
                state=worker.departure.state,
                number=number,
            )
            for name, worker in self.workers_by_id.items()
            if name not in self.dead
        )

    def age_s(self, worker_id: str) -> float:
        return 0.0

    def was_decoder(self, worker_id: str) -> bool:
        worker = self.workers_by_id.get(worker_id)
        return worker is not None and worker.address.kind is WorkerKind.DECODE

    async def refresh(self) -> None:
        return None

    async def changed(self) -> None:
        await self._died.wait()

    def lost(self, worker_id: str) -> None:
        return None

    async def session_move(self, tenant_salt: bytes, session_id: str) -> SessionMove | None:
        return self.moves.find(tenant_salt, session_id)

    async def gone(self, worker_id: str) -> None:
        while worker_id not in self.dead:
            await self._died.wait()

    # -- what tests do -----------------------------------------------------------------------

    async def ask(self, prompt: PromptRequest) -> Answered:
        answered = Answered()
        async with aclosing(self.router.generate(prompt)) as events:
            async for event in events:
                answered.events.append(event)
        return answered

    async def told(self) -> None:
        """Return when the directory, if it listens, knows all that the workers hold."""
        while not self.directory.is_down and any(
            worker.publisher.has_changes
            for name, worker in self.workers_by_id.items()
            if name not in self.dead
        ):
            await self.directory.changed()

    def rows(self) -> int:
        """Encoder rows that all workers have computed."""
        return sum(w.engine.stats().num_encoder_rows for w in self.workers_by_id.values())

    def evict_all(self) -> None:
        """Every cached block, window and parked state is gone."""
        for worker in self.workers_by_id.values():
            prefixes = worker.engine._core._prefixes
            prefixes.blocks.withdraw(lambda record: True)
            prefixes.windows.clear()
            prefixes.parked.clear()

    async def kill(self, name: str) -> None:
        """The worker's process ends; nobody hears from it again."""
        self.dead.add(name)
        self._died.set()
        self._died = asyncio.Event()
        worker = self.workers_by_id[name]
        await worker.publisher.stop()
        await worker.engine.stop()
        if worker.streams is not None:
            await worker.streams.close()
        await worker.transfers.close()
        for other in self.workers_by_id.values():
            if other is not worker:
                other.transfers.peer_lost(name)

    async def settle(self) -> None:
        """Nothing is left of any request on any worker or lane, nor in the router."""
        living = [w for name, w in self.workers_by_id.items() if name not in self.dead]
        for _ in range(2):
            for worker in living:
                await worker.transfers.drain()
        # A read that nobody waits for any more goes on to its end, and holds its blocks until then.
        loop = asyncio.get_running_loop()
        for worker in living:
            await loop.run_in_executor(worker.engine._core._thread, int)
        for worker in living:
            worker.transfers.check_integrity()
            if worker.streams is not None:
                worker.streams.check_integrity()
            assert_idle(worker.engine, worker.machine)
        self.router.check_integrity()

    async def start(self) -> None:
        for worker in self.workers_by_id.values():
            await worker.engine.start()
            await worker.publisher.start()

    async def stop(self) -> None:
        for worker in self.workers_by_id.values():
            await worker.departure.close()
        living = [w for name, w in self.workers_by_id.items() if name not in self.dead]
        for worker in living:
            await worker.publisher.stop()
            await worker.engine.stop()
            if worker.streams is not None:
                await worker.streams.close()
        for worker in living:
            await worker.transfers.close()

    def worker(self, name: str) -> Worker:
        if name in self.dead:
            raise Unreachable(f"worker {name} is gone")
        found = self.workers_by_id.get(name)
        if found is None:
            raise RipresaError(ErrorCode.INTERNAL, f"there is no worker {name}")
        return found

    def _resolve(self, address: WorkerAddress) -> Peer:
        if address.worker_id in self.dead or address.worker_id not in self.workers_by_id:
            raise Unavailable(f"worker {address.worker_id} is gone")
        return self.workers_by_id[address.worker_id].transfers

    def _address(self, name: str) -> WorkerAddress | None:
        if name in self.dead or name not in self.workers_by_id:
            return None
        return self.workers_by_id[name].address


@asynccontextmanager
async def routed_cluster(
    num_encoders: int = 0,
    num_decoders: int = 2,
    *,
    config: EngineConfig = CONFIG,
    num_blocks: int = 128,
    settings: PlannerSettings | None = None,
    max_model_len: int = 512,
) -> AsyncIterator[RoutedCluster]:
    """A running cluster that must be idle at the end, and after 150 s at the latest.

    Without settings, encoders prefill every prompt where there are any, and nothing costs time to
    bring, so that plans do not depend on how busy the test's machine is.
    """
    settings = settings or PlannerSettings(
        max_local_rows=0 if num_encoders else None, round_trip_s=0.0, bandwidth_bytes_per_s=1e15
    )
    cluster = RoutedCluster(num_encoders, num_decoders, config, num_blocks, settings, max_model_len)
    await cluster.start()
    async with asyncio.timeout(150):
        try:
            yield cluster
            await cluster.settle()
        finally:
            await cluster.stop()
