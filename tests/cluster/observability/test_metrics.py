"""Do the gateway's series say what happened, in the format that Prometheus reads?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from ripresa.cluster.observability.metrics import (
    SERIES,
    WORKER_HISTOGRAMS,
    GatewayMetrics,
    Kind,
    RequestRecord,
    RequestState,
)
from ripresa.cluster.routing.prompt import Waste
from ripresa.workers.cache.block_store import StoreStats
from ripresa.workers.errors import ErrorCode
from ripresa.workers.prefix_sources import HitSegment, HitTier
from ripresa.workers.replay import PlanKind, Recipe, TailVariant
from ripresa.workers.report import WorkerKind, WorkerReport
from ripresa.workers.request import (
    EngineStats,
    FinishReason,
    LeaseCounters,
    MoveCounters,
    PullCounters,
    WorkCounters,
)
from ripresa.workers.shadow_counters import KL_BOUNDS, Divergence, ShadowCounters

RECIPE = Recipe(PlanKind.BOUNDED, 2, 2, 4, (4,), 5, TailVariant.FLOORED, 0)

COUNTERS = WorkCounters(
    encoder_rows=40, decoder_prefill_rows=12, decoder_rows=18, transfer_bytes=2_048
)


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def metrics(clock: Clock) -> GatewayMetrics:
    return GatewayMetrics(backends=("gloo",), clock=clock)


def samples(metrics: GatewayMetrics) -> dict[tuple[str, ...], float]:
    """(sample name, label values ...) -> value, as a scraper reads them."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def test_table_and_endpoint_agree(metrics: GatewayMetrics) -> None:
    read = {
        # The parser drops a counter's suffix, and each family has a twin with its creation time.
        family.name + ("_total" if family.type == "counter" else ""): (
            family.type,
            family.documentation,
        )
        for family in text_string_to_metric_families(metrics.render().decode())
        if not family.name.endswith("_created")
    }
    assert read == {series.name: (series.kind, series.documentation) for series in SERIES}


def test_names_follow_the_conventions() -> None:
    for series in SERIES:
        assert re.fullmatch(r"ripresa_[a-z0-9_]+", series.name)
        assert series.name.endswith("_total") == (series.kind is Kind.COUNTER)
        # Those that count no seconds say what they count in their documentation.
        is_timed = series.kind is Kind.HISTOGRAM and series not in WORKER_HISTOGRAMS
        assert is_timed == series.name.endswith("_seconds")
        assert list(series.buckets) == sorted(set(series.buckets))
        assert bool(series.buckets) == (series.kind is Kind.HISTOGRAM)


def test_labels_take_few_values() -> None:
    labels = {name: values for series in SERIES for name, values in series.labels}
    assert set(labels) == {
        *("finish_reason", "code", "backend", "phase", "source", "kind", "direction", "reason"),
        *("outcome", "operation", "end", "tenant", "reference"),
    }
    assert all(len(values) <= 16 for values in labels.values())


def test_tokens_of_peers_and_disks_and_wrong_hints_are_counted_apart(
    metrics: GatewayMetrics,
) -> None:
    recipe = replace(RECIPE, start=300, write_floor=400)
    segments = (
        HitSegment(HitTier.DEVICE, 0, 128),
        HitSegment(HitTier.PEER, 128, 256),
        HitSegment(HitTier.DISK, 256, 300),
    )
    metrics.request_started(num_prompt_tokens=500).planned(recipe, segments, 256)
    metrics.request_started(num_prompt_tokens=500).planned(recipe, (), -100)
    metrics.wasted(Waste.CANCELLED, 70)
    read = samples(metrics)
    assert read["ripresa_prompt_tokens_total", "skipped_peer"] == 128
    assert read["ripresa_prompt_tokens_total", "skipped_local"] == 128 + 300
    assert read["ripresa_prompt_tokens_total", "skipped_disk"] == 44
    assert read["ripresa_directory_hit_error_tokens_total", "missing"] == 256
    assert read["ripresa_directory_hit_error_tokens_total", "unknown"] == 100
    assert read["ripresa_wasted_tokens_total", "cancelled"] == 70


def test_known_labels_exist_before_the_first_request(metrics: GatewayMetrics) -> None:
    read = samples(metrics)
    for reason in FinishReason:
        assert read["ripresa_request_success_total", reason] == 0
    for code in ErrorCode:
        assert read["ripresa_request_failure_total", code] == 0
    assert read["ripresa_transfer_bytes_total", "gloo"] == 0


def report(
    worker_id: str, node_id: str, disk: StoreStats | None, pulls: PullCounters | None = None
) -> WorkerReport:
    counters = WorkCounters()
    stats = EngineStats(0, 0, 1, 1, 0, counters, 0, 0, disk=disk, pulls=pulls or PullCounters())
    return WorkerReport(worker_id, WorkerKind.DECODE, node_id, 1, 1, stats)


