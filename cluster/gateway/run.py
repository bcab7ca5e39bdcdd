"""How do the choices of one request run, and what do the metrics hear of them?

The first choice runs alone until its first token: then its prompt is cached and the others find it.
Their events come in rounds, one of each choice's at a time, so that a stream is the same whenever
and wherever it is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Protocol

from ripresa.cluster.gateway.quotas import Meter
from ripresa.cluster.observability.metrics import GatewayMetrics, RequestState
from ripresa.cluster.routing.event_stream import end_tasks
from ripresa.cluster.routing.prompt import CaughtUp, Placed, Planned, PromptRequest, RouterEvent
from ripresa.workers.errors import ErrorCode, RipresaError
from ripresa.workers.replay import PlanKind, Recipe
from ripresa.workers.request import Finished, FinishReason, Tokens, WorkCounters

MAX_WAITING_EVENTS = 64
"""Events of a choice that wait for the others, or for a slow reader; then the choice waits."""


class Run:
    """One admitted request. Read `events` to its end, or close it.

    Args:
        source: a choice's events; called once for each.
        books: hears what happens.
    """

    def __init__(
        self,
        source: Callable[[PromptRequest], AsyncGenerator[RouterEvent]],
        prompts: Sequence[PromptRequest],
        books: Books,
    ) -> None:
        self._source = source
        self._prompts = prompts
        self._books = books
        self._stopped: set[int] = set()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._queues: list[asyncio.Queue[RouterEvent | Exception]] = [
            asyncio.Queue(MAX_WAITING_EVENTS) for _ in prompts
        ]

    async def events(self) -> AsyncGenerator[tuple[int, RouterEvent]]:
        """Each choice's events, until every choice is finished or stopped.

        Raises:
            RipresaError: a choice failed, and with it the request.
        """
        source = self._single() if len(self._prompts) == 1 else self._several()
        async with aclosing(source) as events:
            async for choice, event in events:
                self._books.book(choice, event)
                yield choice, event

    def stop(self, choice: int) -> None:
        """The rest of a choice is not wanted: its work ends, and no event of it follows."""
        self._stopped.add(choice)
        self._books.stopped(choice)
        if choice in self._tasks:
            self._tasks[choice].cancel()

    async def _single(self) -> AsyncGenerator[tuple[int, RouterEvent]]:
        async with aclosing(self._source(self._prompts[0])) as events:
            async for event in events:
                yield 0, event
                if isinstance(event, Finished) or self._stopped:
                    return
        raise _ended_early()

    async def _several(self) -> AsyncGenerator[tuple[int, RouterEvent]]:
        open_choices = list(range(len(self._prompts)))
        self._begin(0)
        try:
            while open_choices:
                for choice in tuple(open_choices):
                    event: RouterEvent | None = None
                    while not isinstance(event, Tokens | Finished):
                        event = await self._next(choice)
                        yield choice, event
                    if isinstance(event, Finished) or choice in self._stopped:
                        open_choices.remove(choice)
                    for other in range(1, len(self._prompts)):
                        self._begin(other)
        finally:
            await end_tasks(self._tasks.values())

    async def _next(self, choice: int) -> RouterEvent:
        event = await self._queues[choice].get()
        if isinstance(event, Exception):
            raise event
        return event

    def _begin(self, choice: int) -> None:
        if choice not in self._tasks:
            self._tasks[choice] = asyncio.create_task(self._pump(choice), name=f"choice-{choice}")

    async def _pump(self, choice: int) -> None:
        queue = self._queues[choice]
        try:
            async with aclosing(self._source(self._prompts[choice])) as events:
                async for event in events:
                    await queue.put(event)
                    if isinstance(event, Finished):
                        return
            raise _ended_early()
        except Exception as error:  # noqa: BLE001 - the reader raises it
            await queue.put(error)


class Books(Protocol):
    """Hears what happens to a request."""

    def book(self, choice: int, event: RouterEvent) -> None:
        """A choice has gone on."""

    def stopped(self, choice: int) -> None:
        """A choice was ended by a stop string."""

    def fail(self, code: ErrorCode) -> None:
        """What has not ended has failed."""


class CountedBooks:
    """Counts a request in the metrics.

    Args:
        prompts: one for each choice.
        window: W, tokens in a block.
        transfer_backend: what moves state between workers, for the metrics.
        meter: what the tenant is charged with; None where there are no tenants.
    """

    def __init__(
        self,
        prompts: Sequence[PromptRequest],
        metrics: GatewayMetrics,
        window: int,
        transfer_backend: str,
        meter: Meter | None = None,
    ) -> None:
        self._meter = meter
        self._window = window
        self._backend = transfer_backend
        self._backends: list[str | None] = [None] * len(prompts)
        self._counters = [WorkCounters()] * len(prompts)
        self._records = [metrics.request_started(len(p.token_ids)) for p in prompts]

    def book(self, choice: int, event: RouterEvent) -> None:
        record = self._records[choice]
        match event:
            case Placed():
                record.running()
                self._backends[choice] = self._backend if event.encoder_id is not None else None
                if event.recipe is not None:
                    self._planned(choice, event, event.recipe)
            case Planned():
                self._planned(choice, event, event.recipe)
            case Tokens():
                record.delta(len(event.token_ids))
                self._counters[choice] = event.counters
                if self._meter is not None:
                    self._meter.generated(len(event.token_ids))
            case Finished():
                record.finished(event.reason, event.counters, backend=self._backends[choice])

    def stopped(self, choice: int) -> None:
        # Rows that its worker computes until it hears of it are in that worker's totals alone.
        counters, backend = self._counters[choice], self._backends[choice]
        self._records[choice].finished(FinishReason.STOP, counters, backend=backend)

    def fail(self, code: ErrorCode) -> None:
        for record in self._records:
            if record.state is not RequestState.ENDED:
                record.failed(code)

    def _planned(self, choice: int, event: Placed | Planned, recipe: Recipe) -> None:
        is_resumed = recipe.kind is PlanKind.RESUME
        segments = event.prefix.segments(recipe.start, self._window, is_resumed=is_resumed)
        self._records[choice].planned(recipe, segments, event.hit_error_tokens)
        if self._meter is not None:
            self._meter.planned(recipe.start)


class ResumedBooks:
    """Charges what of a stream another gateway has not told; the one that began it counts it.

    Args:
        caught_up: hears that what was known of a choice was told, and whether nothing was.
        meter: of the tenant; None where there are no tenants.
    """

    def __init__(self, caught_up: Callable[[bool], None], meter: Meter | None) -> None:
        self._caught_up = caught_up
        self._meter = meter
        self._num_untold = 0

    def book(self, choice: int, event: RouterEvent) -> None:
        match event:
            case CaughtUp():
                self._caught_up(event.is_lost)
            case Tokens():
                self._num_untold += len(event.token_ids)

    def told(self, *, is_new: bool) -> None:
        """The tokens so far are told: here, or elsewhere before."""
        if is_new and self._meter is not None:
            self._meter.generated(self._num_untold)
        self._num_untold = 0

    def stopped(self, choice: int) -> None:
        return None

    def fail(self, code: ErrorCode) -> None:
        return None


def _ended_early() -> RipresaError:
    return RipresaError(ErrorCode.INTERNAL, "the router's stream ended without a finish")
