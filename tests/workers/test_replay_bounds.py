"""Do the numbers of every plan keep the invariants and the bounds of the replay rules?"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.errors import ConfigError, InvalidArgument
from ripresa.workers.replay import (
    PlanKind,
    ReplayMode,
    TailVariant,
    canonical_restarts,
    cold_recipe,
)
from ripresa.workers.replay_plan import PrefillPlan, StateSource
from ripresa.workers.replay_planner import plan_prefill
from ripresa.workers.replay_query import ParkedImage, PrefillQuery, ReplayGeometry

RELEASED = ReplayGeometry(window=128, rewind=6, num_encoder_layers=20, num_decoder_layers=20)
W, R = RELEASED.window, RELEASED.rewind
LONGEST = 40_000


def chain_of(num_blocks: int, restarts: tuple[int, ...] = ()) -> tuple[BlockIdentity, ...]:
    return tuple(
        BlockIdentity(k.to_bytes(4, "big"), tuple(x for x in restarts if x < (k + 1) * W))
        for k in range(num_blocks)
    )


EXACT_CHAIN = chain_of(-(-LONGEST // W))


@st.composite
def queries(draw: st.DrawFn) -> PrefillQuery:
    """Prompts of the released sizes; what is cached of them is often close to their end."""
    num_tokens = draw(st.one_of(st.integers(1, 1000), st.integers(1, LONGEST)))
    most = num_tokens // W
    num_blocks = draw(st.one_of(st.integers(0, most), st.integers(max(0, most - 3), most)))
    mode = draw(st.sampled_from(ReplayMode))
    interval = draw(st.sampled_from([W, 1024, 4096])) if mode is ReplayMode.CANONICAL else None
    chain = EXACT_CHAIN[:num_blocks]
    if interval is not None:
        chain = chain_of(num_blocks, canonical_restarts(num_blocks * W, interval))
    offsets = draw(st.sets(st.integers(1, 30), max_size=6))
    windows = {chain[-offset] for offset in offsets if offset <= num_blocks}
    tails = [t for t in TailVariant if t is not TailVariant.EXACT or mode is ReplayMode.EXACT]
    image = None
    if num_tokens > 1 and draw(st.booleans()):
        parked = draw(st.integers(max(1, num_tokens - 400), num_tokens - 1))
        floor = draw(st.integers(0, parked - 1))
        image = ParkedImage(parked, floor, max(0, parked - W))
    return PrefillQuery(
        RELEASED,
        num_tokens,
        chain,
        windows,
        image,
        mode,
        draw(st.sampled_from(tails)),
        anchor_interval=interval,
    )


def reuses_blocks(plan: PrefillPlan) -> bool:
    return plan.recipe.kind not in (PlanKind.COLD, PlanKind.RESUME)


@given(queries())
def test_i3_floors_and_starts_are_absolute_and_the_recipe_alone_gives_them(
    query: PrefillQuery,
) -> None:
    plan = plan_prefill(query)
    recipe = plan.recipe
    first = plan.passes[0]
    assert (first.start, first.swa_floor, first.write_floor) == (
        recipe.start,
        recipe.swa_floor,
        recipe.write_floor,
    )
    assert recipe.swa_floor <= recipe.start <= recipe.write_floor <= query.num_tokens
    assert recipe.decoder_start <= plan.decoder_first < query.num_tokens
    assert plan.source_floor <= recipe.decoder_start
    is_replayed = recipe.kind is PlanKind.BOUNDED
    assert (plan.replay is not None) is is_replayed
    if plan.replay is not None:
        assert plan.replay == (recipe.start, recipe.start + W)


@given(queries())
def test_i4_boundaries_are_multiples_of_the_window(query: PrefillQuery) -> None:
    plan = plan_prefill(query)
    kind = plan.recipe.kind
    if kind is not PlanKind.RESUME:
        assert plan.write_floor % W == 0
    if kind not in (PlanKind.RESUME, PlanKind.REBUILD):
        assert plan.start % W == 0
    assert all(restart % W == 0 and restart > 0 for restart in plan.recipe.restarts)
    assert list(plan.recipe.restarts) == sorted(set(plan.recipe.restarts))
    first, stop = plan.entries_written(2)
    # The pair of the first entry lies below the write floor only if an image carries its half.
    assert 2 * first >= plan.write_floor - (plan.write_floor % 2)
    assert stop == query.num_tokens // 2
    assert plan.write_floor % 2 == 0 or kind is PlanKind.RESUME


@given(queries())
def test_i16_recomputed_rows_cost_compute_and_no_blocks(query: PrefillQuery) -> None:
    plan = plan_prefill(query)
    assert plan.num_new_blocks + plan.num_reused_blocks == -(-query.num_tokens // W)
    assert plan.num_reused_blocks == plan.write_floor // W
    assert plan.num_compute_rows >= plan.num_recomputed + plan.num_new
    one_pass = query.mode is not ReplayMode.CANONICAL
    assert (plan.num_compute_rows == plan.num_recomputed + plan.num_new) is (
        one_pass or len(plan.passes) == 1
    )


@given(queries())
def test_i17_skipped_recomputed_and_new_are_the_prompt(query: PrefillQuery) -> None:
    plan = plan_prefill(query)
    assert plan.num_skipped + plan.num_recomputed + plan.num_new == query.num_tokens
    assert min(plan.num_skipped, plan.num_recomputed, plan.num_new) >= 0
    assert plan.num_replayed in (0, W)


@given(queries())
def test_rows_entries_and_blocks_are_contiguous(query: PrefillQuery) -> None:
    plan = plan_prefill(query)
    assert plan.passes[-1].stop == query.num_tokens
    for before, after in pairwise(plan.passes):
        assert after.start == after.swa_floor == before.stop - W
        assert after.write_floor >= before.stop > before.start
    assert plan.encoder_rows == (plan.start, query.num_tokens)
    assert plan.decoder_rows == (plan.decoder_first, query.num_tokens)
    assert plan.entries_written(1) == (plan.write_floor, query.num_tokens)
    assert [*range(plan.write_floor // W), *plan.blocks_completed] == list(
        range(query.num_tokens // W)
    )
    assert (plan.open_pair_position is None) is (query.num_tokens % 2 == 0)


@given(queries())
def test_no_recomputed_row_of_a_hit_is_a_row_of_the_default_tail(query: PrefillQuery) -> None:
    plan = plan_prefill(replace(query, image=None, tail=TailVariant.FLOORED))
    if reuses_blocks(plan):
        assert query.num_tokens - plan.write_floor >= W + R
        assert plan.decoder_first >= plan.write_floor


@given(queries())
def test_a_block_carries_the_restarts_below_its_end(query: PrefillQuery) -> None:
    plan = plan_prefill(query)
    for number in range(plan.num_reused_blocks if reuses_blocks(plan) else 0):
        assert plan.restarts_of_block(number) == query.chain[number].restarts
    before: tuple[int, ...] = ()
    for number in range(query.num_tokens // W):
        restarts = plan.restarts_of_block(number)
        assert restarts in (before, (*before, number * W))
        before = restarts


@given(num_tokens=st.integers(1, LONGEST), new=st.integers(1, LONGEST), held=st.booleans())
def test_a_warm_turn_computes_at_most_389_or_256_more_than_its_new_rows(
    num_tokens: int, new: int, held: bool
) -> None:
    new = min(new, num_tokens)
    chain = EXACT_CHAIN[: (num_tokens - new) // W]
    plan = plan_prefill(PrefillQuery(RELEASED, num_tokens, chain, set(chain) if held else set()))
    assert plan.num_compute_rows <= max(3 * W + R - 1, new + 2 * W) == max(389, new + 256)


def test_the_bound_of_a_warm_turn_is_reached() -> None:
    plan = plan_prefill(PrefillQuery(RELEASED, 1024 + 133, EXACT_CHAIN[:8]))
    assert plan.num_compute_rows == 389
    plan = plan_prefill(PrefillQuery(RELEASED, 1151 + 200, EXACT_CHAIN[:8]))
    assert plan.num_compute_rows == 327 + 128


@given(queries())
def test_resume_computes_only_new_rows(query: PrefillQuery) -> None:
    plan = plan_prefill(query)
    if plan.recipe.kind is PlanKind.RESUME:
        assert query.image is not None
        assert plan.num_compute_rows == query.num_tokens - query.image.num_tokens
        assert plan.num_recomputed == 0
        assert plan.source is StateSource.PARKED_IMAGE


@given(queries())
@settings(max_examples=200)
def test_an_exact_hit_recomputes_at_most_24130_row_layers(query: PrefillQuery) -> None:
    chain = EXACT_CHAIN[: len(query.chain)]
    query = replace(query, mode=ReplayMode.EXACT, anchor_interval=None, chain=chain, image=None)
    plan = plan_prefill(replace(query, tail=TailVariant.FLOORED))
    assert plan.num_recomputed_row_layers <= 24_130


def test_the_costs_of_exact_hits_at_a_million_tokens() -> None:
    chain = chain_of(8192)
    query = PrefillQuery(RELEASED, 1 << 20, chain, mode=ReplayMode.EXACT)
    plan = plan_prefill(query)
    assert plan.recipe.kind is PlanKind.REBUILD
    assert plan.write_floor - plan.start == 2_540
    assert plan.num_recomputed_row_layers == 24_130
    plan = plan_prefill(replace(query, tail=TailVariant.EXACT))
    assert plan.num_tail_rows == 2_541
    assert abs(plan.num_recomputed_row_layers - 70_000) < 3_000
    assert plan.num_decoder_row_layers == 24_150
    # Nine blocks back a window is cheaper than the triangle, ten blocks back it is not.
    for blocks_back, kind in ((9, PlanKind.WINDOW), (10, PlanKind.REBUILD)):
        held = {chain[8190 - blocks_back - 1]}
        assert plan_prefill(replace(query, windows=held)).recipe.kind is kind


def test_behind_an_anchor_layers_leave_out_what_no_later_layer_reads() -> None:
    """However far behind: the triangle of the row below L1, whose window is whole then."""
    restarts = canonical_restarts(63 * 128, 4096)
    chain = chain_of(63, restarts)
    query = PrefillQuery(
        RELEASED, 63 * 128 + 134, chain, mode=ReplayMode.CANONICAL, anchor_interval=4096
    )
    plan = plan_prefill(query)
    assert plan.recipe.kind is PlanKind.ANCHOR
    assert plan.write_floor - plan.start == 31 * 128 + 128
    assert plan.num_recomputed_row_layers == 24_130 + 20
    full = plan_prefill(replace(query, tail=TailVariant.FULL))
    assert full.num_recomputed_row_layers == 20 * 32 * 128


@given(queries(), st.integers(0, 400))
def test_more_cached_blocks_or_tokens_never_move_the_start_back(
    query: PrefillQuery, more: int
) -> None:
    query = replace(query, image=None)
    plan = plan_prefill(query)
    longer = plan_prefill(replace(query, num_tokens=query.num_tokens + more))
    assert longer.write_floor >= plan.write_floor
    fewer = plan_prefill(replace(query, chain=query.chain[: max(0, len(query.chain) - more % 7)]))
    assert fewer.write_floor <= plan.write_floor
    if query.mode is ReplayMode.BOUNDED:
        assert longer.start >= plan.start >= fewer.start


@given(queries())
def test_another_window_never_makes_a_plan_dearer(query: PrefillQuery) -> None:
    query = replace(query, image=None)
    rich = plan_prefill(replace(query, windows=set(query.chain)))
    poor = plan_prefill(replace(query, windows=set()))
    cost = plan_prefill(query).num_recomputed_row_layers
    assert rich.num_recomputed_row_layers <= cost <= poor.num_recomputed_row_layers


def test_a_bounded_replay_is_one_pass_and_a_canonical_one_restarts_on_the_way() -> None:
    plan = plan_prefill(PrefillQuery(RELEASED, 9000, EXACT_CHAIN[:20]))
    assert len(plan.passes) == 1
    canonical = PrefillQuery(RELEASED, 9000, mode=ReplayMode.CANONICAL, anchor_interval=4096)
    assert [(p.start, p.stop, p.write_floor) for p in plan_prefill(canonical).passes] == [
        (0, 4096, 0),
        (3968, 8192, 4096),
        (8064, 9000, 8192),
    ]
    hit = replace(canonical, chain=chain_of(32 + 10, (4096,)))
    assert [(p.start, p.stop, p.write_floor) for p in plan_prefill(hit).passes] == [
        (3968, 8192, 5376),
        (8064, 9000, 8192),
    ]


@pytest.mark.parametrize(
    ("mode", "interval", "num_reused"),
    [
        (ReplayMode.EXACT, None, 16),
        (ReplayMode.CANONICAL, 1024, 24),
        (ReplayMode.BOUNDED, None, 30),
    ],
)
def test_a_chain_is_reused_as_far_as_its_lineage_fits_the_mode(
    mode: ReplayMode, interval: int | None, num_reused: int
) -> None:
    """Restarts at 1024, 2048 (canonical until 3072, exact until 1024) and a foreign block."""
    restarts = (16 * W,) if mode is not ReplayMode.CANONICAL else (1024, 2048)
    chain = (*chain_of(30, restarts), BlockIdentity(b"foreign", ()))
    query = PrefillQuery(RELEASED, 9000, chain, mode=mode, anchor_interval=interval)
    assert plan_prefill(query).num_reused_blocks == num_reused


def test_a_canonical_chain_ends_at_an_anchor_that_it_ignores() -> None:
    chain = (*chain_of(20), *chain_of(30, (1024,))[20:])
    query = PrefillQuery(RELEASED, 9000, chain, mode=ReplayMode.CANONICAL, anchor_interval=1024)
    assert plan_prefill(query).num_reused_blocks == 1024 // W


def test_resume_of_an_exact_session() -> None:
    image = ParkedImage(5000, 0, 2459, tail=TailVariant.EXACT)
    query = PrefillQuery(RELEASED, 5500, EXACT_CHAIN[:39], image=image)
    assert plan_prefill(query).recipe.kind is PlanKind.RESUME
    exact = replace(query, mode=ReplayMode.EXACT)
    assert plan_prefill(exact).recipe.kind is PlanKind.REBUILD
    plan = plan_prefill(replace(exact, tail=TailVariant.EXACT))
    # A fresh exact tail would need encoder output below the image, so its rings go on.
    assert (plan.recipe.kind, plan.decoder_first) == (PlanKind.RESUME, 5000)
    assert plan.recipe.decoder_start == 2459
    longer = replace(exact, num_tokens=9000, tail=TailVariant.EXACT)
    assert plan_prefill(longer).recipe.decoder_start == 9000 - 2541
    inexact = replace(longer, image=replace(image, restarts=(1024,)))
    assert plan_prefill(inexact).recipe.kind is PlanKind.REBUILD


def test_an_image_is_covered_by_its_own_lineage_alone() -> None:
    image = ParkedImage(5 * W + 3, 0, 0, restarts=(2 * W, 5 * W))
    assert image.is_covered_by(chain_of(5, (2 * W,)), W)
    assert not image.is_covered_by(chain_of(4, (2 * W,)), W)
    assert not image.is_covered_by(chain_of(5), W)


def test_a_cold_plan_follows_the_cold_recipe() -> None:
    for tail in (TailVariant.FLOORED, TailVariant.FULL):
        plan = plan_prefill(PrefillQuery(RELEASED, 1000, tail=tail, seed=7))
        assert plan.recipe == cold_recipe(1000, W, tail, 7)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_tokens": 0},
        {"tail": TailVariant.EXACT},
        {"anchor_interval": 4096},
        {"mode": ReplayMode.CANONICAL},
        {"mode": ReplayMode.CANONICAL, "anchor_interval": 4000},
        {"mode": ReplayMode.CANONICAL, "anchor_interval": 0},
    ],
    ids=str,
)
def test_impossible_requests_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        replace(PrefillQuery(RELEASED, 1000), **wrong)


@pytest.mark.parametrize("wrong", [{"window": 7}, {"rewind": -1}, {"num_decoder_layers": 0}])
def test_impossible_geometries_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        replace(RELEASED, **wrong)
