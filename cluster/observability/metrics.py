"""Which series does a gateway export? Every one is a row of `SERIES`; nothing else exists.

A request reports what happens to it through its own `RequestRecord`, which keeps the gauges, the
latencies and the outcome counters consistent: each request leaves the gauges exactly once.
Labels take few values, all known at start-up or from the configuration; no request text, no ids.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from ripresa.cluster.observability.worker_totals import (
    CutShortTotals,
    DiskTotals,
    LeaseTotals,
    MoveTotals,
    PullTotals,
    ShadowTotals,
    held_bytes,
)
from ripresa.cluster.routing.prompt import Waste
from ripresa.cluster.sessions.books import SessionEnd
from ripresa.workers.cache.expected_turns import PrefetchOutcome
from ripresa.workers.cache.session_leases import LeaseOutcome
from ripresa.workers.errors import ErrorCode
from ripresa.workers.prefix_sources import HitSegment, HitTier, PullEnd
from ripresa.workers.replay import PlanKind, Recipe
from ripresa.workers.report import WorkerReport
from ripresa.workers.request import FinishReason, WorkCounters
from ripresa.workers.shadow_counters import (
    KL_BOUNDS,
    Divergence,
    ShadowOutcome,
    ShadowReference,
)

CONTENT_TYPE = CONTENT_TYPE_LATEST

# Seconds. They resolve the demo model on a laptop as well as the longest prompts of a fleet.
FIRST_TOKEN_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0),
)
INTER_TOKEN_BUCKETS_S = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05),
    *(0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5),
)
GAP_BUCKETS_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 3600.0)
REQUEST_BUCKETS_S = (
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0),
)


class Kind(StrEnum):
    """The Prometheus type of a series."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Phase(StrEnum):
    """Why the decoder half computed a row."""

    PREFILL = "prefill"
    DECODE = "decode"


class TokenSource(StrEnum):
    """How the state of a prompt token came to be; every token has one source.

    SKIPPED_LOCAL: it was in the memory of the worker that computes the prompt. SKIPPED_PEER,
    SKIPPED_DISK: that worker brought it from another one, or from its disk. RESUMED: a session
    went on from its parked state, wherever that and the blocks below it were.
    """

    SKIPPED_LOCAL = "skipped_local"
    SKIPPED_PEER = "skipped_peer"
    SKIPPED_DISK = "skipped_disk"
    RESUMED = "resumed"
    RECOMPUTED = "recomputed"
    NEW = "new"


class HitError(StrEnum):
    """MISSING: planned with, and not there. UNKNOWN: there, and the directory had not said so."""

    MISSING = "missing"
    UNKNOWN = "unknown"


class BilledTokens(StrEnum):
    """What a tenant's tokens were; cached ones cost nothing."""

    COMPUTED = "computed"
    CACHED = "cached"
    GENERATED = "generated"


class TenantRefusal(StrEnum):
    """Which of a tenant's limits refused a request."""

    RUNNING = "running"
    TOKENS = "tokens"
    MODEL = "model"


class BreakReason(StrEnum):
    """What of a conversation came back differently.

    REASONING_MISSING: an answer without its reasoning, or with one in other tokens than the
    model's. ARGS_RERENDERED: an answer whose calls were written anew. HEAD_CHANGED: tools, system
    text, effort or thinking. HISTORY_EDITED: a message, or an answer's own text; or some are gone.
    The first two are counted only where the model's own tokens could not stand in.
    """

    REASONING_MISSING = "reasoning_missing"
    ARGS_RERENDERED = "args_rerendered"
    HEAD_CHANGED = "head_changed"
    HISTORY_EDITED = "history_edited"


class SaidOutcome(StrEnum):
    """Of an answer that gateways tell each other.

    SHARED: this gateway's, told to the others. RECEIVED: another one's, heard here. DROPPED: this
    gateway's, of which the others do not hear: the store is slow or out of reach.
    """

    SHARED = "shared"
    RECEIVED = "received"
    DROPPED = "dropped"


class DiskOutcome(StrEnum):
    """Of blocks that a worker asked its disk tier for, or offered to it; names of `StoreStats`."""

    HITS = "hits"
    MISSES = "misses"
    BAD = "bad"
    WRITTEN = "written"
    KNOWN = "known"
    DROPPED = "dropped"
    EVICTED = "evicted"


