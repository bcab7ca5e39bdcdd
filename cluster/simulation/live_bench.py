"""How does a running cluster serve a recorded workload, scaled down to what it can hold?

    trace     | block of W x scale tokens | ... | rest      ids become token ids: equal blocks stay
    cluster   | W tokens | W tokens | ........ | rest/scale  equal, and so do prefixes

A conversation's prompts follow each other; up to so many conversations run at once, in the order in
which their prompts came. Recorded pauses are left out.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

from ripresa.cluster.simulation.arrivals import Prompt, Workload
from ripresa.cluster.simulation.policies import LocalCaches
from ripresa.workers.replay_query import ReplayGeometry

TOKEN_IDS = range(64, 1024)
"""What prompts are made of: no model's vocabulary is smaller, and special tokens lie outside."""


@dataclass(frozen=True, slots=True)
class Answered:
    """What the cluster says of one prompt.

    Attributes:
        num_cached: tokens that were not computed again.
        first_token_s: from the request to the first token, as the gateway measures it.
    """

    num_tokens: int
    num_cached: int
    first_token_s: float


Ask = Callable[[Sequence[int], int], Answered]
"""Sends a prompt and how many tokens to generate; called from several threads."""


@dataclass(frozen=True, slots=True)
class LiveFigures:
    """What a run shows.

    Attributes:
        hit_ratio: cached tokens among all prompt tokens.
        best_ratio: the same for one cache that never forgets anything.
        num_cut: prompts that were too long and lost their ends.
        cold_s: median time to the first token of prompts with less than half cached; None if
            there were none.
        first_token_s: percentile 50, 90 and 99 of the others; None if there were none.
    """

    num_prompts: int
    num_cut: int
    hit_ratio: float
    best_ratio: float
    cold_s: float | None
    first_token_s: tuple[float, float, float] | None


def scaled_tokens(prompt: Prompt, geometry: ReplayGeometry, trace_window: int) -> list[int]:
    """Token ids of a prompt: W for each of its blocks, and a rest of its own."""
    window = geometry.window
    tokens: list[int] = []
    for block in prompt.blocks:
        tokens += random.Random(block).choices(TOKEN_IDS, k=window)
    rest = prompt.num_tokens - len(prompt.blocks) * trace_window
    own = random.Random(f"{prompt.at_s} {prompt.conversation}")
    return tokens + own.choices(TOKEN_IDS, k=max(1, rest * window // trace_window))


def replay_live(
    workload: Workload,
    geometry: ReplayGeometry,
    ask: Ask,
    *,
    max_prompts: int,
    max_prompt_tokens: int,
    max_tokens: int,
    concurrency: int,
    on_prompt: Callable[[int], None] = lambda number: None,
) -> LiveFigures:
    """Send the workload's first prompts.

    Args:
        workload: read with W x scale tokens to a block.
        geometry: of the served model.
        max_prompt_tokens: longer prompts lose their ends.
        max_tokens: to generate for each prompt.
        concurrency: prompts under way at once.

    Raises whatever `ask` raises; nothing is sent afterwards.
    """
    best = LocalCaches("best", ["all"], 1 << 40, geometry, sticky=False)
    answered: list[Answered] = []
    num_cut = num_tokens = 0

    def sent() -> Iterator[tuple[int, list[int]]]:
        nonlocal num_cut, num_tokens
        for prompt in islice(workload, max_prompts):
            tokens = scaled_tokens(prompt, geometry, workload.window)
            kept = min(len(tokens), max_prompt_tokens)
            num_cut += kept < len(tokens)
            num_tokens += kept
            blocks = prompt.blocks[: kept // geometry.window]
            best.serve(Prompt(prompt.at_s, prompt.conversation, kept, 1, blocks))
            yield prompt.conversation, tokens[:kept]

    for answer in _answers(sent(), lambda tokens: ask(tokens, max_tokens), concurrency):
        answered.append(answer)
        on_prompt(len(answered))
    asked = max(1, sum(one.num_tokens for one in answered))
    cold = [one.first_token_s for one in answered if 2 * one.num_cached < one.num_tokens]
    warm = [one.first_token_s for one in answered if 2 * one.num_cached >= one.num_tokens]
    return LiveFigures(
        len(answered),
        num_cut,
        sum(one.num_cached for one in answered) / asked,
        best.num_reused_tokens / max(1, num_tokens),
        percentile(cold, 50) if cold else None,
        (percentile(warm, 50), percentile(warm, 90), percentile(warm, 99)) if warm else None,
    )


def percentile(values: Sequence[float], percent: int) -> float:
    """The value that so many percent of them do not exceed."""
    return sorted(values)[max(0, -(-len(values) * percent // 100) - 1)]


def _answers(
    prompts: Iterator[tuple[int, list[int]]],
    ask: Callable[[Sequence[int]], Answered],
    concurrency: int,
) -> Iterator[Answered]:
    """Answers to prompts, given with their conversations, in their order."""
    room = threading.Semaphore(concurrency)
    newest: dict[int, Future[Answered]] = {}
    waiting: deque[Future[Answered]] = deque()
    with ThreadPoolExecutor(concurrency, thread_name_prefix="live-bench") as threads:
        try:
            for conversation, tokens in prompts:
                if conversation in newest:
                    newest[conversation].result()
                room.acquire()
                future = threads.submit(ask, tokens)
                future.add_done_callback(lambda _: room.release())
                newest[conversation] = future
                waiting.append(future)
                while waiting and waiting[0].done():
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
