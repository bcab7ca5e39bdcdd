"""What is every worker asked through Ray Serve, whatever it computes? Transfers, drains, report."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import ClassVar, Generic, TypeVar

from ripresa.workers.address import WorkerKind
from ripresa.workers.decode_engine import DecodeEngine
from ripresa.workers.departure import Departure, DrainOrder, DrainProgress
from ripresa.workers.encoder_engine import EncoderEngine
from ripresa.workers.errors import RipresaError
from ripresa.workers.model_runner import TorchModelRunner
from ripresa.workers.remote_worker import require_target
from ripresa.workers.report import WorkerReport
from ripresa.workers.transfer.base import Accept, ControlMessage
from ripresa.workers.worker_transfers import WorkerTransfers

E = TypeVar("E", DecodeEngine, EncoderEngine)


class ServedWorker(Generic[E]):
    """The calls that both deployments answer; their constructors make what these attributes name.

    Every call names the replica it is meant for; another one refuses it with `Unreachable`.
    """

    _kind: ClassVar[WorkerKind]
    _worker_id: str
    _node_id: str
    _runner: TorchModelRunner
    _engine: E
    _transfers: WorkerTransfers
    _departure: Departure

    async def deliver(self, message: ControlMessage, *, worker_id: str) -> Accept | None:
        """Take one message of a transfer."""
        require_target(self._worker_id, worker_id)
        return await self._transfers.deliver(message)

    async def drain(
        self, order: DrainOrder, *, worker_id: str
    ) -> AsyncGenerator[DrainProgress | RipresaError]:
        """See `Departure.drain`; what that raises comes last: Serve logs what is raised with its
        traceback, and a drain that is called off is no mistake."""
        try:
            require_target(self._worker_id, worker_id)
            async with aclosing(self._departure.drain(order)) as told:
                async for progress in told:
                    yield progress
        except RipresaError as error:
            yield error

    async def stay(self, *, worker_id: str) -> None:
        """See `Departure.stay`."""
        require_target(self._worker_id, worker_id)
        await self._departure.stay()

    async def flush(self, tenant: str | None, *, worker_id: str) -> int:
        """See `EngineCore.flush`."""
        require_target(self._worker_id, worker_id)
        return await self._engine.flush(tenant)

    async def report(self, *, worker_id: str) -> WorkerReport:
        """This worker's report, now."""
        require_target(self._worker_id, worker_id)
        return self._report()

    async def check_integrity(self, *, worker_id: str) -> None:
        """Raise RipresaError (INTERNAL) if anything is left over or inconsistent."""
        require_target(self._worker_id, worker_id)
        self._engine.check_integrity()
        self._transfers.check_integrity()

    def _report(self) -> WorkerReport:
        layout = self._runner.layout
        return WorkerReport(
            worker_id=self._worker_id,
            kind=self._kind,
            node_id=self._node_id,
            pid=os.getpid(),
            num_parameters=self._runner.weights.num_parameters,
            stats=self._engine.stats(),
            layout_digest=layout.digest,
            state=self._departure.state,
            capacity_tokens=self._runner.num_blocks * layout.window,
            block_bytes=layout.block_bytes,
            window_bytes=layout.window_bytes(layout.window, layout.split),
            hand_over_bytes=layout.state_bytes(2 * layout.window, layout.window, False),
        )
