"""Which requests do the engine tests send to the hash machine?"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from hash_machine import GEOMETRY, VOCABULARY, WINDOW

from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.prompt_plan import PromptPlan, re_execution
from ripresa.workers.replay import Recipe, TailVariant, cold_recipe
from ripresa.workers.request import CacheUse, GenerationRequest, PrefillDone, SamplingParams

if TYPE_CHECKING:
    from split_cluster import Stream


def make_request(
    num_tokens: int = 20,
    *,
    request_id: str = "r",
    max_tokens: int = 6,
    tail: TailVariant = TailVariant.FLOORED,
    seed: int = 7,
    generation: int = 0,
    streamed: tuple[int, ...] = (),
    ignore_eos: bool = True,
    stop_token_ids: tuple[int, ...] = (),
    deadline: float | None = None,
) -> GenerationRequest:
    """A cold request whose prompt follows from its id and length."""
    prompt = random.Random(f"{request_id} {num_tokens}").choices(range(2, VOCABULARY), k=num_tokens)
    return GenerationRequest(
        request_id=request_id,
        generation=generation,
        token_ids=(*prompt, *streamed),
        num_prompt_tokens=num_tokens,
        recipe=cold_recipe(num_tokens, WINDOW, tail, seed, GEOMETRY.num_decoder_layers),
        sampling=SamplingParams(
            max_tokens=max_tokens, ignore_eos=ignore_eos, stop_token_ids=stop_token_ids, seed=seed
        ),
        deadline=deadline,
    )


def cold_plan(request: GenerationRequest) -> PromptPlan:
    """How a worker that holds nothing follows the request's recipe."""
    assert request.recipe is not None
    nothing: frozenset[BlockIdentity] = frozenset()
    return re_execution(request.recipe, request.num_tokens, WINDOW, (), nothing, nothing)


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(2, VOCABULARY), k=length))


def ask(
    token_ids: tuple[int, ...],
    request_id: str = "r",
    *,
    max_tokens: int = 6,
    tail: TailVariant = TailVariant.FLOORED,
    cache: CacheUse | None = None,
    salt: bytes = b"",
) -> GenerationRequest:
    """A first execution: whoever runs the encoder rows fixes the recipe."""
    return GenerationRequest(
        request_id=request_id,
        generation=0,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        recipe=None,
        sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=5),
        tail=tail,
        cache=cache or CacheUse(),
        tenant_salt=salt,
    )


def recipe_of(stream: Stream) -> Recipe:
    """The recipe that a stream reports."""
    return next(event.recipe for event in stream.events if isinstance(event, PrefillDone))
