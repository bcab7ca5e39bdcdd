"""How does a gateway go on with a stream that another one began? It follows what a worker keeps.

find the stream ─▶ its events from the first one on ─▶ Finished
      ▲                    │ the worker is lost: whoever drives the stream executes it elsewhere
      └────────────────────┘ nobody does: the follower executes it itself
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from ripresa.cluster.routing.event_stream import end_tasks
from ripresa.cluster.routing.execution import Execution
from ripresa.cluster.routing.prompt import CaughtUp, Hold, Placed, RouterEvent
from ripresa.cluster.routing.route_finder import WorkerView
from ripresa.workers.address import WorkerKind
from ripresa.workers.errors import ErrorCode, RipresaError, Unreachable
from ripresa.workers.kept_streams import KeptPrompt
from ripresa.workers.prefix_sources import PrefixOutcome
from ripresa.workers.request import (
    EngineEvent,
    Failed,
    Finished,
    PrefillDone,
    RecipeFixed,
    Reserved,
    Tokens,
)

logger = logging.getLogger(__name__)

PAUSES_S = (0.1, 0.2, 0.4, 0.8)
"""Between looks for a stream whose gateway may be taking it elsewhere."""
MAX_FOLLOWED = 4
"""Executions of one stream that are followed before it is executed here."""


class ResumeCalls(Protocol):
    """The way to what workers keep of streams. Every failure is a RipresaError."""

    async def find_stream(
        self, worker_id: str, stream_id: str, choice: int
    ) -> KeptPrompt | None: ...

    def resume(
        self, worker_id: str, stream_id: str, choice: int, hold: Hold
    ) -> AsyncGenerator[tuple[EngineEvent, ...]]: ...


@dataclass(frozen=True, slots=True)
class Found:
    """Where a stream is kept."""

    worker_id: str
    prompt: KeptPrompt


class KeptExecutions:
    """Finds and follows streams on behalf of one router."""

    def __init__(self, view: WorkerView, calls: ResumeCalls) -> None:
        self._view = view
        self._calls = calls

    async def find(
        self, stream_id: str, choice: int, worker_id: str | None, above: int = -1
    ) -> Found | None:
        """The newest execution of a stream; None if no worker keeps one.

        Args:
            worker_id: the likeliest one, of which nothing else is believed: clients may make it
                up. None if that one is known to be gone.
            above: executions of this generation and of older ones do not count.

        Raises:
            Unreachable: that worker is gone, and no other has the stream.
        """
        is_known = worker_id is None or self._view.was_decoder(worker_id)
        if worker_id is not None and is_known:
            found = await self._ask((worker_id,), stream_id, choice, above)
            if found is not None and found.prompt.is_good:
                return found
        for pause_s in PAUSES_S:
            found = await self._ask(self._decoders(), stream_id, choice, above)
            if found is not None or worker_id in self._decoders() or not is_known:
                return found
            await asyncio.sleep(pause_s)
        raise Unreachable(f"decode worker {worker_id}, which kept the stream, is gone")

    async def follow(self, execution: Execution) -> AsyncGenerator[RouterEvent]:
        """What workers keep and stream of a request, to `Finished`, or as far as any has it.

        Raises:
            RipresaError: the request failed.
        """
        ticket = execution.prompt.stream
        assert ticket is not None
        likeliest = ticket.placed_on or None
        generation = -1
        for _ in range(MAX_FOLLOWED):
            try:
                found = await self.find(ticket.stream_id, ticket.choice, likeliest, generation)
            except Unreachable:
                return
            if found is None:
                return
            generation = found.prompt.generation
            execution.next_generation = max(execution.next_generation, generation + 1)
            kept = found.prompt.ticket
            execution.placed_on, execution.prefilled_on = kept.placed_on, kept.prefilled_on
            execution.prefix = kept.prefix
            execution.followed_on = found.worker_id
            execution.fix(found.prompt.recipe)
            try:
                async with aclosing(self._follow(found, execution)) as events:
                    async for event in events:
                        yield event
                return
            except RipresaError as error:
                if error.code not in (ErrorCode.UNAVAILABLE, ErrorCode.NOT_FOUND):
                    raise
                if isinstance(error, Unreachable):
                    self._view.lost(found.worker_id)
                logger.warning("a stream of %s is looked for: %s", found.worker_id, error)
                likeliest = None

    async def _follow(self, found: Found, execution: Execution) -> AsyncGenerator[RouterEvent]:
        ticket, hold = found.prompt.ticket, execution.prompt.hold
        batches = self._calls.resume(found.worker_id, ticket.stream_id, ticket.choice, hold)
        async with aclosing(self._watched(found.worker_id, batches)) as watched:
            async for batch in watched:
                for event in batch:
                    if isinstance(event, Reserved | RecipeFixed | PrefillDone):
                        execution.fix(event.recipe)
                    match event:
                        case Reserved(local=True) | RecipeFixed() if execution.prefix is None:
                            execution.prefix = event.prefix
                    if execution.recipe is not None and not execution.is_placed:
                        execution.is_placed = execution.is_planned = True
                        yield Placed(
                            execution.placed_on,
                            execution.prefilled_on,
                            execution.recipe,
                            "resumed",
                            execution.prefix or PrefixOutcome(),
                        )
                    match event:
                        case Tokens() if self._is_new(event, execution):
                            execution.stream(event)
                            yield event
                        case Finished():
                            yield event
                            return
                        case Failed():
                            raise event.error
                if not execution.is_followed:
                    execution.is_followed = True
                    yield CaughtUp()
        raise Unreachable(f"decode worker {found.worker_id} ended the stream early")

    def _is_new(self, tokens: Tokens, execution: Execution) -> bool:
        """Whether the client lacks them: an earlier execution may have streamed them."""
        return tokens.position >= execution.num_tokens

    async def _watched(
        self, worker_id: str, batches: AsyncGenerator[tuple[EngineEvent, ...]]
    ) -> AsyncGenerator[tuple[EngineEvent, ...]]:
        """The batches, until they end or their worker reports no more."""

        async def following() -> tuple[EngineEvent, ...] | None:
            return await anext(batches, None)

        gone = asyncio.create_task(self._view.gone(worker_id), name="watch")
        steps: list[asyncio.Task[tuple[EngineEvent, ...] | None]] = []
        try:
            while True:
                steps[:] = [asyncio.create_task(following(), name="kept-events")]
                await asyncio.wait({*steps, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not steps[0].done():
                    raise Unreachable(f"worker {worker_id} does not report any more")
                batch = steps[0].result()
                if batch is None:
                    return
                yield batch
        finally:
            await end_tasks((*steps, gone))
            await batches.aclose()

    async def _ask(
        self, workers: tuple[str, ...], stream_id: str, choice: int, above: int
    ) -> Found | None:
        async def ask(worker_id: str) -> Found | None:
            try:
                kept = await self._calls.find_stream(worker_id, stream_id, choice)
            except RipresaError as error:
                logger.warning("%s does not say what it keeps: %s", worker_id, error)
                if isinstance(error, Unreachable):
                    self._view.lost(worker_id)
                return None
            return None if kept is None else Found(worker_id, kept)

        answers = await asyncio.gather(*map(ask, workers))
        found = [one for one in answers if one is not None and one.prompt.generation > above]
        return max(found, key=lambda one: one.prompt.generation, default=None)

    def _decoders(self) -> tuple[str, ...]:
        reports = self._view.workers()
        return tuple(w.worker_id for w in reports if w.kind is WorkerKind.DECODE)
