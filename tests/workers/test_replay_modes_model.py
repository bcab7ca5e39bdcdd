"""Do modes exact and canonical, and tail exact, compute on the real model what they promise?

Numerics are deterministic, so equal means bit for bit.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from observed_model import CASE, CONFIG, WINDOW, Observed, ask, run, run_split, split_engines
from safetensors.torch import load_file

from ripresa.workers.cache.kv_layout import KVFormat
from ripresa.workers.config import ParkConfig, WindowConfig, WindowPolicy
from ripresa.workers.decode_engine import DecodeEngine
from ripresa.workers.encoder_engine import EncoderEngine
from ripresa.workers.models.deepseek_v41.config import ModelConfig
from ripresa.workers.models.deepseek_v41.weights import Half
from ripresa.workers.models.tiny_checkpoint import WeightFormat, write_tiny_checkpoint
from ripresa.workers.replay import PlanKind, Recipe, ReplayMode, TailVariant
from ripresa.workers.replay_plan import EncoderPass
from ripresa.workers.request import CacheUse, Failed, GenerationRequest, Reserved, Tokens
from ripresa.workers.verify_golden import paired_ids

INTERVAL = 3 * WINDOW
LENGTH, NUM_NEW = 90, 8


@pytest.fixture(scope="module")
def tokens() -> tuple[int, ...]:
    golden = load_file(CASE / "golden.safetensors")
    return tuple((golden["token_ids"].tolist() * 3)[:LENGTH])


def answer(logits: Mapping[int, torch.Tensor], length: int = LENGTH) -> torch.Tensor:
    """Logits from the prompt's last row on."""
    return torch.stack([row for position, row in sorted(logits.items()) if position >= length - 1])


async def cold(
    tokens: tuple[int, ...], mode: ReplayMode, tail: TailVariant, max_tokens: int = NUM_NEW
) -> torch.Tensor:
    """The answer's logits by a worker that holds nothing."""
    model = Observed()
    engine = DecodeEngine("d0", model.runner, replace(CONFIG, anchor_interval=INTERVAL))
    await engine.start()
    with model.watched() as logits:
        await run(engine, ask(tokens, mode=mode, tail=tail, max_tokens=max_tokens))
    await engine.stop()
    return answer(logits)


@pytest.mark.parametrize("cached", range(0, LENGTH, WINDOW))
async def test_tail_exact_equals_the_untrimmed_model(tokens: tuple[int, ...], cached: int) -> None:
    expected = await cold(tokens, ReplayMode.BOUNDED, TailVariant.FULL)
    async with split_engines() as (encoder, decoder, model):
        for is_split in (True, False):
            if cached:
                warm = ask(tokens[:cached], mode=ReplayMode.EXACT)
                await run_split(encoder, decoder, warm)
            request = ask(tokens, mode=ReplayMode.EXACT, tail=TailVariant.EXACT, max_tokens=NUM_NEW)
            request = replace(request, cache=CacheUse(ReplayMode.EXACT, writes=False))
            with model.watched() as logits:
                if is_split:
                    recipe = await run_split(encoder, decoder, request)
                else:
                    recipe = await run(decoder, request)
            assert recipe.decoder_start == LENGTH - 1 - (WINDOW - 1) * 4
            assert recipe.write_floor == min(cached, 72)
            assert torch.equal(answer(logits), expected)


@pytest.mark.parametrize(
    ("policy", "tail"),
    [
        (WindowPolicy.FULL, TailVariant.FLOORED),
        pytest.param(WindowPolicy.ZERO, TailVariant.FLOORED, marks=pytest.mark.slow),
        pytest.param(WindowPolicy.ZERO, TailVariant.LAYER_EXACT, marks=pytest.mark.slow),
        pytest.param(WindowPolicy.FULL, TailVariant.LAYER_EXACT, marks=pytest.mark.slow),
    ],
)
async def test_canonical_answers_do_not_depend_on_what_is_cached(
    tokens: tuple[int, ...], policy: WindowPolicy, tail: TailVariant
) -> None:
    """Each possible prefix, with and without windows, with and without an encoder worker."""
    expected = await cold(tokens, ReplayMode.CANONICAL, tail)
    config = replace(CONFIG, anchor_interval=INTERVAL, windows=WindowConfig(policy))
    async with split_engines(config) as (encoder, decoder, model):
        for cached in range(0, LENGTH, WINDOW):
            if cached:
                await run_split(encoder, decoder, ask(tokens[:cached], mode=ReplayMode.CANONICAL))
            request = replace(
                ask(tokens, tail=tail, max_tokens=NUM_NEW),
                cache=CacheUse(ReplayMode.CANONICAL, writes=False),
            )
            for is_split in (True, False):
                with model.watched() as logits:
                    if is_split:
                        recipe = await run_split(encoder, decoder, request)
                    else:
                        recipe = await run(decoder, request)
                assert recipe.write_floor == min(cached, 72)
                assert torch.equal(answer(logits), expected)


