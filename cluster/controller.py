"""The Controller deployment: the registry of workers that gateways plan with."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ripresa.cluster.worker_registry import SessionMoves, WorkerList, WorkerRegistry
from ripresa.workers.address import WorkerKind
from ripresa.workers.report import SessionMove, WorkerReport


class Controller:
    """Takes workers' reports and answers gateways. Losing it loses nothing but freshness.

    Args:
        lease_s: seconds without a report after which a worker counts as lost.
    """

    def __init__(self, lease_s: float) -> None:
        self._registry = WorkerRegistry(lease_s, time.monotonic())
        self._moves = SessionMoves()

    async def report(self, report: WorkerReport) -> None:
        self._registry.report(report, time.monotonic())

    async def workers(self) -> WorkerList:
        return self._registry.workers(time.monotonic())

    async def has_ready_decoder(self, besides: str) -> bool:
        """Whether another decode worker than `besides` takes requests."""
        return any(
            report.kind is WorkerKind.DECODE
            and report.worker_id != besides
            and not report.is_leaving
            for report in self._registry.workers(time.monotonic()).workers
        )

    async def sessions_moved(self, moves: Sequence[SessionMove]) -> None:
        """A worker that leaves has given these sessions away."""
        self._moves.note(moves)

    async def session_move(self, tenant_salt: bytes, session_id: str) -> SessionMove | None:
        """The last known move of a session."""
        return self._moves.find(tenant_salt, session_id)
