"""How does one arm compute a case on the real engine, behind a real hit?

One decode worker in this process with an empty cache, no windows and no parked states: `fill` puts
prefixes in, `plan` runs a prompt as a client's, `foretell` runs it again by its recipe together
with the answer, as a takeover does. Such an execution has the numbers of one that decodes the
answer token by token, and needs one step in place of hundreds.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from ripresa.cluster.evaluation.arms import Arm
from ripresa.cluster.evaluation.selections import Selected, Selections
from ripresa.workers.cache.kv_layout import REWIND_TOKENS
from ripresa.workers.config import (
    EngineConfig,
    LeaseConfig,
    Numerics,
    ParkConfig,
    WindowConfig,
    WindowPolicy,
)
from ripresa.workers.decode_engine import DecodeEngine
from ripresa.workers.errors import ErrorCode, RipresaError
from ripresa.workers.host_memory import available_memory
from ripresa.workers.memory_plan import plan_memory
from ripresa.workers.model_runner import DEFAULT_WORKSPACE_BYTES, kv_layout, load_runner
from ripresa.workers.models.checkpoint import ProgressLines
from ripresa.workers.models.deepseek_v41.config import ModelConfig
from ripresa.workers.models.deepseek_v41.engram_ids import Ids
from ripresa.workers.models.deepseek_v41.weights import Half
from ripresa.workers.replay import Recipe, ReplayMode, TailVariant
from ripresa.workers.replay_query import ReplayGeometry
from ripresa.workers.request import CacheUse, GenerationRequest, SamplingParams
from ripresa.workers.scoring import Foretold, Scored, score, with_given
from ripresa.workers.transfer.base import LaneConfig

ANCHOR_WINDOWS = 4
"""Mode canonical restarts so often, in windows: conversations are shorter than its default."""
_KEPT_SEQUENCES = 6
"""Whole sequences that the KV pool holds: what is filled in, in two modes, and what runs."""


@dataclass(frozen=True, slots=True)
class FirstExecution:
    """A prompt as a client's request computes it.

    Attributes:
        recipe: what was planned, or followed.
        encoder_row_layers, decoder_row_layers: rows that the prompt took, once for each layer.
        seconds: until the answer's first token.
    """

    recipe: Recipe
    encoder_row_layers: int
    decoder_row_layers: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Foretelling:
    """What an execution says of tokens [start, start + n).

    Attributes:
        logits: [n, vocab] float32.
        selected: entries that the rows which foretell them have chosen.
    """

    start: int
    logits: torch.Tensor
    selected: Selected

    def cut(self, start: int, stop: int) -> Foretelling:
        """Of tokens [start, stop) alone."""
        part = slice(start - self.start, stop - self.start)
        selected = {layer: entries[part] for layer, entries in self.selected.items()}
        return Foretelling(start, self.logits[part], selected)


class Laboratory:
    """One engine, and what is asked of it one after the other. Use `laboratory`."""

    def __init__(
        self, engine: DecodeEngine, geometry: ReplayGeometry, max_tokens: int, seen: Selections
    ) -> None:
        self.geometry = geometry
        self.max_tokens = max_tokens
        self._engine = engine
        self._seen = seen

    @property
    def anchor_interval(self) -> int:
        """A of mode canonical, in tokens."""
        return ANCHOR_WINDOWS * self.geometry.window

    async def fill(
        self, token_ids: Sequence[int], num_blocks: int, mode: ReplayMode, salt: bytes = b""
    ) -> None:
        """Compute and keep the first blocks of a sequence, in exact or canonical lineage.

        Args:
            salt: what was filled under another one is not found.
        """
        prompt = token_ids[: num_blocks * self.geometry.window]
        cache = CacheUse(mode, resumes=False)
        await self._score(prompt, (token_ids[len(prompt)],), cache, TailVariant.FLOORED, salt=salt)

    async def step(self, prompt: Sequence[int], following: int, salt: bytes) -> Recipe:
        """A turn in mode bounded that leaves its blocks to the next one."""
        cache = CacheUse(ReplayMode.BOUNDED, resumes=False)
        scored = await self._score(prompt, (following,), cache, TailVariant.FLOORED, salt=salt)
        return scored.recipe

    async def plan(
        self,
        prompt: Sequence[int],
        following: int,
        arm: Arm,
        recipe: Recipe | None = None,
        salt: bytes = b"",
    ) -> FirstExecution:
        """Run a prompt up to the first token of its answer, and leave nothing behind.

        Args:
            following: the answer's first token.
            recipe: to be followed; None lets the worker plan.
        """
        before = self._engine.stats()
        began = time.perf_counter()
        scored = await self._score(prompt, (following,), _reads(arm), arm.tail, recipe, salt)
        seconds = time.perf_counter() - began
        after = self._engine.stats()
        num_decoder_rows = after.num_decoder_rows - before.num_decoder_rows
        return FirstExecution(
            recipe=scored.recipe,
            encoder_row_layers=after.num_row_layers - before.num_row_layers,
            decoder_row_layers=num_decoder_rows * self.geometry.num_decoder_layers,
            seconds=seconds,
        )

    async def foretell(
        self,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
        arm: Arm,
        recipe: Recipe,
        salt: bytes = b"",
        start: int | None = None,
    ) -> Foretelling:
        """What a recipe's execution says of the tokens behind a prompt.

        Args:
            start: the first of them that is foretold, if it lies in the prompt.
        """
        answer = token_ids[num_prompt_tokens:]
        first = num_prompt_tokens if start is None else start
        heard = Foretold(first, len(token_ids))
        self._seen.forget()
        scored = await self._score(
            token_ids[:num_prompt_tokens], answer, _reads(arm), arm.tail, recipe, salt, heard
        )
        _check_rows(scored, len(token_ids) - 1)
        return Foretelling(first, heard.logits, self._seen.of(first - 1, len(token_ids) - 1))

    async def cold(self, token_ids: Sequence[int], start: int) -> Foretelling:
        """What the whole model says of tokens [start, end) without any cache: every row computed,
        and every window whole."""
        heard = Foretold(start, len(token_ids))
        self._seen.forget()
        cache = CacheUse(ReplayMode.EXACT, reads=False, writes=False, resumes=False)
        await self._score(token_ids[:-1], token_ids[-1:], cache, TailVariant.FULL, on_logits=heard)
        return Foretelling(start, heard.logits, self._seen.of(start - 1, len(token_ids) - 1))

    async def decode(
        self, token_ids: Sequence[int], num_prompt_tokens: int, arm: Arm
    ) -> Foretelling:
        """The same as `foretell`, an answer's token a step, as streams are computed."""
        prompt, answer = token_ids[:num_prompt_tokens], token_ids[num_prompt_tokens:]
        heard = Foretold(num_prompt_tokens, len(token_ids))
        self._seen.forget()
        request = self._request(prompt, _reads(arm), arm.tail, None, b"")
        await score(self._engine, with_given(request, answer), heard)
        selected = self._seen.of(num_prompt_tokens - 1, len(token_ids) - 1)
        return Foretelling(num_prompt_tokens, heard.logits, selected)

    async def _score(
        self,
        prompt: Sequence[int],
        answer: Sequence[int],
        cache: CacheUse,
        tail: TailVariant,
        recipe: Recipe | None = None,
        salt: bytes = b"",
        on_logits: Foretold | None = None,
    ) -> Scored:
        """All given tokens but the last one come with the request, as streamed before."""
        request = self._request((*prompt, *answer[:-1]), cache, tail, recipe, salt, len(prompt))
        return await score(self._engine, with_given(request, answer), on_logits)

    def _request(
        self,
        token_ids: Sequence[int],
        cache: CacheUse,
        tail: TailVariant,
        recipe: Recipe | None,
        salt: bytes,
        num_prompt_tokens: int | None = None,
    ) -> GenerationRequest:
        return GenerationRequest(
            request_id=uuid.uuid4().hex,
            generation=0,
            token_ids=tuple(token_ids),
            num_prompt_tokens=num_prompt_tokens or len(token_ids),
            recipe=recipe,
            sampling=SamplingParams(max_tokens=1, temperature=0.0),
            tail=tail,
            cache=cache,
            tenant_salt=salt,
        )


