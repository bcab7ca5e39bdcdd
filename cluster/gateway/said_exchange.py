"""How does one gateway know what the model said through another? By the session store's feed.

stream ── keep ──▶ SaidTurns, and what waits ── share ──▶ store ── news ──▶ SaidTurns of the others

No stream waits for it. Answers that the store does not take in time are dropped and counted; the
conversation then costs a computed prefix wherever else it goes on, never a wrong answer.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from array import array
from collections.abc import Sequence

from ripresa.cluster.gateway.said_turns import SaidTurns
from ripresa.cluster.observability.metrics import GatewayMetrics, SaidOutcome
from ripresa.cluster.routing.event_stream import end_tasks
from ripresa.cluster.sessions.said_feed import FeedPlace, SaidAnswer
from ripresa.cluster.sessions.store import SaidStore
from ripresa.workers.errors import RipresaError

log = logging.getLogger(__name__)

MAX_WAITING_TOKENS = 1 << 18
"""Room of the answers that the store has yet to take."""


class SaidExchange:
    """Tells others of this gateway's answers, and hears of theirs; from `start` to `stop`.

    Args:
        store: where they meet.
        said: this gateway's answers, and what it hears of others'.
        retry_s: pause before a store that is out of reach is asked for news again.
        stop_s: longest time that `stop` gives to answers which the store has yet to take.
    """

    def __init__(
        self,
        store: SaidStore,
        said: SaidTurns,
        metrics: GatewayMetrics,
        *,
        retry_s: float = 1.0,
        stop_s: float = 2.0,
    ) -> None:
        self._store = store
        self._said = said
        self._metrics = metrics
        self._retry_s = retry_s
        self._stop_s = stop_s
        self._name = secrets.token_hex(8)
        self._waiting: list[SaidAnswer] = []
        self._num_tokens = 0
        self._changed = asyncio.Event()
        self._is_stopping = False
        self._sender: asyncio.Task[None] | None = None
        self._listener: asyncio.Task[None] | None = None

    @property
    def num_tokens(self) -> int:
        """Room of the answers that the store has yet to take."""
        return self._num_tokens

    def start(self) -> None:
        self._sender = asyncio.create_task(self._send(), name="said-sender")
        self._listener = asyncio.create_task(self._listen(), name="said-listener")

    async def stop(self) -> None:
        """Tell what has yet to be told, if the store takes it in time, and hear no more."""
        self._is_stopping = True
        self._changed.set()
        tasks = [task for task in (self._listener, self._sender) if task is not None]
        try:
            if self._sender is not None:
                await asyncio.wait({self._sender}, timeout=self._stop_s)
        finally:
            await end_tasks(tasks)

    def tell(self, key: bytes, token_ids: Sequence[int]) -> None:
        """An answer of this gateway."""
        answer = SaidAnswer(key, array("I", token_ids).tobytes())
        if self._num_tokens + answer.num_tokens > MAX_WAITING_TOKENS:
            self._metrics.said(SaidOutcome.DROPPED, 1)
            return
        self._num_tokens += answer.num_tokens
        self._waiting.append(answer)
        self._changed.set()

    async def _send(self) -> None:
        while self._waiting or not self._is_stopping:
            await self._changed.wait()
            self._changed.clear()
            answers, self._waiting = self._waiting, []
            if answers:
                await self._share(answers)

    async def _share(self, answers: Sequence[SaidAnswer]) -> None:
        outcome = SaidOutcome.DROPPED
        try:
            await self._store.share(self._name, answers)
            outcome = SaidOutcome.SHARED
        except RipresaError as error:
            log.warning("other gateways do not hear of %d answers: %s", len(answers), error)
        finally:
            self._metrics.said(outcome, len(answers))
            self._num_tokens -= sum(answer.num_tokens for answer in answers)

    async def _listen(self) -> None:
        place, is_lost = FeedPlace(), False
        while True:
            try:
                news = await self._store.news(self._name, place)
            except RipresaError as error:
                if not is_lost:
                    log.warning("nothing is heard of other gateways' answers: %s", error)
                is_lost = True
                await asyncio.sleep(self._retry_s)
                continue
            place, is_lost = news.place, False
            for answer in news.answers:
                self._said.keep(answer.key, array("I", answer.said))
            self._metrics.said(SaidOutcome.RECEIVED, len(news.answers))
