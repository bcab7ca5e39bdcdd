"""Is the cheapest route chosen, from hits that exist, and does the plan say why?"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from told_index import Held, told_index

from ripresa.cluster.routing.planner import Leader, RouteQuery, SessionHome, plan_route
from ripresa.cluster.routing.route_plan import RoutePlan
from ripresa.cluster.routing.worker_load import PlannerSettings, StateSizes, WorkerLoad
from ripresa.workers.address import WorkerAddress, WorkerKind
from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.errors import InvalidArgument, Unavailable
from ripresa.workers.prefix_sources import BlockSource, ImageSource
from ripresa.workers.replay import PlanKind, TailVariant, cold_recipe
from ripresa.workers.replay_planner import plan_prefill
from ripresa.workers.replay_query import PrefillQuery, ReplayGeometry

W, R = 8, 2
GEOMETRY = ReplayGeometry(W, R, 3, 3)
SETTINGS = PlannerSettings(bandwidth_bytes_per_s=1e6, round_trip_s=0.001)
SIZES = StateSizes(100, 300, 500, 400)
NAMES = ("d0", "d1", "d2", "e0", "e1")
HASHES = tuple(f"h{number}".encode() for number in range(12))


def load(name: str, **changes: object) -> WorkerLoad:
    kind = WorkerKind.ENCODER if name[0] == "e" else WorkerKind.DECODE
    worker = WorkerLoad(WorkerAddress(name, kind), row_s=0.01, decode_step_s=0.02, sizes=SIZES)
    return replace(worker, **changes)  # type: ignore[arg-type]


LOADS = tuple(load(name) for name in NAMES)

held_by_one = st.builds(
    Held,
    st.just(HASHES),
    st.integers(0, 12),
    restarts=st.sampled_from(((), (2 * W,), (2 * W, 5 * W))),
    windows=st.lists(st.integers(1, 12), max_size=3).map(tuple),
)
cluster = st.dictionaries(st.sampled_from(NAMES), st.lists(held_by_one, max_size=2), max_size=4)
loads = st.tuples(
    *(
        st.builds(
            lambda name, rows, decoding, requests: load(
                name, queued_rows=rows, num_decoding=decoding, num_requests=requests
            ),
            st.just(name),
            st.integers(0, 60),
            st.integers(0, 3),
            st.integers(0, 5),
        )
        for name in NAMES
    )
)


def query(
    held: dict[str, list[Held]], num_tokens: int = 12 * W + 3, **changes: object
) -> RouteQuery:
    hashes = HASHES[: num_tokens // W]
    lookup = told_index(W, held).lookup(hashes, 0.0)
    return replace(RouteQuery(GEOMETRY, num_tokens, hashes, lookup=lookup), **changes)  # type: ignore[arg-type]


def identities(part: Held) -> set[BlockIdentity]:
    return {
        BlockIdentity(HASHES[n], tuple(r for r in part.restarts if r < (n + 1) * W))
        for n in range(part.first, part.stop)
    }


def holds(held: dict[str, list[Held]], worker: str) -> set[BlockIdentity]:
    return {name for part in held.get(worker, ()) for name in identities(part)}


def windows_of(held: dict[str, list[Held]], worker: str) -> set[BlockIdentity]:
    return {
        BlockIdentity(HASHES[n - 1], tuple(r for r in part.restarts if r < n * W))
        for part in held.get(worker, ())
        for n in part.windows
    }


@given(cluster, loads, st.integers(1, 12 * W + 3))
@settings(max_examples=300, deadline=None)
def test_a_plan_reuses_what_its_sources_hold(
    held: dict[str, list[Held]], workers: tuple[WorkerLoad, ...], num_tokens: int
) -> None:
    """If the directory is right, the computing worker finds exactly the planned hit."""
    asked = query(held, num_tokens)
    plan = plan_route(asked, workers, SETTINGS)
    for candidate in (plan.chosen, *plan.alternatives):
        hit, mine = candidate.hit, holds(held, candidate.computing)
        windows = windows_of(held, candidate.computing)
        for source in candidate.sources.blocks:
            for number in range(source.first, source.stop):
                lineage = tuple(r for r in source.restarts if r < (number + 1) * W)
                name = BlockIdentity(HASHES[number], lineage)
                assert name in holds(held, source.holder.worker_id)
                assert source.holder.worker_id != candidate.computing
                mine.add(name)
        for window in candidate.sources.windows:
            name = BlockIdentity(HASHES[window.boundary // W - 1], window.restarts)
            assert name in windows_of(held, window.holder.worker_id)
            windows.add(name)
        chain = [
            BlockIdentity(HASHES[n], tuple(r for r in hit.restarts if r < (n + 1) * W))
            for n in range(hit.num_blocks)
        ]
        assert set(chain) <= mine
        real = plan_prefill(PrefillQuery(GEOMETRY, num_tokens, chain, windows))
        assert (real.recipe.kind, real.start) == (hit.kind, hit.start)


@given(cluster, loads)
@settings(max_examples=150, deadline=None)
def test_nothing_that_was_compared_is_cheaper(
    held: dict[str, list[Held]], workers: tuple[WorkerLoad, ...]
) -> None:
    plan = plan_route(query(held), workers, SETTINGS)
    assert not plan.chosen.note
    assert all(
        other.note or other.cost.total_s >= plan.chosen.cost.total_s for other in plan.alternatives
    )
    assert plan.reason


@given(cluster, loads, st.sampled_from(NAMES), st.integers(1, 500))
@settings(max_examples=150, deadline=None)
def test_more_work_never_attracts_a_prompt(
    held: dict[str, list[Held]], workers: tuple[WorkerLoad, ...], name: str, more: int
) -> None:
    """Raising a worker's queue leaves a prompt where it was, or takes it from that worker."""
    free = replace(SETTINGS, max_lead=1e9)
    asked = query(held)
    before = plan_route(asked, workers, free)
    busier = tuple(
        replace(w, queued_rows=w.queued_rows + more) if w.worker_id == name else w for w in workers
    )
    after = plan_route(asked, busier, free)
    used = {after.decoder, after.encoder}
    assert name not in used or {before.decoder, before.encoder} >= {name}