async def test_canonical_differs_from_exact_behind_its_first_anchor(
    tokens: tuple[int, ...],
) -> None:
    """Otherwise the tests above would compare nothing."""
    canonical = await cold(tokens, ReplayMode.CANONICAL, TailVariant.FLOORED)
    exact = await cold(tokens, ReplayMode.EXACT, TailVariant.FLOORED)
    assert not torch.allclose(canonical, exact)


async def test_an_answer_that_crosses_anchors_is_a_prompt_with_them(
    tokens: tuple[int, ...],
) -> None:
    """Decode restarts as prefill does: the next turn finds canonical blocks of the answer."""
    config = replace(CONFIG, anchor_interval=INTERVAL)
    model = Observed()
    engine = DecodeEngine("d0", model.runner, config)
    await engine.start()
    first = ask(tokens[:40], mode=ReplayMode.CANONICAL, max_tokens=40)
    said = [event async for event in engine.generate(first, local=True)]
    grown = tokens[:40] + tuple(
        token for event in said for token in getattr(event, "token_ids", ())
    )
    request = ask(grown + tokens[:13], mode=ReplayMode.CANONICAL, max_tokens=NUM_NEW)
    with model.watched() as logits:
        recipe = await run(engine, request)
    await engine.stop()
    assert recipe.write_floor == 72
    expected = await cold(request.token_ids, ReplayMode.CANONICAL, TailVariant.FLOORED)
    assert torch.equal(answer(logits, request.num_tokens), expected[-NUM_NEW:])


@pytest.fixture(scope="module")
def released_window(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with the release's window of 128."""
    folder = tmp_path_factory.mktemp("window")
    config = json.loads((CASE / "checkpoint" / "config.json").read_text())
    config.get("text_config", config)["sliding_window"] = 128
    write_tiny_checkpoint(folder, config, WeightFormat.F32, seed=3, shards=1)
    return folder


@pytest.mark.slow
async def test_an_exact_hit_equals_a_cold_run_at_every_boundary_of_a_long_prompt(
    released_window: Path,
) -> None:
    generator = torch.Generator().manual_seed(1)
    prompt = tuple(torch.randint(3, 192, (3000,), generator=generator).tolist())
    model = Observed(checkpoint=released_window)
    config = replace(CONFIG, max_batched_tokens=1024)
    engine = DecodeEngine("d0", model.runner, config)
    await engine.start()
    expected: torch.Tensor | None = None
    cap = (3000 - 128 - 6) // 128 * 128
    for cached in range(0, cap + 1, 128):
        if cached:
            await run(engine, ask(prompt[:cached], mode=ReplayMode.EXACT))
        request = replace(ask(prompt, max_tokens=3), cache=CacheUse(ReplayMode.EXACT, writes=False))
        with model.watched() as logits:
            recipe = await run(engine, request)
        assert recipe.write_floor == cached
        if expected is None:
            expected = answer(logits, 3000)
        assert torch.equal(answer(logits, 3000), expected)
    await engine.stop()


def with_engram(shared: Path) -> Callable[[Half], Observed]:
    """Packed KV and n-gram memories: what the release has."""
    checkpoint = shared / "golden" / "case_b_grids_engram_replay" / "checkpoint"
    ids = paired_ids(ModelConfig.from_file(checkpoint / "config.json").vocab_size)
    return lambda half: Observed(half, checkpoint, kv_format=KVFormat.PACKED, compressed_ids=ids)


@pytest.mark.parametrize("where", ["local", "split"])
@pytest.mark.parametrize(
    ("mode", "tail", "lowest", "budget"),
    [
        (ReplayMode.EXACT, TailVariant.FLOORED, 72, 3),
        (ReplayMode.EXACT, TailVariant.LAYER_EXACT, 71, 8),
        (ReplayMode.EXACT, TailVariant.EXACT, 85 - 7 * 4, 2),
        (ReplayMode.CANONICAL, TailVariant.FLOORED, 71, 2),
        (ReplayMode.CANONICAL, TailVariant.LAYER_EXACT, 71, 16),
    ],
)
async def test_rows_that_layers_leave_out_change_no_number(
    shared: Path,
    tokens: tuple[int, ...],
    mode: ReplayMode,
    tail: TailVariant,
    lowest: int,
    budget: int,
    where: str,
) -> None:
    """In chunks, beside another prompt that computes all its rows; and as few as planned."""
    prompt, num_new = tokens[:86], 4
    config = replace(CONFIG, max_batched_tokens=budget * WINDOW, anchor_interval=6 * WINDOW)
    request = replace(
        ask(prompt, tail=tail, max_tokens=num_new), cache=CacheUse(mode, writes=False)
    )
    beside = replace(ask(tokens[3:50]), request_id="beside", cache=CacheUse(reads=False))
    answers = []
    async with split_engines(config, with_engram(shared)) as (encoder, decoder, model):
        computing = decoder if where == "local" else encoder

        async def execute(request: GenerationRequest) -> Recipe:
            if where == "local":
                return await run(decoder, request)
            return await run_split(encoder, decoder, request)

        for number in range(3):
            before = computing.stats().num_row_layers
            with model.watched() as logits:
                mates = (execute(beside),) if number == 2 else ()
                recipe, *_ = await asyncio.gather(execute(request), *mates)
            answers.append(answer(logits, len(prompt)))
            if number == 0:
                await execute(ask(prompt[:72], mode=mode))
                continue
            assert recipe.write_floor == 72
            layers = model.runner.geometry.num_encoder_layers
            rows = EncoderPass(recipe.start, len(prompt), 0, 72, exact_from=lowest)
            planned = rows.num_row_layers(0, WINDOW, layers)
            assert planned < layers * (len(prompt) - recipe.start)
            answered_here = layers * (num_new - 1) if where == "local" else 0
            if not mates:
                assert computing.stats().num_row_layers - before == planned + answered_here
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[0], answers[2])


