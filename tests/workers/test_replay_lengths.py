"""Are recipes with other lengths than the window followed alike, by one worker and by two?

Numerics are deterministic, so equal means bit for bit.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from observed_model import CASE, CONFIG, WINDOW, Observed, ask, run, run_split, split_engines
from safetensors.torch import load_file

from ripresa.workers.decode_engine import DecodeEngine
from ripresa.workers.replay import PlanKind, Recipe, ReplayMode
from ripresa.workers.request import CacheUse, GenerationRequest

LENGTH, CACHED, NUM_NEW = 60, 40, 4


@pytest.fixture(scope="module")
def tokens() -> tuple[int, ...]:
    golden = load_file(CASE / "golden.safetensors")
    return tuple((golden["token_ids"].tolist() * 3)[:LENGTH])


def following(tokens: tuple[int, ...], recipe: Recipe) -> GenerationRequest:
    request = ask(tokens, max_tokens=NUM_NEW)
    cache = CacheUse(ReplayMode.BOUNDED, writes=False)
    return replace(request, recipe=recipe, cache=cache)


@pytest.mark.parametrize("tail", [1, 3, 2 * WINDOW + 3])
@pytest.mark.parametrize("replay", [0, 2, 3 * WINDOW])
async def test_two_workers_compute_what_one_does(
    tokens: tuple[int, ...], replay: int, tail: int
) -> None:
    start = CACHED - replay
    first = max(start, LENGTH - tail)
    alone = Observed()
    engine = DecodeEngine("d0", alone.runner, CONFIG)
    await engine.start()
    await run(engine, ask(tokens[:CACHED], mode=ReplayMode.EXACT))
    planned = await run(engine, replace(ask(tokens), cache=CacheUse(writes=False)))
    assert (planned.kind, planned.write_floor) == (PlanKind.BOUNDED, CACHED)
    recipe = replace(planned, start=start, swa_floor=start, decoder_start=first)
    with alone.watched() as expected:
        assert await run(engine, following(tokens, recipe)) == recipe
    await engine.stop()
    assert min(expected) == first
    async with split_engines() as (encoder, decoder, model):
        await run_split(encoder, decoder, ask(tokens[:CACHED], mode=ReplayMode.EXACT))
        with model.watched() as found:
            assert await run_split(encoder, decoder, following(tokens, recipe)) == recipe
    assert sorted(found) == sorted(expected)
    for position, row in expected.items():
        assert torch.equal(found[position], row), position
