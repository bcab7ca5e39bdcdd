"""The DecodeWorker deployment: a decode engine in a Serve replica."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from ray.serve.handle import DeploymentHandle

from ripresa.workers.address import WorkerAddress, WorkerKind
from ripresa.workers.cache.cache_events import AnnouncerFactory, unheard
from ripresa.workers.collector import spare_startup
from ripresa.workers.decode_engine import DecodeEngine
from ripresa.workers.kept_streams import KeptPrompt, KeptStreams
from ripresa.workers.models.deepseek_v41.weights import Half
from ripresa.workers.remote_peers import RemotePeers
from ripresa.workers.remote_worker import (
    ask_for_other,
    own_identity,
    report_to,
    require_target,
    tell_moves_to,
)
from ripresa.workers.replay_shadow import open_replay_shadow
from ripresa.workers.report import Heartbeat, WorkerReport
from ripresa.workers.request import EngineEvent, GenerationRequest
from ripresa.workers.served_worker import ServedWorker
from ripresa.workers.shadow_samples import ServedSamples
from ripresa.workers.worker_process import start_runner, start_transport
from ripresa.workers.worker_settings import WorkerSettings
from ripresa.workers.worker_transfers import WorkerTransfers


class DecodeWorker(ServedWorker[DecodeEngine]):
    """Streams tokens with the whole model, after its own prefill or a handed-over one.

    Args:
        settings: this worker's settings.
        controller: where reports go.
        announcer: makes what tells others of this worker's cache.
    """

    _kind = WorkerKind.DECODE

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        settings: WorkerSettings,
        controller: DeploymentHandle[Any],
        announcer: AnnouncerFactory = unheard,
    ) -> None:
        self._worker_id, self._node_id = own_identity()
        self._announcer = await announcer(self._worker_id)
        self._runner = await start_runner(settings, Half.ALL)
        own = WorkerAddress(self._worker_id, self._kind)
        others = RemotePeers()
        samples = ServedSamples(settings.engine.shadow, time.time)
        self._transfers = WorkerTransfers(
            own,
            others.resolve,
            start_transport(settings),
            settings.lanes,
        )
        self._engine = DecodeEngine(
            self._worker_id,
            self._runner,
            settings.engine,
            listener=self._announcer,
            peers=self._transfers.peers,
            find_keepers=self._announcer.find_keepers,
            samples=samples,
        )
        self._shadow = open_replay_shadow(self._engine, samples, self._runner, settings.engine)
        self._streams = KeptStreams(
            self._engine, settings.keep_streams_s, settings.kept_streams_bytes
        )
        self._transfers.receive(self._engine.exchange, self._engine)
        self._announcer.advise(self._engine.advise)
        self._announcer.describe(self._engine.room)
        self._heartbeat = Heartbeat(
            self._report, report_to(controller), settings.heartbeat_interval_s
        )
        self._departure = self._engine.departure(
            own,
            others.adopt,
            tell_moves_to(controller),
            ask_for_other(controller, self._worker_id),
            self._heartbeat.soon,
        )
        await self._announcer.start()
        await self._engine.start()
        if self._shadow is not None:
            await self._shadow.start()
        await self._heartbeat.start()
        spare_startup()

    async def generate(
        self, request: GenerationRequest, local: bool, reader: str, *, worker_id: str
    ) -> AsyncGenerator[EngineEvent]:
        """See `KeptStreams.generate`."""
        require_target(self._worker_id, worker_id)
        stream = self._streams.generate(request, local=local, reader=reader)
        async with aclosing(stream) as events:
            async for event in events:
                yield event

    async def find_stream(
        self, stream_id: str, choice: int, *, worker_id: str
    ) -> KeptPrompt | None:
        """See `KeptStreams.find`."""
        require_target(self._worker_id, worker_id)
        return self._streams.find(stream_id, choice)

    async def resume(
        self, stream_id: str, choice: int, reader: str, *, worker_id: str
    ) -> AsyncGenerator[tuple[EngineEvent, ...]]:
        """See `KeptStreams.resume`."""
        require_target(self._worker_id, worker_id)
        stream = self._streams.resume(stream_id, choice, reader=reader)
        async with aclosing(stream) as batches:
            async for batch in batches:
                yield batch

    async def let_go(self, reader: str, *, worker_id: str) -> None:
        """See `KeptStreams.let_go`; a worker that is gone has let go of everything."""
        if worker_id == self._worker_id:
            self._streams.let_go(reader)

    async def abort(self, request_id: str, *, worker_id: str) -> bool:
        """End a request with CANCELLED; False if it does not run here, or the worker is gone."""
        return worker_id == self._worker_id and self._engine.abort(request_id)

    async def lease(self, request_id: str, tools: tuple[str, ...], *, worker_id: str) -> bool:
        """Keep what a finished turn left while its tools run; False if it is not known here."""
        return worker_id == self._worker_id and self._engine.lease(request_id, tools)

    async def end_session(self, tenant_salt: bytes, session_id: str, *, worker_id: str) -> None:
        """The session is closed: nothing of it needs to be kept, nor is where a worker is gone."""
        if worker_id == self._worker_id:
            self._engine.end_session(tenant_salt, session_id)

    async def adopt(self, request: GenerationRequest, *, worker_id: str) -> bool:
        """See `EngineCore.adopt`."""
        require_target(self._worker_id, worker_id)
        return await self._engine.adopt(request)

    async def check_integrity(self, *, worker_id: str) -> None:
        """Raise RipresaError (INTERNAL) if anything is left over or inconsistent."""
        await super().check_integrity(worker_id=worker_id)
        self._streams.check_integrity()
        if self._shadow is not None:
            self._shadow.check_integrity()

    async def __del__(self) -> None:
        await self._departure.close()
        await self._heartbeat.stop()
        await self._announcer.stop()
        if self._shadow is not None:
            await self._shadow.stop()
        await self._engine.stop()
        await self._streams.close()
        await self._transfers.close()

    def _report(self) -> WorkerReport:
        report = super()._report()
        if self._shadow is not None:
            report = replace(report, stats=replace(report.stats, shadow=self._shadow.counters))
        return replace(report, image_bytes=self._runner.image_bytes(self._runner.window - 1))
