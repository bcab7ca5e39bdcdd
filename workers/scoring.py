"""How well does an execution foretell tokens that are known, and how do two executions differ?

A request with `given` tokens runs like any other: planned, from the cache, by its recipe, in the
same steps. Only what is said next is not chosen.

    position       ... L-1 | L ........ L+n-1
    given tokens            g0 ........ gn-1
    foretold by    row L-1  row L ...  row L+n-2      L: tokens of the prompt
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

import torch

from ripresa.workers.decode_engine import DecodeEngine
from ripresa.workers.errors import ErrorCode, RipresaError
from ripresa.workers.job import OnLogits
from ripresa.workers.replay import Recipe
from ripresa.workers.request import (
    Failed,
    Finished,
    GenerationRequest,
    PrefillDone,
    Reserved,
    TokenLogprobs,
    Tokens,
    WorkCounters,
)

_COMPARED_AT_ONCE = 64
"""Rows; a large vocabulary's are 1 MB each in float64."""


@dataclass(frozen=True, slots=True)
class Scored:
    """How a request with given tokens ran.

    Attributes:
        recipe: what it computed, read and wrote.
        logprobs: of each given token, if the request asked for them; else empty.
        prefill: rows up to the first given token.
        counters: rows of the whole request.
    """

    recipe: Recipe
    logprobs: tuple[TokenLogprobs, ...]
    prefill: WorkCounters
    counters: WorkCounters


class Foretold:
    """Gathers the logits that foretell tokens [start, stop); an `OnLogits`.

    Rows of other positions are let go. A row that comes again takes the place of the first.

    Args:
        among: of these tokens only; None for all of them.
    """

    def __init__(self, start: int, stop: int, among: Collection[int] | None = None) -> None:
        self._tokens = [t for t in range(start, stop) if among is None or t in among]
        self._is_wanted = frozenset(self._tokens).__contains__
        self._rows: dict[int, torch.Tensor] = {}

    def __call__(self, position: int, logits: torch.Tensor) -> None:
        for token, row in enumerate(logits, position + 1):
            if self._is_wanted(token):
                # A copy: the rest of the step's logits is let go.
                self._rows[token] = row.clone()

    @property
    def logits(self) -> torch.Tensor:
        """[wanted tokens, vocab] float32, in their order.

        Raises:
            RipresaError: INTERNAL; rows are missing.
        """
        missing = len(self._tokens) - len(self._rows)
        if missing:
            raise RipresaError(ErrorCode.INTERNAL, f"{missing} given tokens were not foretold")
        return torch.stack([self._rows[token] for token in self._tokens])


def with_given(request: GenerationRequest, token_ids: Sequence[int]) -> GenerationRequest:
    """The request whose answer is known: `token_ids` come, to be scored, and nothing is chosen."""
    sampling = replace(request.sampling, max_tokens=len(token_ids), constraint=None)
    return replace(request, sampling=sampling, given=tuple(token_ids))


async def score(
    engine: DecodeEngine, request: GenerationRequest, on_logits: OnLogits | None = None
) -> Scored:
    """Run a request with given tokens on a decode worker that prefills by itself.

    Args:
        on_logits: hears the logits, `Foretold` for instance; without it the request can ask for
            `logprobs` alone, which any worker tells.

    Raises:
        RipresaError: it was refused, or it failed.
    """
    recipe: Recipe | None = None
    prefill: WorkCounters | None = None
    logprobs: list[TokenLogprobs] = []
    stream = engine.generate(request, local=True, on_logits=on_logits)
    async with aclosing(stream) as events:
        async for event in events:
            match event:
                case Reserved(recipe=fixed) if fixed is not None:
                    recipe = fixed
                case PrefillDone():
                    recipe = event.recipe
                case Tokens():
                    prefill = prefill or event.counters
                    logprobs += event.logprobs
                case Failed():
                    raise event.error
                case Finished() if recipe is not None and prefill is not None:
                    return Scored(recipe, tuple(logprobs), prefill, event.counters)
    raise RipresaError(ErrorCode.INTERNAL, "the engine's stream ended without a finish")


@dataclass(frozen=True, slots=True)
class TokenDifferences:
    """How two executions foretell the same tokens; tensors [tokens], in nats.

    Attributes:
        reference_nll, nll: negative log-likelihoods of the tokens, float64.
        kl: KL(reference || other) of the whole distributions, float64.
        same_top: whether both find the same token likeliest, bool.
        top_is_token: whether the other one finds the token itself likeliest, bool.
    """

    reference_nll: torch.Tensor
    nll: torch.Tensor
    kl: torch.Tensor
    same_top: torch.Tensor
    top_is_token: torch.Tensor


def compare_logits(
    reference: torch.Tensor, other: torch.Tensor, token_ids: Sequence[int]
) -> TokenDifferences:
    """Compare row by row.

    Of equally likely tokens the lowest id counts as the likeliest, as in greedy sampling.

    Args:
        reference, other: [tokens, vocab], any float dtype; at least one token.
        token_ids: the tokens that the rows foretell.
    """
    tokens = torch.tensor(token_ids, dtype=torch.int64, device=reference.device)
    parts = zip(
        *(tensor.split(_COMPARED_AT_ONCE) for tensor in (reference, other, tokens)), strict=True
    )
    compared = [_compare(*part) for part in parts]
    return TokenDifferences(*(torch.cat(column) for column in zip(*compared, strict=True)))


def _compare(
    reference: torch.Tensor, other: torch.Tensor, tokens: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The fields of `TokenDifferences`, of rows few enough for float64 copies."""
    log_p = torch.log_softmax(reference.double(), -1)
    log_q = torch.log_softmax(other.double(), -1)
    top, place = other.argmax(-1), tokens[:, None]
    return (
        -log_p.gather(1, place)[:, 0],
        -log_q.gather(1, place)[:, 0],
        (log_p.exp() * (log_p - log_q)).sum(-1),
        top == reference.argmax(-1),
        top == tokens,
    )
