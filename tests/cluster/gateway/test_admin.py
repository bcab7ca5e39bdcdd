"""Does the Admin service say what is, refuse what is wrong, and ask for an operator's key?"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from ripresa.cluster.directory.events import HotPrefix
from ripresa.cluster.directory.index import DirectoryCounters
from ripresa.cluster.gateway.admin_server import AdminServer, Operators
from ripresa.cluster.gateway.admin_service import AdminService
from ripresa.cluster.gateway.api_keys import key_digest
from ripresa.cluster.gateway.validation import tenant_salt
from ripresa.cluster.routing.handles import RayWorkerView
from ripresa.protos import ripresa_pb2 as pb
from ripresa.protos import ripresa_pb2_grpc
from ripresa.workers.address import WorkerAddress, WorkerKind
from ripresa.workers.cache.cache_events import tenant_digest
from ripresa.workers.departure import DrainOrder, DrainProgress
from ripresa.workers.errors import Unavailable
from ripresa.workers.report import WorkerReport, WorkerState
from ripresa.workers.request import EngineStats, WorkCounters

STATS = EngineStats(2, 1, 8, 5, 0, WorkCounters(), 0, 0, num_parked=1, num_sessions=3)
W = 128


def report(name: str, kind: WorkerKind, state: WorkerState = WorkerState.READY) -> WorkerReport:
    return WorkerReport(name, kind, "node", 1, 1, STATS, block_bytes=100, state=state)


@dataclass
class Workers:
    """What an operator's calls reach: they are noted, and answered from a script."""

    reports: list[WorkerReport] = field(
        default_factory=lambda: [
            report("d0", WorkerKind.DECODE),
            report("d1", WorkerKind.DECODE),
            report("d2", WorkerKind.DECODE, WorkerState.DRAINING),
            report("e0", WorkerKind.ENCODER),
        ]
    )
    asked: list[Any] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)

    async def refresh(self) -> None:
        self.asked.append("refresh")

    async def drain(
        self, worker: WorkerAddress, order: DrainOrder
    ) -> AsyncGenerator[DrainProgress]:
        self._note(worker, order)
        yield DrainProgress(WorkerState.DRAINING, 2, 1, 10)
        yield DrainProgress(WorkerState.DRAINED, 0, 0, 20)

    async def stay(self, worker: WorkerAddress) -> None:
        self._note(worker, "stay")

    async def flush(self, worker: WorkerAddress, tenant: str | None) -> int:
        self._note(worker, tenant)
        return W

    async def counters(self) -> DirectoryCounters:
        return replace(
            DirectoryCounters(), num_lookups=3, num_lookup_blocks=30, num_found_blocks=20
        )

    async def top(self, count: int, tenant: str | None) -> list[HotPrefix]:
        self.asked.append((count, tenant))
        return [HotPrefix(b"hash", 4, 9, ("d0", "d1"), 1.0)][:count]

    def _note(self, worker: WorkerAddress, what: object) -> None:
        self.asked.append((worker.worker_id, what))
        if worker.worker_id in self.lost:
            raise Unavailable(f"{worker.worker_id} is gone")


def serve(workers: Workers, keys: str | None = None, *, has_directory: bool = True) -> AdminServer:
    directory = workers if has_directory else None
    service = AdminService(
        workers.refresh, lambda: workers.reports, workers, directory, has_tenants=True, window=W
    )
    operators = Operators(keys)
    return AdminServer(service, host="127.0.0.1", port=0, authenticate=operators.authenticate)


@pytest.fixture
def workers() -> Workers:
    return Workers()


@pytest.fixture
async def stub(workers: Workers) -> AsyncIterator[ripresa_pb2_grpc.AdminAsyncStub]:
    server = serve(workers)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        yield ripresa_pb2_grpc.AdminStub(channel)
    await server.stop()


