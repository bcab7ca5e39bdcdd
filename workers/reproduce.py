"""Does a recorded answer come out again, from its recipe, on an empty cache?

One engine in this process, nothing cached, nothing kept. At the first other token the candidates'
logits are computed once more: a difference within rounding is told from a wrong one.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from ripresa.workers.cache.kv_layout import REWIND_TOKENS, KVFormat
from ripresa.workers.config import EngineConfig, Numerics, ParkConfig, WindowConfig, WindowPolicy
from ripresa.workers.decode_engine import DecodeEngine
from ripresa.workers.errors import ErrorCode, InvalidArgument, RipresaError
from ripresa.workers.host_memory import available_memory
from ripresa.workers.memory_plan import plan_memory
from ripresa.workers.model_runner import (
    DEFAULT_WORKSPACE_BYTES,
    TorchModelRunner,
    kv_layout,
    load_runner,
    model_digest,
)
from ripresa.workers.models.base import EncoderOutput, ModelRunner, StepMasks, StepOutput
from ripresa.workers.models.checkpoint import ProgressLines
from ripresa.workers.models.deepseek_v41.config import ModelConfig
from ripresa.workers.models.deepseek_v41.weights import Half
from ripresa.workers.recording import Recording
from ripresa.workers.replay import RULES_VERSION, PlanKind, ReplayMode, may_reuse
from ripresa.workers.replay_query import ReplayGeometry
from ripresa.workers.request import CacheUse, Failed, Finished, GenerationRequest, Tokens
from ripresa.workers.sampler import check_params
from ripresa.workers.scheduling.admission import check_request, check_tail
from ripresa.workers.scheduling.step_plan import StepPlan
from ripresa.workers.transfer.base import LaneConfig

MAX_ROUNDING = 0.02
"""Most that two candidates' logits differ by where rounding alone chose between them."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token that came out differently.

    Attributes:
        index: in the answer.
        recorded, computed: token ids; None for the answer's end.
        recorded_logit, computed_logit: of the two candidates, computed now; None where one of them
            is the answer's end.
    """

    index: int
    recorded: int | None
    computed: int | None
    recorded_logit: float | None = None
    computed_logit: float | None = None

    @property
    def is_rounding(self) -> bool:
        if self.recorded_logit is None or self.computed_logit is None:
            return False
        return abs(self.recorded_logit - self.computed_logit) <= MAX_ROUNDING


@dataclass(frozen=True, slots=True)
class Reproduction:
    """What came out.

    Attributes:
        output_ids: the answer, as computed now.
        num_encoder_rows: rows of the lower half that it took.
        difference: None if every token is the recorded one.
    """

    output_ids: tuple[int, ...]
    num_encoder_rows: int
    difference: Difference | None


def check_comparable(recording: Recording, folder: Path) -> None:
    """Refuse to compare what other weights or other rules have computed.

    Raises:
        RipresaError: FAILED_PRECONDITION, and what to do about it.
    """
    rules = recording.recipe.rules_version
    if rules != RULES_VERSION:
        raise RipresaError(
            ErrorCode.FAILED_PRECONDITION,
            f"the answer was computed by version {rules!r} of the replay rules, this ripresa has "
            f"{RULES_VERSION!r}; use the one that recorded it",
            field="recipe.rules_version",
        )
    digest = model_digest(folder, ModelConfig.from_file(folder / "config.json"))
    if recording.weights_digest != digest:
        raise RipresaError(
            ErrorCode.FAILED_PRECONDITION,
            f"the answer was computed with weights {recording.weights_digest}, {folder} has "
            f"{digest}; name the checkpoint that was served",
            field="weights_digest",
        )


def load_for(
    recording: Recording,
    folder: Path,
    numerics: Numerics,
    kv_format: KVFormat,
    round_inputs: bool,
    echo: Callable[[str], None],
) -> TorchModelRunner:
    """The whole model, with KV memory for this answer alone.

    Args:
        numerics, kv_format, round_inputs: as the cluster was configured; no answer tells them.

    Raises:
        RipresaError: the recording is impossible (INVALID_ARGUMENT), the checkpoint is wrong, or
            does not fit into memory.
    """
    config = ModelConfig.from_file(folder / "config.json")
    try:
        _check_possible(recording, config)
    except InvalidArgument as error:
        raise InvalidArgument(
            error.field or "",
            f"{error.message}; nobody was ever answered so: use the file as "
            "`ripresa generate --record` wrote it, or record again",
        ) from None
    length = len(recording.token_ids) + recording.sampling.max_tokens
    num_blocks = -(-length // config.sliding_window) + 1
    engine = replace(
        _engine_config(config.sliding_window, num_blocks), numerics=numerics, kv_format=kv_format
    )
    plan = plan_memory(
        config,
        Half.ALL,
        engine,
        LaneConfig(max_lanes=1),
        kv_layout(config, kv_format, "", round_inputs),
        DEFAULT_WORKSPACE_BYTES,
    )
    available = available_memory()
    if available is not None:
        plan.require_fit(available)
    return load_runner(
        folder,
        Half.ALL,
        num_blocks=num_blocks,
        num_slots=1,
        numerics=numerics,
        kv_format=kv_format,
        round_inputs=round_inputs,
        progress=ProgressLines("reading the model", echo),
    )


def _check_possible(recording: Recording, config: ModelConfig) -> None:
    """Refuse what this model can never have been asked, or said."""
    check_params(recording.sampling)
    ended = () if recording.stop_token_id is None else (recording.stop_token_id,)
    for field, token_ids in (
        ("token_ids", recording.token_ids),
        ("output_ids", recording.output_ids),
        ("stop_token_id", ended),
    ):
        for token_id in token_ids:
            if not 0 <= token_id < config.vocab_size:
                raise InvalidArgument(
                    field,
                    f"token id {token_id} is not in the vocabulary (0 to {config.vocab_size - 1})",
                )
    length = len(recording.token_ids) + recording.sampling.max_tokens
    if length > config.max_position_embeddings:
        raise InvalidArgument(
            "sampling.max_tokens",
            f"prompt and answer have {length} tokens, and the model's context "
            f"{config.max_position_embeddings}",
        )
    if recording.recipe.kind is not PlanKind.RESUME:  # that has the tail of the turn before
        check_tail(recording.recipe.tail, recording.mode, "recipe.tail")
    request = _request(recording, (), recording.sampling.max_tokens)
    split, layers = config.split, config.num_hidden_layers
    geometry = ReplayGeometry(config.sliding_window, REWIND_TOKENS, split, layers - split)
    check_request(request, geometry, config.max_position_embeddings)
    _check_mode(recording)


def _check_mode(recording: Recording) -> None:
    """Refuse a recipe that no request of the recorded mode has followed."""
    mode, recipe = recording.mode, recording.recipe
    interval = recipe.anchor_interval
    if (mode is ReplayMode.CANONICAL) is not (interval is not None):
        raise InvalidArgument(
            "recipe.anchor_interval", f"is {interval}; mode canonical has one, and no other mode"
        )
    if not may_reuse(mode, recipe.restarts, interval):
        raise InvalidArgument(
            "recipe.restarts", f"{recipe.restarts} are some, and mode {mode} has none"
        )


async def reproduce(recording: Recording, runner: ModelRunner) -> Reproduction:
    """Compute the answer again and compare.

    Args:
        runner: all layers, with nothing in its KV memory.

    Raises:
        RipresaError: the recording is impossible (INVALID_ARGUMENT), or a step failed.
    """
    expected = _with_end(recording.output_ids, recording.stop_token_id)
    tokens, finished = await _run(recording, runner, (), recording.sampling.max_tokens)
    computed = _with_end(tokens, finished.stop_token_id)
    rows = finished.counters.encoder_rows
    if computed == expected:
        return Reproduction(tokens, rows, None)
    index = next(
        (n for n, pair in enumerate(zip(expected, computed, strict=False)) if pair[0] != pair[1]),
        min(len(expected), len(computed)),
    )
    if index == min(len(expected), len(computed)):
        difference = Difference(index, _at(expected, index), _at(computed, index))
        return Reproduction(tokens, rows, difference)
    watched = _Watched(runner)
    await _run(recording, cast(ModelRunner, watched), expected[:index], index + 1)
    logits = [float(watched.logits[token]) for token in (expected[index], computed[index])]
    difference = Difference(index, expected[index], computed[index], *logits)
    return Reproduction(tokens, rows, difference)


def _with_end(tokens: Sequence[int], stop_token_id: int | None) -> tuple[int, ...]:
    """The answer and the token that ended it."""
    return (*tokens, *(() if stop_token_id is None else (stop_token_id,)))


def _at(tokens: Sequence[int], index: int) -> int | None:
    return tokens[index] if index < len(tokens) else None


def _engine_config(window: int, num_blocks: int) -> EngineConfig:
    return EngineConfig(
        max_batched_tokens=max(512, 2 * window),
        max_num_seqs=1,
        num_blocks=num_blocks,
        windows=WindowConfig(WindowPolicy.ZERO),
        parked=ParkConfig(capacity_bytes=0),
    )


class _Watched:
    """A runner whose last sampled row's logits are kept."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.logits = torch.empty(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def execute(
        self,
        plan: StepPlan,
        inbound: Mapping[int, EncoderOutput] | None = None,
        masks: StepMasks | None = None,
    ) -> StepOutput:
        steps = tuple(replace(s, return_logits=s.sampling is not None) for s in plan.sequences)
        output = self._runner.execute(StepPlan(plan.step, steps), inbound, masks)
        for rows in output.logits.values():
            self.logits = rows[-1]
        return output


