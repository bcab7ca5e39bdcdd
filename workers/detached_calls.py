"""How does a call go on when its caller has died? It ends by a goodbye alone.

To a worker, a gateway that dies looks exactly like one that gives a call up; see `kept_streams`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Coroutine
from typing import Any, TypeVar

from ripresa.workers.errors import ErrorCode, RipresaError

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_GOODBYES = 10_000


class Goodbyes:
    """Callers that said goodbye before their call arrived, as many as are remembered."""

    def __init__(self) -> None:
        self._callers: OrderedDict[str, None] = OrderedDict()

    def add(self, caller: str) -> None:
        self._callers[caller] = None
        if len(self._callers) > MAX_GOODBYES:
            self._callers.popitem(last=False)

    def check(self, caller: str) -> None:
        """Raise RipresaError (CANCELLED) if the caller is gone already."""
        if self._callers.pop(caller, self) is None:
            raise RipresaError(ErrorCode.CANCELLED, "the call was cancelled before it came")


class DetachedCalls:
    """Calls of one worker that outlive their callers. Each caller's name is new."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[Any]] = {}
        self._goodbyes = Goodbyes()

    async def run(self, caller: str, work: Coroutine[Any, Any, T]) -> T:
        """The work's result; if this is cancelled, the work goes on.

        Raises:
            RipresaError: CANCELLED; the caller has said goodbye before it came.
        """
        try:
            self._goodbyes.check(caller)
        except RipresaError:
            work.close()
            raise
        task = asyncio.create_task(work, name="detached-call")
        self._tasks[caller] = task
        task.add_done_callback(lambda _: self._end(caller))
        return await asyncio.shield(task)

    def let_go(self, caller: str) -> None:
        """The caller goes on purpose: its work ends."""
        task = self._tasks.get(caller)
        if task is None:
            self._goodbyes.add(caller)
        else:
            task.cancel()

    async def close(self) -> None:
        """End what runs."""
        tasks = tuple(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _end(self, caller: str) -> None:
        task = self._tasks.pop(caller)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.info("a detached call ended by an error: %s", error)
