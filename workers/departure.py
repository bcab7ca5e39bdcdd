"""How does a worker leave without losing anything? It ends what runs, and gives the rest away.

    READY ── drain ──▶ DRAINING ── streams end, or go on elsewhere after the grace ──▶ DRAINED
      ▲                    │          └ sessions with their blocks, and last copies, go elsewhere
      └────── stay ────────┴──────────────────────────────────────────────────────────────┘

Streams that no other worker could take stay until one is ready, or they have ended.

A session moves as if its next turn had come elsewhere: the receiver pulls state and blocks from
here. This worker keeps its copies, so a drained worker still answers pulls until it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ripresa.workers.address import WorkerAddress
from ripresa.workers.cache.parked_states import ParkedSession
from ripresa.workers.errors import ErrorCode, RipresaError, Unavailable, WorkerLeaving, reason_of
from ripresa.workers.prefix_sources import BlockSource, ImageSource, PrefixSources
from ripresa.workers.replay import ReplayMode, TailVariant
from ripresa.workers.report import SessionMove, WorkerState
from ripresa.workers.request import CacheUse, GenerationRequest, SamplingParams

logger = logging.getLogger(__name__)

NUM_MOVES_AT_ONCE = 4
MOVE_TIMEOUT_S = 60.0
"""Longest wait for one session's move; its pulls have shorter times of their own."""
PROGRESS_INTERVAL_S = 0.25
ASK_TIMEOUT_S = 5.0
ASK_INTERVAL_S = 1.0
"""Between two questions whether another worker is ready: longer than gateways take to see it."""
NEWS_S = 1.0
"""So long it may take until it is known that a worker leaves."""


@dataclass(frozen=True, slots=True)
class DrainOrder:
    """How a worker is to leave.

    Attributes:
        grace_s: how long its streams may go on here while others could take them; about
            `NEWS_S` if it is less.
        receivers: who may take its sessions; empty to give none away.
        gives_blocks: its last copies go to workers that have room for them.
    """

    grace_s: float
    receivers: tuple[WorkerAddress, ...] = ()
    gives_blocks: bool = False


@dataclass(frozen=True, slots=True)
class DrainProgress:
    """How far it is.

    Attributes:
        num_running: requests that it still has.
        num_sessions: sessions whose state is parked here and nowhere else.
        num_bytes: sent to other workers since the drain began.
    """

    state: WorkerState
    num_running: int
    num_sessions: int
    num_bytes: int


class Leaving(Protocol):
    """What an engine does for its departure."""

    @property
    def num_requests(self) -> int:
        """Requests that it has, those included whose prefix is still brought."""

    @property
    def num_bytes_served(self) -> int:
        """Bytes of cached state that it has sent to other workers so far."""

    @property
    def window(self) -> int:
        """W, tokens in a block."""

    def leave(self) -> None:
        """Refuse new requests. Idempotent."""

    def stay(self) -> None:
        """Take new requests again. Idempotent."""

    async def emptied(self) -> None:
        """Return when it has no request."""

    def fail_all(self, error: RipresaError) -> None:
        """End every request with this error."""

    async def give_blocks(self) -> None:
        """Let other workers keep the last copies that are here, as far as they have room.

        Raises:
            RipresaError: nobody says who should.
        """

    def sessions(self) -> Sequence[ParkedSession[Any]]:
        """The sessions whose states are parked, the latest first."""


Adopt = Callable[[WorkerAddress, GenerationRequest], Awaitable[bool]]
"""Has a worker bring the state of a request's session, and its blocks, from the sources it names.

Whether the session can go on there. Raises RipresaError: the worker is gone, or takes nothing.
"""
Tell = Callable[[Sequence[SessionMove]], Awaitable[None]]
"""Tells gateways, by whatever way, where sessions are now. Raises RipresaError if it cannot."""
HasOther = Callable[[], Awaitable[bool]]
"""Whether another decode worker takes requests, so that those that fail here go on there.

Raises RipresaError if nobody knows.
"""