@asynccontextmanager
async def laboratory(
    folder: Path,
    longest: Callable[[ReplayGeometry], int],
    numerics: Numerics,
    echo: Callable[[str], None],
    compressed_ids: Ids | None = None,
) -> AsyncGenerator[Laboratory]:
    """A checkpoint's engine, started.

    Args:
        longest: tokens of the longest sequence that is wanted, of a model with such a geometry.
        compressed_ids: of a model with Engram whose folder has no tokenizer.

    Raises:
        ConfigError, CheckpointError: the folder is no readable checkpoint.
    """
    model = ModelConfig.from_file(folder / "config.json")
    window, num_layers = model.sliding_window, model.num_hidden_layers
    geometry = ReplayGeometry(window, REWIND_TOKENS, model.split, num_layers - model.split)
    max_tokens = min(longest(geometry), model.max_position_embeddings - 1)
    num_blocks = _KEPT_SEQUENCES * -(-max_tokens // window)
    config = EngineConfig(
        max_batched_tokens=max(512, 4 * window),
        max_num_seqs=1,
        num_blocks=num_blocks,
        anchor_interval=ANCHOR_WINDOWS * window,
        reserved_output_tokens=max_tokens,
        numerics=numerics,
        windows=WindowConfig(WindowPolicy.ZERO),
        parked=ParkConfig(capacity_bytes=0),
        leases=LeaseConfig(max_share=0),
    )
    plan = plan_memory(
        model,
        Half.ALL,
        config,
        LaneConfig(max_lanes=1),
        kv_layout(model, config.kv_format, ""),
        DEFAULT_WORKSPACE_BYTES,
    )
    available = available_memory()
    if available is not None:
        plan.require_fit(available)
    seen = Selections()
    runner = load_runner(
        folder,
        Half.ALL,
        num_blocks=num_blocks,
        num_slots=1,
        numerics=numerics,
        compressed_ids=compressed_ids,
        observer=seen,
        progress=ProgressLines("reading the model", echo),
    )
    engine = DecodeEngine("evaluation", runner, config)
    await engine.start()
    try:
        yield Laboratory(engine, geometry, max_tokens, seen)
        engine.check_integrity()
    finally:
        await engine.stop()


def _reads(arm: Arm) -> CacheUse:
    return CacheUse(arm.mode, writes=False, resumes=False)


def _check_rows(scored: Scored, num_tokens: int) -> None:
    """Refuse numbers of an execution whose hit was evicted meanwhile.

    It would have computed the same values, but not those that the recipe is about.
    """
    recipe, rows = scored.recipe, scored.counters
    if recipe.anchor_interval is None and rows.encoder_rows > num_tokens - recipe.start:
        raise RipresaError(
            ErrorCode.INTERNAL,
            f"{rows.encoder_rows} encoder rows were computed and {num_tokens - recipe.start} "
            "planned: cached blocks are gone",
        )