@pytest.mark.parametrize("parked_bytes", [0, 1 << 24])
async def test_a_stream_that_was_parked_equals_an_undisturbed_one(
    tokens: tuple[int, ...], parked_bytes: int
) -> None:
    """From its kept state, or by its recipe once more."""
    requests = [
        replace(ask(tokens[n : n + 30], max_tokens=40), request_id=f"r{n}") for n in range(3)
    ]
    model = Observed(num_blocks=16)
    config = replace(
        CONFIG,
        num_blocks=16,
        reserved_output_tokens=1,
        parked=ParkConfig(capacity_bytes=parked_bytes),
    )
    said: list[list[tuple[int, ...]]] = []
    for is_crowded in (False, True):
        engine = DecodeEngine("d0", model.runner, config)
        await engine.start()

        async def stream(
            request: GenerationRequest, engine: DecodeEngine = engine
        ) -> tuple[int, ...]:
            events = [event async for event in engine.generate(request, local=True)]
            return tuple(t for e in events if isinstance(e, Tokens) for t in e.token_ids)

        if is_crowded:
            said.append(list(await asyncio.gather(*(stream(request) for request in requests))))
            assert engine.stats().num_preemptions > 0
        else:
            said.append([await stream(request) for request in requests])
        engine.check_integrity()
        await engine.stop()
    assert said[0] == said[1]
    assert all(len(answer) == 40 for answer in said[0])


@pytest.mark.parametrize("streamed", [0, 3])
@pytest.mark.parametrize("kind", ["bounded", "window", "resume", "canonical", "tail exact"])
async def test_a_stream_goes_on_elsewhere_after_its_worker_died(
    tokens: tuple[int, ...], kind: str, streamed: int
) -> None:
    """On a worker that holds nothing, and by way of an encoder worker that holds nothing."""
    modes = {"canonical": ReplayMode.CANONICAL, "tail exact": ReplayMode.EXACT}
    mode = modes.get(kind, ReplayMode.BOUNDED)
    tail = TailVariant.EXACT if kind == "tail exact" else TailVariant.FLOORED
    policy = WindowPolicy.FULL if kind == "window" else WindowPolicy.ZERO
    config = replace(CONFIG, anchor_interval=INTERVAL, windows=WindowConfig(policy))
    model = Observed()
    engine = DecodeEngine("d0", model.runner, config)
    await engine.start()
    prompt = tokens[:60]
    session = "s" if kind == "resume" else None
    warm = replace(ask(tokens[:40], mode=mode, tail=tail, max_tokens=4), session_id=session)
    said = await answered(engine, warm)
    if kind == "resume":
        prompt = tokens[:40] + said + tokens[50:70]
    request = replace(ask(prompt, mode=mode, tail=tail, max_tokens=12), session_id=session)
    said = await answered(engine, request)
    recipe = await run(engine, replace(request, session_id=None, cache=CacheUse(mode)))
    if kind == "resume":
        # The recipe of the turn itself.
        await engine.stop()
        engine = DecodeEngine("d0", model.runner, config)
        await engine.start()
        await answered(engine, warm)
        recipe = await run(engine, request)
    await engine.stop()
    kinds = {"bounded": PlanKind.BOUNDED, "window": PlanKind.WINDOW, "resume": PlanKind.RESUME}
    assert recipe.kind is kinds.get(kind, recipe.kind)
    again = replace(
        request, recipe=recipe, generation=1, token_ids=prompt + said[:streamed], session_id=None
    )
    async with split_engines(config) as (encoder, decoder, _):
        assert await answered(decoder, again) == said[streamed:]
        decoder._core._prefixes.blocks.withdraw(lambda record: True)
        assert await answered(decoder, again, encoder) == said[streamed:]


async def answered(
    engine: DecodeEngine, request: GenerationRequest, encoder: EncoderEngine | None = None
) -> tuple[int, ...]:
    """The tokens of a stream."""
    said: list[int] = []
    async for event in engine.generate(request, local=encoder is None):
        assert not isinstance(event, Failed), event
        if isinstance(event, Reserved) and encoder is not None:
            await encoder.prefill(request, "d0")
        if isinstance(event, Tokens):
            said += event.token_ids
    return tuple(said)
