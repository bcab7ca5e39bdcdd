"""Does a hit on the real model compute what the golden values, and a cold run, say?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from observed_model import (
    CASE,
    CONFIG,
    WINDOW,
    Observed,
    ask,
    run,
    run_split,
    split_engines,
    stacked,
)
from safetensors.torch import load_file

from ripresa.workers.cache.kv_layout import KVFormat
from ripresa.workers.config import WindowConfig, WindowPolicy
from ripresa.workers.decode_engine import DecodeEngine
from ripresa.workers.model_runner import TorchModelRunner
from ripresa.workers.models.deepseek_v41.config import ModelConfig
from ripresa.workers.models.deepseek_v41.weights import Half
from ripresa.workers.replay import PlanKind, ReplayMode, TailVariant
from ripresa.workers.request import Tokens
from ripresa.workers.verify_golden import paired_ids


@pytest.fixture(scope="module")
def golden() -> dict[str, torch.Tensor]:
    return load_file(CASE / "golden.safetensors")


@pytest.fixture(scope="module")
def tokens(golden: Mapping[str, torch.Tensor]) -> tuple[int, ...]:
    return tuple(golden["token_ids"].tolist())


CASES = [
    (TailVariant.FLOORED, "spec.both_replays_floored"),
    (TailVariant.LAYER_EXACT, "spec.both_replays"),
    (TailVariant.FULL, "spec.encoder_replay"),
]


@pytest.mark.parametrize(("tail", "name"), CASES)
async def test_a_bounded_hit_is_the_golden_replay(
    golden: Mapping[str, torch.Tensor], tokens: tuple[int, ...], tail: TailVariant, name: str
) -> None:
    model = Observed()
    engine = DecodeEngine("d0", model.runner, CONFIG)
    await engine.start()
    assert (await run(engine, ask(tokens[:24], tail=tail))).kind is PlanKind.COLD
    with model.watched() as logits:
        recipe = await run(engine, ask(tokens, tail=tail))
    assert (recipe.kind, recipe.start, recipe.write_floor) == (PlanKind.BOUNDED, 16, 24)
    expected = golden[f"{name}.logits"]
    torch.testing.assert_close(stacked(logits), expected, atol=1e-3, rtol=0)
    await engine.stop()


@pytest.mark.parametrize(("tail", "name"), CASES)
async def test_a_bounded_hit_over_two_workers_is_the_golden_replay(
    golden: Mapping[str, torch.Tensor], tokens: tuple[int, ...], tail: TailVariant, name: str
) -> None:
    async with split_engines() as (encoder, decoder, model):
        await run_split(encoder, decoder, ask(tokens[:24], tail=tail))
        before = encoder.stats().num_encoder_rows
        with model.watched() as logits:
            recipe = await run_split(encoder, decoder, ask(tokens, tail=tail))
        assert (recipe.kind, recipe.start, recipe.write_floor) == (PlanKind.BOUNDED, 16, 24)
        assert encoder.stats().num_encoder_rows - before == 44 - 16
        assert decoder.stats().num_encoder_rows == 0
        expected = golden[f"{name}.logits"]
        torch.testing.assert_close(stacked(logits), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("tail", [TailVariant.FLOORED, TailVariant.LAYER_EXACT])
@pytest.mark.parametrize("cached", range(8, 104, 8))
async def test_an_exact_hit_equals_a_cold_run_bit_for_bit(
    tokens: tuple[int, ...], cached: int, tail: TailVariant
) -> None:
    prompt = (tokens * 3)[:118]
    answers = []
    for warm in (False, True):
        model = Observed()
        engine = DecodeEngine("d0", model.runner, CONFIG)
        await engine.start()
        if warm:
            await run(engine, ask(prompt[:cached]))
        with model.watched() as logits:
            request = ask(prompt, tail=tail, mode=ReplayMode.EXACT, max_tokens=12)
            recipe = await run(engine, request)
        assert recipe.write_floor == (cached if warm else 0)
        assert recipe.restarts == ()
        answers.append(stacked(logits))
        await engine.stop()
    assert torch.equal(*answers)


@pytest.mark.parametrize("budget", [16, 24, 64])
@pytest.mark.parametrize("cached", [24, 40, 72, 96])
async def test_going_on_from_a_window_equals_a_cold_run_bit_for_bit(
    tokens: tuple[int, ...], cached: int, budget: int
) -> None:
    prompt = (tokens * 3)[:118]
    windows = WindowConfig(WindowPolicy.FULL)
    config = replace(CONFIG, windows=windows, max_batched_tokens=budget)
    answers = []
    for warm in (False, True):
        model = Observed()
        engine = DecodeEngine("d0", model.runner, config)
        await engine.start()
        if warm:
            await run(engine, ask(prompt[: cached + 3]))
        with model.watched() as logits:
            recipe = await run(engine, ask(prompt, max_tokens=12))
        if warm:
            assert (recipe.kind, recipe.start) == (PlanKind.WINDOW, cached)
        answers.append(stacked(logits))
        await engine.stop()
    assert torch.equal(*answers)


@pytest.mark.parametrize("num_new", [1, 5, 8, 21])
@pytest.mark.parametrize("length", [37, 40, 43])
async def test_a_parked_session_goes_on_bit_for_bit(
    tokens: tuple[int, ...], length: int, num_new: int
) -> None:
    """The continuation of the same recipe, from the image and from nothing."""
    prompt = (tokens * 3)[:118]
    model = Observed()
    engine = DecodeEngine("d0", model.runner, CONFIG)
    await engine.start()
    request = replace(ask(prompt[:length], max_tokens=6), session_id="s")
    said = [event async for event in engine.generate(request, local=True)]
    answer = tuple(t for e in said if isinstance(e, Tokens) for t in e.token_ids)
    longer = replace(
        ask((*prompt[:length], *answer, *prompt[60 : 60 + num_new]), max_tokens=9), session_id="s"
    )
    with model.watched() as resumed:
        recipe = await run(engine, longer)
    assert (recipe.kind, recipe.start) == (PlanKind.RESUME, length + 5)
    await engine.stop()
    other = Observed()
    engine = DecodeEngine("d0", other.runner, CONFIG)
    await engine.start()
    with other.watched() as computed:
        assert await run(engine, replace(longer, recipe=recipe)) == recipe
    for position, logits in resumed.items():
        assert torch.equal(logits, computed[position])
    await engine.stop()


async def test_a_re_execution_elsewhere_equals_the_undisturbed_stream(
    tokens: tuple[int, ...],
) -> None:
    prompt = (tokens * 3)[:100]
    answers: list[dict[int, torch.Tensor]] = []
    request = ask(prompt, max_tokens=10)
    for warm in (True, False):
        model = Observed()
        engine = DecodeEngine("d0", model.runner, CONFIG)
        await engine.start()
        if warm:
            await run(engine, ask(prompt[:40]))
            await run(engine, ask(prompt[:70]))
        with model.watched() as logits:
            recipe = await run(engine, request)
        request = replace(request, recipe=recipe)
        answers.append(logits)
        await engine.stop()
    assert recipe.restarts == (40, 70 // WINDOW * WINDOW)
    assert torch.equal(stacked(answers[0]), stacked(answers[1]))


def test_the_runner_knows_its_geometry() -> None:
    runner: TorchModelRunner = Observed().runner
    geometry = runner.geometry
    assert (geometry.window, geometry.rewind) == (WINDOW, 6)
    assert geometry.num_encoder_layers + geometry.num_decoder_layers == 8


@pytest.mark.parametrize("where", ["local", "split"])
@pytest.mark.parametrize(("tail", "name"), CASES)
async def test_a_bounded_hit_with_grids_and_engram_is_the_golden_replay(
    shared: Path, tail: TailVariant, name: str, where: str
) -> None:
    case = shared / "golden" / "case_b_grids_engram_replay"
    golden = load_file(case / "golden.safetensors")
    tokens = tuple(golden["token_ids"].tolist())

    def make(half: Half) -> Observed:
        vocab_size = ModelConfig.from_file(case / "checkpoint" / "config.json").vocab_size
        return Observed(
            half,
            case / "checkpoint",
            kv_format=KVFormat.PACKED,
            compressed_ids=paired_ids(vocab_size),
        )

    async with split_engines(make=make) as (encoder, decoder, model):
        for length in (24, len(tokens)):
            request = ask(tokens[:length], tail=tail)
            with model.watched() as logits:
                if where == "local":
                    recipe = await run(decoder, request)
                else:
                    recipe = await run_split(encoder, decoder, request)
    assert (recipe.kind, recipe.start, recipe.write_floor) == (PlanKind.BOUNDED, 16, 24)
    expected = golden[f"{name}.logits"]
    torch.testing.assert_close(stacked(logits), expected, atol=1e-3, rtol=0)
