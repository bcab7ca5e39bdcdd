"""Which workers are there, and how busy? Reports with leases; plain Python without a clock."""

from __future__ import annotations

from dataclasses import dataclass

from ripresa.workers.report import WorkerReport


@dataclass(frozen=True, slots=True)
class WorkerList:
    """The workers whose leases hold, by id.

    Attributes:
        is_complete: every worker that lives has had the time to report, so a worker that is not
            listed is lost. False just after a restart.
    """

    workers: tuple[WorkerReport, ...]
    is_complete: bool


@dataclass(frozen=True, slots=True)
class _Lease:
    report: WorkerReport
    expires_at: float


class WorkerRegistry:
    """Keeps the newest report of each worker for `lease_s` seconds.

    Soft state: after a restart it is complete again within one heartbeat interval, and says so
    after one lease.

    Args:
        started_at: now, in monotonic seconds.
    """

    def __init__(self, lease_s: float, started_at: float) -> None:
        self._lease_s = lease_s
        self._started_at = started_at
        self._leases: dict[str, _Lease] = {}

    def report(self, report: WorkerReport, now: float) -> None:
        """Take a registration or renewal at `now` (monotonic seconds)."""
        if report.leaving:
            self._leases.pop(report.worker_id, None)
        else:
            self._leases[report.worker_id] = _Lease(report, now + self._lease_s)

    def workers(self, now: float) -> WorkerList:
        """The workers whose leases hold at `now`."""
        lapsed = [key for key, lease in self._leases.items() if lease.expires_at <= now]
        for key in lapsed:
            del self._leases[key]
        return WorkerList(
            tuple(self._leases[key].report for key in sorted(self._leases)),
            is_complete=now - self._started_at >= self._lease_s,
        )
