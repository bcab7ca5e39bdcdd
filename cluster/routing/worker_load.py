"""How busy is a worker, and how fast? What the planner knows of each, in rows and seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from ripresa.cluster.config_tree import setting
from ripresa.workers.address import WorkerAddress, WorkerKind
from ripresa.workers.report import WorkerReport


@dataclass(frozen=True, slots=True)
class PlannerSettings:
    """How routes are compared; the speeds hold until workers have measured theirs.

    Attributes:
        encoder_row_s, decoder_row_s: seconds of a prompt row of one half of the model on an
            encoder worker and on a decode worker.
        decode_step_s: seconds of a decode worker's step that only continues streams.
        bandwidth_bytes_per_s: of state between two workers.
        round_trip_s: what every exchange between two workers costs before the first byte.
        inter_token_target_s: no step of a decode worker with streams should take longer.
        max_local_rows: longer prompts, less what is cached, go to an encoder if there is one; null
            leaves it to the cost, 0 spares decode workers every prompt.
        max_lead: who holds most of a prompt computes it, unless its queue is this share above the
            mean of its kind,
        max_lead_s: and by more than these seconds: reports are a little old, and what a prompt
            leaves behind it must be brought after it.
        log_plans: newest plans that a gateway can explain.
    """

    encoder_row_s: float = setting(2e-4, at_least=0)
    decoder_row_s: float = setting(2e-4, at_least=0)
    decode_step_s: float = setting(0.02, at_least=0)
    bandwidth_bytes_per_s: float = setting(1e9, at_least=1)
    round_trip_s: float = setting(0.002, at_least=0)
    inter_token_target_s: float = setting(0.2, at_least=0)
    max_local_rows: int | None = setting(None, at_least=0)
    max_lead: float = setting(0.1, at_least=0)
    max_lead_s: float = setting(0.1, at_least=0)
    log_plans: int = setting(1000, at_least=0)


@dataclass(frozen=True, slots=True)
class StateSizes:
    """Bytes that travel, by what they are; see `WorkerReport`."""

    block_bytes: int = 0
    window_bytes: int = 0
    hand_over_bytes: int = 0
    image_bytes: int = 0


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """One worker as the planner sees it.

    Attributes:
        queued_rows: rows of both halves that it computes before those of a new prompt.
        num_requests: streams and prompts that it has.
        num_decoding: streams that take part in each of its steps.
        capacity_tokens: positions that its whole KV pool holds; None if it has not said so.
        row_s, decode_step_s: see `PlannerSettings`.
        is_leaving: it takes no new requests; what it holds can be pulled.
    """

    address: WorkerAddress
    queued_rows: int = 0
    num_requests: int = 0
    num_decoding: int = 0
    capacity_tokens: int | None = None
    row_s: float = 2e-4
    decode_step_s: float = 0.02
    sizes: StateSizes = field(default_factory=StateSizes)
    is_leaving: bool = False

    @property
    def worker_id(self) -> str:
        return self.address.worker_id

    @property
    def is_encoder(self) -> bool:
        return self.address.kind is WorkerKind.ENCODER

    @property
    def queue_s(self) -> float:
        return self.queued_rows * self.row_s

    def holds(self, num_tokens: int) -> bool:
        """Whether a request of so many positions ever fits its KV pool."""
        return self.capacity_tokens is None or num_tokens <= self.capacity_tokens

    def prefill_s(self, num_rows: int, max_chunk_rows: int | None) -> float:
        """Seconds of a prompt's rows, the streams' rows in the same steps included."""
        seconds = num_rows * self.row_s
        if self.num_decoding:
            num_steps = 1 if max_chunk_rows is None else -(-num_rows // max_chunk_rows)
            seconds += num_steps * self.decode_step_s
        return seconds


def worker_loads(
    reports: Iterable[WorkerReport],
    pending_rows: Mapping[str, int],
    pending_requests: Mapping[str, int],
    settings: PlannerSettings,
    age_s: Callable[[str], float],
) -> tuple[WorkerLoad, ...]:
    """Loads from reports and from what this gateway has sent since.

    Args:
        pending_rows, pending_requests: sent by this gateway and not over, by worker.
        age_s: seconds since a worker's report, in which its queue went on.
    """
    return tuple(
        _worker_load(
            report,
            pending_rows.get(report.worker_id, 0),
            pending_requests.get(report.worker_id, 0),
            settings,
            age_s(report.worker_id),
        )
        for report in reports
    )


def _worker_load(
    report: WorkerReport,
    pending_rows: int,
    pending_requests: int,
    settings: PlannerSettings,
    age_s: float,
) -> WorkerLoad:
    stats, rates = report.stats, report.stats.rates
    is_encoder = report.kind is WorkerKind.ENCODER
    default_row_s = settings.encoder_row_s if is_encoder else settings.decoder_row_s
    row_s = default_row_s if rates.row_s is None else rates.row_s
    num_done = int(age_s / row_s) if row_s else stats.num_queued_rows
    return WorkerLoad(
        WorkerAddress(report.worker_id, report.kind),
        queued_rows=max(stats.num_queued_rows - num_done, pending_rows),
        num_requests=max(stats.num_running + stats.num_waiting, pending_requests),
        num_decoding=stats.num_decoding,
        capacity_tokens=report.capacity_tokens,
        row_s=row_s,
        decode_step_s=(
            settings.decode_step_s if rates.decode_step_s is None else rates.decode_step_s
        ),
        sizes=StateSizes(
            report.block_bytes, report.window_bytes, report.hand_over_bytes, report.image_bytes
        ),
        is_leaving=report.is_leaving,
    )
