"""Does the registry list who reports, forget who does not, and say when a list is complete?"""

from __future__ import annotations

from dataclasses import replace

from ripresa.cluster.controller import Controller
from ripresa.cluster.worker_registry import SETTLING_LEASES, WorkerRegistry
from ripresa.workers.address import WorkerKind
from ripresa.workers.report import WorkerReport, WorkerState
from ripresa.workers.request import EngineStats, WorkCounters

STATS = EngineStats(0, 0, 8, 8, 0, WorkCounters(), 0, 0)


def report(worker_id: str) -> WorkerReport:
    return WorkerReport(worker_id, WorkerKind.DECODE, "node", 1, 1, STATS)


def listed(registry: WorkerRegistry, now: float) -> list[str]:
    return [worker.worker_id for worker in registry.workers(now).workers]


def test_a_lease_holds_from_the_last_report() -> None:
    registry = WorkerRegistry(lease_s=5.0, started_at=100.0)
    registry.report(report("b"), now=100.0)
    registry.report(report("a"), now=101.0)
    registry.report(report("b"), now=102.0)
    assert listed(registry, 105.9) == ["a", "b"]
    assert listed(registry, 106.0) == ["b"]
    assert listed(registry, 107.0) == []


def test_a_leaving_worker_stays_listed_as_such() -> None:
    """Its streams go on, and what it holds can be pulled."""
    registry = WorkerRegistry(lease_s=5.0, started_at=0.0)
    registry.report(report("a"), now=0.0)
    registry.report(replace(report("a"), state=WorkerState.DRAINING), now=1.0)
    (worker,) = registry.workers(1.0).workers
    assert worker.is_leaving


def test_a_list_is_complete_some_leases_after_the_start() -> None:
    registry = WorkerRegistry(lease_s=5.0, started_at=10.0)
    registry.report(report("a"), now=10.0)
    settled = 10.0 + 5.0 * SETTLING_LEASES
    assert not registry.workers(settled - 0.1).is_complete
    assert registry.workers(settled).is_complete


def test_before_that_it_is_known_who_reports_no_more() -> None:
    """And not who has not found the controller's successor yet."""
    registry = WorkerRegistry(lease_s=5.0, started_at=0.0)
    for name in ("a", "b"):
        registry.report(report(name), now=1.0)
    registry.report(report("b"), now=4.0)
    assert registry.workers(6.0).lapsed == {"a"}
    assert registry.workers(7.0).lapsed == {"a"}
    registry.report(report("a"), now=8.0)
    assert registry.workers(8.5).lapsed == set()
    assert registry.workers(9.0).lapsed == {"b"}
    assert registry.workers(100.0).lapsed == set()


async def test_the_controller_knows_whether_another_decode_worker_is_ready() -> None:
    controller = Controller(lease_s=60.0)
    assert not await controller.has_ready_decoder("a")
    for other in (
        report("a"),
        replace(report("e"), kind=WorkerKind.ENCODER),
        replace(report("b"), state=WorkerState.DRAINING),
    ):
        await controller.report(other)
        assert not await controller.has_ready_decoder("a")
    await controller.report(report("b"))
    assert await controller.has_ready_decoder("a")
    assert await controller.has_ready_decoder("e")
