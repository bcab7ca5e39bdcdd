"""How do the choices of one request run, and what do the metrics hear of them?

The first choice runs alone until its first token: then its prompt is cached and the others find it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from ripresa.cluster.gateway.quotas import Meter
from ripresa.cluster.observability.metrics import GatewayMetrics, RequestState
from ripresa.cluster.routing.event_stream import end_tasks
from ripresa.cluster.routing.prompt import Placed, Planned, PromptRequest, Router, RouterEvent
from ripresa.workers.errors import ErrorCode, RipresaError
from ripresa.workers.replay import Recipe
from ripresa.workers.request import Finished, FinishReason, Tokens, WorkCounters

MAX_WAITING_EVENTS = 64
"""Events of all choices that wait for a slow reader; then the choices wait."""


class Run:
    """One admitted request. Read `events` to its end, or close it.

    Args:
        prompts: one for each choice.
        window: W, tokens in a block.
        transfer_backend: what moves state between workers, for the metrics.
        meter: what the tenant is charged with; None where there are no tenants.
    """

    def __init__(
        self,
        router: Router,
        prompts: Sequence[PromptRequest],
        metrics: GatewayMetrics,
        window: int,
        transfer_backend: str,
        meter: Meter | None = None,
    ) -> None:
        self._meter = meter
        self._router = router
        self._prompts = prompts
        self._window = window
        self._backend = transfer_backend
        self._backends: list[str | None] = [None] * len(prompts)
        self._records = [metrics.request_started(len(p.token_ids)) for p in prompts]
        self._stopped: set[int] = set()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._queue: asyncio.Queue[tuple[int, RouterEvent | Exception]] = asyncio.Queue(
            MAX_WAITING_EVENTS
        )

    async def events(self) -> AsyncGenerator[tuple[int, RouterEvent]]:
        """Each choice's events, until every choice is finished or stopped.

        Raises:
            RipresaError: a choice failed, and with it the request.
        """
        source = self._single() if len(self._prompts) == 1 else self._several()
        async with aclosing(source) as events:
            async for choice, event in events:
                self._book(choice, event)
                yield choice, event

    def stop(self, choice: int) -> None:
        """The rest of a choice is not wanted: its work ends, and no event of it follows."""
        self._stopped.add(choice)
        # Its workers' counters are not known; the rows it took are missing from the totals.
        self._records[choice].finished(FinishReason.STOP, WorkCounters(), backend=None)
        if choice in self._tasks:
            self._tasks[choice].cancel()

    def fail(self, code: ErrorCode) -> None:
        """Count what has not ended as failed."""
        for record in self._records:
            if record.state is not RequestState.ENDED:
                record.failed(code)

    async def _single(self) -> AsyncGenerator[tuple[int, RouterEvent]]:
        async with aclosing(self._router.generate(self._prompts[0])) as events:
            async for event in events:
                yield 0, event
                if isinstance(event, Finished) or self._stopped:
                    return
        raise _ended_early()

    async def _several(self) -> AsyncGenerator[tuple[int, RouterEvent]]:
        ended: set[int] = set()
        self._begin(0)
        try:
            while len(ended | self._stopped) < len(self._prompts):
                choice, event = await self._queue.get()
                if choice in self._stopped:
                    continue
                if isinstance(event, Exception):
                    raise event
                if isinstance(event, Finished):
                    ended.add(choice)
                if isinstance(event, Tokens | Finished):
                    for other in range(1, len(self._prompts)):
                        self._begin(other)
                yield choice, event
        finally:
            await end_tasks(self._tasks.values())

    def _begin(self, choice: int) -> None:
        if choice not in self._tasks:
            self._tasks[choice] = asyncio.create_task(self._pump(choice), name=f"choice-{choice}")

    async def _pump(self, choice: int) -> None:
        try:
            async with aclosing(self._router.generate(self._prompts[choice])) as events:
                async for event in events:
                    await self._queue.put((choice, event))
                    if isinstance(event, Finished):
                        return
            raise _ended_early()
        except Exception as error:  # noqa: BLE001 - the reader raises it
            await self._queue.put((choice, error))

    def _book(self, choice: int, event: RouterEvent) -> None:
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
                if self._meter is not None:
                    self._meter.generated(len(event.token_ids))
            case Finished():
                record.finished(event.reason, event.counters, backend=self._backends[choice])

    def _planned(self, choice: int, event: Placed | Planned, recipe: Recipe) -> None:
        num_from_peers = event.prefix.tokens_from_peers(recipe.start, self._window)
        self._records[choice].planned(recipe, num_from_peers, event.hit_error_tokens)
        if self._meter is not None:
            self._meter.planned(recipe.start)


def _ended_early() -> RipresaError:
    return RipresaError(ErrorCode.INTERNAL, "the router's stream ended without a finish")
