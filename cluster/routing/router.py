"""How is one request driven to its end? Place it, run both workers, retry what a worker lost.

place ─▶ decode.generate ─▶ Reserved ─▶ encoder.prefill ─▶ PrefillDone ─▶ Tokens.. ─▶ Finished
              ▲                              │ fails: another encoder, else local
              └──── decode worker lost: again by the same recipe, from what was streamed ────┘
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Protocol

from ripresa.cluster.routing.event_stream import EventStream, end_tasks
from ripresa.cluster.routing.planner import RoutePlan, least_loaded, plan_route
from ripresa.cluster.routing.prompt import Placed, Planned, PromptRequest, RouterEvent
from ripresa.workers.address import WorkerKind
from ripresa.workers.errors import (
    ErrorCode,
    InvalidArgument,
    RipresaError,
    Unavailable,
    Unreachable,
)
from ripresa.workers.replay import Recipe, TailVariant
from ripresa.workers.report import WorkerReport
from ripresa.workers.request import (
    EngineEvent,
    Failed,
    Finished,
    GenerationRequest,
    PrefillDone,
    RecipeFixed,
    Reserved,
    Tokens,
    WorkCounters,
)

logger = logging.getLogger(__name__)

MAX_SESSIONS = 65536
"""Sessions whose decode worker a gateway remembers; forgetting one costs a replay."""

MAX_REMEMBERED_IDS = 10_000
MAX_EXECUTIONS = 4
"""Executions of one request before its last error is the client's answer."""


class WorkerCalls(Protocol):
    """The way to workers. Every failure is a RipresaError; a lost worker is UNAVAILABLE."""

    def generate(
        self, worker_id: str, request: GenerationRequest, local: bool
    ) -> AsyncGenerator[EngineEvent]: ...

    async def prefill(
        self, worker_id: str, request: GenerationRequest, receiver: str
    ) -> WorkCounters: ...

    async def abort(self, worker_id: str, request_id: str) -> bool: ...


class WorkerView(Protocol):
    """What this gateway knows about workers."""

    def workers(self) -> tuple[WorkerReport, ...]:
        """The newest reports, without those that were found dead since."""

    async def refresh(self) -> None:
        """Ask again, after what was known led nowhere."""

    async def gone(self, worker_id: str) -> None:
        """Returns once the worker's reports have stopped: it died or hangs."""

    def lost(self, worker_id: str) -> None:
        """A call found this worker gone; it is not listed again for a while."""


