"""Do sampling parameters that look back hold through an engine, and over a takeover?"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from tiny_model import tiny_checkpoint
from tiny_tokenizer import write_tiny_tokenizer

from ripresa.workers.config import EngineConfig, Numerics
from ripresa.workers.decode_engine import DecodeEngine
from ripresa.workers.model_runner import TorchModelRunner, load_runner
from ripresa.workers.models.deepseek_v41.tensor_specs import Half
from ripresa.workers.replay import Recipe
from ripresa.workers.request import (
    EngineEvent,
    Failed,
    Finished,
    FinishReason,
    GenerationRequest,
    PrefillDone,
    SamplingParams,
    TokenLogprobs,
    Tokens,
)
from ripresa.workers.scheduling.step_plan import SequenceStep, StepPlan

CONFIG = EngineConfig(
    max_batched_tokens=32, max_num_seqs=4, num_blocks=32, numerics=Numerics.DETERMINISTIC
)
PROMPT = tuple(Random(4).choices(range(96), k=21))
STOP = 7


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> TorchModelRunner:
    folder: Path = tmp_path_factory.mktemp("sampling") / "model"
    tiny_checkpoint(folder)
    write_tiny_tokenizer(folder)
    return load_runner(
        folder, Half.ALL, num_blocks=32, num_slots=4, numerics=Numerics.DETERMINISTIC
    )


def request(max_tokens: int = 12, **sampling: Any) -> GenerationRequest:
    return GenerationRequest(
        request_id="r",
        generation=0,
        token_ids=PROMPT,
        num_prompt_tokens=len(PROMPT),
        recipe=None,
        sampling=SamplingParams(max_tokens, ignore_eos=True, **sampling),
    )


async def run(runner: TorchModelRunner, asked: GenerationRequest) -> list[EngineEvent]:
    engine = DecodeEngine("d0", runner, CONFIG)
    await engine.start()
    try:
        events = await collect(engine, asked)
        engine.check_integrity()
    finally:
        await engine.stop()
    assert not any(isinstance(event, Failed) for event in events), events[-1]
    return events


async def collect(engine: DecodeEngine, asked: GenerationRequest) -> list[EngineEvent]:
    return [event async for event in engine.generate(asked, local=True)]


def tokens_of(events: list[EngineEvent]) -> tuple[int, ...]:
    return tuple(t for event in events if isinstance(event, Tokens) for t in event.token_ids)


def logprobs_of(events: list[EngineEvent]) -> list[TokenLogprobs]:
    return [entry for event in events if isinstance(event, Tokens) for entry in event.logprobs]


def recipe_of(events: list[EngineEvent]) -> Recipe:
    return next(event.recipe for event in events if isinstance(event, PrefillDone))


LOOKING_BACK: dict[str, dict[str, Any]] = {
    "penalties": {
        "presence_penalty": 1.5,
        "frequency_penalty": 1.0,
        "repetition_penalty": 1.7,
        "temperature": 0.8,
        "seed": 3,
    },
    "greedy": {"frequency_penalty": 2.0, "temperature": 0.0},
    "min_p": {"min_p": 0.2, "seed": 9},
    "min_tokens": {
        "min_tokens": 9,
        "stop_token_ids": (STOP,),
        "logit_bias": ((STOP, 100.0),),
        "seed": 4,
    },
}


@pytest.mark.parametrize("sampling", LOOKING_BACK.values(), ids=LOOKING_BACK)
async def test_a_takeover_gives_the_same_continuation(
    runner: TorchModelRunner, sampling: dict[str, Any]
) -> None:
    asked = request(**sampling)
    events = await run(runner, asked)
    tokens = tokens_of(events)
    assert len(tokens) >= 9
    for cut in (1, 4, len(tokens) - 1):
        again = replace(
            asked, generation=1, token_ids=PROMPT + tokens[:cut], recipe=recipe_of(events)
        )
        assert tokens_of(await run(runner, again)) == tokens[cut:], cut


async def test_penalties_change_a_stream(runner: TorchModelRunner) -> None:
    plain = tokens_of(await run(runner, request(temperature=0.0)))
    never_again = {"temperature": 0.0, "presence_penalty": 50.0, "repetition_penalty": 50.0}
    varied = tokens_of(await run(runner, request(**never_again)))
    assert len(set(plain)) < len(plain), "the tiny model repeats itself"
    assert len(set(varied)) == len(varied)


@pytest.mark.parametrize(
    "poison",
    [
        {"repetition_penalty": 1e-320},
        {"frequency_penalty": -1e308, "presence_penalty": -1.7e308},
        {"banned_token_ids": tuple(range(96))},
        {"temperature": float("nan")},
    ],
    ids=lambda poison: next(iter(poison)),
)
async def test_a_poisoned_request_fails_alone(
    runner: TorchModelRunner, poison: dict[str, Any]
) -> None:
    mates = [replace(request(seed=n, frequency_penalty=0.5), request_id=f"{n}") for n in (1, 2)]
    alone = [tokens_of(await run(runner, mate)) for mate in mates]
    engine = DecodeEngine("d0", runner, CONFIG)
    await engine.start()
    try:
        poisoned, *others = await asyncio.gather(
            *(collect(engine, asked) for asked in (request(**poison), *mates))
        )
        assert engine.stats().num_running == 0
        engine.check_integrity()
    finally:
        await engine.stop()
    failed = poisoned[-1]
    assert isinstance(failed, Failed)
    assert "of 3 sequences failed" not in str(failed.error)
    assert [tokens_of(events) for events in others] == alone
    assert all(isinstance(events[-1], Finished) for events in others)


async def test_an_ending_comes_no_sooner_than_asked(runner: TorchModelRunner) -> None:
    eager = {"stop_token_ids": (STOP,), "logit_bias": ((STOP, 100.0),)}
    *_, finished = await run(runner, request(**eager))
    assert finished.num_generated_tokens == 1  # type: ignore[union-attr]
    *_, finished = await run(runner, request(min_tokens=5, **eager))
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.num_generated_tokens) == (FinishReason.STOP, 6)


async def test_banned_tokens_never_come(runner: TorchModelRunner) -> None:
    plain = tokens_of(await run(runner, request(temperature=0.0)))
    banned = tuple(set(plain))
    other = tokens_of(await run(runner, request(temperature=0.0, banned_token_ids=banned)))
    assert not set(other) & set(banned)


async def test_log_probabilities_are_those_of_the_models_logits(runner: TorchModelRunner) -> None:
    changed = {"temperature": 0.0, "logprobs": 3, "logit_bias": ((40, 100.0),)}
    events = await run(runner, request(4, **changed))
    assert tokens_of(events) == (40,) * 4
    entries = logprobs_of(events)
    assert len(entries) == 4
    step = SequenceStep(
        slot=0,
        block_table=tuple(range(5)),
        token_ids=PROMPT,
        decoder_start=len(PROMPT) - 8,
        decoder_stop=len(PROMPT),
        decoder_floor=len(PROMPT) - 8,
        source_floor=len(PROMPT) - 8,
        return_logits=True,
    )
    logits = runner.execute(StepPlan(0, (step,))).logits[0][-1]
    runner.release_slot(0)
    expected = torch.log_softmax(logits.double(), 0)
    assert entries[0].chosen == pytest.approx(expected[40].item(), abs=1e-6)
    best = expected.topk(3)
    assert [i for i, _ in entries[0].top] == best.indices.tolist()
    assert [p for _, p in entries[0].top] == pytest.approx(best.values.tolist(), abs=1e-6)
    assert not logprobs_of(await run(runner, request(4)))
