"""Whom does a gateway take for lost while the controller restarts? Nobody who may come back."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from ripresa.cluster.routing.handles import RayWorkerView
from ripresa.cluster.worker_registry import SETTLING_LEASES, WorkerRegistry
from ripresa.workers.address import WorkerKind
from ripresa.workers.report import WorkerReport
from ripresa.workers.request import EngineStats, WorkCounters

LEASE_S = 5.0


class FakeController:
    """A handle to a registry whose clock is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.registry = WorkerRegistry(LEASE_S, self.now)
        self.workers = SimpleNamespace(remote=self._workers)

    async def _workers(self) -> Any:
        return self.registry.workers(self.now)

    def report(self, *names: str) -> None:
        for name in names:
            stats = EngineStats(0, 0, 8, 8, 0, WorkCounters(), 0, 0)
            report = WorkerReport(name, WorkerKind.DECODE, "node", 1, 1, stats)
            self.registry.report(report, self.now)

    def restart(self) -> None:
        self.registry = WorkerRegistry(LEASE_S, self.now)


async def test_a_restarted_controller_loses_no_worker_that_lives() -> None:
    controller = FakeController()
    view = RayWorkerView(cast(Any, controller))

    async def listed() -> list[str]:
        await view.refresh()
        return [worker.worker_id for worker in view.workers()]

    controller.report("a", "b", "c")
    assert await listed() == ["a", "b", "c"]
    controller.now = 100.0
    controller.restart()
    assert await listed() == ["a", "b", "c"]
    controller.now += LEASE_S
    controller.report("a", "b")
    # `c` has not found the new one within a lease: nobody knows whether it lives.
    assert await listed() == ["a", "b", "c"]
    gone = asyncio.create_task(view.gone("b"))
    controller.now += LEASE_S
    controller.report("a")
    # `b` had found it, and is silent again: that one is lost.
    assert await listed() == ["a", "c"]
    await gone
    controller.now = 100.0 + LEASE_S * SETTLING_LEASES
    controller.report("a")
    assert await listed() == ["a"]
