"""How do several tasks make one stream of events, of which any can end it by an error?"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

from ripresa.workers.request import EngineEvent, PrefillDone


class EventStream:
    """One execution's events from several tasks, in order; the first error of any ends it.

    Attributes:
        has_state: the prompt's state is on the decode worker, whatever its encoder says.
    """

    def __init__(self) -> None:
        self.has_state = False
        self._events: asyncio.Queue[EngineEvent | Exception] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something that puts events; `close` ends it."""
        task = asyncio.create_task(self._run(work))
        self._tasks.append(task)
        return task

    def put(self, event: EngineEvent) -> None:
        self.has_state |= isinstance(event, PrefillDone)
        self._events.put_nowait(event)

    async def next(self) -> EngineEvent:
        """The next event; raises what ended the execution."""
        event = await self._events.get()
        if isinstance(event, Exception):
            raise event
        return event

    async def close(self) -> None:
        """End every task, and wait until each has let go of what it held."""
        await end_tasks(self._tasks)

    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001 - `next` raises it
            self._events.put_nowait(error)


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks, and wait until each has let go of what it held."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