@given(cluster, loads, st.sets(st.sampled_from(NAMES)))
@settings(max_examples=100, deadline=None)
def test_an_avoided_worker_has_no_part(
    held: dict[str, list[Held]], workers: tuple[WorkerLoad, ...], avoid: set[str]
) -> None:
    asked = query(held, avoid=avoid)
    if {"d0", "d1", "d2"} <= avoid:
        with pytest.raises(Unavailable):
            plan_route(asked, workers, SETTINGS)
        return
    plan = plan_route(asked, workers, SETTINGS)
    for candidate in (plan.chosen, *plan.alternatives):
        sources = candidate.sources
        asks = {part.holder.worker_id for part in (*sources.blocks, *sources.windows)}
        assert not avoid & {candidate.decoder, candidate.encoder, *asks}


def chosen(held: dict[str, list[Held]], workers: tuple[WorkerLoad, ...] = LOADS) -> RoutePlan:
    return plan_route(query(held), workers, SETTINGS)


def test_an_idle_cluster_computes_where_the_prefix_is() -> None:
    plan = chosen({"d1": [Held(HASHES, 10)]})
    assert (plan.decoder, plan.encoder) == ("d1", None)
    assert not plan.chosen.sources


def test_a_busy_holder_is_asked_for_its_blocks_instead() -> None:
    workers = tuple(replace(w, queued_rows=100 * (w.worker_id == "d1")) for w in LOADS)
    plan = chosen({"d1": [Held(HASHES, 10)]}, workers)
    assert plan.decoder != "d1"
    assert plan.chosen.sources.blocks[0].holder.worker_id == "d1"
    assert plan.chosen.hit.num_blocks == 10


def test_a_long_prompt_goes_to_an_encoder_where_streams_would_wait() -> None:
    workers = tuple(
        replace(w, num_decoding=0 if w.is_encoder else 4, decode_step_s=0.3) for w in LOADS
    )
    plan = plan_route(query({}), workers, replace(SETTINGS, inter_token_target_s=0.5))
    assert plan.encoder is not None
    assert any(other.encoder is None for other in plan.alternatives)


def test_a_setting_spares_decode_workers_every_prompt() -> None:
    plan = plan_route(query({}), LOADS, replace(SETTINGS, max_local_rows=0))
    assert plan.encoder is not None
    assert any("max_local_rows" in other.note for other in plan.alternatives)
    alone = plan_route(query({}), LOADS[:3], replace(SETTINGS, max_local_rows=0))
    assert alone.encoder is None


def test_a_session_goes_on_at_home_unless_that_takes_longer() -> None:
    asked = query({}, home=SessionHome("d2", 80))
    plan = plan_route(asked, LOADS, SETTINGS)
    assert plan.decoder == "d2"
    assert (plan.chosen.hit.kind, plan.chosen.hit.start) == (PlanKind.RESUME, 80)
    busy = tuple(replace(w, queued_rows=1000 * (w.worker_id == "d2")) for w in LOADS)
    assert plan_route(asked, busy, SETTINGS).decoder != "d2"


