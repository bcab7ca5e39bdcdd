"""How does the router reach workers through Ray Serve? Calls to chosen replicas, and their list."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager
from typing import Any

from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from ripresa.cluster.routing.prompt import Hold
from ripresa.cluster.worker_registry import WorkerList
from ripresa.workers.address import WorkerAddress, WorkerKind
from ripresa.workers.departure import DrainOrder, DrainProgress
from ripresa.workers.errors import RipresaError
from ripresa.workers.kept_streams import KeptPrompt
from ripresa.workers.remote_worker import TARGET, apart, direct, failures
from ripresa.workers.report import SessionMove, WorkerReport
from ripresa.workers.request import (
    EngineEvent,
    Failed,
    Finished,
    GenerationRequest,
    WorkCounters,
)

logger = logging.getLogger(__name__)

MOVE_TIMEOUT_S = 1.0
"""Longest wait for where a session has moved; a turn without it computes more."""
LOST_FOR_S = 10.0
"""A worker that a call found gone is not listed for this long; its lease lapses sooner."""
MAX_KNOWN = 10_000
"""Decode workers that are remembered, the lost ones, too."""
LIST_TIMEOUT_S = 5.0
"""Longest wait for the controller's list of workers."""
FIND_TIMEOUT_S = 5.0
"""Longest wait for a worker to say whether it keeps a stream."""


class TargetRouter(RequestRouter):
    """Sends a call to the replica that its keyword `worker_id` names, or, if that one is gone, to
    any other, which refuses it at once."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        target = None if pending_request is None else pending_request.kwargs.get(TARGET)
        chosen = [r for r in candidate_replicas if r.replica_id.unique_id == target]
        return [chosen or candidate_replicas]


class RayWorkerCalls:
    """Calls by Serve handles; implements `WorkerCalls`."""

    def __init__(
        self, encoders: DeploymentHandle[Any] | None, decoders: DeploymentHandle[Any]
    ) -> None:
        self._encoders = None if encoders is None else direct(encoders)
        self._decoders = direct(decoders)
        self._streams = self._decoders.options(stream=True)
        self._goodbyes: set[asyncio.Task[None]] = set()
        self._is_detached = False

    def detach(self) -> None:
        """From now on the end of a call ends no work that others could go on with."""
        self._is_detached = True

    async def generate(
        self, worker_id: str, request: GenerationRequest, local: bool, hold: Hold
    ) -> AsyncGenerator[EngineEvent]:
        reader = uuid.uuid4().hex
        is_over = request.stream is None
        async with failures(f"decode worker {worker_id}"):
            events: Any = apart(
                self._streams.generate.remote, request, local, reader, **{TARGET: worker_id}
            )
            try:
                async for event in events:
                    is_over |= isinstance(event, Finished | Failed)
                    yield event
            finally:
                events.cancel()
                if hold.ends_work and not is_over:
                    self._say_goodbye(self._decoders, worker_id, reader)

    async def find_stream(self, worker_id: str, stream_id: str, choice: int) -> KeptPrompt | None:
        async with failures(f"decode worker {worker_id}"), asyncio.timeout(FIND_TIMEOUT_S):
            found: KeptPrompt | None = await apart(
                self._decoders.find_stream.remote, stream_id, choice, **{TARGET: worker_id}
            )
            return found

    async def resume(
        self, worker_id: str, stream_id: str, choice: int, hold: Hold
    ) -> AsyncGenerator[tuple[EngineEvent, ...]]:
        reader = uuid.uuid4().hex
        is_over = False
        async with failures(f"decode worker {worker_id}"):
            batches: Any = apart(
                self._streams.resume.remote, stream_id, choice, reader, **{TARGET: worker_id}
            )
            try:
                async for batch in batches:
                    is_over |= any(isinstance(event, Finished | Failed) for event in batch)
                    yield batch
            finally:
                batches.cancel()
                if hold.ends_work and not is_over:
                    self._say_goodbye(self._decoders, worker_id, reader)

    def _say_goodbye(self, workers: DeploymentHandle[Any], worker_id: str, caller: str) -> None:
        """Tell a worker that a caller went on purpose; a dead gateway's calls end just so."""
        if self._is_detached:
            return
        task = asyncio.create_task(self._let_go(workers, worker_id, caller), name="goodbye")
        self._goodbyes.add(task)
        task.add_done_callback(self._goodbyes.discard)

    async def _let_go(self, workers: DeploymentHandle[Any], worker_id: str, caller: str) -> None:
        try:
            async with failures(f"worker {worker_id}"):
                await apart(workers.let_go.remote, caller, **{TARGET: worker_id})
        except RipresaError as error:
            # Its work has ended with it.
            logger.debug("a call was not let go: %s", error)

    async def close(self) -> None:
        """Return once every goodbye has arrived."""
        await asyncio.gather(*self._goodbyes)

    async def prefill(
        self, worker_id: str, request: GenerationRequest, receiver: str, hold: Hold
    ) -> WorkCounters:
        assert self._encoders is not None
        caller = uuid.uuid4().hex
        is_over = request.stream is None
        async with failures(f"encoder worker {worker_id}"):
            answer: Any = apart(
                self._encoders.prefill.remote, request, receiver, caller, **{TARGET: worker_id}
            )
            try:
                counters: WorkCounters | RipresaError = await answer
                is_over = True
                if isinstance(counters, RipresaError):
                    raise counters
                return counters
            except RipresaError:
                is_over = True
                raise
            finally:
                answer.cancel()
                if hold.ends_work and not is_over:
                    self._say_goodbye(self._encoders, worker_id, caller)

    async def abort(self, worker_id: str, request_id: str) -> bool:
        async with failures(f"decode worker {worker_id}"):
            found: bool = await apart(
                self._decoders.abort.remote, request_id, **{TARGET: worker_id}
            )
            return found

    async def lease(self, worker_id: str, request_id: str, tools: tuple[str, ...]) -> bool:
        async with failures(f"decode worker {worker_id}"):
            target = {TARGET: worker_id}
            is_known: bool = await apart(self._decoders.lease.remote, request_id, tools, **target)
            return is_known

    async def end_session(self, worker_id: str, tenant_salt: bytes, session_id: str) -> None:
        async with failures(f"decode worker {worker_id}"):
            target = {TARGET: worker_id}
            await apart(self._decoders.end_session.remote, tenant_salt, session_id, **target)


