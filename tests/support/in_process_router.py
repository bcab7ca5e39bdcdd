"""What stands behind a gateway in its tests? A small real router that answers from a script."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from ripresa.cluster.routing.planner import NoWorker, nobody_among
from ripresa.cluster.routing.prompt import Placed, PromptRequest, RouterEvent
from ripresa.workers.errors import ErrorCode, RipresaError
from ripresa.workers.kept_streams import KeptPrompt
from ripresa.workers.replay import cold_recipe
from ripresa.workers.request import (
    Finished,
    FinishReason,
    TokenLogprobs,
    Tokens,
    WorkCounters,
)


@dataclass
class InProcessRouter:
    """Answers from a script: token k of the answer is `script[k % len(script)]`.

    Attributes:
        script: the ids that are repeated until `max_tokens`, a stop id or the end of sentence.
        answers: scripts of single requests, first to last, before `script` serves the others.
        batch: tokens an event.
        hold: while it is clear, a stream waits before each event after the first token.
        hold_prefill: the same before the first token.
        failure: raised once one token was streamed.
        refusals: raised instead of a placement, one a request, first to last.
        opened: set once a request has arrived.
        calls: tools that answers called, by request.
        closed: sessions that were ended.
        seen: prompts that arrived; open: requests that are not closed yet.
        produced: how many tokens of each were taken.
        num_held: leading tokens of any prompt that are held, by salt.
    """

    script: tuple[int, ...] = (40, 41, 42, 43)
    answers: list[tuple[int, ...]] = field(default_factory=list)
    batch: int = 1
    hold: asyncio.Event = field(default_factory=asyncio.Event)
    hold_prefill: asyncio.Event = field(default_factory=asyncio.Event)
    failure: Exception | None = None
    refusals: list[Exception] = field(default_factory=list)
    is_ready: bool = True
    encoder_id: str | None = "encoder-0"
    calls: dict[str, tuple[str, ...]] = field(default_factory=dict)
    closed: list[tuple[bytes, str]] = field(default_factory=list)
    seen: list[PromptRequest] = field(default_factory=list)
    open: set[str] = field(default_factory=set)
    produced: Counter[str] = field(default_factory=Counter)
    num_held: dict[bytes, int] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)
    all_closed: asyncio.Event = field(default_factory=asyncio.Event)
    opened: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.hold.set()
        self.hold_prefill.set()
        self.all_closed.set()

    async def generate(self, prompt: PromptRequest) -> AsyncGenerator[RouterEvent]:
        self.seen.append(prompt)
        self.open.add(prompt.request_id)
        self.all_closed.clear()
        self.opened.set()
        try:
            async for event in self._events(prompt):
                yield event
        finally:
            self.open.discard(prompt.request_id)
            if not self.open:
                self.all_closed.set()

    async def _events(self, prompt: PromptRequest) -> AsyncGenerator[RouterEvent]:
        num_prompt, sampling = len(prompt.token_ids), prompt.sampling
        if self.refusals:
            raise self.refusals.pop(0)
        script = self.answers.pop(0) if self.answers else self.script
        recipe = cold_recipe(num_prompt, 8, prompt.tail, sampling.seed, 1)
        yield Placed("decode-0", self.encoder_id, recipe, "the only one")
        await self.hold_prefill.wait()
        stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else {1})
        done, stop = 0, None
        while done < sampling.max_tokens and stop is None:
            size = min(self.batch, sampling.max_tokens - done)
            ids = tuple(script[(done + k) % len(script)] for k in range(size))
            for place, token_id in enumerate(ids):
                if token_id in stops:
                    ids, stop = ids[: place + 1], token_id
                    break
            logprobs = _logprobs(ids, sampling.logprobs)
            counters = WorkCounters(4 * num_prompt, 4, 4 * (done + size), 1000)
            yield Tokens(num_prompt + done, ids, logprobs, counters)
            done += len(ids)
            self.produced[prompt.request_id] += len(ids)
            if self.failure is not None:
                raise self.failure
            await self.hold.wait()
            if prompt.request_id in self.aborted:
                raise RipresaError(ErrorCode.CANCELLED, "the request was aborted")
        reason = FinishReason.LENGTH if stop is None else FinishReason.STOP
        yield Finished(reason, stop, done, WorkCounters(4 * num_prompt, 4, 4 * done, 1000))

    async def find_stream(self, stream_id: str, worker_id: str) -> KeptPrompt | None:
        """It keeps none."""
        return None

    async def abort(self, request_id: str) -> bool:
        if request_id not in self.open:
            return False
        self.aborted.add(request_id)
        self.hold.set()
        return True

    def called(self, request_id: str, tools: Sequence[str]) -> None:
        self.calls[request_id] = tuple(tools)

    async def end_session(self, tenant_salt: bytes, session_id: str) -> None:
        self.closed.append((tenant_salt, session_id))

    def explain(self, request_id: str) -> list[str]:
        if all(prompt.request_id != request_id for prompt in self.seen):
            raise RipresaError(ErrorCode.NOT_FOUND, "not remembered", field="request_id")
        return [f"request {request_id}", "the only one"]

    async def num_held_tokens(self, token_ids: Sequence[int], tenant_salt: bytes) -> int:
        return self.num_held.get(tenant_salt, 0)

    async def why_not_ready(self) -> NoWorker | None:
        return None if self.is_ready else nobody_among(())


def _logprobs(ids: tuple[int, ...], num_top: int | None) -> tuple[TokenLogprobs, ...]:
    """Token k has the log probability -k/100, and the lowest ids are the likeliest."""
    if num_top is None:
        return ()
    top = tuple((token_id, -token_id / 100) for token_id in range(num_top))
    return tuple(TokenLogprobs(-token_id / 100, top) for token_id in ids)
