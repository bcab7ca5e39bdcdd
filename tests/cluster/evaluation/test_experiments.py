"""Does each arm compute what it claims, through the real engine, and is the exact one exact?

Numerics are deterministic, so equal means bit for bit.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_model import tiny_checkpoint
from tiny_tokenizer import write_tiny_tokenizer

from ripresa.cluster.evaluation.arms import (
    REFERENCE,
    Arm,
    answer_arms,
    answer_recipe,
    hit_arms,
    hit_recipe,
    lengths,
)
from ripresa.cluster.evaluation.cases import Answer, Case, make_case, spread, stack_of
from ripresa.cluster.evaluation.experiments import (
    DEPTHS,
    Experiment,
    Result,
    at_boundaries,
    growth,
    longest_case,
    self_test,
    stack_length,
    stacked,
)
from ripresa.cluster.evaluation.laboratory import Laboratory, laboratory
from ripresa.workers.config import Numerics
from ripresa.workers.errors import ErrorCode, InvalidArgument, RipresaError
from ripresa.workers.replay import PlanKind, ReplayMode, TailVariant
from ripresa.workers.replay_query import ReplayGeometry

WINDOW, REWIND, ENCODER_LAYERS, DECODER_LAYERS = 8, 6, 2, 2
GEOMETRY = ReplayGeometry(WINDOW, REWIND, ENCODER_LAYERS, DECODER_LAYERS)
ANSWER = 60
"""Length of the prompt; its hit ends at 40."""
TOKENS = tuple(random.Random(1).choices(range(96), k=longest_case(GEOMETRY)))
CASE = Case(
    0, TOKENS[:130], 64, ANSWER, (Answer("T1 call", ANSWER, 70), Answer("T2 read near", 90, 100))
)
"""The exact arm needs 4(W - 1) = 28 rows before one, so it leaves some out at both boundaries."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluation") / "model"
    tiny_checkpoint(folder)
    write_tiny_tokenizer(folder)
    return folder


@pytest.fixture
async def lab(checkpoint: Path) -> AsyncIterator[Laboratory]:
    async with laboratory(
        checkpoint, longest_case, Numerics.DETERMINISTIC, lambda line: None
    ) as lab:
        yield lab


@pytest.fixture(scope="module")
def results(checkpoint: Path) -> dict[Experiment, Result]:
    """What both boundaries of the case say."""

    async def run() -> dict[Experiment, Result]:
        echoed: list[str] = []
        async with laboratory(
            checkpoint, longest_case, Numerics.DETERMINISTIC, echoed.append
        ) as lab:
            return {result.experiment: result async for result in at_boundaries(lab, CASE)}

    return asyncio.run(run())


def kl_of(result: Result, arm: str) -> float:
    mine = [group for group in result.groups if group.arm == arm]
    return sum(g.sums["kl"] for g in mine) / sum(g.num_tokens for g in mine)


def test_both_boundaries(results: dict[Experiment, Result]) -> None:
    assert set(results) == {Experiment.ANSWER, Experiment.HIT}
    for result in results.values():
        assert result.worst_exact == 0.0
        assert result.exact_start
        assert kl_of(result, "exact") == 0.0
        exact = [group for group in result.groups if group.arm == "exact"]
        for group in exact:
            assert group.sums["same top"] == group.num_tokens
            assert all(group.sums[f"overlap of layer {x}"] == group.num_tokens for x in (1, 2, 3))
    answer, hit = results[Experiment.ANSWER], results[Experiment.HIT]
    assert (answer.hit, hit.hit) == (40, 64)
    assert hit.exact_start == 64 - 4 * (WINDOW - 1)
    arms = [arm.name for arm in answer_arms(WINDOW)]
    assert list(dict.fromkeys(group.arm for group in answer.groups)) == arms
    assert kl_of(answer, "decoder 0") > kl_of(answer, "decoder 4") > 0
    assert kl_of(answer, "both 0") > kl_of(answer, "both 4") > 0
    # Two layers of a half need no more than 2(W - 1) rows, four at one place do.
    assert kl_of(answer, "decoder 16") == kl_of(answer, "both 16") == 0
    assert kl_of(hit, "both 0") > kl_of(hit, "both 16") > 0
    assert {m.task for m in answer.matches} == {"T1 call", "T2 read near"}
    assert {m.task for m in hit.matches} == {"T2 read near"}


