"""Does an answer of any kind of hit come out again on an empty cache, and a wrong one not?"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hash_machine import HashMachine
from hash_requests import prompt

from ripresa.workers.cache.kv_layout import KVFormat
from ripresa.workers.config import EngineConfig, Numerics, WindowConfig, WindowPolicy
from ripresa.workers.decode_engine import DecodeEngine
from ripresa.workers.errors import ErrorCode, InvalidArgument, RipresaError
from ripresa.workers.model_runner import load_runner, model_digest
from ripresa.workers.models.base import ModelRunner
from ripresa.workers.models.deepseek_v41.config import ModelConfig
from ripresa.workers.models.deepseek_v41.weights import Half
from ripresa.workers.recording import Recording, read_recording
from ripresa.workers.replay import PlanKind, Recipe, ReplayMode, TailVariant
from ripresa.workers.reproduce import check_comparable, load_for, reproduce
from ripresa.workers.request import (
    CacheUse,
    Failed,
    Finished,
    FinishReason,
    GenerationRequest,
    PrefillDone,
    SamplingParams,
    Tokens,
)

CASE = Path(__file__).resolve().parents[1] / "data" / "golden" / "case_g_plain_replay"
FOLDER = CASE / "checkpoint"
DIGEST = model_digest(FOLDER, ModelConfig.from_file(FOLDER / "config.json"))
CONFIG = EngineConfig(
    max_batched_tokens=32,
    max_num_seqs=2,
    num_blocks=64,
    windows=WindowConfig(WindowPolicy.FULL),
    anchor_interval=32,
)
SAMPLING = SamplingParams(max_tokens=12, temperature=0.8, top_k=20, ignore_eos=True, seed=3)


@asynccontextmanager
async def served(
    runner: ModelRunner, policy: WindowPolicy = WindowPolicy.FULL
) -> AsyncIterator[DecodeEngine]:
    engine = DecodeEngine("d0", runner, replace(CONFIG, windows=WindowConfig(policy)))
    await engine.start()
    yield engine
    await engine.stop()


async def answer(
    engine: DecodeEngine,
    token_ids: tuple[int, ...],
    *,
    tail: TailVariant = TailVariant.FLOORED,
    mode: ReplayMode = ReplayMode.BOUNDED,
    sampling: SamplingParams = SAMPLING,
    session_id: str | None = None,
) -> Recording:
    """Ask, and keep what is needed to ask again."""
    request = GenerationRequest(
        request_id="r",
        generation=0,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        recipe=None,
        sampling=sampling,
        tail=tail,
        cache=CacheUse(mode),
        session_id=session_id,
    )
    recipe: Recipe | None = None
    tokens: list[int] = []
    async for event in engine.generate(request, local=True):
        assert not isinstance(event, Failed), event
        if isinstance(event, PrefillDone):
            recipe = event.recipe
        if isinstance(event, Tokens):
            tokens += event.token_ids
        if isinstance(event, Finished):
            assert recipe is not None
            return Recording(
                weights_digest=DIGEST,
                token_ids=token_ids,
                sampling=replace(sampling, max_tokens=event.num_generated_tokens),
                mode=mode,
                recipe=recipe,
                output_ids=tuple(tokens),
                reason=event.reason,
                stop_token_id=event.stop_token_id,
            )
    raise AssertionError("the stream had no end")


@cache
def load(name: str = "served") -> ModelRunner:
    """One model a name: what an engine leaves in its memory, the next one's cache does not know."""
    return load_runner(
        FOLDER,
        Half.ALL,
        num_blocks=64,
        num_slots=2,
        numerics=Numerics.DETERMINISTIC,
        poison=True,
    )


def load_empty(recording: Recording) -> ModelRunner:
    return load("reproduced")