BUSY_HOME = tuple(replace(w, queued_rows=1000 * (w.worker_id == "d2")) for w in LOADS)


@pytest.mark.parametrize("why", ["busy", "avoided"])
def test_a_session_moves_with_its_state(why: str) -> None:
    """Its home has no time, or refused the request, but lives."""
    held = {"d1": [Held(HASHES, 4)]}
    home = SessionHome("d2", 83, (2 * W, 11 * W))
    asked = query(held, home=home, avoid={"d2"} if why == "avoided" else frozenset())
    plan = plan_route(asked, BUSY_HOME if why == "busy" else LOADS, SETTINGS)
    chosen, address = plan.chosen, WorkerAddress("d2", WorkerKind.DECODE)
    assert (chosen.hit.kind, chosen.hit.start, chosen.encoder) == (PlanKind.RESUME, 83, None)
    assert chosen.decoder in ("d0", "d1")
    assert chosen.sources.image == ImageSource(address, 83)
    # All blocks below the state, in its lineage.
    assert chosen.sources.blocks == (BlockSource(address, (2 * W,), 0, 10),)
    assert "comes from d2" in plan.reason


def test_a_state_s_bytes_are_part_of_the_cost() -> None:
    held = {"d0": [Held(HASHES, 12)]}
    asked = query(held, home=SessionHome("d2", 96))
    large = tuple(replace(w, sizes=StateSizes(100, 300, 500, 10_000)) for w in BUSY_HOME[:3])
    plan = plan_route(asked, large, SETTINGS)
    assert plan.chosen.hit.kind is PlanKind.RESUME
    moved = 2 * SETTINGS.round_trip_s + (10_000 + 100) / SETTINGS.bandwidth_bytes_per_s
    # The last of twelve blocks lies above what a hit could use: the planner does not ask for it.
    assert plan.chosen.cost.bring_s == pytest.approx(moved)
    slow = replace(SETTINGS, bandwidth_bytes_per_s=1e4)
    assert plan_route(asked, large, slow).chosen.hit.kind is not PlanKind.RESUME


@given(cluster, loads, st.integers(1, 12 * W + 2), st.sets(st.sampled_from(NAMES[:3]), max_size=2))
@settings(max_examples=100, deadline=None)
def test_only_a_living_home_gives_a_state(
    held: dict[str, list[Held]],
    workers: tuple[WorkerLoad, ...],
    num_tokens: int,
    avoid: set[str],
) -> None:
    asked = query(held, home=SessionHome("d2", num_tokens), avoid=avoid)
    plan = plan_route(asked, workers, SETTINGS)
    for candidate in (plan.chosen, *plan.alternatives):
        is_resume = candidate.hit.kind is PlanKind.RESUME
        assert is_resume or candidate.sources.image is None
        assert (candidate.sources.image is None) or candidate.encoder is None
        assert not is_resume or (candidate.sources.image is None) == (candidate.decoder == "d2")
    alive = [worker for worker in workers if worker.worker_id != "d2"]
    without = plan_route(replace(asked, avoid=avoid - {"d0"}), alive, SETTINGS)
    for candidate in (without.chosen, *without.alternatives):
        assert candidate.hit.kind is not PlanKind.RESUME


def test_a_holder_computes_unless_it_is_far_above_the_mean() -> None:
    """Bringing would be sooner, and still the blocks stay where they are used."""
    fast = replace(SETTINGS, bandwidth_bytes_per_s=1e9, round_trip_s=0.0)
    held = {"d1": [Held(HASHES, 10)]}
    workers = tuple(replace(w, queued_rows=100 + 5 * (w.worker_id == "d1")) for w in LOADS[:3])
    plan = plan_route(query(held), workers, fast)
    assert plan.decoder == "d1"
    assert any("d1 holds more of it" in other.note for other in plan.alternatives)
    busier = tuple(replace(w, queued_rows=100 + 50 * (w.worker_id == "d1")) for w in LOADS[:3])
    assert plan_route(query(held), busier, fast).decoder != "d1"


