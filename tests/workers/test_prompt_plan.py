"""Does a re-execution go on where another execution ended, and only where that is exact?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hash_machine import GEOMETRY, WINDOW

from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.prompt_plan import PromptPlan, block_identity, re_execution
from ripresa.workers.replay import PlanKind, Recipe, ReplayMode, TailVariant
from ripresa.workers.replay_planner import plan_prefill
from ripresa.workers.replay_query import PrefillQuery

LENGTH = 20 * WINDOW + 3
HASHES = [bytes([number]) for number in range(LENGTH // WINDOW)]
INTERVAL = 6 * WINDOW


def recipe_of(
    mode: ReplayMode, tail: TailVariant = TailVariant.FLOORED, num_cached: int = 0
) -> Recipe:
    interval = INTERVAL if mode is ReplayMode.CANONICAL else None
    restarts: list[int] = []
    chain = []
    for number, block_hash in enumerate(HASHES[:num_cached]):
        if interval and number and number * WINDOW % interval == 0:
            restarts.append(number * WINDOW)
        chain.append(BlockIdentity(block_hash, tuple(restarts)))
    query = PrefillQuery(
        GEOMETRY, LENGTH, chain=chain, mode=mode, tail=tail, anchor_interval=interval
    )
    return plan_prefill(query).recipe


def go_on(recipe: Recipe, num_held: int, windows: Iterable[int]) -> PromptPlan:
    names = [block_identity(recipe, HASHES, number, WINDOW) for number in range(len(HASHES))]
    held = frozenset(names[:num_held])
    kept = frozenset(names[number - 1] for number in windows)
    return re_execution(recipe, LENGTH, WINDOW, HASHES, held, kept)


@pytest.mark.parametrize("num_cached", [0, 3])
@pytest.mark.parametrize("mode", [ReplayMode.BOUNDED, ReplayMode.EXACT])
def test_it_goes_on_from_the_newest_window(mode: ReplayMode, num_cached: int) -> None:
    recipe = recipe_of(mode, num_cached=num_cached)
    plan = go_on(recipe, 12, [5, 10, 14])
    (rows,) = plan.passes
    assert (rows.start, rows.write_floor) == (10 * WINDOW, 10 * WINDOW)
    assert rows.swa_floor == 9 * WINDOW + 1
    assert len(plan.chain) == 10
    assert plan.window == plan.chain[-1]
    assert plan.recipe is recipe


@pytest.mark.parametrize("length", [0, WINDOW // 2, WINDOW, 3 * WINDOW])
def test_a_recipe_says_how_long_its_own_replay_is(length: int) -> None:
    planned = recipe_of(ReplayMode.BOUNDED, num_cached=9)
    assert planned.kind is PlanKind.BOUNDED
    start = planned.write_floor - length
    recipe = replace(planned, start=start, swa_floor=start)
    (rows,) = go_on(recipe, 9, []).passes
    assert (rows.start, rows.swa_floor, rows.write_floor) == (start, start, 9 * WINDOW)
    first, own = go_on(recipe, 4, []).passes
    assert (first.start, first.stop, first.write_floor) == (0, 9 * WINDOW, 4 * WINDOW)
    assert (own.start, own.stop, own.write_floor) == (start, LENGTH, 9 * WINDOW)


def test_blocks_alone_are_no_help() -> None:
    plan = go_on(recipe_of(ReplayMode.BOUNDED), 12, [])
    assert plan.chain == ()
    assert plan.passes[0].start == 0


def test_a_restart_needs_no_window() -> None:
    recipe = recipe_of(ReplayMode.CANONICAL)
    plan = go_on(recipe, 14, [9])
    first, last = plan.passes
    assert (first.start, first.stop, first.swa_floor) == (11 * WINDOW, 18 * WINDOW, 11 * WINDOW)
    assert (first.write_floor, first.output_from) == (14 * WINDOW, 12 * WINDOW)
    assert (last.start, last.stop, last.output_from) == (17 * WINDOW, LENGTH, 18 * WINDOW)
    assert plan.window is None
    # A window behind it spares more; one at it was cut before the restart.
    assert go_on(recipe, 14, [12, 13]).passes[0].start == 13 * WINDOW
    assert go_on(recipe, 12, [12]).passes[0].start == 11 * WINDOW


@pytest.mark.parametrize(
    ("tail", "last"),
    [
        (TailVariant.FLOORED, 19),
        (TailVariant.LAYER_EXACT, 18),
        (TailVariant.EXACT, 17),
        (TailVariant.FULL, 0),
    ],
)
def test_no_row_that_the_decoder_half_needs_is_left_out(tail: TailVariant, last: int) -> None:
    recipe = recipe_of(ReplayMode.EXACT, tail)
    assert recipe.kind is PlanKind.COLD
    plan = go_on(recipe, 20, range(1, 21))
    assert plan.passes[0].start == last * WINDOW
    assert plan.passes[0].start <= recipe.decoder_start
