"""How is one request driven to its end? Place it, run both workers, retry what a worker lost.

place ─▶ decode.generate ─▶ Reserved ─▶ encoder.prefill ─▶ PrefillDone ─▶ Tokens.. ─▶ Finished
  ▲           ▲                              │ fails: another encoder, else local
  │           └──── decode worker lost: again by the same recipe, from what was streamed ────┘
  ├── a followed leader is gone: ask the directory again
  └── every decode worker is full, or none is ready: wait for a turn

A resumed request follows the execution that some worker keeps; if none does, it is executed so too.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Protocol

from ripresa.cluster.routing.event_stream import EventStream, end_tasks
from ripresa.cluster.routing.execution import Execution
from ripresa.cluster.routing.kept_execution import KeptExecutions, ResumeCalls
from ripresa.cluster.routing.plan_log import explanation
from ripresa.cluster.routing.planner import NoWorker
from ripresa.cluster.routing.prefix_hints import PrefixHints, new_claim
from ripresa.cluster.routing.prompt import (
    CaughtUp,
    Hold,
    Placed,
    Planned,
    PromptRequest,
    RouterEvent,
    Waste,
)
from ripresa.cluster.routing.route_finder import Placement, RouteFinder, WorkerView
from ripresa.cluster.routing.turn_leases import LeaseCalls, TurnLeases
from ripresa.cluster.routing.waiting_line import QueueTimeout, Wait, WaitingLine
from ripresa.cluster.routing.worker_load import PlannerSettings
from ripresa.workers.address import WorkerKind
from ripresa.workers.errors import (
    ErrorCode,
    LeaderGone,
    RipresaError,
    Unavailable,
    Unreachable,
    WorkerLeaving,
)
from ripresa.workers.kept_streams import KeptPrompt
from ripresa.workers.prefix_sources import PrefixOutcome
from ripresa.workers.request import (
    Bringing,
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

MAX_REMEMBERED_IDS = 10_000
MAX_EXECUTIONS = 4
"""Executions of one request that may fail; the last one's error is the client's answer."""
MAX_LEADERS_LOST = 8
"""Leaders that one request waits for in vain before it computes by itself."""


class WorkerCalls(LeaseCalls, ResumeCalls, Protocol):
    """The way to workers. Every failure is a RipresaError; a lost worker is UNAVAILABLE."""

    def generate(
        self, worker_id: str, request: GenerationRequest, local: bool, hold: Hold
    ) -> AsyncGenerator[EngineEvent]: ...

    async def prefill(
        self, worker_id: str, request: GenerationRequest, receiver: str, hold: Hold
    ) -> WorkCounters: ...

    async def abort(self, worker_id: str, request_id: str) -> bool: ...


class ClusterRouter:
    """Runs prompts on the cluster's workers; implements `Router`.

    Args:
        view: which workers there are.
        calls: how they are reached.
        hints: what the prefix directory knows.
        settings: how routes are compared.
        reserve_timeout_s: longest wait for a decode worker's first word, and for another report
            of one that is to be asked again.
        on_waste: hears of prompt tokens that were computed in vain.
        abort_elsewhere: asks the routers of other gateways to `abort_waiting`; None if there are
            none.

    Attributes:
        log: the newest plans.
        leases: tells workers what their turns led to.
    """

    def __init__(
        self,
        view: WorkerView,
        calls: WorkerCalls,
        hints: PrefixHints,
        settings: PlannerSettings,
        reserve_timeout_s: float = 5.0,
        on_waste: Callable[[Waste, int], None] | None = None,
        abort_elsewhere: Callable[[str], Awaitable[bool]] | None = None,
    ) -> None:
        self._view = view
        self._calls = calls
        self._routes = RouteFinder(view, hints, settings, reserve_timeout_s)
        self._kept = KeptExecutions(view, calls)
        self._settings = settings
        self._reserve_timeout_s = reserve_timeout_s
        self._on_waste = on_waste
        self._abort_elsewhere = abort_elsewhere
        self._line = WaitingLine(view.changed)
        self.leases = TurnLeases(calls)
        self.log = self._routes.log
        self._generations: OrderedDict[str, int] = OrderedDict()
        self._life = uuid.uuid4().hex
        self._running: dict[str, str] = {}
        self._waits: dict[str, Wait] = {}

    @property
    def window(self) -> int:
        """W, tokens in a block."""
        return self._routes.window

    async def why_not_ready(self) -> NoWorker | None:
        return self._routes.nobody()

    async def num_held_tokens(self, token_ids: Sequence[int], tenant_salt: bytes) -> int:
        return await self._routes.num_held_tokens(token_ids, tenant_salt)

    def explain(self, request_id: str) -> list[str]:
        found = self.log.find(request_id)
        if found is None:
            raise RipresaError(
                ErrorCode.NOT_FOUND,
                f"no plan of request {request_id} is remembered; the newest "
                f"{self._settings.log_plans} are (planner.log_plans)",
                field="request_id",
            )
        return explanation(found, self.window)

    async def abort(self, request_id: str) -> bool:
        if self.abort_waiting(request_id):
            return True
        here = self._running.get(request_id)
        decoders = [w.worker_id for w in self._view.workers() if w.kind is WorkerKind.DECODE]

        def on_workers() -> list[Awaitable[bool]]:
            workers = decoders if here is None else [here]
            return [self._calls.abort(worker, request_id) for worker in workers]

        if here is not None or self._abort_elsewhere is None:
            return await _any_found(on_workers())
        if await _any_found([*on_workers(), self._abort_elsewhere(request_id)]):
            return True
        # Who has left another gateway's line meanwhile is on a worker now.
        return await _any_found(on_workers())

    def abort_waiting(self, request_id: str) -> bool:
        """End a request that waits for room in this router; False if none of this id does."""
        wait = self._waits.get(request_id)
        return wait is not None and wait.abort()

    def called(self, request_id: str, tools: Sequence[str]) -> None:
        self.leases.called(request_id, tools)

    async def end_session(self, tenant_salt: bytes, session_id: str) -> None:
        decoders = [w.worker_id for w in self._view.workers() if w.kind is WorkerKind.DECODE]
        await self.leases.end_session(decoders, tenant_salt, session_id)

    def check_integrity(self) -> None:
        """Raise RipresaError (INTERNAL) if an idle router still counts requests."""
        if self._running or self._waits or len(self._line) or not self._routes.pending.is_empty:
            raise RipresaError(
                ErrorCode.INTERNAL,
                f"left over: {self._running} {self._waits} {self._routes.pending}",
            )

    async def find_stream(self, stream_id: str, worker_id: str) -> KeptPrompt | None:
        found = await self._kept.find(stream_id, 0, worker_id)
        return None if found is None else found.prompt

    def generate(self, prompt: PromptRequest) -> AsyncGenerator[RouterEvent]:
        return self._wait_and_drive(self._execution(prompt))

    async def resume(self, prompt: PromptRequest) -> AsyncGenerator[RouterEvent]:
        execution = self._execution(prompt)
        async with aclosing(self._kept.follow(execution)) as events:
            async for event in events:
                if isinstance(event, Finished):
                    self.leases.ended(prompt.request_id, execution.followed_on)
                    yield event
                    return
                yield event
        if not execution.is_followed:
            yield CaughtUp(is_lost=True)
        async with aclosing(self._wait_and_drive(execution)) as events:
            async for event in events:
                yield event

    def _execution(self, prompt: PromptRequest) -> Execution:
        first_generation = self._generations.get(prompt.request_id, 0)
        return Execution(prompt, first_generation, new_claim(), self._life)

    async def _wait_and_drive(self, execution: Execution) -> AsyncGenerator[RouterEvent]:
        prompt = execution.prompt
        with Wait(self._line, prompt.priority, prompt.max_queue_s) as wait:
            self._waits[prompt.request_id] = wait
            try:
                async with aclosing(self._drive(execution, wait)) as events:
                    async for event in events:
                        yield event
            finally:
                # A resumed stream may be driven twice here, until one of the two sees the other.
                self._waits.pop(prompt.request_id, None)

    async def _drive(self, execution: Execution, wait: Wait) -> AsyncGenerator[RouterEvent]:
        """Execute a request from where it stands, again and again until it is finished."""
        prompt = execution.prompt
        log = self.log.begin(prompt.request_id, len(prompt.token_ids))
        avoid: set[str] = set()
        gone: str | None = None
        retries = _Retries()
        num_leaders_lost = 0
        failure: RipresaError | None = None
        nobody: NoWorker | None = None
        while True:
            follows = num_leaders_lost < MAX_LEADERS_LOST
            try:
                await wait.turn()
                route = await self._routes.place(execution, avoid, log, gone, follows=follows)
                nobody = None
            except NoWorker as error:
                nobody = error
                if wait.refused():
                    continue
                raise self._untaken(execution, failure, nobody) from None
            except QueueTimeout:
                # Whoever has come since the last try is waited for as others are.
                missing = self._routes.nobody(execution.max_total_tokens)
                if missing is None and failure is not None:
                    missing = nobody
                if missing is None:
                    raise
                raise self._untaken(execution, failure, missing) from None
            try:
                async with aclosing(self._execute(execution, route, avoid)) as events:
                    async for event in events:
                        log.recipe = execution.recipe
                        if isinstance(event, Reserved):
                            wait.admitted()
                        if not execution.is_planned and execution.recipe is not None:
                            execution.prefix = route.outcome or PrefixOutcome()
                        match event:
                            case Reserved() if not execution.is_placed:
                                execution.is_placed = True
                                execution.is_planned = execution.recipe is not None
                                yield Placed(
                                    execution.placed_on,
                                    route.encoder,
                                    execution.recipe,
                                    route.plan.reason,
                                    execution.prefix or PrefixOutcome(),
                                    route.hit_error_tokens,
                                )
                            case Tokens():
                                execution.stream(event)
                                wait.started()
                                yield execution.counted(event)
                            case Finished():
                                self._routes.remember(execution, route.decoder, event)
                                self.leases.ended(prompt.request_id, route.decoder)
                                yield execution.counted(event)
                                return
                        if not execution.is_planned and execution.recipe is not None:
                            execution.is_planned = True
                            yield Planned(
                                execution.recipe,
                                execution.prefix or PrefixOutcome(),
                                route.hit_error_tokens,
                            )
            except (GeneratorExit, asyncio.CancelledError):
                if not execution.has_streamed:
                    self._waste(Waste.CANCELLED, route)
                raise
            except LeaderGone as error:
                route.log.error = str(error)
                num_leaders_lost += 1
                leader = route.hints.leader
                gone = None if leader is None else leader.request_id
            except RipresaError as error:
                route.log.error = str(error)
                failure = error
                if error.code is ErrorCode.RESOURCE_EXHAUSTED and self._may_wait(
                    execution, route, avoid, wait
                ):
                    continue
                may_retry = self._may_retry(error, execution, route, avoid)
                if not may_retry or not retries.take(error, route.decoder, execution.num_tokens):
                    self._waste(Waste.FAILED, route)
                    raise
                self._waste(Waste.RETRIED, route)
                logger.warning("request %s is executed again: %s", prompt.request_id, error)

    def _untaken(
        self, execution: Execution, failure: RipresaError | None, nobody: NoWorker
    ) -> RipresaError:
        """What is told of a request that nobody takes."""
        is_full = failure is not None and failure.code is ErrorCode.RESOURCE_EXHAUSTED
        if failure is None or (is_full and self._routes.nobody(execution.max_total_tokens)):
            return nobody
        # What the last worker said tells more than that there is no other one.
        return failure

    def _waste(self, reason: Waste, route: Placement) -> None:
        if self._on_waste is not None and route.num_computed:
            self._on_waste(reason, route.num_computed)

    def _may_retry(
        self, error: RipresaError, execution: Execution, route: Placement, avoid: set[str]
    ) -> bool:
        """Whether another execution may do what this one did not."""
        if isinstance(error, _PrefillFailed):
            return True
        if isinstance(error, Unreachable):
            self._routes.lost(route.decoder)
        avoid.add(route.decoder)
        return error.code is ErrorCode.UNAVAILABLE

    def _may_wait(
        self, execution: Execution, route: Placement, avoid: set[str], wait: Wait
    ) -> bool:
        """Whether a request that a full worker refused may ask others now, or all of them later."""
        avoid.add(route.decoder)
        if not avoid.issuperset(self._routes.decoders(execution)):
            return True
        if not wait.refused():
            return False
        avoid.clear()
        return True

    async def _execute(
        self, execution: Execution, route: Placement, avoid: set[str]
    ) -> AsyncGenerator[EngineEvent]:
        """One execution's events; a failure of it is raised."""
        is_local = route.encoder is None
        if not execution.is_placed:
            execution.placed_on, execution.prefilled_on = route.decoder, route.encoder
        request = execution.next_request(
            route.computing.sources if is_local else None,
            leads=route.hints.leads,
            max_chunk_rows=route.plan.max_chunk_rows,
            keeps=True,
        )
        stream = EventStream()
        is_ours = True
        self._running[request.request_id] = route.decoder
        num_rows = request.num_tokens - route.computing.hit.start if is_local else self.window
        with self._routes.pending.counted(route.decoder, num_rows) as prefilled:
            try:
                stream.start(self._decode(execution, route, request, stream))
                stream.start(self._raise_when_gone(route.decoder))
                reserved = await self._first_word(stream, route.decoder)
                if isinstance(reserved, Bringing):
                    reserved = await stream.next()
                yield reserved
                prefill: asyncio.Task[None] | None = None
                if not is_local:
                    prefill = stream.start(self._prefill(execution, route, avoid, stream))
                while True:
                    event = await stream.next()
                    if isinstance(event, PrefillDone):
                        prefilled()
                        if execution.recipe is not None:
                            route.num_computed = execution.num_tokens - execution.recipe.start
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
                if not stream.has_state:
                    self._routes.give_up(execution, route)
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
        route: Placement,
        request: GenerationRequest,
        stream: EventStream,
    ) -> None:
        """Put the decode worker's events into the stream; the recipe is known before its reader."""
        local = route.encoder is None
        hold = execution.prompt.hold
        async with aclosing(self._calls.generate(route.decoder, request, local, hold)) as events:
            async for event in events:
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Reserved | RecipeFixed | PrefillDone):
                    execution.fix(event.recipe)
                if (isinstance(event, Reserved) and local) or isinstance(event, RecipeFixed):
                    self._routes.admitted(execution, route, event.prefix)
                stream.put(event)
                if isinstance(event, Finished):
                    return
        raise Unreachable(f"decode worker {route.decoder} ended the stream early")

    async def _first_word(self, stream: EventStream, decoder: str) -> EngineEvent:
        try:
            async with asyncio.timeout(self._reserve_timeout_s):
                return await stream.next()
        except TimeoutError:
            raise Unreachable(f"decode worker {decoder} does not answer") from None

    async def _raise_when_gone(self, worker_id: str) -> None:
        await self._view.gone(worker_id)
        raise Unreachable(f"worker {worker_id} does not report any more")

    async def _prefill(
        self, execution: Execution, route: Placement, avoid: set[str], stream: EventStream
    ) -> None:
        """Prefill on one encoder after another until one succeeds.

        Raises:
            RipresaError: no encoder could.
        """
        while True:
            encoder = route.computing.computing
            try:
                num_rows = execution.num_tokens - route.computing.hit.start
                with self._routes.pending.counted(encoder, num_rows):
                    await self._prefill_once(execution, route)
                return
            except RipresaError as error:
                if stream.has_state:
                    logger.warning("encoder %s failed after its work was done: %s", encoder, error)
                    return
                retryable = (ErrorCode.UNAVAILABLE, ErrorCode.RESOURCE_EXHAUSTED)
                if isinstance(error, LeaderGone) or error.code not in retryable:
                    raise
                logger.warning("encoder %s did not prefill: %s", encoder, error)
                avoid.add(encoder)
                if isinstance(error, Unreachable):
                    self._routes.lost(encoder)
                try:
                    self._routes.take_over(execution, route, avoid)
                except Unavailable:
                    raise _PrefillFailed(f"no encoder could prefill the prompt: {error}") from error

    async def _prefill_once(self, execution: Execution, route: Placement) -> None:
        encoder = route.computing.computing
        request = execution.next_request(route.computing.sources, leads=route.hints.leads)
        call = asyncio.create_task(
            self._calls.prefill(encoder, request, route.decoder, execution.prompt.hold),
            name="prefill",
        )
        watch = asyncio.create_task(self._raise_when_gone(encoder), name="watch")
        try:
            await asyncio.wait({call, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                watch.result()
            execution.prefilled(call.result())
        finally:
            await end_tasks((call, watch))


async def _any_found(asked: Iterable[Awaitable[bool]]) -> bool:
    """Whether anybody found what all were asked for, at once when one has.

    Raises:
        RipresaError: nobody did, and somebody did not say.
    """
    answers = [asyncio.ensure_future(answer) for answer in asked]
    failure: RipresaError | None = None
    try:
        for answer in asyncio.as_completed(answers):
            try:
                if await answer:
                    return True
            except RipresaError as error:
                failure = error
    finally:
        await end_tasks(answers)
    if failure is not None:
        raise failure
    return False


class _Retries:
    """How often one request may still be executed again."""

    def __init__(self) -> None:
        self._num_failed = 0
        self._num_tokens = 0
        self._left: set[str] = set()

    def take(self, error: RipresaError, worker_id: str, num_tokens: int) -> bool:
        """Whether it may be after this failure.

        A move off a worker that is leaving is none, unless there was one off the same worker with
        as many tokens.
        """
        if num_tokens != self._num_tokens:
            self._num_tokens, self._left = num_tokens, set()
        if isinstance(error, WorkerLeaving) and worker_id not in self._left:
            self._left.add(worker_id)
            return True
        self._num_failed += 1
        return self._num_failed < MAX_EXECUTIONS


class _PrefillFailed(Unavailable):
    """No encoder could prefill; the decode worker is not at fault."""
