"""Does the planner give every number of the worked cases of the hit rule?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.replay_plan import PrefillPlan
from ripresa.workers.replay_planner import plan_prefill
from ripresa.workers.replay_query import ParkedImage, PrefillQuery, ReplayGeometry


def numbers(plan: PrefillPlan) -> dict[str, Any]:
    """The plan in the words of a case file."""
    return {
        "kind": plan.recipe.kind,
        "hit_tokens": plan.num_skipped,
        "block_kv_reused_tokens": plan.write_floor,
        "replay": plan.replay,
        "encoder_rows": plan.encoder_rows,
        "swa_read_floor": plan.recipe.swa_floor,
        "block_kv_write_floor": plan.recipe.write_floor,
        "decoder_rows": plan.decoder_rows,
        "decoder_read_floor": plan.recipe.decoder_start,
        "ratio1_entries_written": plan.entries_written(1),
        "ratio2_entries_written": plan.entries_written(2),
        "open_pair_token": plan.open_pair_position,
        "blocks_completed": tuple(plan.blocks_completed),
        "encoder_state_exact": plan.is_encoder_exact,
    }


def as_tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def test_worked_cases(shared: Path) -> None:
    file = json.loads((shared / "cases" / "replay_cases.json").read_text())
    geometry = ReplayGeometry(file["window"], file["rewind"], 20, 20)
    assert len(file["cases"]) == 68
    for case in file["cases"]:
        chain = [BlockIdentity(b"%d" % k, ()) for k in range(case["cached_blocks"])]
        windows = {chain[x // file["window"] - 1] for x in case["swa_windows_at"]}
        image = case["parked_image"] and ParkedImage(**case["parked_image"])
        plan = plan_prefill(PrefillQuery(geometry, case["num_tokens"], chain, windows, image))
        expected = {name: as_tuples(value) for name, value in case["expected"].items()}
        assert numbers(plan) == expected, case["name"]


@pytest.mark.parametrize("num_tokens", [40, 44])
def test_golden_replays_are_planned_from_24_tokens(num_tokens: int) -> None:
    """The golden checkpoints have window 8 and 4 + 4 layers; their replays are of [16, 24)."""
    chain = [BlockIdentity(b"%d" % k, ()) for k in range(5)]
    plan = plan_prefill(PrefillQuery(ReplayGeometry(8, 6, 4, 4), num_tokens, chain))
    assert plan.replay == (16, 24)


@pytest.mark.parametrize("image_tokens", [40, 41])
def test_an_image_that_is_not_older_than_the_prompt_is_ignored(image_tokens: int) -> None:
    image = ParkedImage(image_tokens, 0, 32)
    plan = plan_prefill(PrefillQuery(ReplayGeometry(8, 6, 4, 4), 40, image=image))
    assert plan.recipe.kind == "cold"