async def test_status(stub: Any, workers: Workers) -> None:
    status = await stub.GetClusterStatus(pb.GetClusterStatusRequest())
    assert workers.asked == ["refresh"]
    assert [(w.worker_id, w.kind, w.state) for w in status.workers] == [
        ("d0", "decode", pb.WORKER_STATE_READY),
        ("d1", "decode", pb.WORKER_STATE_READY),
        ("d2", "decode", pb.WORKER_STATE_DRAINING),
        ("e0", "encoder", pb.WORKER_STATE_READY),
    ]
    first = status.workers[0]
    assert (first.running_requests, first.waiting_requests, first.open_sessions) == (2, 2, 3)
    assert (first.kv_bytes_used, first.kv_bytes_total) == (300, 800)


@pytest.mark.parametrize("migrate", [True, False])
async def test_drain(stub: Any, workers: Workers, migrate: bool) -> None:
    request = pb.DrainWorkerRequest(worker_id="d0", migrate_prefixes=migrate)
    told = [progress async for progress in stub.DrainWorker(request)]
    # Only those who stay take anything.
    receivers = (WorkerAddress("d1", WorkerKind.DECODE),) if migrate else ()
    assert workers.asked[1:] == [("d0", DrainOrder(30.0, receivers, migrate))]
    assert [(p.state, p.running_requests, p.sessions_left, p.bytes_migrated) for p in told] == [
        (pb.WORKER_STATE_DRAINING, 2, 1, 10),
        (pb.WORKER_STATE_DRAINED, 0, 0, 20),
    ]


async def test_drain_without_grace_and_of_an_encoder(stub: Any, workers: Workers) -> None:
    request = pb.DrainWorkerRequest(
        worker_id="e0", migrate_prefixes=True, grace_period=Duration(nanos=0)
    )
    assert [progress async for progress in stub.DrainWorker(request)]
    assert workers.asked[1:] == [("e0", DrainOrder(0.0, (), gives_blocks=True))]


async def test_resume(stub: Any, workers: Workers) -> None:
    answer = await stub.ResumeWorker(pb.ResumeWorkerRequest(worker_id="d2"))
    assert answer.state == pb.WORKER_STATE_READY
    assert workers.asked[1:] == [("d2", "stay")]


async def test_prefix_stats(stub: Any, workers: Workers) -> None:
    stats = await stub.GetPrefixStats(pb.GetPrefixStatsRequest(tenant_id="red", top_prefixes=1))
    assert (stats.lookups, stats.lookup_tokens, stats.hit_tokens) == (3, 30 * W, 20 * W)
    (entry,) = stats.top
    assert (entry.digest, entry.num_tokens, entry.hits) == (b"hash", 4 * W, 9)
    assert list(entry.worker_ids) == ["d0", "d1"]
    assert entry.last_used_time.seconds > 0
    # By the name that the tenant's blocks are charged to, whatever he narrows by.
    assert workers.asked == [(1, tenant_digest(tenant_salt("red", "anything")))]


async def test_flush(stub: Any, workers: Workers) -> None:
    flush = stub.FlushPrefixCache
    assert (await flush(pb.FlushPrefixCacheRequest())).tokens_dropped == 4 * W
    assert workers.asked[1:] == [(name, None) for name in ("d0", "d1", "d2", "e0")]
    workers.asked.clear()
    answer = await flush(pb.FlushPrefixCacheRequest(tenant_id="red", worker_id="d1"))
    assert answer.tokens_dropped == W
    assert workers.asked[1:] == [("d1", tenant_digest(tenant_salt("red", "")))]
    workers.asked.clear()
    workers.lost = {"d0"}
    with pytest.raises(grpc.aio.AioRpcError, match="d0 is gone") as lost:
        await flush(pb.FlushPrefixCacheRequest())
    assert lost.value.code() is grpc.StatusCode.UNAVAILABLE
    assert len(workers.asked) == 5  # the others have flushed all the same


