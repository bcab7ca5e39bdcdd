"""What does bounded replay cost the answers that are served? They are scored again, in spare time.

    served     ── distributions of sampled tokens ──┐
    exact      the same tokens, no restart at all   ├── KL, likeliest token ──▶ report ──▶ metrics
    repeat     the same tokens, the served recipe ──┘

What differs between served and repeat is no effect of replay: batch mates, other workers' blocks,
other devices. It is the floor below which the exact arm says nothing; what lies above it by much is
a fault.

Both arms are computed from the token ids alone, by an engine of its own on the same weights: with
its own KV memory, an empty cache, no directory, session, lease, disk or peer. So they take nothing
from what is served, leave nothing behind, and do not repeat what a damaged cache says. That engine
shares the step thread of the one that serves, and begins a step only while that one has no request;
a request that comes meanwhile waits for that step, of 2W rows, to end.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from ripresa.workers.config import (
    EngineConfig,
    LeaseConfig,
    MoveConfig,
    ParkConfig,
    WindowConfig,
    WindowPolicy,
)
from ripresa.workers.decode_engine import DecodeEngine
from ripresa.workers.errors import ErrorCode, RipresaError
from ripresa.workers.model_runner import TorchModelRunner
from ripresa.workers.models.base import ModelRunner
from ripresa.workers.replay import PlanKind, Recipe, ReplayMode
from ripresa.workers.replay_planner import plan_prefill
from ripresa.workers.replay_query import PrefillQuery, ReplayGeometry
from ripresa.workers.request import CacheUse, GenerationRequest, SamplingParams
from ripresa.workers.scoring import Foretold, compare_logits, score
from ripresa.workers.shadow_counters import (
    Divergence,
    ShadowCounters,
    ShadowOutcome,
    ShadowReference,
)
from ripresa.workers.shadow_samples import SEGMENT_TOKENS, ServedSample, ServedSamples

logger = logging.getLogger(__name__)


def exact_recipe(recipe: Recipe, num_prompt_tokens: int, geometry: ReplayGeometry) -> Recipe:
    """The same execution without any restart: mode exact, with the same decoder rows."""
    if recipe.kind is PlanKind.RESUME:
        # Its decoder rows may begin in an earlier turn, where no plan of its own would begin.
        return replace(recipe, swa_floor=0, restarts=())
    query = PrefillQuery(
        geometry,
        num_prompt_tokens,
        mode=ReplayMode.EXACT,
        tail=recipe.tail,
        seed=recipe.seed,
    )
    return plan_prefill(query).recipe


class ReplayShadow:
    """Scores the sampled answers of an engine again, one after the other.

    Args:
        served: the engine whose spare time it takes.
        samples: what that engine keeps of its answers.
        runner: the same model with KV memory of its own, of `ShadowConfig.num_blocks`.
        config: the served engine's settings.
        clock: seconds since the epoch, as the served engine's.
    """

    def __init__(
        self,
        served: DecodeEngine,
        samples: ServedSamples,
        runner: ModelRunner,
        config: EngineConfig,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._samples = samples
        self._geometry = runner.geometry
        self._engine = DecodeEngine(
            "shadow",
            runner,
            _shadow_engine(config, runner),
            clock,
            spare=served.lend(lambda: self._engine.wake()),
        )
        self._divergences = {reference: Divergence() for reference in ShadowReference}
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to score. Raises RipresaError (FAILED_PRECONDITION) the second time."""
        await self._engine.start()
        self._task = asyncio.create_task(self._run(), name="replay-shadow")

    async def stop(self) -> None:
        """End what is under way and drop what waits; before the served engine stops."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._engine.stop()
        self._samples.close()

    @property
    def counters(self) -> ShadowCounters:
        stats = self._engine.stats()
        return ShadowCounters(
            outcomes=tuple((str(k), n) for k, n in self._samples.outcomes.items()),
            divergences=tuple((str(k), d) for k, d in self._divergences.items()),
            num_rows=stats.num_encoder_rows + stats.num_decoder_rows,
        )

    def check_integrity(self) -> None:
        """Raise RipresaError (INTERNAL) unless its engine's pools and queues agree."""
        self._engine.check_integrity()

    async def _run(self) -> None:
        while True:
            sample = await self._samples.next()
            outcome = ShadowOutcome.STOPPED
            try:
                outcome = await self._score(sample)
            finally:
                self._samples.done(outcome)

    async def _score(self, sample: ServedSample) -> ShadowOutcome:
        num_prompt_tokens = sample.num_prompt_tokens
        recipes = {
            ShadowReference.EXACT: exact_recipe(sample.recipe, num_prompt_tokens, self._geometry),
            ShadowReference.REPEAT: sample.recipe,
        }
        try:
            found = {which: await self._distance(sample, r) for which, r in recipes.items()}
        except RipresaError as error:
            if error.code is ErrorCode.DEADLINE_EXCEEDED:
                return ShadowOutcome.BUSY
            logger.warning("a served answer cannot be scored again: %s", error)
            return ShadowOutcome.FAILED
        except Exception:
            logger.exception("a served answer cannot be scored again")
            return ShadowOutcome.FAILED
        for which, divergence in found.items():
            self._divergences[which] += divergence
        return ShadowOutcome.SCORED

    async def _distance(self, sample: ServedSample, recipe: Recipe) -> Divergence:
        """How far the served distributions are from those of an execution by `recipe`."""
        positions = sorted(sample.rows)
        foretold = Foretold(positions[0], positions[-1] + 1, sample.rows.keys())
        await score(self._engine, _request(sample, recipe), foretold)
        served = torch.stack([sample.rows[position] for position in positions])
        token_ids = [sample.token_ids[position] for position in positions]
        return await asyncio.to_thread(_divergence, foretold.logits, served, token_ids)