class RayWorkerCare:
    """Looks after workers by Serve handles; implements `WorkerCare`."""

    def __init__(
        self, encoders: DeploymentHandle[Any] | None, decoders: DeploymentHandle[Any]
    ) -> None:
        self._handles = {WorkerKind.DECODE: direct(decoders)}
        if encoders is not None:
            self._handles[WorkerKind.ENCODER] = direct(encoders)

    async def drain(
        self, worker: WorkerAddress, order: DrainOrder
    ) -> AsyncGenerator[DrainProgress]:
        async with self._failures(worker):
            stream = self._handles[worker.kind].options(stream=True)
            told: Any = stream.drain.remote(order, **{TARGET: worker.worker_id})
            try:
                async for progress in told:
                    if isinstance(progress, RipresaError):
                        raise progress
                    yield progress
            finally:
                told.cancel()

    async def stay(self, worker: WorkerAddress) -> None:
        async with self._failures(worker):
            await self._handles[worker.kind].stay.remote(**{TARGET: worker.worker_id})

    async def flush(self, worker: WorkerAddress, tenant: str | None) -> int:
        async with self._failures(worker):
            num_tokens: int = await self._handles[worker.kind].flush.remote(
                tenant, **{TARGET: worker.worker_id}
            )
            return num_tokens

    @staticmethod
    def _failures(worker: WorkerAddress) -> AbstractAsyncContextManager[None]:
        return failures(f"{worker.kind} worker {worker.worker_id}")


class RayWorkerView:
    """The controller's list of workers, asked for regularly; implements `WorkerView`.

    Without a controller, or with one that just started, the workers known before stay listed.
    """

    def __init__(
        self,
        controller: DeploymentHandle[Any],
        interval_s: float = 0.5,
        timeout_s: float = LIST_TIMEOUT_S,
    ) -> None:
        self._controller = controller
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._listed: dict[str, WorkerReport] = {}
        self._lost: dict[str, float] = {}
        self._decoders: OrderedDict[str, None] = OrderedDict()
        self._seen: dict[str, float] = {}
        self._shrunk = asyncio.Event()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def workers(self) -> tuple[WorkerReport, ...]:
        return tuple(w for w in self._listed.values() if w.worker_id not in self._lost)

    def age_s(self, worker_id: str) -> float:
        return time.monotonic() - self._seen.get(worker_id, time.monotonic())

    def was_decoder(self, worker_id: str) -> bool:
        return worker_id in self._decoders

    def address(self, worker_id: str) -> WorkerAddress | None:
        """Of a worker that is listed."""
        worker = self._listed.get(worker_id)
        if worker is None or worker_id in self._lost:
            return None
        return WorkerAddress(worker_id, worker.kind)

    def lost(self, worker_id: str) -> None:
        self._lost[worker_id] = time.monotonic() + LOST_FOR_S

    async def session_move(self, tenant_salt: bytes, session_id: str) -> SessionMove | None:
        try:
            async with failures("the controller"), asyncio.timeout(MOVE_TIMEOUT_S):
                move: SessionMove | None = await apart(
                    self._controller.session_move.remote, tenant_salt, session_id
                )
            return move
        except RipresaError as error:
            logger.warning("where a session has moved is not known: %s", error)
            return None

    async def gone(self, worker_id: str) -> None:
        while worker_id in self._listed:
            await self._shrunk.wait()

    async def changed(self) -> None:
        await self._changed.wait()

    async def refresh(self) -> None:
        """Ask for the newest reports.

        Raises:
            RipresaError: the controller does not answer, or not in time.
        """
        async with failures("the controller"), asyncio.timeout(self._timeout_s):
            answer: WorkerList = await self._controller.workers.remote()
        now = time.monotonic()
        self._lost = {worker: until for worker, until in self._lost.items() if until > now}
        listed = {
            name: worker
            for name, worker in self._listed.items()
            if not answer.is_complete and name not in answer.lapsed
        }
        listed.update((worker.worker_id, worker) for worker in answer.workers)
        self._seen = {
            name: self._seen[name] if self._listed.get(name) == worker else now
            for name, worker in listed.items()
        }
        has_shrunk = bool(self._listed.keys() - listed.keys())
        if listed != self._listed:
            self._changed.set()
            self._changed = asyncio.Event()
        self._listed = dict(sorted(listed.items()))
        for name, worker in self._listed.items():
            if worker.kind is WorkerKind.DECODE:
                self._decoders[name] = None
                self._decoders.move_to_end(name)
        while len(self._decoders) > max(MAX_KNOWN, len(self._listed)):
            self._decoders.popitem(last=False)
        if has_shrunk:
            self._shrunk.set()
            self._shrunk = asyncio.Event()

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="worker-view")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                await self.refresh()
            except RipresaError as error:
                logger.warning("the list of workers may be old: %s", error)
            await asyncio.sleep(self._interval_s)
