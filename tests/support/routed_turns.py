"""How do tests ask a routed cluster for one turn, and check what it says and computes?"""

from __future__ import annotations

from dataclasses import replace

from hash_machine import reference_stream
from routed_cluster import Answered, RoutedCluster
from split_cluster import CONFIG

from ripresa.cluster.routing.prompt import PromptRequest
from ripresa.workers.config import WindowConfig, WindowPolicy
from ripresa.workers.replay import TailVariant
from ripresa.workers.request import CacheUse, GenerationRequest, SamplingParams

WINDOWS = replace(CONFIG, windows=WindowConfig(WindowPolicy.JUNCTION))


def ask(
    token_ids: tuple[int, ...],
    request_id: str,
    *,
    max_tokens: int = 4,
    salt: bytes = b"",
    session: str | None = None,
    cache: CacheUse | None = None,
) -> PromptRequest:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=5)
    return PromptRequest(
        request_id,
        token_ids,
        sampling,
        TailVariant.FLOORED,
        cache=cache or CacheUse(),
        tenant_salt=salt,
        session_id=session,
    )


def check_tokens(asked: PromptRequest, answered: Answered) -> None:
    """The stream is what the reference gives for the recipe that the client was told."""
    request = GenerationRequest(
        asked.request_id,
        0,
        asked.token_ids,
        len(asked.token_ids),
        answered.recipe,
        asked.sampling,
        cache=asked.cache,
        tail=asked.tail,
    )
    assert answered.tokens == reference_stream(request).tokens


async def turn(cluster: RoutedCluster, asked: PromptRequest) -> Answered:
    """One request alone: it computes exactly the rows of its plan, and streams what it should."""
    before = cluster.rows()
    answered = await cluster.ask(asked)
    await cluster.told()
    recipe, num_tokens = answered.recipe, len(asked.token_ids)
    assert answered.finished.counters.encoder_rows == num_tokens - recipe.start
    # Each generated token but the last passes the encoder half as well.
    assert cluster.rows() - before == num_tokens - recipe.start + len(answered.tokens) - 1
    check_tokens(asked, answered)
    return answered