def open_replay_shadow(
    served: DecodeEngine, samples: ServedSamples, runner: TorchModelRunner, config: EngineConfig
) -> ReplayShadow | None:
    """What scores a worker's answers again, with memory of its own; None if nothing is to be."""
    num_blocks = config.shadow.num_blocks(runner.window, runner.max_model_len)
    if num_blocks == 0:
        return None
    return ReplayShadow(served, samples, runner.beside(num_blocks, num_slots=1), config)


def _shadow_engine(config: EngineConfig, runner: ModelRunner) -> EngineConfig:
    """An engine that computes one sequence in small steps and keeps nothing."""
    return EngineConfig(
        max_batched_tokens=2 * runner.window,
        max_num_seqs=1,
        num_blocks=runner.num_blocks,
        reserved_output_tokens=1,
        anchor_interval=config.anchor_interval,
        windows=WindowConfig(WindowPolicy.ZERO),
        parked=ParkConfig(capacity_bytes=0),
        leases=LeaseConfig(max_share=0),
        moves=MoveConfig(max_bytes_per_s=0),
    )


def _request(sample: ServedSample, recipe: Recipe) -> GenerationRequest:
    """All but the last token as if they had been streamed: their rows come in whole chunks."""
    answer = sample.token_ids[sample.num_prompt_tokens :]
    return GenerationRequest(
        request_id="shadow",
        generation=0,
        token_ids=sample.token_ids[:-1],
        num_prompt_tokens=sample.num_prompt_tokens,
        recipe=recipe,
        sampling=SamplingParams(max_tokens=len(answer), temperature=0.0),
        deadline=sample.expires,
        tail=recipe.tail,
        cache=CacheUse(reads=False, writes=False, resumes=False),
        given=answer,
    )


def _divergence(reference: torch.Tensor, served: torch.Tensor, token_ids: list[int]) -> Divergence:
    found = Divergence()
    # A few rows at a time: the comparison takes several times their bytes.
    for first in range(0, len(token_ids), SEGMENT_TOKENS):
        part = slice(first, first + SEGMENT_TOKENS)
        rows = reference[part]
        told = compare_logits(rows, served[part].to(rows.device), token_ids[part])
        # Rounding makes the distance of equal distributions a little less than nothing.
        found += Divergence.of(told.kl.clamp(min=0.0).tolist(), told.same_top.tolist())
    return found
