"""What does a worker say about itself, and how often? Registration and load, as one message."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import count

from ripresa.workers.address import WorkerKind
from ripresa.workers.errors import RipresaError, reason_of
from ripresa.workers.request import EngineStats

logger = logging.getLogger(__name__)


class WorkerState(StrEnum):
    """READY: it takes requests. DRAINING: it ends those it has. DRAINED: nothing is left on it."""

    READY = "ready"
    DRAINING = "draining"
    DRAINED = "drained"


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """A worker's registration, renewed with every heartbeat.

    Attributes:
        worker_id: unique for ever; a restarted process has another one.
        kind: what it does.
        node_id, pid: where it runs.
        num_parameters: model parameters it holds.
        stats: load and work so far.
        layout_digest: of its KV layout; names of blocks depend on it.
        block_bytes, window_bytes, hand_over_bytes, image_bytes: what of a prompt's state travels:
            block KV of one block, one encoder window, everything of a hand-over but whole blocks,
            a session's parked state.
        capacity_tokens: positions that its KV pool holds; None for a worker that does not say.
        state: whether it takes new work.
        number: of this heartbeat among the worker's; 0 for a report that was asked for.
    """

    worker_id: str
    kind: WorkerKind
    node_id: str
    pid: int
    num_parameters: int
    stats: EngineStats
    layout_digest: bytes = b""
    block_bytes: int = 0
    window_bytes: int = 0
    hand_over_bytes: int = 0
    image_bytes: int = 0
    capacity_tokens: int | None = None
    state: WorkerState = WorkerState.READY
    number: int = 0

    @property
    def is_leaving(self) -> bool:
        """It takes no new work; what it holds can still be pulled."""
        return self.state is not WorkerState.READY


@dataclass(frozen=True, slots=True)
class SessionMove:
    """A session's state of `num_tokens` positions is parked on another worker now."""

    tenant_salt: bytes
    session_id: str
    num_tokens: int
    worker_id: str


class Heartbeat:
    """Sends reports until it is stopped; the first one at once.

    A report that cannot be delivered is logged and the next one tried: the receiver may restart,
    and a worker goes on serving without it.
    """

    def __init__(
        self,
        make: Callable[[], WorkerReport],
        send: Callable[[WorkerReport], Awaitable[None]],
        interval_s: float,
    ) -> None:
        self._make = make
        self._send = send
        self._interval_s = interval_s
        self._is_due = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def soon(self) -> None:
        """Something changed that others should hear of: report now, not when it is time."""
        self._is_due.set()

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="heartbeat")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        for number in count(1):
            try:
                async with asyncio.timeout(10 * self._interval_s):
                    await self._send(replace(self._make(), number=number))
            except (RipresaError, TimeoutError) as error:
                logger.warning("a report was not delivered: %s", reason_of(error))
            with suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._is_due.wait()
            self._is_due.clear()