def tokens_by_source(
    recipe: Recipe, num_prompt_tokens: int, segments: Sequence[HitSegment] = ()
) -> dict[TokenSource, int]:
    """Split a prompt's tokens: skipped + recomputed + new (replay rules, section 2).

    Args:
        segments: where the skipped tokens' state was; () for the worker's own memory.
    """
    if recipe.kind is PlanKind.RESUME:
        skipped = {TokenSource.RESUMED: recipe.start}
    else:
        num_from_peers = sum(s.num_tokens for s in segments if s.tier is HitTier.PEER)
        num_from_disk = sum(s.num_tokens for s in segments if s.tier is HitTier.DISK)
        skipped = {
            TokenSource.SKIPPED_LOCAL: recipe.start - num_from_peers - num_from_disk,
            TokenSource.SKIPPED_PEER: num_from_peers,
            TokenSource.SKIPPED_DISK: num_from_disk,
        }
    return {
        **skipped,
        TokenSource.RECOMPUTED: recipe.write_floor - recipe.start,
        TokenSource.NEW: num_prompt_tokens - recipe.write_floor,
    }


@dataclass(frozen=True, slots=True)
class Series:
    """One row of the table.

    Attributes:
        name: as it is queried (counters with `_total`, histograms without `_bucket`).
        kind: the Prometheus type.
        documentation: what is counted or measured, with its unit.
        labels: label name -> values known in advance; these exist, at zero, from the start. An
            empty tuple means that the values come from the configuration, as all of the series
            with it do.
        buckets: upper bounds of a histogram, in its unit.
    """

    name: str
    kind: Kind
    documentation: str
    labels: tuple[tuple[str, tuple[str, ...]], ...] = ()
    buckets: tuple[float, ...] = ()


TIME_TO_FIRST_TOKEN = Series(
    "ripresa_time_to_first_token_seconds",
    Kind.HISTOGRAM,
    "Seconds from the arrival of a request to its first token.",
    buckets=FIRST_TOKEN_BUCKETS_S,
)
INTER_TOKEN_LATENCY = Series(
    "ripresa_inter_token_latency_seconds",
    Kind.HISTOGRAM,
    "Seconds between two delta messages of a stream, one observation a message.",
    buckets=INTER_TOKEN_BUCKETS_S,
)
E2E_REQUEST_LATENCY = Series(
    "ripresa_e2e_request_latency_seconds",
    Kind.HISTOGRAM,
    "Seconds from the arrival of a request to the end of its stream, finished requests only.",
    buckets=REQUEST_BUCKETS_S,
)
NUM_REQUESTS_RUNNING = Series(
    "ripresa_num_requests_running",
    Kind.GAUGE,
    "Requests for which a decode worker holds pages.",
)
NUM_REQUESTS_WAITING = Series(
    "ripresa_num_requests_waiting",
    Kind.GAUGE,
    "Accepted requests for which no decode worker holds pages yet.",
)
PROMPT_TOKENS = Series(
    "ripresa_prompt_tokens_total",
    Kind.COUNTER,
    "Prompt tokens of requests whose prefill was planned, by how their state came to be.",
    labels=(("source", tuple(TokenSource)),),
)
PLAN_KIND = Series(
    "ripresa_plan_kind_total",
    Kind.COUNTER,
    "Requests by how the state before their first computed row came to be.",
    labels=(("kind", tuple(PlanKind)),),
)
DIRECTORY_HIT_ERROR = Series(
    "ripresa_directory_hit_error_tokens_total",
    Kind.COUNTER,
    "Tokens by which hits differed from what the prefix directory made the planner expect.",
    labels=(("direction", tuple(HitError)),),
)
WASTED_TOKENS = Series(
    "ripresa_wasted_tokens_total",
    Kind.COUNTER,
    "Tokens of prompts that were computed whole for executions that led to no answer, by reason.",
    labels=(("reason", tuple(Waste)),),
)
CUT_SHORT_TOKENS = Series(
    "ripresa_cut_short_tokens_total",
    Kind.COUNTER,
    "Computed tokens of prompts that ended before they were whole, of all workers that live long "
    "enough to say so.",
)
LINEAGE_RESTARTS = Series(
    "ripresa_lineage_restarts_total",
    Kind.COUNTER,
    "Boundaries with cut encoder windows in the planned prompts, their own included.",
)
GENERATION_TOKENS = Series(
    "ripresa_generation_tokens_total",
    Kind.COUNTER,
    "Tokens streamed to clients.",
)
REQUEST_SUCCESS = Series(
    "ripresa_request_success_total",
    Kind.COUNTER,
    "Requests whose stream finished, by the reason why it ended.",
    labels=(("finish_reason", tuple(FinishReason)),),
)
REQUEST_FAILURE = Series(
    "ripresa_request_failure_total",
    Kind.COUNTER,
    "Requests refused before they started or ended by an error or a cancel, by error code.",
    labels=(("code", tuple(ErrorCode)),),
)
RESUMES = Series(
    "ripresa_resumes_total",
    Kind.COUNTER,
    "Streams that clients asked to go on with, by how that ended: OK or an error code.",
    labels=(("code", ("OK", *ErrorCode)),),
)
TRANSFER_BYTES = Series(
    "ripresa_transfer_bytes_total",
    Kind.COUNTER,
    "Bytes of state handed from encoder to decode workers for finished requests, by backend.",
    labels=(("backend", ()),),
)
ENCODER_ROWS = Series(
    "ripresa_encoder_rows_total",
    Kind.COUNTER,
    "Rows computed in the encoder half for finished requests, summed over its layers.",
)
DECODER_ROWS = Series(
    "ripresa_decoder_rows_total",
    Kind.COUNTER,
    "Rows computed in the decoder half for finished requests, summed over its layers, by phase.",
    labels=(("phase", tuple(Phase)),),
)