def test_disk_tiers_are_summed_over_the_lives_of_all_workers() -> None:
    reports = [
        report("a", "n", StoreStats(hits=3, bad=1, bytes_read=30, num_bytes=100)),
        report("b", "n", StoreStats(hits=4, failures=2, bytes_written=7, num_bytes=120)),
        report("c", "m", StoreStats(num_bytes=5)),
        report("d", "m", None),
    ]
    metrics = GatewayMetrics(workers=lambda: reports)
    for _ in range(2):
        read = samples(metrics)
        assert read["ripresa_disk_blocks_total", "hits"] == 7
        assert read["ripresa_disk_blocks_total", "bad"] == 1
        assert read["ripresa_disk_io_bytes_total", "read"] == 30
        assert read["ripresa_disk_failures_total",] == 2
        assert read["ripresa_disk_used_bytes",] == 125
    reports[:2] = [report("e", "n", StoreStats(hits=1, num_bytes=90))]
    read = samples(metrics)
    assert read["ripresa_disk_blocks_total", "hits"] == 8
    assert read["ripresa_disk_used_bytes",] == 95


def test_leases_are_summed_over_the_lives_of_all_workers() -> None:
    def leasing(worker_id: str, granted: int, num_pinned: int) -> WorkerReport:
        leases = LeaseCounters(
            (("granted", granted), ("yielded", 1)), num_pinned, (("used", granted), ("unused", 1))
        )
        found = report(worker_id, "n", None)
        return replace(found, stats=replace(found.stats, leases=leases), block_bytes=100)

    reports = [leasing("a", 3, 2), leasing("b", 4, 1)]
    metrics = GatewayMetrics(workers=lambda: reports)
    for _ in range(2):
        read = samples(metrics)
        assert read["ripresa_lease_outcome_total", "granted"] == 7
        assert read["ripresa_lease_outcome_total", "yielded"] == 2
        assert read["ripresa_lease_outcome_total", "lapsed"] == 0
        assert read["ripresa_lease_pinned_bytes",] == 300
        assert read["ripresa_prefetched_blocks_total", "used"] == 7
        assert read["ripresa_prefetched_blocks_total", "unused"] == 2
    reports[:1] = [leasing("c", 1, 0)]
    read = samples(metrics)
    assert read["ripresa_lease_outcome_total", "granted"] == 8
    assert read["ripresa_prefetched_blocks_total", "used"] == 8
    assert read["ripresa_lease_pinned_bytes",] == 100


def test_prompts_cut_short_are_summed_over_the_lives_of_all_workers() -> None:
    def cutting(worker_id: str, num_tokens: int) -> WorkerReport:
        found = report(worker_id, "n", None)
        return replace(found, stats=replace(found.stats, num_cut_short_tokens=num_tokens))

    reports = [cutting("a", 300), cutting("b", 0)]
    metrics = GatewayMetrics(workers=lambda: reports)
    for _ in range(2):
        assert samples(metrics)["ripresa_cut_short_tokens_total",] == 300
    reports[:1] = [cutting("c", 20), cutting("a", 310)]
    assert samples(metrics)["ripresa_cut_short_tokens_total",] == 330


def test_pulls_are_summed_over_the_lives_of_all_workers() -> None:
    first = PullCounters((("complete", 3), ("late", 1)), received_bytes=70)
    reports = [report("a", "n", None, first), report("b", "n", None)]
    metrics = GatewayMetrics(workers=lambda: reports)
    for _ in range(2):
        read = samples(metrics)
        assert read["ripresa_peer_pulls_total", "complete"] == 3
        assert read["ripresa_peer_pulls_total", "late"] == 1
        assert read["ripresa_peer_pulls_total", "failed"] == 0
        assert read["ripresa_peer_pull_bytes_total",] == 70
    reports[:1] = [report("c", "n", None, PullCounters((("complete", 1),), received_bytes=5))]
    read = samples(metrics)
    assert read["ripresa_peer_pulls_total", "complete"] == 4
    assert read["ripresa_peer_pull_bytes_total",] == 75


def test_moves_are_summed_over_the_lives_of_all_workers() -> None:
    def said(worker_id: str, moves: MoveCounters) -> WorkerReport:
        told = report(worker_id, "n", None)
        return replace(told, stats=replace(told.stats, moves=moves))

    first = MoveCounters(num_moved=3, num_refused=2, num_late=1, num_taken=4, sent_bytes=70)
    reports = [said("a", first), said("b", MoveCounters())]
    metrics = GatewayMetrics(workers=lambda: reports)
    for _ in range(2):
        read = samples(metrics)
        counts = [read["ripresa_moved_blocks_total", each] for each in ("moved", "refused", "late")]
        assert counts == [3, 2, 1]
        assert read["ripresa_moved_block_bytes_total",] == 70
    reports[:1] = [said("c", MoveCounters(num_moved=1, sent_bytes=5))]
    read = samples(metrics)
    assert read["ripresa_moved_blocks_total", "moved"] == 4
    assert read["ripresa_moved_block_bytes_total",] == 75


