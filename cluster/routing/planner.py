"""Where should a prompt run? A pure function from load reports to a route, with its reason."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from ripresa.workers.address import WorkerKind
from ripresa.workers.errors import Unavailable
from ripresa.workers.report import WorkerReport


@dataclass(frozen=True, slots=True)
class RoutePlan:
    """Where one execution of a request runs.

    Attributes:
        decoder: worker id of the decode worker.
        encoder: worker id of the encoder worker; None if the decode worker prefills by itself.
        reason: why, in words for a log line.
    """

    decoder: str
    encoder: str | None
    reason: str


def plan_route(
    workers: Sequence[WorkerReport],
    pending: dict[str, int],
    avoid: Set[str] = frozenset(),
    home: str | None = None,
) -> RoutePlan:
    """Choose the least loaded decode worker, and the least loaded encoder if there is any.

    Args:
        workers: the newest reports.
        pending: requests that this gateway sent to a worker and that are not over.
        avoid: workers that failed this request or refused it.
        home: the decode worker that keeps the state of the request's session; None for none.

    Raises:
        Unavailable: no decode worker is left.
    """
    if (
        home is not None
        and home not in avoid
        and any(worker.worker_id == home and worker.kind is WorkerKind.DECODE for worker in workers)
    ):
        return RoutePlan(home, None, "the session's state is parked on this decode worker")
    decoder = least_loaded(workers, WorkerKind.DECODE, pending, avoid)
    if decoder is None:
        raise Unavailable("no decode worker is ready; retry, or check the cluster's status")
    encoder = least_loaded(workers, WorkerKind.ENCODER, pending, avoid)
    if encoder is None:
        known = any(worker.kind is WorkerKind.ENCODER for worker in workers)
        why = "every encoder failed it" if known else "there are no encoders"
        return RoutePlan(decoder, None, f"least loaded decode worker; local, since {why}")
    return RoutePlan(decoder, encoder, "least loaded decode worker and encoder")


def least_loaded(
    workers: Sequence[WorkerReport],
    kind: WorkerKind,
    pending: dict[str, int],
    avoid: Set[str],
) -> str | None:
    """The worker of a kind with the fewest requests; ties go to the lower id."""
    candidates = [w for w in workers if w.kind is kind and w.worker_id not in avoid]
    if not candidates:
        return None

    def load(worker: WorkerReport) -> tuple[int, str]:
        reported = worker.stats.num_running + worker.stats.num_waiting
        return max(reported, pending.get(worker.worker_id, 0)), worker.worker_id

    return min(candidates, key=load).worker_id