MOVE_OUTCOMES = ("moved", "refused", "late")
MOVED_BLOCKS = Series(
    "ripresa_moved_blocks_total",
    Kind.COUNTER,
    "Last copies that workers had to evict: another one keeps them, had nothing older, or got them "
    "too late. Every gateway tells it of all workers: take the largest, not the sum.",
    labels=(("outcome", MOVE_OUTCOMES),),
)
MOVED_BYTES = Series(
    "ripresa_moved_block_bytes_total",
    Kind.COUNTER,
    "Bytes of last copies that workers sent to others, likewise of all workers.",
)

DISK_BLOCKS = Series(
    "ripresa_disk_blocks_total",
    Kind.COUNTER,
    "Blocks that workers asked their disk tiers for or offered to them, by what became of them. "
    "Every gateway tells it of all workers: take the largest, not the sum.",
    labels=(("outcome", tuple(DiskOutcome)),),
)
DISK_IO_BYTES = Series(
    "ripresa_disk_io_bytes_total",
    Kind.COUNTER,
    "Bytes that workers read from and wrote to their disk tiers, likewise of all workers.",
    labels=(("operation", ("read", "write")),),
)
DISK_FAILURES = Series(
    "ripresa_disk_failures_total",
    Kind.COUNTER,
    "Writes and clean-ups that a worker's disk refused, likewise of all workers.",
)
DISK_USED_BYTES = Series(
    "ripresa_disk_used_bytes",
    Kind.GAUGE,
    "Bytes that the disk tiers of all machines hold, as far as their workers know.",
)
PEER_PULLS = Series(
    "ripresa_peer_pulls_total",
    Kind.COUNTER,
    "Pulls of cached blocks and windows from other workers, by how they ended, of all workers.",
    labels=(("end", tuple(PullEnd)),),
)
PEER_PULL_BYTES = Series(
    "ripresa_peer_pull_bytes_total",
    Kind.COUNTER,
    "Bytes of cached blocks and windows that workers pulled from each other, of all workers.",
)
TENANT_RUNNING = Series(
    "ripresa_tenant_requests_running",
    Kind.GAUGE,
    "Choices under way, by tenant of the key file.",
    labels=(("tenant", ()),),
)
TENANT_TOKENS = Series(
    "ripresa_tenant_tokens_total",
    Kind.COUNTER,
    "Prompt tokens, computed or cached, and generated tokens, by tenant.",
    labels=(("tenant", ()), ("kind", tuple(BilledTokens))),
)
TENANT_REFUSALS = Series(
    "ripresa_tenant_refusals_total",
    Kind.COUNTER,
    "Requests refused by a limit of their tenant, by that limit.",
    labels=(("tenant", ()), ("reason", tuple(TenantRefusal))),
)
LEASES = Series(
    "ripresa_lease_outcome_total",
    Kind.COUNTER,
    "Leases of sessions whose tools run, by what became of them, likewise of all workers.",
    labels=(("outcome", tuple(LeaseOutcome)),),
)
LEASE_PINNED_BYTES = Series(
    "ripresa_lease_pinned_bytes",
    Kind.GAUGE,
    "Bytes of block KV that leases keep from being evicted, of all workers.",
)
PREFETCHED_BLOCKS = Series(
    "ripresa_prefetched_blocks_total",
    Kind.COUNTER,
    "KV blocks that workers read back from disk before their session went on, by what became of "
    "them, likewise of all workers.",
    labels=(("outcome", tuple(PrefetchOutcome)),),
)
TOOL_GAP = Series(
    "ripresa_tool_gap_seconds",
    Kind.HISTOGRAM,
    "Seconds from an answer that calls tools to the next prompt of its conversation.",
    buckets=GAP_BUCKETS_S,
)
PREFIX_BREAK = Series(
    "ripresa_prefix_break_total",
    Kind.COUNTER,
    "Prompts that do not begin with their conversation's last prompt and answer, by why.",
    labels=(("reason", tuple(BreakReason)),),
)
SAID_ANSWERS = Series(
    "ripresa_said_answers_total",
    Kind.COUNTER,
    "Answers as the model said them that gateways tell each other, by what became of them.",
    labels=(("outcome", tuple(SaidOutcome)),),
)
SESSIONS_OPEN = Series(
    "ripresa_sessions_open",
    Kind.GAUGE,
    "Opened sessions that the session store holds. Every gateway tells it of the one store: take "
    "the largest, not the sum.",
)
SESSION_BYTES = Series(
    "ripresa_session_bytes",
    Kind.GAUGE,
    "Memory of the opened sessions' transcripts, about, likewise of the one store.",
)
SAID_TOKENS = Series(
    "ripresa_said_tokens",
    Kind.GAUGE,
    "Tokens, or their room, of the answers that the store keeps for gateways, likewise.",
)
SESSIONS_ENDED = Series(
    "ripresa_sessions_ended_total",
    Kind.COUNTER,
    "Sessions that were closed, expired or had to make room, likewise.",
    labels=(("reason", tuple(SessionEnd)),),
)
SHADOW_KL = Series(
    "ripresa_replay_shadow_kl",
    Kind.HISTOGRAM,
    "KL(reference || served) in nats, of served tokens behind a bounded replay. Reference `exact` "
    "restarts nowhere; `repeat` follows the served recipe once more: the noise floor. Of all "
    "workers: take the largest, not the sum.",
    labels=(("reference", tuple(ShadowReference)),),
    buckets=KL_BOUNDS,
)
SHADOW_TOP1_AGREEMENT = Series(
    "ripresa_replay_shadow_top1_agreement",
    Kind.HISTOGRAM,
    "1 where the likeliest token is the reference's, else 0, of the same tokens; the sum over the "
    "count is their share. Likewise of all workers.",
    labels=(("reference", tuple(ShadowReference)),),
    buckets=(0.0,),
)
SHADOW_TOKENS = Series(
    "ripresa_replay_shadow_tokens_total",
    Kind.COUNTER,
    "Served tokens that were sampled to be scored again, by what became of them, likewise.",
    labels=(("outcome", tuple(ShadowOutcome)),),
)
SHADOW_ROWS = Series(
    "ripresa_replay_shadow_rows_total",
    Kind.COUNTER,
    "Rows of both halves computed to score tokens again; in no other series. Likewise.",
)
SERIES = (
    TIME_TO_FIRST_TOKEN,
    INTER_TOKEN_LATENCY,
    E2E_REQUEST_LATENCY,
    NUM_REQUESTS_RUNNING,
    NUM_REQUESTS_WAITING,
    PROMPT_TOKENS,
    PLAN_KIND,
    DIRECTORY_HIT_ERROR,
    WASTED_TOKENS,
    CUT_SHORT_TOKENS,
    LINEAGE_RESTARTS,
    GENERATION_TOKENS,
    REQUEST_SUCCESS,
    REQUEST_FAILURE,
    RESUMES,
    TRANSFER_BYTES,
    ENCODER_ROWS,
    DECODER_ROWS,
    DISK_BLOCKS,
    DISK_IO_BYTES,
    DISK_FAILURES,
    DISK_USED_BYTES,
    PEER_PULLS,
    PEER_PULL_BYTES,
    MOVED_BLOCKS,
    MOVED_BYTES,
    TENANT_RUNNING,
    TENANT_TOKENS,
    TENANT_REFUSALS,
    LEASES,
    LEASE_PINNED_BYTES,
    PREFETCHED_BLOCKS,
    TOOL_GAP,
    PREFIX_BREAK,
    SAID_ANSWERS,
    SESSIONS_OPEN,
    SESSION_BYTES,
    SAID_TOKENS,
    SESSIONS_ENDED,
    SHADOW_KL,
    SHADOW_TOP1_AGREEMENT,
    SHADOW_TOKENS,
    SHADOW_ROWS,
)
# Histograms that workers fill: the gateway tells their sums.
WORKER_HISTOGRAMS = (SHADOW_KL, SHADOW_TOP1_AGREEMENT)


