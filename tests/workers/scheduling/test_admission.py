"""Is every request that no worker can run refused, with the field at fault?"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hash_machine import GEOMETRY
from hash_requests import make_request

from ripresa.workers.errors import InvalidArgument
from ripresa.workers.replay import PlanKind, ReplayMode, TailVariant
from ripresa.workers.request import CacheUse, GenerationRequest
from ripresa.workers.scheduling.admission import check_request, positions_to_reserve

GOOD = make_request(20, max_tokens=4)
assert GOOD.recipe is not None
RECIPE = GOOD.recipe
BOUNDED = replace(RECIPE, kind=PlanKind.BOUNDED, write_floor=8, restarts=(8,))
WINDOW = replace(RECIPE, kind=PlanKind.WINDOW, start=8, swa_floor=1, write_floor=8)
PREVIOUS = replace(WINDOW, kind=PlanKind.PREVIOUS_WINDOW, write_floor=16, decoder_start=12)
REBUILD = replace(RECIPE, kind=PlanKind.REBUILD, write_floor=8)
RESUME = replace(RECIPE, kind=PlanKind.RESUME, start=15, swa_floor=8, write_floor=15)
ANCHOR = replace(
    RECIPE,
    kind=PlanKind.ANCHOR,
    start=8,
    swa_floor=8,
    write_floor=16,
    anchor_interval=8,
    restarts=(8, 16),
)
LAYER_EXACT = replace(RECIPE, tail=TailVariant.LAYER_EXACT, source_floor=5)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (replace(GOOD, token_ids=(), num_prompt_tokens=0), "token_ids"),
        (replace(GOOD, num_prompt_tokens=0), "num_prompt_tokens"),
        (replace(GOOD, num_prompt_tokens=21), "num_prompt_tokens"),
        (make_request(64), "token_ids"),
        (make_request(20, max_tokens=0), "sampling.max_tokens"),
        (make_request(20, max_tokens=2, streamed=(5, 6)), "sampling.max_tokens"),
        (
            replace(GOOD, recipe=replace(RECIPE, tail=TailVariant.EXACT, decoder_start=13)),
            "recipe.decoder_start",
        ),
        (replace(GOOD, recipe=replace(RECIPE, anchor_interval=12)), "recipe.anchor_interval"),
        (replace(GOOD, recipe=replace(RECIPE, anchor_interval=0)), "recipe.anchor_interval"),
        (replace(GOOD, recipe=replace(RECIPE, anchor_interval=16)), "recipe.restarts"),
        (replace(GOOD, recipe=replace(BOUNDED, anchor_interval=8)), "recipe.kind"),
        (replace(GOOD, recipe=replace(BOUNDED, kind=PlanKind.ANCHOR)), "recipe.anchor_interval"),
        (replace(GOOD, recipe=replace(RECIPE, kind=PlanKind.BOUNDED)), "recipe.kind"),
        (replace(GOOD, recipe=replace(RECIPE, kind=PlanKind.RESUME)), "recipe.kind"),
        (replace(GOOD, recipe=replace(RECIPE, start=8)), "recipe.start"),
        (replace(GOOD, recipe=replace(BOUNDED, write_floor=9)), "recipe.write_floor"),
        (replace(GOOD, recipe=replace(BOUNDED, write_floor=24)), "recipe.write_floor"),
        (replace(GOOD, recipe=replace(BOUNDED, swa_floor=1)), "recipe.start"),
        (replace(GOOD, recipe=replace(BOUNDED, restarts=(8, 8))), "recipe.restarts"),
        (replace(GOOD, recipe=replace(BOUNDED, restarts=(4,))), "recipe.restarts"),
        (replace(GOOD, recipe=replace(BOUNDED, restarts=(16,))), "recipe.restarts"),
        *(
            (replace(GOOD, recipe=recipe), f"recipe.{field}")
            for recipe, field in (
                (replace(BOUNDED, restarts=()), "restarts"),
                (replace(BOUNDED, start=8), "swa_floor"),
                (replace(WINDOW, start=4, swa_floor=0), "start"),
                (replace(WINDOW, start=0, swa_floor=0), "start"),
                (replace(WINDOW, swa_floor=0), "swa_floor"),
                (replace(WINDOW, restarts=(8,)), "restarts"),
                (replace(PREVIOUS, restarts=(8,)), "restarts"),
                (replace(REBUILD, restarts=(8,), write_floor=16), "restarts"),
                (replace(REBUILD, swa_floor=0, start=1), "swa_floor"),
                (replace(RESUME, start=8), "start"),
                (replace(RESUME, restarts=(16,)), "restarts"),
                (replace(ANCHOR, start=4, swa_floor=4), "start"),
                (replace(ANCHOR, kind=PlanKind.WINDOW, start=16, swa_floor=9), "start"),
                (replace(RECIPE, source_floor=8), "source_floor"),
                (replace(LAYER_EXACT, source_floor=13), "source_floor"),
                (replace(LAYER_EXACT, source_floor=-1), "source_floor"),
            )
        ),
        (replace(GOOD, recipe=None, tail=TailVariant.EXACT), "tail"),
        (
            replace(
                GOOD, recipe=None, tail=TailVariant.EXACT, cache=CacheUse(ReplayMode.CANONICAL)
            ),
            "tail",
        ),
        (replace(GOOD, recipe=replace(RECIPE, decoder_start=20)), "recipe.decoder_start"),
        (
            replace(GOOD, recipe=replace(BOUNDED, start=8, swa_floor=8, decoder_start=7)),
            "recipe.decoder_start",
        ),
        (
            replace(GOOD, recipe=replace(RECIPE, tail=TailVariant.FULL, decoder_start=11)),
            "recipe.decoder_start",
        ),
        (replace(GOOD, recipe=replace(RECIPE, rules_version="0")), "recipe.rules_version"),
    ],
)
def test_a_bad_request_is_refused_by_field(request_: GenerationRequest, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_request(request_, GEOMETRY, 64)
    assert caught.value.field == field


def test_good_requests_pass() -> None:
    check_request(GOOD, GEOMETRY, 64)
    check_request(make_request(20, max_tokens=3, streamed=(5, 6)), GEOMETRY, 64)
    check_request(make_request(63, max_tokens=1), GEOMETRY, 64)
    check_request(replace(GOOD, recipe=replace(RECIPE, decoder_start=11)), GEOMETRY, 64)
    exact = replace(RECIPE, tail=TailVariant.EXACT, decoder_start=0)
    check_request(replace(GOOD, recipe=exact), GEOMETRY, 64)
    exact_mode = CacheUse(ReplayMode.EXACT)
    check_request(
        replace(GOOD, recipe=None, tail=TailVariant.EXACT, cache=exact_mode), GEOMETRY, 64
    )
    check_request(replace(GOOD, recipe=None, cache=CacheUse(ReplayMode.CANONICAL)), GEOMETRY, 64)
    canonical = replace(RECIPE, anchor_interval=8, restarts=(8, 16))
    check_request(replace(GOOD, recipe=canonical), GEOMETRY, 64)
    for recipe in (BOUNDED, WINDOW, PREVIOUS, REBUILD, RESUME, ANCHOR, LAYER_EXACT):
        check_request(replace(GOOD, recipe=recipe), GEOMETRY, 64)


def test_positions_end_with_the_context() -> None:
    assert positions_to_reserve(GOOD, 64, generates=True) == 24
    assert positions_to_reserve(GOOD, 22, generates=True) == 22
    assert positions_to_reserve(GOOD, 64, generates=False) == 20