async def recordings(kind: PlanKind, tail: TailVariant) -> list[Recording]:
    """Answers that a real model gave by this kind of hit."""
    first = prompt(1, 61)
    modes = {PlanKind.REBUILD: ReplayMode.EXACT, PlanKind.ANCHOR: ReplayMode.CANONICAL}
    mode = modes.get(kind, ReplayMode.BOUNDED)
    policy = WindowPolicy.ZERO
    session = "s" if kind is PlanKind.RESUME else None
    if kind in (PlanKind.WINDOW, PlanKind.PREVIOUS_WINDOW):
        policy = WindowPolicy.FULL
    async with served(load(), policy) as engine:
        made = [await answer(engine, first, tail=tail, mode=mode, session_id=session)]
        for number in range(3):
            longer = made[-1].token_ids + made[-1].output_ids + prompt(2 + number, 19)
            if kind is PlanKind.FROM_ZERO:
                longer = first[:10] + prompt(5 + number, 20)
            made.append(await answer(engine, longer, tail=tail, mode=mode, session_id=session))
    return [recording for recording in made if recording.recipe.kind is kind]


KINDS = [
    PlanKind.COLD,
    PlanKind.BOUNDED,
    PlanKind.FROM_ZERO,
    PlanKind.WINDOW,
    PlanKind.RESUME,
    PlanKind.REBUILD,
    PlanKind.ANCHOR,
]


@pytest.mark.parametrize(
    ("kind", "tail"),
    [
        *((kind, TailVariant.FLOORED) for kind in KINDS),
        *(
            pytest.param(kind, tail, marks=pytest.mark.slow)
            for kind in KINDS
            for tail in (TailVariant.LAYER_EXACT, TailVariant.FULL)
        ),
        (PlanKind.REBUILD, TailVariant.EXACT),
    ],
)
async def test_an_answer_of_this_kind_comes_out_again(
    kind: PlanKind, tail: TailVariant, tmp_path: Path
) -> None:
    made = await recordings(kind, tail)
    assert made, f"no answer was of kind {kind}"
    for recording in made:
        recording.write(tmp_path / "answer.json")
        read = read_recording(tmp_path / "answer.json")
        assert read == recording
        result = await reproduce(read, load_empty(read))
        assert result.difference is None
        assert result.output_ids == recording.output_ids


async def test_an_answer_that_a_stop_token_ended_comes_out_again() -> None:
    async with served(load()) as engine:
        whole = await answer(engine, prompt(1, 40))
        stop = whole.output_ids[5]
        first = whole.output_ids.index(stop)
        sampling = replace(SAMPLING, stop_token_ids=(stop,))
        recording = await answer(engine, prompt(1, 40), sampling=sampling)
    assert (recording.reason, recording.stop_token_id) == (FinishReason.STOP, stop)
    assert recording.output_ids == whole.output_ids[:first]
    assert (await reproduce(recording, load_empty(recording))).difference is None


async def test_a_model_is_loaded_for_one_answer() -> None:
    async with served(load()) as engine:
        recording = await answer(engine, prompt(1, 40))
    runner = load_for(
        recording, FOLDER, Numerics.DETERMINISTIC, KVFormat.PACKED, False, lambda line: None
    )
    assert runner.num_slots == 1
    assert (await reproduce(recording, runner)).difference is None


async def test_every_sampling_parameter_is_kept(tmp_path: Path) -> None:
    sampling = SamplingParams(
        max_tokens=8,
        temperature=1.3,
        top_p=0.9,
        min_p=0.01,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.2,
        logit_bias=((7, 2.5), (9, -1.0)),
        banned_token_ids=(3,),
        min_tokens=2,
        ignore_eos=True,
        seed=2**63,
    )
    async with served(load()) as engine:
        recording = await answer(engine, prompt(1, 40), sampling=sampling)
    recording.write(tmp_path / "answer.json")
    read = read_recording(tmp_path / "answer.json")
    assert read == recording
    assert (await reproduce(read, load_empty(read))).difference is None


async def test_a_wrong_token_is_found_with_both_candidates_logits() -> None:
    async with served(load()) as engine:
        recording = await answer(engine, prompt(1, 40))
    runner = load_empty(recording)
    for index in (0, 4, len(recording.output_ids) - 1):
        output = list(recording.output_ids)
        output[index] ^= 1
        result = await reproduce(replace(recording, output_ids=tuple(output)), runner)
        found = result.difference
        assert found is not None
        assert (found.index, found.recorded) == (index, output[index])
        assert found.computed == recording.output_ids[index]
        assert found.recorded_logit is not None
        assert found.computed_logit is not None
        gap = abs(found.recorded_logit - found.computed_logit)
        assert found.is_rounding is (gap <= 0.02)