class RequestState(StrEnum):
    """Where a request stands; `_NEXT` lists the legal steps."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


_NEXT = {
    # Back to waiting when a worker died and the request is planned again.
    RequestState.WAITING: {RequestState.RUNNING, RequestState.ENDED},
    RequestState.RUNNING: {RequestState.WAITING, RequestState.ENDED},
    RequestState.ENDED: frozenset[RequestState](),
}


class GatewayMetrics:
    """The series of one gateway process, in a registry of their own.

    Args:
        backends: transfer backends in use, so that their counters exist before the first byte.
        clock: monotonic seconds; tests pass their own.
        workers: the newest reports of all workers.
    """

    def __init__(
        self,
        *,
        backends: tuple[str, ...] = (),
        clock: Callable[[], float] = time.monotonic,
        workers: Callable[[], Sequence[WorkerReport]] = tuple,
    ) -> None:
        self.registry = CollectorRegistry()
        self._workers = workers
        self._disks = DiskTotals()
        self._pulls = PullTotals()
        self._leases = LeaseTotals()
        self._moves = MoveTotals()
        self._cut_short = CutShortTotals()
        self._shadow = ShadowTotals()
        self._clock = clock
        self._counters: dict[Series, Counter] = {}
        self._gauges: dict[Series, Gauge] = {}
        self._histograms: dict[Series, Histogram] = {}
        for series in SERIES:
            if series not in WORKER_HISTOGRAMS:
                self._register(series)
        self.registry.register(_ShadowHistograms(self._shadow))
        for backend in backends:
            self.counter(TRANSFER_BYTES).labels(backend)

    def request_started(self, num_prompt_tokens: int) -> RequestRecord:
        """Counts an accepted request as waiting and starts its clock."""
        return RequestRecord(self, self._clock, num_prompt_tokens)

    def request_rejected(self, code: ErrorCode) -> None:
        """Counts a request that was refused before it started."""
        self.counter(REQUEST_FAILURE).labels(code).inc()

    def resumed(self, error: ErrorCode | None) -> None:
        """Counts a resumed stream that was told to its end, or what ended it."""
        self.counter(RESUMES).labels("OK" if error is None else error).inc()

    def wasted(self, reason: Waste, num_tokens: int) -> None:
        """Counts prompt tokens that were computed in vain."""
        self.counter(WASTED_TOKENS).labels(reason).inc(num_tokens)

    def continued(self, broken: BreakReason | None, gap_s: float | None) -> None:
        """Counts a prompt that continues a conversation.

        Args:
            broken: why it does not begin with what was said; None if it does.
            gap_s: seconds since the last answer called tools; None if it did not.
        """
        if broken is not None:
            self.counter(PREFIX_BREAK).labels(broken).inc()
        if gap_s is not None:
            self.histogram(TOOL_GAP).observe(gap_s)

    def said(self, outcome: SaidOutcome, num_answers: int) -> None:
        """Counts answers that gateways tell each other."""
        self.counter(SAID_ANSWERS).labels(outcome).inc(num_answers)

    def counter(self, series: Series) -> Counter:
        """The counter behind a row of `SERIES`."""
        return self._counters[series]

    def gauge(self, series: Series) -> Gauge:
        """The gauge behind a row of `SERIES`."""
        return self._gauges[series]

    def histogram(self, series: Series) -> Histogram:
        """The histogram behind a row of `SERIES`."""
        return self._histograms[series]

    def render(self) -> bytes:
        """The current values in Prometheus's text format, to be served as `CONTENT_TYPE`."""
        self._count_disks()
        self._count_pulls()
        self._count_leases()
        self._count_moves()
        self._count_shadow()
        self.counter(CUT_SHORT_TOKENS).inc(self._cut_short.take(self._workers()))
        return generate_latest(self.registry)

    def _count_disks(self) -> None:
        """Bring the series of the workers' disk tiers up to date."""
        reports = self._workers()
        added = self._disks.take(reports)
        for outcome in DiskOutcome:
            self.counter(DISK_BLOCKS).labels(outcome).inc(added[outcome])
        self.counter(DISK_IO_BYTES).labels("read").inc(added["bytes_read"])
        self.counter(DISK_IO_BYTES).labels("write").inc(added["bytes_written"])
        self.counter(DISK_FAILURES).inc(added["failures"])
        self.gauge(DISK_USED_BYTES).set(held_bytes(reports))

    def _count_pulls(self) -> None:
        """Bring the series of what workers pull from each other up to date."""
        ends, num_bytes = self._pulls.take(self._workers())
        for end, count in ends.items():
            self.counter(PEER_PULLS).labels(end).inc(count)
        self.counter(PEER_PULL_BYTES).inc(num_bytes)

    def _count_leases(self) -> None:
        """Bring the series of the workers' leases up to date."""
        reports = self._workers()
        leases, prefetched = self._leases.take(reports)
        for outcome, count in leases.items():
            self.counter(LEASES).labels(outcome).inc(count)
        for outcome, count in prefetched.items():
            self.counter(PREFETCHED_BLOCKS).labels(outcome).inc(count)
        pinned = sum(r.stats.leases.num_pinned_blocks * r.block_bytes for r in reports)
        self.gauge(LEASE_PINNED_BYTES).set(pinned)

    def _count_moves(self) -> None:
        """Bring the series of what workers keep for each other up to date."""
        added = self._moves.take(self._workers())
        for outcome in MOVE_OUTCOMES:
            self.counter(MOVED_BLOCKS).labels(outcome).inc(added[f"num_{outcome}"])
        self.counter(MOVED_BYTES).inc(added["sent_bytes"])

    def _count_shadow(self) -> None:
        """Bring the series of what workers score again up to date."""
        outcomes, num_rows = self._shadow.take(self._workers())
        for outcome, count in outcomes.items():
            self.counter(SHADOW_TOKENS).labels(outcome).inc(count)
        self.counter(SHADOW_ROWS).inc(num_rows)

    def _register(self, series: Series) -> None:
        names = [name for name, _ in series.labels]
        match series.kind:
            case Kind.HISTOGRAM:
                self._histograms[series] = Histogram(
                    series.name,
                    series.documentation,
                    names,
                    registry=self.registry,
                    buckets=series.buckets,
                )
            case Kind.GAUGE:
                self._gauges[series] = Gauge(
                    series.name, series.documentation, names, registry=self.registry
                )
            case Kind.COUNTER:
                counter = Counter(series.name, series.documentation, names, registry=self.registry)
                self._counters[series] = counter
                if len(series.labels) == 1:
                    for value in series.labels[0][1]:
                        counter.labels(value)


