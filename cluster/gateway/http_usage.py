"""How is a request's work told in an OpenAI-shaped body?"""

from __future__ import annotations

from ripresa.cluster.gateway.chat_encoding import Json
from ripresa.cluster.gateway.stream_facts import StreamFacts


def usage(facts: StreamFacts, num_reasoning_tokens: int | None = None) -> Json:
    """OpenAI's `usage`; DeepSeek's names for cached tokens beside OpenAI's."""
    prompt, completion = facts.num_prompt_tokens, facts.num_completion_tokens
    cached = facts.num_cached_tokens
    told: Json = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "prompt_cache_hit_tokens": cached,
        "prompt_cache_miss_tokens": prompt - cached,
    }
    if num_reasoning_tokens is not None:
        told["completion_tokens_details"] = {"reasoning_tokens": num_reasoning_tokens}
    return told


def our_usage(facts: StreamFacts) -> Json:
    """What no client's type has a place for: how the prompt's state came to be."""
    started = facts.started()
    return {
        "worker_id": started.worker_id,
        "recomputed_tokens": started.cache.recomputed_tokens,
        "seed": started.seed,
    }