class ClusterRouter:
    """Runs prompts on the cluster's workers; implements `Router`.

    Args:
        view: which workers there are.
        calls: how they are reached.
        reserve_timeout_s: longest wait for a decode worker's reservation.
    """

    def __init__(
        self,
        view: WorkerView,
        calls: WorkerCalls,
        reserve_timeout_s: float = 5.0,
    ) -> None:
        self._view = view
        self._calls = calls
        self._reserve_timeout_s = reserve_timeout_s
        self._generations: OrderedDict[str, int] = OrderedDict()
        self._pending: Counter[str] = Counter()
        self._running: dict[str, str] = {}
        # The decode worker of each session's last turn, newest last.
        self._homes: OrderedDict[tuple[bytes, str], str] = OrderedDict()

    async def ready(self) -> bool:
        return any(w.kind is WorkerKind.DECODE for w in self._view.workers())

    async def abort(self, request_id: str) -> bool:
        here = self._running.get(request_id)
        decoders = [w.worker_id for w in self._view.workers() if w.kind is WorkerKind.DECODE]
        asked = [here] if here is not None else decoders
        answers = await asyncio.gather(
            *(self._calls.abort(worker, request_id) for worker in asked), return_exceptions=True
        )
        unknown = [a for a in answers if isinstance(a, BaseException)]
        if any(answer is True for answer in answers):
            return True
        if unknown:
            raise unknown[0]
        return False

    def check_integrity(self) -> None:
        """Raise RipresaError (INTERNAL) if an idle router still counts requests."""
        if self._running or +self._pending:
            raise RipresaError(
                ErrorCode.INTERNAL, f"left over: {self._running} {dict(self._pending)}"
            )

    async def generate(self, prompt: PromptRequest) -> AsyncGenerator[RouterEvent]:
        if prompt.tail is TailVariant.EXACT:
            raise InvalidArgument(
                "options.cache_policy.tail", "tail EXACT is not supported by this version"
            )
        execution = Execution(prompt, self._generations.get(prompt.request_id, 0))
        placed = planned = False
        avoid: set[str] = set()
        for attempt in range(MAX_EXECUTIONS):
            route = await self._place(avoid, self._home(prompt))
            try:
                async with aclosing(self._execute(execution, route, avoid)) as events:
                    async for event in events:
                        match event:
                            case Reserved() if not placed:
                                placed, planned = True, execution.recipe is not None
                                yield Placed(
                                    route.decoder, route.encoder, execution.recipe, route.reason
                                )
                            case Tokens():
                                execution.stream(event)
                                yield event
                            case Finished():
                                self._remember(prompt, route.decoder)
                                yield execution.finish(event)
                                return
                        if not planned and execution.recipe is not None:
                            planned = True
                            yield Planned(execution.recipe)
            except RipresaError as error:
                if attempt == MAX_EXECUTIONS - 1 or not self._may_retry(error, route, avoid):
                    raise
                logger.warning("request %s is executed again: %s", prompt.request_id, error)

    async def _place(self, avoid: set[str], home: str | None) -> RoutePlan:
        try:
            return plan_route(self._view.workers(), self._pending, avoid, home)
        except Unavailable:
            await self._view.refresh()
            return plan_route(self._view.workers(), self._pending, avoid, home)

    def _home(self, prompt: PromptRequest) -> str | None:
        """Where the prompt's session was served last, if it may go on from there."""
        if prompt.session_id is None or not prompt.cache.resumes:
            return None
        return self._homes.get((prompt.tenant_salt, prompt.session_id))

    def _remember(self, prompt: PromptRequest, decoder: str) -> None:
        if prompt.session_id is None:
            return
        key = (prompt.tenant_salt, prompt.session_id)
        self._homes[key] = decoder
        self._homes.move_to_end(key)
        if len(self._homes) > MAX_SESSIONS:
            self._homes.popitem(last=False)

    def _may_retry(self, error: RipresaError, route: RoutePlan, avoid: set[str]) -> bool:
        """Whether another execution may do what this one did not."""
        if isinstance(error, _PrefillFailed):
            return True
        if isinstance(error, Unreachable):
            self._view.lost(route.decoder)
        avoid.add(route.decoder)
        if error.code is ErrorCode.UNAVAILABLE:
            return True
        # A worker whose pools are full; another one may have room.
        return error.code is ErrorCode.RESOURCE_EXHAUSTED and any(
            w.kind is WorkerKind.DECODE and w.worker_id not in avoid for w in self._view.workers()
        )

    async def _execute(
        self, execution: Execution, route: RoutePlan, avoid: set[str]
    ) -> AsyncGenerator[EngineEvent]:
        """One execution's events; a failure of it is raised."""
        request = execution.next_request()
        stream = EventStream()
        is_ours = True
        self._running[request.request_id] = route.decoder
        with self._counted(route.decoder):
            try:
                stream.start(self._decode(execution, route, request, stream))
                stream.start(self._raise_when_gone(route.decoder))
                yield await self._reservation(stream, route.decoder)
                prefill: asyncio.Task[None] | None = None
                if route.encoder is not None:
                    prefill = stream.start(
                        self._prefill(execution, route.encoder, route.decoder, avoid, stream)
                    )
                while True:
                    event = await stream.next()
                    if isinstance(event, Finished) and prefill is not None:
                        # The encoder's answer carries its counters; it is on its way.
                        await asyncio.wait({prefill}, timeout=1.0)
                    yield event
            except RipresaError as error:
                # Then the id is another gateway's, and so are its generations.
                is_ours = error.code is not ErrorCode.ALREADY_EXISTS
                raise
            finally:
                self._running.pop(request.request_id, None)
                if is_ours:
                    self._outdate(request.request_id, execution.next_generation)
                await stream.close()

    def _outdate(self, request_id: str, next_generation: int) -> None:
        """A later request with this id replaces what workers have not heard the end of yet."""
        self._generations[request_id] = next_generation
        self._generations.move_to_end(request_id)
        if len(self._generations) > MAX_REMEMBERED_IDS:
            self._generations.popitem(last=False)

    async def _decode(
        self,
        execution: Execution,
        route: RoutePlan,
        request: GenerationRequest,
        stream: EventStream,
    ) -> None:
        """Put the decode worker's events into the stream; the recipe is known before its reader."""
        local = route.encoder is None
        async with aclosing(self._calls.generate(route.decoder, request, local)) as events:
            async for event in events:
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Reserved | RecipeFixed | PrefillDone):
                    execution.fix(event.recipe)
                stream.put(event)
                if isinstance(event, Finished):
                    return
        raise Unreachable(f"decode worker {route.decoder} ended the stream early")

    async def _reservation(self, stream: EventStream, decoder: str) -> EngineEvent:
        try:
            async with asyncio.timeout(self._reserve_timeout_s):
                return await stream.next()
        except TimeoutError:
            raise Unreachable(f"decode worker {decoder} does not answer") from None

    async def _raise_when_gone(self, worker_id: str) -> None:
        await self._view.gone(worker_id)
        raise Unreachable(f"worker {worker_id} does not report any more")

    async def _prefill(
        self,
        execution: Execution,
        encoder: str,
        decoder: str,
        avoid: set[str],
        stream: EventStream,
    ) -> None:
        """Prefill on one encoder after another until one succeeds.

        Raises:
            RipresaError: no encoder could.
        """
        while True:
            try:
                with self._counted(encoder):
                    await self._prefill_once(execution, encoder, decoder)
                return
            except RipresaError as error:
                if stream.has_state:
                    logger.warning("encoder %s failed after its work was done: %s", encoder, error)
                    return
                if error.code not in (ErrorCode.UNAVAILABLE, ErrorCode.RESOURCE_EXHAUSTED):
                    raise
                logger.warning("encoder %s did not prefill: %s", encoder, error)
                avoid.add(encoder)
                if isinstance(error, Unreachable):
                    self._view.lost(encoder)
                workers = self._view.workers()
                another = least_loaded(workers, WorkerKind.ENCODER, self._pending, avoid)
                if another is None:
                    raise _PrefillFailed(f"no encoder could prefill the prompt: {error}") from error
                encoder = another

    async def _prefill_once(self, execution: Execution, encoder: str, decoder: str) -> None:
        call = asyncio.create_task(
            self._calls.prefill(encoder, execution.next_request(), decoder), name="prefill"
        )
        watch = asyncio.create_task(self._raise_when_gone(encoder), name="watch")
        try:
            await asyncio.wait({call, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                watch.result()
            execution.prefilled(call.result())
        finally:
            await end_tasks((call, watch))

    @contextmanager
    def _counted(self, worker_id: str) -> Iterator[None]:
        self._pending[worker_id] += 1
        try:
            yield
        finally:
            self._pending[worker_id] -= 1
            if not self._pending[worker_id]:
                del self._pending[worker_id]


class Execution:
    """What is known of a request over all its executions.

    Attributes:
        recipe: fixed by the worker that ran the encoder rows first; it never changes.
        next_generation: above those of every execution so far.
    """

    def __init__(self, prompt: PromptRequest, first_generation: int) -> None:
        self._prompt = prompt
        self.recipe: Recipe | None = None
        self._streamed: list[int] = []
        self.next_generation = first_generation
        self._prefill_counters = WorkCounters()

    def fix(self, recipe: Recipe | None) -> None:
        """Book the recipe that a worker reports; raises RipresaError (INTERNAL) for another one."""
        if self.recipe is None:
            self.recipe = recipe
        elif recipe != self.recipe:
            raise RipresaError(
                ErrorCode.INTERNAL,
                f"request {self._prompt.request_id} was executed by another recipe than its first",
            )

    def stream(self, tokens: Tokens) -> None:
        """Book tokens on their way to the client."""
        self._streamed += tokens.token_ids

    def prefilled(self, counters: WorkCounters) -> None:
        """Book an encoder's work."""
        self._prefill_counters = counters

    def finish(self, finished: Finished) -> Finished:
        """The last worker's event, with the work of the encoder added."""
        own, encoder = finished.counters, self._prefill_counters
        counters = replace(own, encoder_rows=own.encoder_rows + encoder.encoder_rows)
        return replace(finished, counters=counters)

    def next_request(self) -> GenerationRequest:
        """The request from the prompt and what was streamed; it outdates every earlier one."""
        generation = self.next_generation
        self.next_generation += 1
        return GenerationRequest(
            request_id=self._prompt.request_id,
            generation=generation,
            token_ids=self._prompt.token_ids + tuple(self._streamed),
            num_prompt_tokens=len(self._prompt.token_ids),
            recipe=self.recipe,
            sampling=self._prompt.sampling,
            deadline=self._prompt.deadline,
            tail=self._prompt.tail,
            cache=self._prompt.cache,
            tenant_salt=self._prompt.tenant_salt,
            session_id=self._prompt.session_id,
        )


class _PrefillFailed(Unavailable):
    """No encoder could prefill; the decode worker is not at fault."""