class _ShadowHistograms(Collector):
    """The workers' distances as histograms: whole counts, which no `Histogram` takes."""

    def __init__(self, totals: ShadowTotals) -> None:
        self._totals = totals

    def collect(self) -> Iterator[HistogramMetricFamily]:
        kl, agreement = (
            HistogramMetricFamily(
                series.name, series.documentation, labels=[name for name, _ in series.labels]
            )
            for series in WORKER_HISTOGRAMS
        )
        for reference, divergence in self._totals.divergences.items():
            kl.add_metric([reference], *_kl_histogram(divergence))
            agreement.add_metric([reference], *_agreement_histogram(divergence))
        yield kl
        yield agreement


Buckets = list[tuple[str, float]]
"""Upper bounds and how many are at most that, ascending."""


def _kl_histogram(divergence: Divergence) -> tuple[Buckets, float]:
    counts = accumulate(divergence.kl_counts)
    buckets = zip(map(floatToGoString, (*KL_BOUNDS, math.inf)), counts, strict=True)
    return list(buckets), divergence.kl_sum


def _agreement_histogram(divergence: Divergence) -> tuple[Buckets, float]:
    num_tokens, num_agreeing = divergence.num_tokens, divergence.num_agreeing
    return [("0.0", num_tokens - num_agreeing), ("+Inf", num_tokens)], num_agreeing