KL, AGREEMENT = "ripresa_replay_shadow_kl", "ripresa_replay_shadow_top1_agreement"


def test_what_is_scored_again_is_summed_over_the_lives_of_all_workers() -> None:
    def scoring(worker_id: str, exact: Divergence, repeat: Divergence) -> WorkerReport:
        told = report(worker_id, "n", None)
        found = ShadowCounters(
            (("scored", exact.num_tokens), ("busy", 2)),
            (("exact", exact), ("repeat", repeat)),
            num_rows=100,
        )
        return replace(told, stats=replace(told.stats, shadow=found))

    first = Divergence.of([0.0, 0.02, 5.0], [True, True, False])
    second = Divergence.of([0.5], [True])
    still = Divergence.of([0.0] * 3, [True] * 3)
    reports = [scoring("a", first, still), scoring("b", second, Divergence.of([0.0], [True]))]
    metrics = GatewayMetrics(workers=lambda: reports)
    for _ in range(2):
        read = samples(metrics)
        assert read[f"{KL}_count", "exact"] == read[f"{KL}_count", "repeat"] == 4
        assert read[f"{KL}_sum", "exact"] == pytest.approx(5.52)
        assert read[f"{KL}_sum", "repeat"] == 0
        assert [
            read[f"{KL}_bucket", bound, "exact"] for bound in ("1e-06", "0.03", "1.0", "+Inf")
        ] == [1, 2, 3, 4]
        assert read[f"{AGREEMENT}_sum", "exact"] == 3
        assert read[f"{AGREEMENT}_count", "exact"] == 4
        assert read[f"{AGREEMENT}_bucket", "0.0", "exact"] == 1
        assert read["ripresa_replay_shadow_tokens_total", "scored"] == 4
        assert read["ripresa_replay_shadow_tokens_total", "busy"] == 4
        assert read["ripresa_replay_shadow_tokens_total", "failed"] == 0
        assert read["ripresa_replay_shadow_rows_total",] == 200
    # One goes, one comes, one goes on.
    reports[:] = [
        scoring("c", second, second),
        scoring("b", second + second, second),
    ]
    read = samples(metrics)
    assert read[f"{KL}_count", "exact"] == 6
    assert read[f"{KL}_sum", "exact"] == pytest.approx(6.52)
    assert read["ripresa_replay_shadow_tokens_total", "scored"] == 6


@settings(max_examples=25)
@given(st.lists(st.tuples(st.floats(0, 100), st.booleans())))
def test_every_token_is_in_one_bucket_at_most_that_far(found: list[tuple[float, bool]]) -> None:
    divergence = Divergence.of((kl for kl, _ in found), (agrees for _, agrees in found))
    metrics = GatewayMetrics(
        workers=lambda: [
            replace(
                told := report("a", "n", None),
                stats=replace(
                    told.stats, shadow=ShadowCounters(divergences=(("exact", divergence),))
                ),
            )
        ]
    )
    read = samples(metrics)
    for bound in KL_BOUNDS:
        at_most = sum(kl <= bound for kl, _ in found)
        assert read[f"{KL}_bucket", str(bound), "exact"] == at_most
    assert read[f"{KL}_count", "exact"] == len(found)