def test_every_arm_computes_the_rows_that_its_recipe_says(
    results: dict[Experiment, Result],
) -> None:
    costs = {cost.arm: cost for cost in results[Experiment.ANSWER].costs}
    hit = 40
    for length in lengths(WINDOW):
        decoder, both = costs[f"decoder {length}"], costs[f"both {length}"]
        num_decoder_rows = DECODER_LAYERS * max(length, 1)
        assert decoder.decoder_row_layers == both.decoder_row_layers == num_decoder_rows
        assert both.num_skipped == hit - length
        assert both.encoder_row_layers == ENCODER_LAYERS * (ANSWER - hit + length)
        # Layer 0 computes W - 1 rows more than layer 1, whose rows from L1 on are all needed.
        assert decoder.kind == PlanKind.REBUILD
        exact_from = min(hit, ANSWER - length)
        expected = ENCODER_LAYERS * (ANSWER - exact_from) + WINDOW - 1
        assert decoder.encoder_row_layers == expected
    assert costs[f"both {WINDOW}"].kind == PlanKind.BOUNDED
    assert costs["exact"].decoder_row_layers == DECODER_LAYERS * (1 + (WINDOW - 1) * DECODER_LAYERS)
    assert costs["canonical"].kind == PlanKind.ANCHOR


async def test_the_planner_knows_the_window_and_the_evaluation_every_length(
    lab: Laboratory,
) -> None:
    await lab.fill(TOKENS, 5, ReplayMode.EXACT)
    for arm in answer_arms(WINDOW):
        if arm.length is not None or arm.mode is ReplayMode.CANONICAL:
            continue
        run = await lab.plan(TOKENS[:ANSWER], TOKENS[ANSWER], arm)
        if arm.tail is TailVariant.FLOORED:
            own = replace(arm, length=WINDOW)
            assert answer_recipe(run.recipe, own, ANSWER, GEOMETRY) == run.recipe
    full = Arm("", ReplayMode.BOUNDED, TailVariant.FULL)
    run = await lab.plan(TOKENS[:ANSWER], TOKENS[ANSWER], full)
    assert hit_recipe(40, WINDOW, 0) == run.recipe


async def test_stacked_boundaries_lie_behind_one_another(lab: Laboratory) -> None:
    case = Case(1, TOKENS[: stack_length(GEOMETRY)], None, None, (Answer("T", 150, 156),))
    result = await stacked(lab, case)
    assert [cost.arm for cost in result.costs] == ["exact", *map(str, DEPTHS)]
    assert [cost.kind for cost in result.costs] == 2 * [PlanKind.REBUILD] + 5 * [PlanKind.BOUNDED]
    assert {cost.num_skipped for cost in result.costs[2:]} == {16 * WINDOW}
    assert (result.hit, result.worst_exact) == (17 * WINDOW, 0.0)
    assert result.exact_start
    assert len({kl_of(result, str(depth)) for depth in DEPTHS}) == len(DEPTHS)
    assert kl_of(result, "16") > kl_of(result, "0")


async def test_growing_prompts_skip_more_and_cost_no_more(lab: Laboratory) -> None:
    case = Case(1, TOKENS[: stack_length(GEOMETRY)], None, None, ())
    result = await growth(lab, case, 1)
    by_arm: dict[str, list[int]] = {}
    for cost in result.costs:
        by_arm.setdefault(cost.arm, []).append(cost.encoder_row_layers)
    # The shortest prompts have too few cached blocks for a replay to leave anything out.
    assert len(set(by_arm["bounded"][1:])) == 1
    assert len(set(by_arm["exact"][2:])) == 1
    assert by_arm["exact"][0] <= by_arm["cold, exact"][0]
    cold = by_arm["cold, exact"]
    assert cold == sorted(set(cold))
    assert cold[-1] == ENCODER_LAYERS * (16 * WINDOW + REWIND)


