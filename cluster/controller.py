"""The Controller deployment: the registry of workers that gateways plan with."""

from __future__ import annotations

import time

from ripresa.cluster.worker_registry import WorkerList, WorkerRegistry
from ripresa.workers.report import WorkerReport


class Controller:
    """Takes workers' reports and answers gateways. Losing it loses nothing but freshness.

    Args:
        lease_s: seconds without a report after which a worker counts as lost.
    """

    def __init__(self, lease_s: float) -> None:
        self._registry = WorkerRegistry(lease_s, time.monotonic())

    async def report(self, report: WorkerReport) -> None:
        self._registry.report(report, time.monotonic())

    async def workers(self) -> WorkerList:
        return self._registry.workers(time.monotonic())
