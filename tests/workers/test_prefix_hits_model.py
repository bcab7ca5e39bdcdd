"""Does a hit on the real model compute what the golden values, and a cold run, say?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ripresa.workers.cache.kv_layout import KVFormat
from ripresa.workers.config import EngineConfig, Numerics, WindowConfig, WindowPolicy
from ripresa.workers.decode_engine import DecodeEngine
from ripresa.workers.encoder_engine import EncoderEngine
from ripresa.workers.model_runner import TorchModelRunner, load_runner
from ripresa.workers.models.base import EncoderOutput, StepOutput
from ripresa.workers.models.deepseek_v41.weights import Half
from ripresa.workers.replay import PlanKind, Recipe, ReplayMode, TailVariant
from ripresa.workers.request import (
    CacheUse,
    Failed,
    GenerationRequest,
    PrefillDone,
    Reserved,
    SamplingParams,
)
from ripresa.workers.scheduling.step_plan import StepPlan
from ripresa.workers.transfer.inbound import InboundTransfers
from ripresa.workers.transfer.loopback import LoopbackTransport
from ripresa.workers.transfer.outbound import OutboundTransfers

CASE = Path(__file__).resolve().parents[1] / "data" / "golden" / "case_g_plain_replay"
WINDOW = 8
CONFIG = EngineConfig(
    max_batched_tokens=3 * WINDOW,
    max_num_seqs=4,
    num_blocks=64,
    windows=WindowConfig(WindowPolicy.ZERO),
)


class Observed:
    """A runner's decoder logits, row by row, while it serves an engine."""

    def __init__(self, half: Half = Half.ALL) -> None:
        self.runner = load_runner(
            CASE / "checkpoint",
            half,
            num_blocks=CONFIG.num_blocks,
            num_slots=CONFIG.max_num_seqs,
            numerics=Numerics.DETERMINISTIC,
            kv_format=KVFormat.FLOAT32,
            poison=True,
        )
        self.logits: dict[int, torch.Tensor] = {}
        self._execute = self.runner.execute
        self.runner.execute = self._observe  # type: ignore[method-assign]

    def _observe(
        self, plan: StepPlan, inbound: Mapping[int, EncoderOutput] | None = None
    ) -> StepOutput:
        steps = tuple(replace(s, return_logits=s.num_decoder_rows > 0) for s in plan.sequences)
        output = self._execute(StepPlan(plan.step, steps), inbound)
        for step in steps:
            if step.return_logits:
                rows = range(step.decoder_start, step.decoder_stop)
                self.logits.update(zip(rows, output.logits[step.slot], strict=True))
        return output

    @contextmanager
    def watched(self) -> Iterator[dict[int, torch.Tensor]]:
        self.logits = {}
        yield self.logits


@pytest.fixture(scope="module")
def golden() -> dict[str, torch.Tensor]:
    return load_file(CASE / "golden.safetensors")


@pytest.fixture(scope="module")
def tokens(golden: Mapping[str, torch.Tensor]) -> tuple[int, ...]:
    return tuple(golden["token_ids"].tolist())


def ask(
    token_ids: Sequence[int],
    *,
    tail: TailVariant = TailVariant.FLOORED,
    mode: ReplayMode = ReplayMode.BOUNDED,
    max_tokens: int = 1,
) -> GenerationRequest:
    return GenerationRequest(
        request_id="r",
        generation=0,
        token_ids=tuple(token_ids),
        num_prompt_tokens=len(token_ids),
        recipe=None,
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        tail=tail,
        cache=CacheUse(mode),
    )


async def run(engine: DecodeEngine, request: GenerationRequest) -> Recipe:
    recipe: Recipe | None = None
    async for event in engine.generate(request, local=True):
        assert not isinstance(event, Failed), event
        if isinstance(event, PrefillDone):
            recipe = event.recipe
    assert recipe is not None
    engine.check_integrity()
    return recipe


async def run_split(
    encoder: EncoderEngine, decoder: DecodeEngine, request: GenerationRequest
) -> Recipe:
    recipe: Recipe | None = None
    async for event in decoder.generate(request, local=False):
        assert not isinstance(event, Failed), event
        if isinstance(event, Reserved):
            await encoder.prefill(request, "d0")
        if isinstance(event, PrefillDone):
            recipe = event.recipe
    assert recipe is not None
    return recipe


def stacked(logits: Mapping[int, torch.Tensor]) -> torch.Tensor:
    return torch.stack([logits[position] for position in sorted(logits)])


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
    model, half = Observed(), Observed(Half.ENCODER)
    transport = LoopbackTransport()
    decoder = DecodeEngine("d0", model.runner, CONFIG)
    inbound = InboundTransfers(decoder, transport)
    outbound = OutboundTransfers("e0", lambda _: inbound, transport)
    encoder = EncoderEngine("e0", half.runner, outbound, CONFIG)
    await encoder.start()
    await decoder.start()
    await run_split(encoder, decoder, ask(tokens[:24], tail=tail))
    before = encoder.stats().num_encoder_rows
    with model.watched() as logits:
        recipe = await run_split(encoder, decoder, ask(tokens, tail=tail))
    assert (recipe.kind, recipe.start, recipe.write_floor) == (PlanKind.BOUNDED, 16, 24)
    assert encoder.stats().num_encoder_rows - before == 44 - 16
    assert decoder.stats().num_encoder_rows == 0
    expected = golden[f"{name}.logits"]
    torch.testing.assert_close(stacked(logits), expected, atol=1e-3, rtol=0)
    await encoder.stop()
    await outbound.close()
    await decoder.stop()
    await inbound.close()


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