async def test_the_self_test_compares_hits_and_decoding(lab: Laboratory) -> None:
    checks = await self_test(lab, CASE, 6)
    assert len(checks) == 5
    assert [check.difference for check in checks] == [0.0] * 5
    assert [bool(check.start) for check in checks] == [True, True, False, False, False]
    with pytest.raises(RipresaError) as refused:
        await self_test(lab, replace(CASE, hit=None))
    assert refused.value.code is ErrorCode.FAILED_PRECONDITION


@pytest.mark.slow
async def test_a_self_test_sees_an_arm_that_is_not_exact(
    lab: Laboratory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(geometry: ReplayGeometry) -> list[Arm]:
        return [replace(arm, length=WINDOW) for arm in hit_arms(geometry)]

    monkeypatch.setattr("ripresa.cluster.evaluation.experiments.hit_arms", short)
    differences = [check.difference for check in await self_test(lab, CASE, 2)]
    assert differences[0] == 0.0
    assert differences[1] > 0.0


async def test_a_hit_that_was_evicted_is_no_result(lab: Laboratory) -> None:
    recipe = hit_recipe(64, WINDOW, 0)
    arm = Arm("both", ReplayMode.BOUNDED, TailVariant.FULL, WINDOW)
    with pytest.raises(RipresaError, match="blocks are gone"):
        await lab.foretell(TOKENS[:100], 99, arm, recipe, start=65)


def test_boundaries_are_chosen_where_a_hit_can_end() -> None:
    short = make_case(0, TOKENS[:17], [Answer("T", 4, 9)], GEOMETRY, 0)
    assert (short.hit, short.answer) == (None, None)
    straddle = make_case(0, TOKENS[:99], [Answer("T", 40, 50)], GEOMETRY, 0, 48, "across b")
    assert (straddle.hit, straddle.answer, straddle.placement) == (48, 40, "across b")
    beside = make_case(0, TOKENS[:99], [Answer("T", 40, 50)], GEOMETRY, 0, 49, "across b")
    assert beside.hit is None
    assert CASE.supervised == frozenset([*range(60, 70), *range(90, 100)])
    cut = make_case(0, TOKENS[:65], CASE.answers, GEOMETRY, 0)
    assert (cut.answers, cut.answer) == ((), None)


def test_boundaries_are_drawn_from_all_places_by_the_seed() -> None:
    answers = [Answer("T", start, start + 2) for start in (8, 29, 30, 60, 126)]
    drawn = [make_case(0, TOKENS[:130], answers, GEOMETRY, seed) for seed in range(300)]
    assert {case.hit for case in drawn} == set(range(16, 126, WINDOW))
    assert {case.answer for case in drawn} == {30, 60, 126}
    assert drawn[7] == make_case(0, TOKENS[:130], answers, GEOMETRY, 7)
    others = {make_case(number, TOKENS[:130], answers, GEOMETRY, 0).hit for number in range(20)}
    assert len(others) > 3, "one seed gives every conversation places of its own"
    last = make_case(0, TOKENS[:130], answers, GEOMETRY, None)
    assert (last.hit, last.answer) == (120, 126)


def test_conversations_are_spread_and_joined() -> None:
    assert spread(500, 4, 0) == [0, 125, 250, 375]
    assert spread(500, 4, 3) == [3, 128, 253, 378]
    assert spread(3, 9, 0) == [0, 1, 2]
    parts = [Case(n, TOKENS[:30], None, None, (Answer("T", 5, 9),)) for n in range(5)]
    first, second = stack_of(parts, 55)
    assert first.token_ids == (TOKENS[:30] + TOKENS[:30])[:55]
    assert first.answers == (Answer("T", 5, 9), Answer("T", 35, 39))
    assert (first.number, second.number) == (0, 2)


def test_windows_without_even_quarters_are_refused() -> None:
    with pytest.raises(InvalidArgument):
        lengths(12)
    assert lengths(128) == (0, 32, 64, 128, 256)
    assert REFERENCE.name == "exact"
