"""What would one process answer? The in-process engine that clusters are compared with."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace

from noise_checkpoint import noise_checkpoint

from ripresa.workers.config import EngineConfig, Numerics
from ripresa.workers.decode_engine import DecodeEngine
from ripresa.workers.model_runner import load_runner
from ripresa.workers.models.deepseek_v41.weights import Half
from ripresa.workers.replay import Recipe, TailVariant, cold_recipe
from ripresa.workers.request import Failed, GenerationRequest, SamplingParams, Tokens


@dataclass(frozen=True, slots=True)
class Question:
    """One request, hashable, as tests ask it of an engine and of a cluster."""

    token_ids: tuple[int, ...]
    max_tokens: int = 8
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    tail: TailVariant = TailVariant.FLOORED
    reads_cache: bool = False

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed,
            ignore_eos=True,
        )


@dataclass(frozen=True, slots=True)
class Run:
    """What an engine answered, and the seconds until its first token."""

    answers: tuple[tuple[int, ...], ...]
    first_token_s: float


class ReferenceEngine:
    """A whole model in this process; answers one question after the other, from memory if it was
    asked before."""

    def __init__(self, numerics: Numerics = Numerics.DETERMINISTIC) -> None:
        self.config = EngineConfig(max_num_seqs=16, num_blocks=256, numerics=numerics)
        self.runner = load_runner(
            noise_checkpoint(),
            Half.ALL,
            num_blocks=self.config.num_blocks,
            num_slots=self.config.max_num_seqs,
            numerics=numerics,
        )
        self._answers: dict[Question, tuple[int, ...]] = {}

    def answer(self, question: Question) -> tuple[int, ...]:
        """The tokens of a solo run."""
        if question not in self._answers:
            (self._answers[question],) = asyncio.run(self.run(question)).answers
        return self._answers[question]

    def follow(self, question: Question, recipe: Recipe) -> tuple[int, ...]:
        """The tokens of a solo run that follows a recipe, from nothing cached."""
        (answer,) = asyncio.run(self.run(question, recipe=recipe)).answers
        return answer

    async def run(self, *questions: Question, recipe: Recipe | None = None) -> Run:
        """Answer questions at the same time, in one engine that lives as long as they take."""
        engine = DecodeEngine("reference", self.runner, self.config)
        await engine.start()
        began = time.perf_counter()
        first: list[float] = []

        async def ask(index: int, question: Question) -> tuple[int, ...]:
            tokens: list[int] = []
            request = generation_request(question, self.runner.window, f"reference-{index}")
            if recipe is not None:
                request = replace(request, recipe=recipe)
            async for event in engine.generate(request, local=True):
                match event:
                    case Tokens():
                        first.append(time.perf_counter() - began)
                        tokens += event.token_ids
                    case Failed():
                        raise event.error
            return tuple(tokens)

        try:
            answers = await asyncio.gather(*map(ask, range(len(questions)), questions))
        finally:
            await engine.stop()
        return Run(tuple(answers), first[0])


def generation_request(question: Question, window: int, request_id: str) -> GenerationRequest:
    """The question as engines take it, with the recipe of a prompt none of which is cached."""
    num_tokens = len(question.token_ids)
    return GenerationRequest(
        request_id=request_id,
        generation=0,
        token_ids=question.token_ids,
        num_prompt_tokens=num_tokens,
        recipe=cold_recipe(num_tokens, window, question.tail, question.seed),
        sampling=question.sampling,
    )
