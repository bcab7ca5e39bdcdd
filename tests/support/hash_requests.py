"""Which requests do the engine tests send to the hash machine?"""

from __future__ import annotations

import random

from hash_machine import VOCABULARY, WINDOW

from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.prompt_plan import PromptPlan, re_execution
from ripresa.workers.replay import TailVariant, cold_recipe
from ripresa.workers.request import GenerationRequest, SamplingParams


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
        recipe=cold_recipe(num_tokens, WINDOW, tail, seed),
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
