"""Do given tokens run like generated ones, and are they scored by the same numbers?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from tiny_model import tiny_checkpoint
from tiny_tokenizer import write_tiny_tokenizer

from ripresa.workers.config import EngineConfig, Numerics, WindowConfig, WindowPolicy
from ripresa.workers.decode_engine import DecodeEngine
from ripresa.workers.errors import ErrorCode, InvalidArgument, RipresaError
from ripresa.workers.model_runner import TorchModelRunner, load_runner
from ripresa.workers.models.deepseek_v41.tensor_specs import Half
from ripresa.workers.replay import PlanKind, ReplayMode, TailVariant
from ripresa.workers.request import (
    CacheUse,
    GenerationRequest,
    OutputConstraint,
    SamplingParams,
    TokenLogprobs,
    Tokens,
)
from ripresa.workers.scoring import Foretold, compare_logits, score, with_given

WINDOW, VOCAB = 8, 96
CONFIG = EngineConfig(
    max_batched_tokens=32,
    max_num_seqs=4,
    num_blocks=32,
    numerics=Numerics.DETERMINISTIC,
    windows=WindowConfig(WindowPolicy.ZERO),
)
PROMPT = tuple(Random(4).choices(range(VOCAB), k=45))
GIVEN = tuple(Random(5).choices(range(VOCAB), k=12))


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> TorchModelRunner:
    folder: Path = tmp_path_factory.mktemp("scoring") / "model"
    tiny_checkpoint(folder)
    write_tiny_tokenizer(folder)
    return load_runner(
        folder, Half.ALL, num_blocks=32, num_slots=4, numerics=Numerics.DETERMINISTIC
    )


@pytest.fixture
async def engine(runner: TorchModelRunner):  # type: ignore[no-untyped-def]
    engine = DecodeEngine("d0", runner, CONFIG)
    await engine.start()
    yield engine
    engine.check_integrity()
    await engine.stop()


def ask(
    token_ids: tuple[int, ...] = PROMPT,
    *,
    mode: ReplayMode = ReplayMode.BOUNDED,
    tail: TailVariant = TailVariant.FLOORED,
    cache: CacheUse | None = None,
    max_tokens: int = len(GIVEN),
    logprobs: int | None = 3,
) -> GenerationRequest:
    return GenerationRequest(
        request_id="r",
        generation=0,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        recipe=None,
        sampling=SamplingParams(max_tokens, 1.0, seed=3, ignore_eos=True, logprobs=logprobs),
        tail=tail,
        cache=cache or CacheUse(mode),
    )


async def generated(
    engine: DecodeEngine, request: GenerationRequest
) -> tuple[tuple[int, ...], tuple[TokenLogprobs, ...]]:
    events = [event async for event in engine.generate(request, local=True)]
    told = [event for event in events if isinstance(event, Tokens)]
    return (
        tuple(token for event in told for token in event.token_ids),
        tuple(entry for event in told for entry in event.logprobs),
    )


@pytest.mark.parametrize("mode", ReplayMode)
async def test_given_tokens_have_the_log_probabilities_of_the_stream_that_chose_them(
    engine: DecodeEngine, mode: ReplayMode
) -> None:
    """Behind a hit as well: the scored request reads the cache that the stream has read."""
    await generated(engine, ask(PROMPT[:30], mode=mode, max_tokens=1))
    request = ask(cache=CacheUse(mode, writes=False))
    token_ids, logprobs = await generated(engine, request)
    scored = await score(engine, with_given(request, token_ids))
    assert scored.logprobs == logprobs
    assert scored.recipe.kind is not PlanKind.COLD


async def test_the_log_probabilities_of_any_tokens_are_those_of_one_forward(
    engine: DecodeEngine,
) -> None:
    """Given one by one behind a short prompt, or as the rows of a long one."""
    exact = CacheUse(ReplayMode.EXACT, writes=False)
    stop = len(PROMPT) + len(GIVEN)
    one_by_one, at_once = Foretold(len(PROMPT), stop), Foretold(len(PROMPT), stop)
    short = with_given(ask(tail=TailVariant.EXACT, cache=exact), GIVEN)
    scored = await score(engine, short, one_by_one)
    long = ask(PROMPT + GIVEN, tail=TailVariant.FULL, cache=exact)
    await score(engine, with_given(long, GIVEN[:1]), at_once)
    assert torch.equal(one_by_one.logits, at_once.logits)
    rows = torch.log_softmax(at_once.logits.double(), -1)
    expected = [float(row[token]) for row, token in zip(rows, GIVEN, strict=True)]
    assert [entry.chosen for entry in scored.logprobs] == pytest.approx(expected, abs=1e-9)
    assert scored.prefill.encoder_rows == len(PROMPT)
    assert scored.counters.decoder_rows == len(GIVEN) - 1


async def test_no_given_token_ends_the_stream_or_is_changed(engine: DecodeEngine) -> None:
    request = ask(cache=CacheUse(writes=False))
    ends = replace(
        request.sampling,
        ignore_eos=False,
        stop_token_ids=GIVEN[:2],
        banned_token_ids=GIVEN,
        repetition_penalty=9.0,
        min_tokens=5,
    )
    plain = await score(engine, with_given(request, GIVEN))
    bent = await score(engine, with_given(replace(request, sampling=ends), GIVEN))
    assert len(bent.logprobs) == len(GIVEN)
    assert bent.logprobs == plain.logprobs


async def test_a_takeover_goes_on_with_the_tokens_that_are_left(engine: DecodeEngine) -> None:
    request = with_given(ask(cache=CacheUse(writes=False)), GIVEN)
    whole = await score(engine, request)
    for cut in (1, len(GIVEN) - 1):
        rest = replace(request, generation=1, token_ids=PROMPT + GIVEN[:cut], recipe=whole.recipe)
        assert (await score(engine, rest)).logprobs == whole.logprobs[cut:]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"given": GIVEN[:-1]}, "given"),
        ({"constrained": True}, "given"),
        ({"given": (*GIVEN[:-1], VOCAB)}, "given"),
        ({"given": (*GIVEN[:-1], -1)}, "given"),
    ],
    ids=["fewer than asked for", "constrained", "above the vocabulary", "below it"],
)
async def test_bad_given_tokens_are_refused(
    engine: DecodeEngine, change: dict[str, object], field: str
) -> None:
    request = with_given(ask(), GIVEN)
    if change.pop("constrained", False):
        constraint = OutputConstraint("start: /a/", "grammar")
        request = replace(request, sampling=replace(request.sampling, constraint=constraint))
    with pytest.raises(InvalidArgument) as refused:
        await score(engine, replace(request, **change))  # type: ignore[arg-type]
    assert refused.value.field == field


def test_comparisons_are_those_of_the_formulas() -> None:
    reference = torch.tensor([[0.0, 1.0, 2.0], [3.0, 3.0, 0.0]])
    other = torch.tensor([[0.0, 2.0, 1.0], [3.0, 3.0, 0.0]])
    found = compare_logits(reference, other, (2, 1))
    p, q = reference.double().softmax(-1), other.double().softmax(-1)
    assert torch.allclose(found.kl, (p * (p / q).log()).sum(-1))
    assert found.kl[0] > 0.1
    assert found.kl[1] == 0
    assert torch.allclose(found.reference_nll, -torch.stack([p[0, 2], p[1, 1]]).log())
    assert torch.allclose(found.nll, -torch.stack([q[0, 2], q[1, 1]]).log())
    assert found.same_top.tolist() == [False, True]
    assert found.top_is_token.tolist() == [False, False]


def test_missing_rows_are_told() -> None:
    rows = Foretold(3, 5)
    rows(1, torch.zeros(2, 4))
    with pytest.raises(RipresaError) as refused:
        _ = rows.logits
    assert refused.value.code is ErrorCode.INTERNAL
