"""Which workers are there, how busy, and what have those that left given to whom?

Reports with leases; plain Python without a clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from ripresa.workers.report import SessionMove, WorkerReport

SETTLING_LEASES = 12
"""So many leases after a restart every worker that lives has found the controller's successor, on a
loaded machine, too."""


@dataclass(frozen=True, slots=True)
class WorkerList:
    """The workers whose leases hold, by id.

    Attributes:
        is_complete: every worker that lives has had the time to report, so a worker that is not
            listed is lost. False for a while after a restart.
        lapsed: workers that have reported and do so no more: lost, whether the list is complete
            or not. Empty once it is.
    """

    workers: tuple[WorkerReport, ...]
    is_complete: bool
    lapsed: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class _Lease:
    report: WorkerReport
    expires_at: float


class WorkerRegistry:
    """Keeps the newest report of each worker for `lease_s` seconds.

    Soft state: after a restart it is complete again as soon as every worker has found it, and says
    so after `SETTLING_LEASES`. Until then a worker that it has not heard of may live.

    Args:
        started_at: now, in monotonic seconds.
    """

    def __init__(self, lease_s: float, started_at: float) -> None:
        self._lease_s = lease_s
        self._started_at = started_at
        self._leases: dict[str, _Lease] = {}
        self._lapsed: set[str] = set()

    def report(self, report: WorkerReport, now: float) -> None:
        """Take a registration or renewal at `now` (monotonic seconds)."""
        self._leases[report.worker_id] = _Lease(report, now + self._lease_s)
        self._lapsed.discard(report.worker_id)

    def workers(self, now: float) -> WorkerList:
        """The workers whose leases hold at `now`."""
        lapsed = [key for key, lease in self._leases.items() if lease.expires_at <= now]
        for key in lapsed:
            del self._leases[key]
        is_complete = now - self._started_at >= SETTLING_LEASES * self._lease_s
        self._lapsed = set() if is_complete else self._lapsed.union(lapsed)
        reports = tuple(self._leases[key].report for key in sorted(self._leases))
        return WorkerList(reports, is_complete, frozenset(self._lapsed))


class SessionMoves:
    """The last move of each session away from a worker that left; the oldest are forgotten.

    Args:
        capacity: sessions that are remembered; forgetting one costs it a replay.
    """

    def __init__(self, capacity: int = 65536) -> None:
        self._capacity = capacity
        self._moves: OrderedDict[tuple[bytes, str], SessionMove] = OrderedDict()

    def note(self, moves: Iterable[SessionMove]) -> None:
        for move in moves:
            key = (move.tenant_salt, move.session_id)
            self._moves[key] = move
            self._moves.move_to_end(key)
        while len(self._moves) > self._capacity:
            self._moves.popitem(last=False)

    def find(self, tenant_salt: bytes, session_id: str) -> SessionMove | None:
        return self._moves.get((tenant_salt, session_id))
