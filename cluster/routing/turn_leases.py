"""Who tells a worker that a turn which it ran called tools, so that its session will come back?

The worker sees tokens; whoever reads the answer sees calls, when the stream is over. It is told in
the background: what it keeps until then may be evicted like anything else, no more.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from ripresa.workers.errors import RipresaError, reason_of

logger = logging.getLogger(__name__)

MAX_ENDED = 4096
"""Requests that have ended and of whose answers nothing was heard yet."""
TIMEOUT_S = 5.0
"""Longest wait for a worker's answer."""


class LeaseCalls(Protocol):
    """The way to decode workers. Every failure is a RipresaError."""

    async def lease(self, worker_id: str, request_id: str, tools: tuple[str, ...]) -> bool: ...

    async def end_session(self, worker_id: str, tenant_salt: bytes, session_id: str) -> None: ...


class TurnLeases:
    """The turns of one gateway's requests that are over."""

    def __init__(self, calls: LeaseCalls) -> None:
        self._calls = calls
        self._decoders: OrderedDict[str, str] = OrderedDict()
        self._telling: set[asyncio.Task[None]] = set()

    def ended(self, request_id: str, decoder: str) -> None:
        """A request's stream is over; this worker has its state."""
        self._decoders[request_id] = decoder
        self._decoders.move_to_end(request_id)
        if len(self._decoders) > MAX_ENDED:
            self._decoders.popitem(last=False)

    def called(self, request_id: str, tools: Sequence[str]) -> None:
        """The answer called these tools: its worker is told. Nothing if it is not known."""
        decoder = self._decoders.pop(request_id, None)
        if decoder is None:
            return
        task = asyncio.create_task(self._lease(decoder, request_id, tuple(tools)), name="lease")
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def end_session(
        self, decoders: Sequence[str], tenant_salt: bytes, session_id: str
    ) -> None:
        """A session is closed: these workers keep nothing of it. One that cannot be asked will
        find out when its lease lapses."""
        told = (self._end(decoder, tenant_salt, session_id) for decoder in decoders)
        await asyncio.gather(*told)

    async def drain(self) -> None:
        """Wait until no worker is being told anything."""
        while self._telling:
            await asyncio.wait(self._telling)

    async def _lease(self, decoder: str, request_id: str, tools: tuple[str, ...]) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._calls.lease(decoder, request_id, tools)
        except (RipresaError, TimeoutError) as error:
            logger.warning(
                "request %s has no lease at %s: %s", request_id, decoder, reason_of(error)
            )

    async def _end(self, decoder: str, tenant_salt: bytes, session_id: str) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._calls.end_session(decoder, tenant_salt, session_id)
        except (RipresaError, TimeoutError) as error:
            logger.warning(
                "%s was not told that a session is closed: %s", decoder, reason_of(error)
            )