class Departure:
    """One worker's way out, and back. Used on the engine's event loop.

    Args:
        engine: what it leaves with.
        own: this worker.
        adopt: how another worker is asked to take a session.
        tell: hears of the moves.
        has_other: whether somebody could go on with its requests.
        on_change: called when the state has changed.
    """

    def __init__(
        self,
        engine: Leaving,
        own: WorkerAddress,
        adopt: Adopt,
        tell: Tell,
        has_other: HasOther,
        on_change: Callable[[], None],
    ) -> None:
        self._on_change = on_change
        self._engine = engine
        self._own = own
        self._adopt = adopt
        self._tell = tell
        self._has_other = has_other
        self._task: asyncio.Task[None] | None = None
        self._order: DrainOrder | None = None
        self._state = WorkerState.READY
        self._moved: set[tuple[bytes, str, int]] = set()
        self._bytes_before = 0
        self._num_moves = 0

    @property
    def state(self) -> WorkerState:
        return self._state

    @property
    def progress(self) -> DrainProgress:
        return DrainProgress(
            self._state,
            self._engine.num_requests,
            len(self._left()),
            self._engine.num_bytes_served - self._bytes_before,
        )

    async def drain(self, order: DrainOrder) -> AsyncGenerator[DrainProgress]:
        """Leave, and tell how far it is until it is done. Closing this does not call it off.

        A second order replaces the first one's grace and receivers.

        Raises:
            Unavailable: the drain was called off.
            RipresaError: INTERNAL; it failed: the worker takes nothing new, and may be drained
                again.
        """
        self._begin(order)
        told: DrainProgress | None = None
        while True:
            task = self._task
            if task is None:
                raise Unavailable("the drain was called off: the worker serves again")
            now = self.progress
            if now != told:
                yield now
                told = now
            if now.state is WorkerState.DRAINED:
                return
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise RipresaError(
                    ErrorCode.INTERNAL,
                    f"the drain failed: {error!r}; drain the worker again, or let it serve again",
                ) from error
            await asyncio.wait({task}, timeout=PROGRESS_INTERVAL_S)

    async def stay(self) -> None:
        """Serve again. Idempotent."""
        await self._end_task()
        self._engine.stay()
        self._move_to(WorkerState.READY)

    async def close(self) -> None:
        """The process ends."""
        await self._end_task()

    def _begin(self, order: DrainOrder) -> None:
        is_dead = (
            self._state is WorkerState.DRAINING and self._task is not None and self._task.done()
        )
        if self._state is not WorkerState.READY and order == self._order and not is_dead:
            return
        if self._task is not None:
            self._task.cancel()
        if self._state is WorkerState.READY:
            self._bytes_before = self._engine.num_bytes_served
            self._moved.clear()
        self._order = order
        self._move_to(WorkerState.DRAINING)
        self._engine.leave()
        self._task = asyncio.create_task(self._run(order), name="drain")

    async def _end_task(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self, order: DrainOrder) -> None:
        try:
            await self._leave(order)
        except Exception:
            logger.exception("the drain failed")
            raise

    async def _leave(self, order: DrainOrder) -> None:
        try:
            async with asyncio.timeout(order.grace_s):
                await self._give_away(order.receivers)
                await self._engine.emptied()
        except TimeoutError:
            await self._hand_on(is_known=order.grace_s >= NEWS_S)
        # Those whose turns have ended meanwhile.
        await self._give_away(order.receivers)
        if order.gives_blocks:
            try:
                await self._engine.give_blocks()
            except RipresaError as error:
                logger.warning("no blocks were given away: %s", error)
            except Exception:
                # They are copies; the sessions and streams are safe already.
                logger.exception("giving blocks away failed")
        self._move_to(WorkerState.DRAINED)

    async def _hand_on(self, *, is_known: bool) -> None:
        """Fail what runs, so that it goes on elsewhere, as soon as somebody could take it.

        Args:
            is_known: who began to leave at the same time would be known by now.
        """
        has_waited = False
        while self._engine.num_requests:
            is_there = await self._is_replaceable()
            if is_there and is_known and not has_waited:
                logger.info("%d requests go on elsewhere", self._engine.num_requests)
                self._engine.fail_all(
                    WorkerLeaving("the worker is leaving; another one can serve the request")
                )
                await self._engine.emptied()
                return
            if not is_there and not has_waited:
                logger.warning(
                    "%d requests go on here until they end, or another decode worker is ready",
                    self._engine.num_requests,
                )
            # One that has just come is seen once more, so that gateways know it too.
            has_waited, is_known = not is_there, True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ASK_INTERVAL_S):
                    await self._engine.emptied()

    async def _is_replaceable(self) -> bool:
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                return await self._has_other()
        except (RipresaError, TimeoutError) as error:
            logger.warning("whether another worker is ready is not known: %s", reason_of(error))
            return False

    def _move_to(self, state: WorkerState) -> None:
        self._state = state
        self._on_change()

    def _left(self) -> list[ParkedSession[Any]]:
        """Sessions that are parked here alone."""
        return [session for session in self._engine.sessions() if _key(session) not in self._moved]

    async def _give_away(self, receivers: Sequence[WorkerAddress]) -> None:
        """Have the receivers take all sessions, in turns, a few at once."""
        if not receivers:
            return
        left = iter(self._left())
        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_MOVES_AT_ONCE):
                group.create_task(self._give(left, receivers))

    async def _give(
        self, left: Iterable[ParkedSession[Any]], receivers: Sequence[WorkerAddress]
    ) -> None:
        for session in left:
            first = self._num_moves
            self._num_moves += 1
            for place in range(len(receivers)):
                receiver = receivers[(first + place) % len(receivers)]
                if await self._has_taken(receiver, session, first):
                    self._moved.add(_key(session))
                    await self._tell_move(receiver, session)
                    break

    async def _has_taken(
        self, receiver: WorkerAddress, session: ParkedSession[Any], number: int
    ) -> bool:
        request = self._request(session, number)
        try:
            async with asyncio.timeout(MOVE_TIMEOUT_S):
                return await self._adopt(receiver, request)
        except (RipresaError, TimeoutError) as error:
            logger.warning("%s took no session: %s", receiver.worker_id, reason_of(error))
            return False
        except Exception:
            # One session's failure holds up no other one; it stays here, and is counted.
            logger.exception("%s took no session", receiver.worker_id)
            return False

    def _request(self, session: ParkedSession[Any], number: int) -> GenerationRequest:
        """A turn of the session that is never run: what it needs is what is to be brought."""
        tokens, recipe, window = session.state.token_ids, session.state.recipe, self._engine.window
        num_blocks = len(tokens) // window
        blocks: tuple[BlockSource, ...] = ()
        if num_blocks:
            restarts = recipe.restarts_below(num_blocks * window)
            blocks = (BlockSource(self._own, restarts, 0, num_blocks),)
        mode = ReplayMode.EXACT if recipe.tail is TailVariant.EXACT else ReplayMode.BOUNDED
        return GenerationRequest(
            # No client's request has a space in its id.
            request_id=f"move {number} of {self._own.worker_id}",
            generation=0,
            # A state is for a true prefix of a turn's tokens.
            token_ids=(*tokens, tokens[-1]),
            num_prompt_tokens=len(tokens) + 1,
            recipe=None,
            sampling=SamplingParams(max_tokens=1),
            tail=recipe.tail,
            cache=CacheUse(mode),
            tenant_salt=session.tenant_salt,
            session_id=session.session_id,
            sources=PrefixSources(blocks, image=ImageSource(self._own, len(tokens))),
        )

    async def _tell_move(self, receiver: WorkerAddress, session: ParkedSession[Any]) -> None:
        salt, session_id, num_tokens = _key(session)
        try:
            await self._tell([SessionMove(salt, session_id, num_tokens, receiver.worker_id)])
        except RipresaError as error:
            logger.warning("nobody heard where a session is now: %s", error)


def _key(session: ParkedSession[Any]) -> tuple[bytes, str, int]:
    return session.tenant_salt, session.session_id, len(session.state.token_ids)
