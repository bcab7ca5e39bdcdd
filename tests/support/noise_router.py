"""What stands behind a gateway whose answers only their constraints make sensible? Noise, sampled.

Random logits instead of a model, the worker's own sampler, history and grammars behind them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

import numpy as np
import torch

from ripresa.cluster.routing.prompt import KeptPrompt, Placed, PromptRequest, RouterEvent
from ripresa.workers.errors import ErrorCode, RipresaError
from ripresa.workers.grammar import Grammars
from ripresa.workers.models.vocabulary import Vocabulary
from ripresa.workers.replay import cold_recipe
from ripresa.workers.request import Finished, FinishReason, Tokens
from ripresa.workers.sampler import sample
from ripresa.workers.token_history import TokenHistory


class NoiseRouter:
    """Answers every prompt with noise, as far as the request's parameters let it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._grammars = Grammars(lambda: vocabulary)
        self.seen: list[PromptRequest] = []

    async def generate(self, prompt: PromptRequest) -> AsyncGenerator[RouterEvent]:
        self.seen.append(prompt)
        sampling, num_prompt = prompt.sampling, len(prompt.token_ids)
        eos, size = self._vocabulary.eos_token_id, len(self._vocabulary.bytes_of)
        constraint = sampling.constraint
        matcher = None if constraint is None else self._grammars.matcher(constraint)
        history = TokenHistory(sampling, prompt.token_ids, num_prompt, eos)
        recipe = cold_recipe(num_prompt, 8, prompt.tail, sampling.seed, 1)
        yield Placed("noise", None, recipe, "the only one")
        noise = np.random.default_rng(sampling.seed)
        said: list[int] = []
        for _ in range(sampling.max_tokens):
            mask = None
            if matcher is not None and history.constrained_from is not None:
                matcher.follow(said[history.constrained_from + matcher.num_followed :])
                mask = matcher.mask()
            logits = torch.from_numpy(noise.normal(size=size))
            position = num_prompt + len(said)
            token_id = sample(logits, sampling, position, history.rules(), mask)
            if token_id == eos:
                yield Finished(FinishReason.STOP, eos, len(said) + 1)
                return
            said.append(token_id)
            history.add(token_id)
            yield Tokens(position, (token_id,))
        yield Finished(FinishReason.LENGTH, None, len(said))

    async def find_stream(self, stream_id: str, worker_id: str) -> KeptPrompt | None:
        return None

    def resume(self, prompt: PromptRequest) -> AsyncGenerator[RouterEvent]:
        raise RipresaError(ErrorCode.NOT_FOUND, "no stream is kept here")

    def called(self, request_id: str, tools: Sequence[str]) -> None:
        """Nothing is kept."""

    async def end_session(self, tenant_salt: bytes, session_id: str) -> None:
        """Nothing was kept."""

    async def num_held_tokens(self, token_ids: Sequence[int], tenant_salt: bytes) -> int:
        return 0

    async def abort(self, request_id: str) -> bool:
        return False

    def explain(self, request_id: str) -> list[str]:
        raise RipresaError(ErrorCode.NOT_FOUND, "not remembered", field="request_id")

    async def why_not_ready(self) -> None:
        return None