async def test_another_recipe_gives_another_answer() -> None:
    """What makes the recipe part of the recording: without it the tokens differ."""
    (recording,) = (await recordings(PlanKind.BOUNDED, TailVariant.FLOORED))[:1]
    cold = replace(
        recording.recipe, kind=PlanKind.COLD, start=0, swa_floor=0, write_floor=0, restarts=()
    )
    result = await reproduce(replace(recording, recipe=cold), load_empty(recording))
    assert result.difference is not None


async def test_a_missing_or_a_further_token_is_a_difference() -> None:
    machine = HashMachine()
    async with served(machine) as engine:
        recording = await answer(engine, prompt(1, 40))
    shorter = replace(recording, output_ids=recording.output_ids[:-1])
    result = await reproduce(shorter, HashMachine())
    assert result.difference is not None
    assert (result.difference.index, result.difference.recorded) == (11, None)
    stopped = replace(recording, reason=FinishReason.STOP, stop_token_id=1)
    result = await reproduce(stopped, HashMachine())
    assert result.difference is not None
    assert (result.difference.recorded, result.difference.computed) == (1, None)
    assert not result.difference.is_rounding


async def test_other_weights_and_other_rules_are_refused() -> None:
    async with served(HashMachine()) as engine:
        recording = await answer(engine, prompt(1, 40))
    check_comparable(recording, FOLDER)
    with pytest.raises(RipresaError, match="name the checkpoint that was served") as refused:
        check_comparable(replace(recording, weights_digest="0" * 32), FOLDER)
    assert refused.value.code is ErrorCode.FAILED_PRECONDITION
    other = replace(recording.recipe, rules_version="0")
    with pytest.raises(RipresaError, match="version '0' of the replay rules"):
        check_comparable(replace(recording, recipe=other), FOLDER)


IMPOSSIBLE = {
    "prompt": ({"token_ids": (1, 10**9)}, "token_ids"),
    "answer": ({"output_ids": (1, 10**9)}, "output_ids"),
    "negative": ({"output_ids": (-5,)}, "output_ids"),
    "end": ({"stop_token_id": 10**9}, "stop_token_id"),
    "length": ({"sampling": replace(SAMPLING, max_tokens=10**9)}, "sampling.max_tokens"),
    "temperature": ({"sampling": replace(SAMPLING, temperature=-1.0)}, "temperature"),
}


