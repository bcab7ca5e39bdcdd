"""What does an operator ask of a cluster? The Admin service without any server around it.

Any gateway answers: what it says comes from workers and directory, and a drain is the worker's own
business, which goes on whoever listens.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from types import MappingProxyType
from typing import Protocol

from google.protobuf.timestamp_pb2 import Timestamp

from ripresa.cluster.directory.events import HotPrefix
from ripresa.cluster.directory.index import DirectoryCounters
from ripresa.cluster.gateway.call import Call
from ripresa.cluster.gateway.status import RequestError
from ripresa.cluster.gateway.validation import seconds_of, tenant_salt
from ripresa.protos import ripresa_pb2 as pb
from ripresa.workers.address import WorkerAddress, WorkerKind
from ripresa.workers.cache.cache_events import tenant_digest
from ripresa.workers.departure import DrainOrder, DrainProgress
from ripresa.workers.errors import ErrorCode, InvalidArgument
from ripresa.workers.report import WorkerReport, WorkerState

DEFAULT_GRACE_S = 30.0
MAX_GRACE_S = 24 * 3600.0
MAX_TOP_PREFIXES = 100

_STATE: Mapping[WorkerState, pb.WorkerState.ValueType] = MappingProxyType(
    {state: pb.WorkerState.Value(f"WORKER_STATE_{state.name}") for state in WorkerState}
)


class WorkerCare(Protocol):
    """The way to workers. Every failure is a RipresaError; a lost worker is UNAVAILABLE."""

    def drain(self, worker: WorkerAddress, order: DrainOrder) -> AsyncGenerator[DrainProgress]:
        """See `Departure.drain`."""

    async def stay(self, worker: WorkerAddress) -> None:
        """See `Departure.stay`."""

    async def flush(self, worker: WorkerAddress, tenant: str | None) -> int:
        """See `EngineCore.flush`."""


class PrefixCounts(Protocol):
    """What the prefix directory has counted. Raises RipresaError if it does not answer."""

    async def counters(self) -> DirectoryCounters: ...

    async def top(self, count: int, tenant: str | None) -> list[HotPrefix]: ...


class AdminService:
    """Looks after the workers. Lives on one event loop.

    Args:
        refresh: asks for the newest reports.
        workers: those.
        care: the way to workers.
        prefixes: the directory; None if there is none.
        has_tenants: there is a key file.
        window: W, tokens in a block.
    """

    def __init__(
        self,
        refresh: Callable[[], Awaitable[None]],
        workers: Callable[[], Sequence[WorkerReport]],
        care: WorkerCare,
        prefixes: PrefixCounts | None,
        *,
        has_tenants: bool,
        window: int,
    ) -> None:
        self._refresh = refresh
        self._workers = workers
        self._care = care
        self._prefixes = prefixes
        self._has_tenants = has_tenants
        self._window = window

    async def get_cluster_status(
        self, request: pb.GetClusterStatusRequest, call: Call
    ) -> pb.ClusterStatus:
        await self._refresh()
        return pb.ClusterStatus(workers=[_worker(report) for report in self._workers()])

    async def drain_worker(
        self, request: pb.DrainWorkerRequest, call: Call
    ) -> AsyncGenerator[pb.DrainProgress]:
        """Raises RipresaError: INVALID_ARGUMENT, NOT_FOUND, UNAVAILABLE (lost, or called off)."""
        grace_s = DEFAULT_GRACE_S
        if request.HasField("grace_period"):
            grace_s = seconds_of(request.grace_period, "grace_period")
        if not 0 <= grace_s <= MAX_GRACE_S:
            raise InvalidArgument("grace_period", f"must be 0 to {MAX_GRACE_S:.0f} seconds")
        await self._refresh()
        worker = self._find(request.worker_id)
        receivers: tuple[WorkerAddress, ...] = ()
        if request.migrate_prefixes and worker.kind is WorkerKind.DECODE:
            others = sorted(self._others(worker), key=lambda report: report.stats.num_running)
            receivers = tuple(_address(report) for report in others)
        order = DrainOrder(grace_s, receivers, request.migrate_prefixes)
        async with aclosing(self._care.drain(_address(worker), order)) as told:
            async for progress in told:
                yield pb.DrainProgress(
                    state=_STATE[progress.state],
                    running_requests=progress.num_running,
                    sessions_left=progress.num_sessions,
                    bytes_migrated=progress.num_bytes,
                )

    async def resume_worker(
        self, request: pb.ResumeWorkerRequest, call: Call
    ) -> pb.ResumeWorkerResponse:
        await self._refresh()
        await self._care.stay(_address(self._find(request.worker_id)))
        return pb.ResumeWorkerResponse(state=pb.WORKER_STATE_READY)

    async def get_prefix_stats(
        self, request: pb.GetPrefixStatsRequest, call: Call
    ) -> pb.PrefixStats:
        if self._prefixes is None:
            raise RequestError(
                ErrorCode.FAILED_PRECONDITION,
                "NO_DIRECTORY",
                "this cluster has no prefix directory (directory.enabled)",
            )
        if request.top_prefixes > MAX_TOP_PREFIXES:
            raise InvalidArgument("top_prefixes", f"must be at most {MAX_TOP_PREFIXES}")
        tenant = self._tenant(request.tenant_id)
        counters, top = await asyncio.gather(
            self._prefixes.counters(), self._prefixes.top(request.top_prefixes, tenant)
        )
        return pb.PrefixStats(
            lookups=counters.num_lookups,
            lookup_tokens=counters.num_lookup_blocks * self._window,
            hit_tokens=counters.num_found_blocks * self._window,
            top=[self._entry(hot) for hot in top],
        )

    async def flush_prefix_cache(
        self, request: pb.FlushPrefixCacheRequest, call: Call
    ) -> pb.FlushPrefixCacheResponse:
        """Raises the error of a worker that could not flush; others have all the same."""
        tenant = self._tenant(request.tenant_id)
        await self._refresh()
        workers: Sequence[WorkerReport] = self._workers()
        if request.worker_id:
            workers = [self._find(request.worker_id)]
        flushed = await asyncio.gather(
            *(self._care.flush(_address(worker), tenant) for worker in workers),
            return_exceptions=True,
        )
        num_tokens = 0
        for answer in flushed:
            if isinstance(answer, BaseException):
                raise answer
            num_tokens += answer
        return pb.FlushPrefixCacheResponse(tokens_dropped=num_tokens)

    def _find(self, worker_id: str) -> WorkerReport:
        if not worker_id:
            raise InvalidArgument("worker_id", "name a worker")
        reports = self._workers()
        found = next((report for report in reports if report.worker_id == worker_id), None)
        if found is None:
            known = ", ".join(report.worker_id for report in reports) or "none"
            raise RequestError(
                ErrorCode.NOT_FOUND,
                "WORKER_NOT_FOUND",
                f"no such worker reports; there are: {known}",
                field="worker_id",
                resource=("worker", worker_id),
            )
        return found

    def _others(self, worker: WorkerReport) -> list[WorkerReport]:
        return [
            report
            for report in self._workers()
            if report.kind is WorkerKind.DECODE
            and not report.is_leaving
            and report.worker_id != worker.worker_id
        ]

    def _tenant(self, tenant_id: str) -> str | None:
        """The digest that caches know a tenant by; None for all."""
        if not tenant_id:
            return None
        if not self._has_tenants:
            raise InvalidArgument(
                "tenant_id", "this cluster has no tenants (gateway.api_keys_file)"
            )
        # One that is in the file no more may still have left something.
        return tenant_digest(tenant_salt(tenant_id, ""))

    def _entry(self, hot: HotPrefix) -> pb.PrefixEntry:
        used = Timestamp()
        used.FromNanoseconds(math.floor((time.time() - hot.age_s) * 1e9))
        return pb.PrefixEntry(
            digest=hot.last_hash,
            num_tokens=hot.num_blocks * self._window,
            hits=hot.num_hits,
            worker_ids=hot.workers,
            last_used_time=used,
        )


def _address(report: WorkerReport) -> WorkerAddress:
    return WorkerAddress(report.worker_id, report.kind)


def _worker(report: WorkerReport) -> pb.Worker:
    stats = report.stats
    return pb.Worker(
        worker_id=report.worker_id,
        node_id=report.node_id,
        state=_STATE[report.state],
        running_requests=stats.num_running,
        waiting_requests=stats.num_waiting + stats.num_parked,
        kv_bytes_used=(stats.num_blocks - stats.num_free_blocks) * report.block_bytes,
        kv_bytes_total=stats.num_blocks * report.block_bytes,
        open_sessions=stats.num_sessions,
        kind=report.kind.value,
    )