def test_a_short_queue_is_no_lead_whatever_its_share() -> None:
    """A report that is a little old must not move a session, or the use of its blocks, away."""
    fast = replace(SETTINGS, bandwidth_bytes_per_s=1e9, round_trip_s=0.0)
    home, held = SessionHome("d2", 80), {"d2": [Held(HASHES, 10)]}
    for asked in (query({}, home=home), query(held)):
        for rows in range(14):
            waiting = tuple(replace(w, queued_rows=rows * (w.worker_id == "d2")) for w in LOADS)
            assert plan_route(asked, waiting, fast).decoder == "d2"
        waiting = tuple(replace(w, queued_rows=40 * (w.worker_id == "d2")) for w in LOADS)
        assert plan_route(asked, waiting, fast).chosen.computing != "d2"
    none = replace(fast, max_lead_s=0.0)
    waiting = tuple(replace(w, queued_rows=1 * (w.worker_id == "d2")) for w in LOADS)
    assert plan_route(query(held), waiting, none).chosen.computing != "d2"


@given(cluster, loads, st.lists(st.integers(0, 15 * W), min_size=5, max_size=5))
@settings(max_examples=100, deadline=None)
def test_no_route_has_a_worker_that_cannot_hold_the_request(
    held: dict[str, list[Held]], workers: tuple[WorkerLoad, ...], capacities: list[int]
) -> None:
    asked = query(held, max_total_tokens=14 * W)
    limited = tuple(
        replace(worker, capacity_tokens=capacity)
        for worker, capacity in zip(workers, capacities, strict=True)
    )
    small = {
        worker.worker_id
        for worker in limited
        if worker.capacity_tokens is not None
        and worker.capacity_tokens < (asked.num_tokens if worker.is_encoder else 14 * W)
    }
    if small.issuperset(NAMES[:3]):
        with pytest.raises(InvalidArgument, match=r"decoders\.num_blocks"):
            plan_route(asked, limited, SETTINGS)
        return
    plan = plan_route(asked, limited, SETTINGS)
    for candidate in (plan.chosen, *plan.alternatives):
        assert not small & {candidate.decoder, candidate.encoder}
    assert {line.split(":")[0] for line in plan.left_out} == small


def test_followers_wait_at_the_leader() -> None:
    leader = Leader("claim", WorkerAddress("d1", WorkerKind.DECODE), 0, 11)
    plan = plan_route(query({}, leader=leader), LOADS, SETTINGS)
    followed = plan.chosen.sources.leader
    assert followed is not None
    assert (followed.request_id, followed.holder.worker_id) == ("claim", "d1")
    # Blocks that are held already are worth no wait.
    held = {name: [Held(HASHES, 11)] for name in NAMES}
    assert plan_route(query(held, leader=leader), LOADS, SETTINGS).chosen.sources.leader is None


def test_without_hints_a_prompt_is_placed_by_load() -> None:
    busy = tuple(replace(w, queued_rows=10 * (w.worker_id != "d2")) for w in LOADS)
    plan = plan_route(RouteQuery(GEOMETRY, 50), busy, SETTINGS)
    assert (plan.decoder, plan.encoder) == ("d2", None)
    with pytest.raises(Unavailable):
        plan_route(RouteQuery(GEOMETRY, 50), [load("e0")], SETTINGS)


def test_chunks_beside_streams_keep_the_inter_token_target() -> None:
    plan = plan_route(query({}), LOADS[:1], replace(SETTINGS, inter_token_target_s=0.52))
    assert plan.max_chunk_rows == 48
    # Two windows always fit: with less, some last chunk would never be legal.
    tight = plan_route(query({}), LOADS[:1], replace(SETTINGS, inter_token_target_s=0.0))
    assert tight.max_chunk_rows == 2 * W


@given(cluster, loads, st.sampled_from(((), (2 * W,), (2 * W, 5 * W))), st.integers(1, 11))
@settings(max_examples=150, deadline=None)
def test_a_takeover_stays_with_decode_worker_and_recipe(
    held: dict[str, list[Held]],
    workers: tuple[WorkerLoad, ...],
    restarts: tuple[int, ...],
    num_blocks: int,
) -> None:
    """Blocks of other lineages count as missing, and none beyond the recipe's are reused."""
    recipe = replace(
        cold_recipe(12 * W + 3, W, TailVariant.FLOORED, 0),
        kind=PlanKind.BOUNDED,
        write_floor=num_blocks * W,
        restarts=restarts,
    )
    plan = plan_route(query(held, recipe=recipe, decoder="d1"), workers, SETTINGS)
    for candidate in (plan.chosen, *plan.alternatives):
        assert candidate.decoder == "d1"
        assert candidate.encoder in ("e0", "e1")
        hit = candidate.hit
        assert hit.num_blocks <= num_blocks
        assert hit.restarts == tuple(r for r in restarts if r < hit.num_blocks * W)
    with pytest.raises(Unavailable):
        plan_route(query(held, recipe=recipe, decoder="d1"), workers[:3], SETTINGS)
