"""Which requests may go on from a session's parked state, by mode and tail of both turns?"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hash_machine import WINDOW, HashMachine, reference_stream
from hash_requests import ask, prompt, recipe_of
from split_cluster import CONFIG, collect, local_engine

from ripresa.workers.replay import PlanKind, ReplayMode, TailVariant
from ripresa.workers.request import CacheUse, GenerationRequest

BOUNDED, EXACT, CANONICAL = ReplayMode.BOUNDED, ReplayMode.EXACT, ReplayMode.CANONICAL
FLOORED, TAIL_EXACT = TailVariant.FLOORED, TailVariant.EXACT
CONFIG_OF_TEST = replace(CONFIG, num_blocks=256, anchor_interval=3 * WINDOW)


def turn(
    tokens: tuple[int, ...], mode: ReplayMode, tail: TailVariant, *, resumes: bool = True
) -> GenerationRequest:
    cache = CacheUse(mode, resumes=resumes)
    return replace(ask(tokens, tail=tail, cache=cache), session_id="s")


@pytest.mark.parametrize(
    ("first", "second", "is_resumed"),
    [
        ((BOUNDED, FLOORED), (BOUNDED, FLOORED), True),
        ((EXACT, FLOORED), (BOUNDED, FLOORED), True),
        ((EXACT, TAIL_EXACT), (EXACT, TAIL_EXACT), True),
        ((EXACT, TAIL_EXACT), (BOUNDED, FLOORED), True),
        ((EXACT, TAIL_EXACT), (EXACT, FLOORED), False),
        ((EXACT, FLOORED), (EXACT, TAIL_EXACT), False),
        ((EXACT, FLOORED), (EXACT, FLOORED), False),
        ((BOUNDED, FLOORED), (EXACT, TAIL_EXACT), False),
        ((BOUNDED, FLOORED), (CANONICAL, FLOORED), False),
        ((CANONICAL, FLOORED), (CANONICAL, FLOORED), False),
        ((CANONICAL, FLOORED), (BOUNDED, FLOORED), False),
    ],
)
@pytest.mark.parametrize("resumes", [True, False])
async def test_resume_needs_a_state_that_is_worth_it(
    first: tuple[ReplayMode, TailVariant],
    second: tuple[ReplayMode, TailVariant],
    is_resumed: bool,
    resumes: bool,
) -> None:
    async with local_engine(HashMachine(num_blocks=256), CONFIG_OF_TEST) as (engine, _):
        tokens = prompt(1, 43)
        stream = await collect(engine, turn(tokens, *first))
        longer = turn(tokens + stream.tokens + prompt(2, 30), *second, resumes=resumes)
        answer = await collect(engine, longer)
        recipe = recipe_of(answer)
        assert (recipe.kind is PlanKind.RESUME) is (is_resumed and resumes)
        answer.assert_equals(reference_stream(longer, recipe=recipe))


@pytest.mark.parametrize("num_new", [1, 5, 21, 40])
async def test_a_chain_of_exact_turns_stays_exact(num_new: int) -> None:
    """Each turn resumes, and one that takes exact blocks by way of a bounded turn does not."""
    async with local_engine(HashMachine(num_blocks=256), CONFIG_OF_TEST) as (engine, _):
        tokens = prompt(3, 43)
        for number in range(4):
            request = turn(tokens, EXACT, TAIL_EXACT)
            stream = await collect(engine, request)
            recipe = recipe_of(stream)
            assert recipe.kind is (PlanKind.RESUME if number else PlanKind.COLD)
            assert recipe.restarts == ()
            stream.assert_equals(reference_stream(request, recipe=recipe))
            tokens += stream.tokens + prompt(4 + number, num_new)
        other = replace(turn(tokens, BOUNDED, FLOORED), session_id=None)
        bounded = recipe_of(await collect(engine, other))
        assert bounded.kind is PlanKind.BOUNDED
        parked = turn(tokens + prompt(9, 1), BOUNDED, FLOORED, resumes=False)
        parked = replace(parked, cache=replace(parked.cache, resumes=True))
        assert recipe_of(await collect(engine, parked)).kind is PlanKind.RESUME
