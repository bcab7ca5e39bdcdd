"""Does a constraint hold through an engine, whatever else happens to its request?

The model's weights are random, so whatever fits a grammar here does so for its sake.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from random import Random

import pytest
from noise_checkpoint import noise_checkpoint

from ripresa.workers.config import EngineConfig, Numerics
from ripresa.workers.decode_engine import DecodeEngine
from ripresa.workers.errors import ErrorCode, InvalidArgument, RipresaError
from ripresa.workers.model_runner import TorchModelRunner, load_runner
from ripresa.workers.models.deepseek_v41.tensor_specs import Half
from ripresa.workers.request import (
    Bringing,
    EngineEvent,
    Failed,
    Finished,
    FinishReason,
    GenerationRequest,
    OutputConstraint,
    PrefillDone,
    SamplingParams,
    TokenLogprobs,
    Tokens,
)

NUM_BLOCKS = 3
CONFIG = EngineConfig(
    max_num_seqs=4,
    num_blocks=NUM_BLOCKS,
    numerics=Numerics.DETERMINISTIC,
    reserved_output_tokens=1,
)
REGEX = "[a-z]{6,9}( [0-9]{3}){4}"
DATES = OutputConstraint(f"start: /{REGEX}/", "constraint")
PROMPT = tuple(Random(4).choices(range(40, 4000), k=120))


@pytest.fixture(scope="module")
def runner() -> TorchModelRunner:
    return load_runner(
        noise_checkpoint(), Half.ALL, num_blocks=NUM_BLOCKS, num_slots=4, numerics=CONFIG.numerics
    )


@pytest.fixture
async def engine(runner: TorchModelRunner) -> AsyncIterator[DecodeEngine]:
    engine = DecodeEngine("d0", runner, CONFIG)
    await engine.start()
    yield engine
    engine.check_integrity()
    await engine.stop()


def request(name: str = "r", seed: int = 1, prompt: tuple[int, ...] = PROMPT) -> GenerationRequest:
    sampling = SamplingParams(
        max_tokens=60, seed=seed, frequency_penalty=0.5, logprobs=1, constraint=DATES
    )
    return GenerationRequest(name, 0, prompt, len(prompt), None, sampling)


async def run(engine: DecodeEngine, asked: GenerationRequest) -> list[EngineEvent]:
    return [event async for event in engine.generate(asked, local=True)]


def tokens_of(events: list[EngineEvent]) -> tuple[int, ...]:
    return tuple(t for event in events if isinstance(event, Tokens) for t in event.token_ids)


def text_of(runner: TorchModelRunner, events: list[EngineEvent]) -> str:
    spelled = runner.vocabulary().bytes_of
    return b"".join(spelled[token_id] for token_id in tokens_of(events)).decode()


async def test_a_takeover_gives_the_same_rest_at_every_cut(
    engine: DecodeEngine, runner: TorchModelRunner
) -> None:
    events = await run(engine, request())
    assert isinstance(events[0], Bringing)
    assert re.fullmatch(REGEX, text_of(runner, events))
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.stop_token_id) == (FinishReason.STOP, runner.eos_token_id)
    tokens = tokens_of(events)
    recipe = next(event.recipe for event in events if isinstance(event, PrefillDone))
    for cut in (1, len(tokens) // 2, len(tokens)):
        again = replace(request(), generation=cut, token_ids=PROMPT + tokens[:cut], recipe=recipe)
        assert tokens_of(await run(engine, again)) == tokens[cut:], cut


async def test_answers_in_one_batch_are_those_alone_even_if_they_must_park(
    engine: DecodeEngine, runner: TorchModelRunner
) -> None:
    prompts = [PROMPT, PROMPT[1:], (*PROMPT, 41)]
    asked = [request(f"r{n}", seed=n, prompt=prompt) for n, prompt in enumerate(prompts)]
    free = replace(asked[1], sampling=replace(asked[1].sampling, constraint=None))
    asked[1] = free
    together = await asyncio.gather(*(run(engine, each) for each in asked))
    assert engine.stats().num_preemptions > 0
    for each, events in zip(asked, together, strict=True):
        alone = await run(engine, replace(each, request_id=each.request_id + "'"))
        assert tokens_of(events) == tokens_of(alone)
        fits = re.fullmatch(REGEX, text_of(runner, events)) if each is not free else None
        assert (fits is None) is (each is free)


async def test_log_probabilities_know_nothing_of_the_constraint(engine: DecodeEngine) -> None:
    entries: list[TokenLogprobs] = []
    for event in await run(engine, request()):
        if isinstance(event, Tokens):
            entries += event.logprobs
    assert entries
    assert all(entry.chosen <= entry.top[0][1] for entry in entries)
    assert any(entry.chosen < entry.top[0][1] for entry in entries)


@pytest.mark.parametrize(
    "hostile",
    [
        "start: /(a/",
        "start: other",
        "not a grammar",
        'start: %json {"type": "tomato"}',
        'start: %json {"$ref": "#"}',
        "start: start",
        "start: /" + "(" * 5000 + "a" + ")" * 5000 + "/",
        'start: %json {"enum": [' + ",".join(f'"v{n}"' for n in range(100_000)) + "]}",
    ],
    ids=lambda text: text[:24],
)
async def test_a_hostile_grammar_is_refused_before_anything_is_reserved(
    engine: DecodeEngine, hostile: str
) -> None:
    bad = OutputConstraint(hostile, "the.field")
    asked = request()
    asked = replace(asked, sampling=replace(asked.sampling, constraint=bad))
    with pytest.raises(InvalidArgument) as caught:
        await run(engine, asked)
    assert caught.value.field == "the.field"
    assert len(str(caught.value)) < 500
    assert engine.stats().num_running == 0


async def test_a_cancel_while_a_grammar_is_compiled_leaves_nothing(engine: DecodeEngine) -> None:
    stream = engine.generate(request(), local=True)
    assert isinstance(await anext(stream), Bringing)
    waiting = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert engine.stats().num_running == 0


async def test_a_broken_mask_fails_its_request_alone(
    engine: DecodeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = replace(request("plain"), sampling=SamplingParams(max_tokens=8, seed=2))
    expected = tokens_of(await run(engine, plain))

    def fail(_: object) -> None:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr("ripresa.workers.grammar.Matcher.mask", fail)
    bound, free = await asyncio.gather(run(engine, request()), run(engine, plain))
    assert tokens_of(free) == expected
    error = bound[-1]
    assert isinstance(error, Failed)
    assert isinstance(error.error, RipresaError)
    assert error.error.code is ErrorCode.INTERNAL
