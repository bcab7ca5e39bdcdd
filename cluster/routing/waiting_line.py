"""Who tries next when every worker that could take a request is full, or none is ready?

    refused by all ─▶ join ─▶ turn: first in the line, and something has changed ─▶ try ─┬▶ leave
                                ▲                                                        │
                                └─────────────────────── refused again ──────────────────┘

One line a gateway: lower priority numbers come first, and among equals whoever came first. News are
a worker's report, the end of one of the gateway's own requests, and somebody's leaving the line.
"""

from __future__ import annotations

import asyncio
import math
from bisect import insort
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count

from ripresa.cluster.routing.event_stream import end_tasks
from ripresa.workers.errors import ErrorCode, ResourceExhausted, RipresaError

STARTED_WAIT_S = 120.0
"""A stream that lost its worker waits so long for another one, at least."""


class QueueTimeout(ResourceExhausted):
    """Every worker stayed full for as long as the request may wait."""


@dataclass(order=True, slots=True)
class Place:
    """A request's place in the line.

    Attributes:
        priority: lower ones come first.
        number: ascends with every place.
        news: what its next try waits for, since its last one; None if it has not tried.
    """

    priority: float
    number: int
    news: asyncio.Event | None = field(default=None, compare=False)


class WaitingLine:
    """The requests of one gateway that wait for room, in order.

    Args:
        reported: returns once a worker has reported again, came or went.

    Attributes:
        news: set, and replaced by another one, whenever something ends that may leave room.
    """

    def __init__(self, reported: Callable[[], Awaitable[None]]) -> None:
        self.news = asyncio.Event()
        self._reported = reported
        self._line: list[Place] = []
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._line)

    def comes_before(self, priority: float) -> bool:
        """Whether somebody waits who comes before a newcomer of this priority."""
        return bool(self._line) and self._line[0].priority <= priority

    @contextmanager
    def place(self, priority: float, news: asyncio.Event | None = None) -> Iterator[Place]:
        """A place in the line, for as long as the body runs.

        Args:
            news: `WaitingLine.news` as it was before the request was refused; None if it was not.
        """
        place = Place(priority, next(self._numbers), news)
        insort(self._line, place)
        try:
            yield place
        finally:
            self._line.remove(place)
            self.freed()

    async def turn(self, place: Place) -> None:
        """Returns when it is this place's turn to try, again if it has tried before."""
        if place.news is not None:
            await self._change(place.news)
        while self._line[0] is not place:
            await self.news.wait()
        place.news = self.news

    def freed(self) -> None:
        """Something has ended: there may be room."""
        self.news.set()
        self.news = asyncio.Event()

    async def _change(self, news: asyncio.Event) -> None:
        """Returns once there may be more room than before."""
        waits = [asyncio.ensure_future(news.wait()), asyncio.ensure_future(self._reported())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end_tasks(waits)


class Wait:
    """One request's dealings with the line; when the body ends, it has left.

    Args:
        priority: lower ones come first.
        max_s: longest wait; 0 to be refused rather than wait.
    """

    def __init__(self, line: WaitingLine, priority: int, max_s: float) -> None:
        self._line = line
        self._priority: float = priority
        self._max_s = max_s
        self._news = line.news
        self._place: Place | None = None
        self._until: float | None = None
        self._held = ExitStack()
        self._scope: asyncio.Timeout | None = None
        self._has_turn = False
        self._is_aborted = False

    def __enter__(self) -> Wait:
        return self

    def __exit__(self, *exception: object) -> None:
        self._held.close()
        self._line.freed()

    async def turn(self) -> None:
        """Returns when the request may try; until it is refused or admitted, at once.

        Raises:
            RipresaError: RESOURCE_EXHAUSTED (a `QueueTimeout`), or CANCELLED after `abort`.
        """
        if self._has_turn:
            return
        if self._place is None and self._line.comes_before(self._priority):
            if self._max_s <= 0:
                raise QueueTimeout(
                    f"{len(self._line)} requests wait for room and come first; let the request "
                    "wait too (max_queue_time), or try again"
                )
            self._join(None)
        if self._place is None:
            self._news = self._line.news
            self._has_turn = True
            return
        try:
            async with asyncio.timeout_at(self._until) as self._scope:
                await self._line.turn(self._place)
            self._has_turn = True
        except TimeoutError:
            if self._is_aborted:
                raise RipresaError(ErrorCode.CANCELLED, "the request was aborted") from None
            raise QueueTimeout(
                f"no worker had room for the request within {self._max_s:g} s (max_queue_time, or "
                "gateway.max_queue_time_s); try again, or add decode workers"
            ) from None
        finally:
            self._scope = None

    def started(self) -> None:
        """Its client has tokens of it: from now on it comes before all others, and waits for a
        while whatever was asked."""
        self._priority, self._max_s = -math.inf, max(self._max_s, STARTED_WAIT_S)

    def refused(self) -> bool:
        """Every worker is full, or none is ready; whether to try again at the next turn."""
        self._has_turn = False
        if self._max_s <= 0:
            return False
        if self._place is None:
            self._join(self._news)
        return True

    def admitted(self) -> None:
        """A worker has taken it; the next one in the line may try."""
        self._held.close()
        self._place, self._has_turn = None, False

    def abort(self) -> bool:
        """End its wait; False if it does not wait."""
        if self._scope is None:
            return False
        self._is_aborted = True
        self._scope.reschedule(asyncio.get_running_loop().time())
        return True

    def _join(self, news: asyncio.Event | None) -> None:
        self._place = self._held.enter_context(self._line.place(self._priority, news))
        self._until = asyncio.get_running_loop().time() + self._max_s
