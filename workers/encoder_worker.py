"""The EncoderWorker deployment: an encoder engine in a Serve replica."""

from __future__ import annotations

from typing import Any

from ray.serve.handle import DeploymentHandle

from ripresa.workers.address import WorkerAddress, WorkerKind
from ripresa.workers.cache.cache_events import AnnouncerFactory, unheard
from ripresa.workers.collector import spare_startup
from ripresa.workers.detached_calls import DetachedCalls
from ripresa.workers.encoder_engine import EncoderEngine
from ripresa.workers.errors import RipresaError
from ripresa.workers.models.deepseek_v41.weights import Half
from ripresa.workers.remote_peers import RemotePeers
from ripresa.workers.remote_worker import (
    ask_for_other,
    own_identity,
    report_to,
    require_target,
    tell_moves_to,
)
from ripresa.workers.report import Heartbeat
from ripresa.workers.request import GenerationRequest, WorkCounters
from ripresa.workers.served_worker import ServedWorker
from ripresa.workers.worker_process import start_runner, start_transport
from ripresa.workers.worker_settings import WorkerSettings
from ripresa.workers.worker_transfers import WorkerTransfers


class EncoderWorker(ServedWorker[EncoderEngine]):
    """Prefills prompts with the lower half of the model and hands their state over.

    Args:
        settings: this worker's settings.
        controller: where reports go.
        decoders: the decode workers that state is handed to.
        announcer: makes what tells others of this worker's cache.
    """

    _kind = WorkerKind.ENCODER

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        settings: WorkerSettings,
        controller: DeploymentHandle[Any],
        decoders: DeploymentHandle[Any],
        announcer: AnnouncerFactory = unheard,
    ) -> None:
        self._worker_id, self._node_id = own_identity()
        self._announcer = await announcer(self._worker_id)
        self._runner = await start_runner(settings, Half.ENCODER)
        own = WorkerAddress(self._worker_id, self._kind)
        others = RemotePeers({WorkerKind.DECODE: decoders})
        self._transfers = WorkerTransfers(
            own,
            others.resolve,
            start_transport(settings),
            settings.lanes,
        )
        self._engine = EncoderEngine(
            self._worker_id,
            self._runner,
            self._transfers.outbound,
            settings.engine,
            listener=self._announcer,
            peers=self._transfers.peers,
            find_keepers=self._announcer.find_keepers,
        )
        self._transfers.receive(self._engine.exchange)
        self._announcer.advise(self._engine.advise)
        self._announcer.describe(self._engine.room)
        self._calls = DetachedCalls()
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
        await self._heartbeat.start()
        spare_startup()

    async def prefill(
        self, request: GenerationRequest, receiver: str, caller: str, *, worker_id: str
    ) -> WorkCounters | RipresaError:
        """See `EncoderEngine.prefill`; for a kept stream it goes on when the caller dies.

        What it raises is returned: an exception would stand in the log as a crash.
        """
        require_target(self._worker_id, worker_id)
        work = self._engine.prefill(request, receiver)
        try:
            return await (work if request.stream is None else self._calls.run(caller, work))
        except RipresaError as error:
            return error

    async def let_go(self, caller: str, *, worker_id: str) -> None:
        """See `DetachedCalls.let_go`; a worker that is gone has let go of everything."""
        if worker_id == self._worker_id:
            self._calls.let_go(caller)

    async def __del__(self) -> None:
        await self._departure.close()
        await self._heartbeat.stop()
        await self._announcer.stop()
        await self._calls.close()
        await self._engine.stop()
        await self._transfers.close()