REFUSED = {
    "no worker": ("DrainWorker", pb.DrainWorkerRequest(), "INVALID_ARGUMENT", "name a worker"),
    "unknown": (
        "DrainWorker",
        pb.DrainWorkerRequest(worker_id="d9"),
        "NOT_FOUND",
        "there are: d0, d1, d2, e0",
    ),
    "negative grace": (
        "DrainWorker",
        pb.DrainWorkerRequest(worker_id="d0", grace_period=Duration(seconds=-1)),
        "INVALID_ARGUMENT",
        "grace_period",
    ),
    "grace of two signs": (
        "DrainWorker",
        pb.DrainWorkerRequest(worker_id="d0", grace_period=Duration(seconds=1, nanos=-5)),
        "INVALID_ARGUMENT",
        "grace_period",
    ),
    "long grace": (
        "DrainWorker",
        pb.DrainWorkerRequest(worker_id="d0", grace_period=Duration(seconds=1 << 35)),
        "INVALID_ARGUMENT",
        "grace_period",
    ),
    "unknown to stay": (
        "ResumeWorker",
        pb.ResumeWorkerRequest(worker_id="d9"),
        "NOT_FOUND",
        "worker_id",
    ),
    "many": (
        "GetPrefixStats",
        pb.GetPrefixStatsRequest(top_prefixes=101),
        "INVALID_ARGUMENT",
        "at most 100",
    ),
    "unknown to flush": (
        "FlushPrefixCache",
        pb.FlushPrefixCacheRequest(worker_id="d9"),
        "NOT_FOUND",
        "worker_id",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_what_is_wrong_is_refused(stub: Any, workers: Workers, case: str) -> None:
    method, request, code, words = REFUSED[case]
    call = getattr(stub, method)(request)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await (call.read() if method == "DrainWorker" else call)
    assert refused.value.code().name == code
    assert words in (refused.value.details() or "")
    assert all(asked == "refresh" for asked in workers.asked)


async def test_a_cluster_without_a_directory_has_no_statistics(workers: Workers) -> None:
    server = serve(workers, has_directory=False)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub: Any = ripresa_pb2_grpc.AdminStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match=r"directory\.enabled") as refused:
            await stub.GetPrefixStats(pb.GetPrefixStatsRequest())
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    await server.stop()


async def test_operators_have_keys_of_their_own(workers: Workers, tmp_path: Path) -> None:
    path = tmp_path / "operators.yaml"
    path.write_text(f"tenants: {{ann: {{keys: ['{key_digest('rk-ann')}']}}}}")
    server = serve(workers, str(path))
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub: Any = ripresa_pb2_grpc.AdminStub(channel)
        for metadata in ((), (("authorization", "Bearer rk-bob"),)):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.FlushPrefixCache(pb.FlushPrefixCacheRequest(), metadata=metadata)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.DrainWorker(
                    pb.DrainWorkerRequest(worker_id="d0"), metadata=metadata
                ).read()
        assert workers.asked == []
        ann = (("authorization", "Bearer rk-ann"),)
        assert (await stub.GetClusterStatus(pb.GetClusterStatusRequest(), metadata=ann)).workers
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "ripresa.v1.Admin"):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
    await server.stop()


@pytest.mark.parametrize("method", ["GetClusterStatus", "DrainWorker", "ResumeWorker", "Flush"])
async def test_a_controller_that_does_not_answer_is_worth_another_try(method: str) -> None:
    workers = Workers()

    async def never() -> None:
        await asyncio.Event().wait()

    controller: Any = SimpleNamespace(workers=SimpleNamespace(remote=never))
    workers.refresh = RayWorkerView(controller, timeout_s=0.01).refresh  # type: ignore[method-assign]
    server = serve(workers)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub: Any = ripresa_pb2_grpc.AdminStub(channel)
        calls: dict[str, Any] = {
            "GetClusterStatus": lambda: stub.GetClusterStatus(pb.GetClusterStatusRequest()),
            "DrainWorker": lambda: stub.DrainWorker(pb.DrainWorkerRequest(worker_id="d0")).read(),
            "ResumeWorker": lambda: stub.ResumeWorker(pb.ResumeWorkerRequest(worker_id="d0")),
            "Flush": lambda: stub.FlushPrefixCache(pb.FlushPrefixCacheRequest()),
        }
        with pytest.raises(grpc.aio.AioRpcError, match="the controller") as caught:
            await calls[method]()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    status = rpc_status.from_call(caught.value)  # type: ignore[arg-type]
    assert status is not None
    retry = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(retry) for detail in status.details)
    assert retry.retry_delay.seconds
    assert workers.asked == []
    await server.stop()
