"""How does a gateway know what to tell in its metrics of the session store? It asks regularly."""

from __future__ import annotations

import asyncio
import logging

from ripresa.cluster.observability.metrics import (
    SAID_TOKENS,
    SESSION_BYTES,
    SESSIONS_ENDED,
    SESSIONS_OPEN,
    GatewayMetrics,
)
from ripresa.cluster.routing.event_stream import end_tasks
from ripresa.cluster.sessions.books import SessionEnd
from ripresa.cluster.sessions.store import SessionStore
from ripresa.workers.errors import RipresaError

log = logging.getLogger(__name__)


class StoreWatch:
    """Brings the store's series up to date, from `start` to `stop`.

    A store that is out of reach leaves them as they are; one that begins anew counts on from there.

    Args:
        interval_s: between two questions.
    """

    def __init__(
        self, store: SessionStore, metrics: GatewayMetrics, interval_s: float = 5.0
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._interval_s = interval_s
        self._ended = dict.fromkeys(SessionEnd, 0)
        self._task: asyncio.Task[None] | None = None

    async def refresh(self) -> None:
        """Ask now.

        Raises:
            RipresaError: UNAVAILABLE; the store is out of reach.
        """
        stats = await self._store.stats()
        metrics = self._metrics
        metrics.gauge(SESSIONS_OPEN).set(stats.num_sessions)
        metrics.gauge(SESSION_BYTES).set(stats.num_bytes)
        metrics.gauge(SAID_TOKENS).set(stats.num_said_tokens)
        for why, count in stats.ended.items():
            # A smaller one is of a store that has begun anew.
            before = self._ended[why] if self._ended[why] <= count else 0
            metrics.counter(SESSIONS_ENDED).labels(why).inc(count - before)
        self._ended = stats.ended

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="store-watch")

    async def stop(self) -> None:
        if self._task is not None:
            await end_tasks([self._task])

    async def _run(self) -> None:
        while True:
            try:
                await self.refresh()
            except RipresaError as error:
                log.warning("what the session store holds is not known: %s", error)
            await asyncio.sleep(self._interval_s)