@pytest.mark.parametrize(("changes", "field"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
async def test_what_no_model_has_said_is_refused(changes: dict[str, Any], field: str) -> None:
    async with served(HashMachine()) as engine:
        recording = replace(await answer(engine, prompt(1, 40)), token_ids=(1, 2), output_ids=(3,))
    with pytest.raises(InvalidArgument) as refused:
        load_for(
            replace(recording, **changes),
            FOLDER,
            Numerics.DETERMINISTIC,
            KVFormat.PACKED,
            round_inputs=False,
            echo=lambda line: None,
        )
    assert refused.value.field == field


CONTRADICTORY: dict[str, tuple[dict[str, Any], str]] = {
    "rows above the write floor": ({"start": 24}, "recipe.start"),
    "write floor behind the prompt": ({"write_floor": 48}, "recipe.write_floor"),
    "restart behind the prompt": ({"restarts": (48,)}, "recipe.restarts"),
    "replay without its restart": ({"restarts": ()}, "recipe.restarts"),
    "rows of two kinds": ({"kind": PlanKind.WINDOW, "restarts": ()}, "recipe.swa_floor"),
    "decoder rows behind the prompt": ({"decoder_start": 40}, "recipe.decoder_start"),
    "rows that no tail reads": ({"source_floor": 32}, "recipe.source_floor"),
    "a tail of another mode": ({"tail": TailVariant.EXACT, "decoder_start": 0}, "recipe.tail"),
    "anchors of another mode": (
        {
            "kind": PlanKind.WINDOW,
            "start": 16,
            "swa_floor": 9,
            "anchor_interval": 24,
            "restarts": (24,),
        },
        "recipe.anchor_interval",
    ),
}


FOLLOWED = Recording(
    weights_digest=DIGEST,
    token_ids=prompt(1, 40),
    sampling=SAMPLING,
    mode=ReplayMode.BOUNDED,
    recipe=Recipe(PlanKind.BOUNDED, 8, 8, 16, (16,), 32, TailVariant.FLOORED, 3),
    output_ids=(3,),
    reason=FinishReason.LENGTH,
)


def loaded(recording: Recording, told: list[str]) -> ModelRunner:
    return load_for(recording, FOLDER, Numerics.DETERMINISTIC, KVFormat.PACKED, False, told.append)


@pytest.mark.parametrize(("changes", "field"), CONTRADICTORY.values(), ids=CONTRADICTORY)
def test_a_recipe_that_contradicts_itself_is_refused_before_the_model_is_read(
    changes: dict[str, Any], field: str
) -> None:
    told: list[str] = []
    with pytest.raises(InvalidArgument, match="--record") as refused:
        loaded(replace(FOLLOWED, recipe=replace(FOLLOWED.recipe, **changes)), told)
    assert refused.value.field == field
    assert told == []


async def test_a_resumed_turn_has_the_tail_of_another_mode_that_came_before() -> None:
    async with served(load()) as engine:
        first = await answer(
            engine, prompt(1, 61), tail=TailVariant.EXACT, mode=ReplayMode.EXACT, session_id="s"
        )
        longer = first.token_ids + first.output_ids + prompt(2, 3)
        resumed = await answer(engine, longer, session_id="s")
    assert (resumed.recipe.kind, resumed.recipe.tail) == (PlanKind.RESUME, TailVariant.EXACT)
    result = await reproduce(resumed, loaded(replace(resumed, weights_digest=DIGEST), []))
    assert result.difference is None


async def test_the_recipe_without_the_contradiction_is_followed() -> None:
    assert len((await reproduce(FOLLOWED, loaded(FOLLOWED, []))).output_ids) == 12


# -- the file -----------------------------------------------------------------------------------


@pytest.fixture
async def file(tmp_path: Path) -> Path:
    async with served(HashMachine()) as engine:
        recording = await answer(engine, prompt(1, 40))
    path = tmp_path / "answer.json"
    recording.write(path)
    return path


BROKEN = {
    "not JSON": ("", lambda d: None, "no recording"),
    "a list": ("", lambda d: [], "no recording"),
    "another file": ("", lambda d: {"format": "x"}, "generate --record"),
    "another version": ("", lambda d: d | {"version": 1}, "version 1"),
    "a missing part": ("recipe", lambda d: {k: v for k, v in d.items() if k != "recipe"}, "miss"),
    "an unknown part": ("more", lambda d: d | {"more": 1}, "is unknown"),
    "text for tokens": ("token_ids", lambda d: d | {"token_ids": "1, 2"}, "a list"),
    "text for a token": ("token_ids[1]", lambda d: d | {"token_ids": [1, "2"]}, "must be int"),
    "a truth for a token": ("token_ids[0]", lambda d: d | {"token_ids": [True]}, "must be int"),
    "no kind": (
        "recipe.kind",
        lambda d: d | {"recipe": d["recipe"] | {"kind": "warm"}},
        "no known",
    ),
    "a recipe of text": ("recipe", lambda d: d | {"recipe": "cold"}, "an object"),
    "no seed": (
        "sampling.seed",
        lambda d: d | {"sampling": {k: v for k, v in d["sampling"].items() if k != "seed"}},
        "missing",
    ),
}


@pytest.mark.parametrize(("field", "change", "words"), BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_refused(file: Path, field: str, change, words: str) -> None:  # type: ignore[no-untyped-def]
    changed = change(json.loads(file.read_text()))
    file.write_text("{" if changed is None else json.dumps(changed))
    with pytest.raises(InvalidArgument, match=words) as refused:
        read_recording(file)
    assert refused.value.field == (field or str(file))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="cannot be read"):
        read_recording(tmp_path / "nothing")
    with pytest.raises(InvalidArgument, match="cannot be read"):
        read_recording(tmp_path)


async def test_an_impossible_recording_is_refused(file: Path) -> None:
    recording = read_recording(file)
    recipe = replace(recording.recipe, start=8, write_floor=8)
    with pytest.raises(InvalidArgument):
        await reproduce(replace(recording, recipe=recipe), HashMachine())
    with pytest.raises(InvalidArgument):
        await reproduce(replace(recording, token_ids=(2**33,)), HashMachine())