def _request(recording: Recording, streamed: tuple[int, ...], max_tokens: int) -> GenerationRequest:
    """The recorded one, behind what was `streamed`."""
    return GenerationRequest(
        request_id=uuid.uuid4().hex,
        generation=0,
        token_ids=(*recording.token_ids, *streamed),
        num_prompt_tokens=len(recording.token_ids),
        recipe=recording.recipe,
        sampling=replace(recording.sampling, max_tokens=max_tokens, seed=recording.recipe.seed),
        tail=recording.recipe.tail,
        cache=CacheUse(recording.mode, reads=False, writes=False, resumes=False),
    )


async def _run(
    recording: Recording, runner: ModelRunner, streamed: tuple[int, ...], max_tokens: int
) -> tuple[tuple[int, ...], Finished]:
    """The answer behind what was `streamed`, up to `max_tokens` in all."""
    request = _request(recording, streamed, max_tokens)
    tokens: list[int] = []
    async with _engine(runner) as engine, aclosing(engine.generate(request, local=True)) as events:
        async for event in events:
            match event:
                case Tokens():
                    tokens += event.token_ids
                case Failed():
                    raise event.error
                case Finished():
                    return tuple(tokens), event
    raise RipresaError(ErrorCode.INTERNAL, "the engine's stream ended without a finish")


@asynccontextmanager
async def _engine(runner: ModelRunner) -> AsyncGenerator[DecodeEngine]:
    engine = DecodeEngine("reproduce", runner, _engine_config(runner.window, runner.num_blocks))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()