def test_a_stream_that_finishes(metrics: GatewayMetrics, clock: Clock) -> None:
    request = metrics.request_started(num_prompt_tokens=7)
    assert samples(metrics)["ripresa_num_requests_waiting",] == 1
    request.running()
    request.planned(RECIPE)
    assert samples(metrics)["ripresa_num_requests_waiting",] == 0
    assert samples(metrics)["ripresa_num_requests_running",] == 1
    for pause_s, num_tokens in ((0.3, 1), (0.02, 2), (0.04, 1)):
        clock.now_s += pause_s
        request.delta(num_tokens)
    clock.now_s += 0.14
    request.finished(FinishReason.LENGTH, COUNTERS, backend="gloo")

    read = samples(metrics)
    assert read["ripresa_num_requests_running",] == 0
    by_source = {key[1]: read[key] for key in read if key[0] == "ripresa_prompt_tokens_total"}
    assert by_source == {
        "skipped_local": 2,
        "skipped_peer": 0,
        "skipped_disk": 0,
        "resumed": 0,
        "recomputed": 2,
        "new": 3,
    }
    assert read["ripresa_plan_kind_total", "bounded"] == 1
    assert read["ripresa_lineage_restarts_total",] == 1
    assert read["ripresa_generation_tokens_total",] == 4
    assert read["ripresa_time_to_first_token_seconds_count",] == 1
    assert read["ripresa_time_to_first_token_seconds_sum",] == pytest.approx(0.3)
    assert read["ripresa_inter_token_latency_seconds_count",] == 2
    assert read["ripresa_inter_token_latency_seconds_sum",] == pytest.approx(0.06)
    assert read["ripresa_inter_token_latency_seconds_bucket", "0.03"] == 1
    assert read["ripresa_e2e_request_latency_seconds_count",] == 1
    assert read["ripresa_e2e_request_latency_seconds_sum",] == pytest.approx(0.5)
    assert read["ripresa_request_success_total", "length"] == 1
    assert read["ripresa_request_success_total", "stop"] == 0
    assert read["ripresa_encoder_rows_total",] == 40
    assert read["ripresa_decoder_rows_total", "prefill"] == 12
    assert read["ripresa_decoder_rows_total", "decode"] == 18
    assert read["ripresa_transfer_bytes_total", "gloo"] == 2_048


def test_a_local_prefill_moves_no_bytes(metrics: GatewayMetrics) -> None:
    request = metrics.request_started(num_prompt_tokens=1)
    request.running()
    request.finished(FinishReason.STOP, WorkCounters(encoder_rows=3), backend=None)
    assert samples(metrics)["ripresa_transfer_bytes_total", "gloo"] == 0


@pytest.mark.parametrize("was_running", [False, True])
def test_a_request_that_fails(metrics: GatewayMetrics, was_running: bool) -> None:
    request = metrics.request_started(num_prompt_tokens=3)
    if was_running:
        request.running()
    request.failed(ErrorCode.DEADLINE_EXCEEDED)
    read = samples(metrics)
    assert read["ripresa_num_requests_waiting",] == 0
    assert read["ripresa_num_requests_running",] == 0
    assert read["ripresa_request_failure_total", "DEADLINE_EXCEEDED"] == 1
    assert read["ripresa_e2e_request_latency_seconds_count",] == 0


def test_a_refused_request_never_waits(metrics: GatewayMetrics) -> None:
    metrics.request_rejected(ErrorCode.RESOURCE_EXHAUSTED)
    read = samples(metrics)
    assert read["ripresa_request_failure_total", "RESOURCE_EXHAUSTED"] == 1
    assert read["ripresa_num_requests_waiting",] == 0
    assert read["ripresa_prompt_tokens_total", "new"] == 0


def test_a_request_ends_once(metrics: GatewayMetrics) -> None:
    request = metrics.request_started(num_prompt_tokens=3)
    request.failed(ErrorCode.CANCELLED)
    with pytest.raises(RuntimeError, match="ended cannot become ended"):
        request.failed(ErrorCode.CANCELLED)
    with pytest.raises(RuntimeError, match="ended cannot become running"):
        request.running()
    assert samples(metrics)["ripresa_request_failure_total", "CANCELLED"] == 1
    assert samples(metrics)["ripresa_num_requests_waiting",] == 0


def test_two_gateways_of_one_process_do_not_mix(metrics: GatewayMetrics) -> None:
    other = GatewayMetrics()
    other.request_started(num_prompt_tokens=7).planned(RECIPE)
    assert samples(metrics)["ripresa_prompt_tokens_total", "new"] == 0


@given(
    st.lists(
        st.lists(st.sampled_from(["running", "waiting_again", "delta"]), max_size=6),
        min_size=1,
        max_size=5,
    ),
    st.randoms(use_true_random=False),
)
def test_gauges_return_to_zero_whatever_happens(steps: list[list[str]], random: Random) -> None:
    metrics = GatewayMetrics()
    open_requests = [(metrics.request_started(1), iter(names)) for names in steps]
    while open_requests:
        index = random.randrange(len(open_requests))
        request, names = open_requests[index]
        if not take_step(request, names):
            request.failed(ErrorCode.UNAVAILABLE)
            del open_requests[index]
        for state in (RequestState.WAITING, RequestState.RUNNING):
            counted = metrics.registry.get_sample_value(f"ripresa_num_requests_{state}")
            assert counted == sum(request.state is state for request, _ in open_requests)
    assert samples(metrics)["ripresa_request_failure_total", "UNAVAILABLE"] == len(steps)


def take_step(request: RequestRecord, names: Iterator[str]) -> bool:
    """Takes the next legal step; False when none is left."""
    for name in names:
        match name, request.state:
            case "running", "waiting":
                request.running()
            case "waiting_again", "running":
                request.waiting_again()
            case "delta", "running":
                request.delta(1)
            case _:
                continue
        return True
    return False
