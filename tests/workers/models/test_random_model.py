"""Do random weights behave like a model: varied, finite, reading its whole context?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from noise_checkpoint import noise_checkpoint
from tokenizers import Tokenizer

from ripresa.workers.config import Numerics
from ripresa.workers.demo.build_tokenizer import TOKENIZER
from ripresa.workers.model_runner import TorchModelRunner, load_runner
from ripresa.workers.models.base import StepOutput
from ripresa.workers.models.deepseek_v41.weights import Half
from ripresa.workers.request import SamplingParams
from ripresa.workers.scheduling.step_plan import SequenceStep, StepPlan

CALL = Path(__file__).parents[2] / "data" / "miniswe_call.json"
GREEDY = SamplingParams(max_tokens=1, temperature=0)
LENGTH = 1200


@pytest.fixture(scope="module")
def runner() -> TorchModelRunner:
    runner = load_runner(
        noise_checkpoint(), Half.ALL, num_blocks=10, num_slots=1, numerics=Numerics.FAST
    )
    assert runner.weights.num_parameters == 11_824_624
    return runner


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    return list(tokenizer.encode(json.loads(CALL.read_text())["input"]).ids)[:LENGTH]


def step(runner: TorchModelRunner, tokens: list[int], start: int) -> StepOutput:
    """Rows [start, len(tokens)); prompts go on through the decoder by their last window."""
    floor = LENGTH - runner.window
    plan = SequenceStep(
        slot=0,
        block_table=tuple(range(10)),
        token_ids=tuple(tokens[start:]),
        lookback_ids=tuple(tokens[max(0, start - 3) : start]),
        encoder_start=start,
        decoder_start=max(start, floor),
        decoder_stop=len(tokens),
        decoder_floor=floor,
        source_floor=floor,
        sampling=GREEDY,
        return_logits=True,
    )
    return runner.execute(StepPlan(0, (plan,)))


def test_logits_are_of_a_sane_size_and_greedy_text_does_not_collapse(
    runner: TorchModelRunner, prompt: list[int]
) -> None:
    output = step(runner, prompt, 0)
    logits = output.logits[0]
    assert 1 < logits.std().item() < 2
    assert len(set(logits.argmax(-1).tolist())) > 100
    tokens = [*prompt, output.sampled[0]]
    while len(tokens) < LENGTH + 40:
        tokens.append(step(runner, tokens, len(tokens) - 1).sampled[0])
    assert len(set(tokens[LENGTH:])) > 30
    assert runner.eos_token_id not in tokens[LENGTH:]


def test_every_part_of_the_context_counts(runner: TorchModelRunner, prompt: list[int]) -> None:
    """Windows alone reach back 128 + 4 * 127 positions, so the first ones count by the pools."""
    last = step(runner, prompt, 0).logits[0][-1]
    for position in (0, 5, 500, 1000, LENGTH - 2):
        changed = [*prompt]
        changed[position] = (changed[position] + 7) % 4096
        difference = step(runner, changed, 0).logits[0][-1] - last
        assert difference.abs().max().item() > 0.01, position
        assert torch.isfinite(difference).all()