class RequestRecord:
    """What one request adds to the series; made by `GatewayMetrics.request_started`.

    Every request ends with exactly one of `finished` and `failed`; later calls raise
    `RuntimeError`, because they would count a request twice.
    """

    def __init__(
        self, metrics: GatewayMetrics, clock: Callable[[], float], num_prompt_tokens: int
    ) -> None:
        self._metrics = metrics
        self._clock = clock
        self._num_prompt_tokens = num_prompt_tokens
        self._arrived_s = clock()
        self._last_delta_s: float | None = None
        self._state = RequestState.WAITING
        self._gauge(RequestState.WAITING).inc()

    @property
    def state(self) -> RequestState:
        return self._state

    def running(self) -> None:
        """A decode worker holds the request's pages."""
        self._move(RequestState.RUNNING)

    def planned(
        self,
        recipe: Recipe,
        segments: Sequence[HitSegment] = (),
        hit_error_tokens: int | None = None,
    ) -> None:
        """What is computed of the prompt is fixed; called once.

        Args:
            segments: see `tokens_by_source`.
            hit_error_tokens: planned minus real hit; None if none was planned with.
        """
        counter = self._metrics.counter
        sources = tokens_by_source(recipe, self._num_prompt_tokens, segments)
        for source, num_tokens in sources.items():
            counter(PROMPT_TOKENS).labels(source).inc(num_tokens)
        if hit_error_tokens:
            direction = HitError.MISSING if hit_error_tokens > 0 else HitError.UNKNOWN
            counter(DIRECTORY_HIT_ERROR).labels(direction).inc(abs(hit_error_tokens))
        counter(PLAN_KIND).labels(recipe.kind).inc()
        counter(LINEAGE_RESTARTS).inc(len(recipe.restarts))

    def waiting_again(self) -> None:
        """The worker is gone; the request waits for another one."""
        self._move(RequestState.WAITING)

    def delta(self, num_tokens: int) -> None:
        """A message with `num_tokens` new tokens goes to the client."""
        now_s = self._clock()
        if self._last_delta_s is None:
            self._metrics.histogram(TIME_TO_FIRST_TOKEN).observe(now_s - self._arrived_s)
        else:
            self._metrics.histogram(INTER_TOKEN_LATENCY).observe(now_s - self._last_delta_s)
        self._last_delta_s = now_s
        self._metrics.counter(GENERATION_TOKENS).inc(num_tokens)

    def finished(
        self, reason: FinishReason, counters: WorkCounters, *, backend: str | None
    ) -> None:
        """The stream ended well.

        Args:
            reason: why it ended.
            counters: the rows and bytes that the workers report for it.
            backend: what moved the state; None if the decode worker prefilled by itself.
        """
        self._move(RequestState.ENDED)
        counter = self._metrics.counter
        counter(REQUEST_SUCCESS).labels(reason).inc()
        counter(ENCODER_ROWS).inc(counters.encoder_rows)
        counter(DECODER_ROWS).labels(Phase.PREFILL).inc(counters.decoder_prefill_rows)
        counter(DECODER_ROWS).labels(Phase.DECODE).inc(counters.decoder_rows)
        if backend is not None:
            counter(TRANSFER_BYTES).labels(backend).inc(counters.transfer_bytes)
        self._metrics.histogram(E2E_REQUEST_LATENCY).observe(self._clock() - self._arrived_s)

    def failed(self, code: ErrorCode) -> None:
        """The stream ended by an error, a deadline or a cancel."""
        self._move(RequestState.ENDED)
        self._metrics.counter(REQUEST_FAILURE).labels(code).inc()

    def _move(self, state: RequestState) -> None:
        if state not in _NEXT[self._state]:
            raise RuntimeError(f"a request that is {self._state} cannot become {state}")
        self._gauge(self._state).dec()
        self._state = state
        if state is not RequestState.ENDED:
            self._gauge(state).inc()

    def _gauge(self, state: RequestState) -> Gauge:
        waiting = state is RequestState.WAITING
        return self._metrics.gauge(NUM_REQUESTS_WAITING if waiting else NUM_REQUESTS_RUNNING)
