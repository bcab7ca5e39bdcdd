"""How does a test cancel a coroutine at its k-th await, for every k? By counting what it yields.

task ── send ──▶ coroutine ── yields a future ──▶ loop        k-th yield: cancel arrives there
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from functools import partial
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Counted(Generic[T]):
    """Awaits a coroutine and counts how often it waits.

    Args:
        at: the wait, from 1, at which `then` is called once.
    """

    def __init__(
        self, coroutine: Coroutine[Any, Any, T], at: int, then: Callable[[], object]
    ) -> None:
        self.num_waits = 0
        self._coroutine = coroutine
        self._at = at
        self._then = then

    def __await__(self) -> Generator[Any, Any, T]:
        inner = self._coroutine.__await__()
        step: Callable[[], Any] = inner.__next__
        while True:
            try:
                waited_for = step()
            except StopIteration as over:
                result: T = over.value
                return result
            self.num_waits += 1
            if self.num_waits == self._at:
                self._then()
            try:
                yield waited_for
            except BaseException as error:  # noqa: BLE001  all of them belong to the coroutine
                step = _throwing(inner, error)
            else:
                step = inner.__next__


def _throwing(inner: Generator[Any, Any, Any], error: BaseException) -> Callable[[], Any]:
    return lambda: inner.throw(error)


async def cancelled_at(wait: int, make: Callable[[], Coroutine[Any, Any, T]]) -> T | None:
    """Run a coroutine and cancel it at that wait; None if it was, else what it returned.

    Other errors than the cancel are raised.
    """
    loop = asyncio.get_running_loop()

    async def run() -> T:
        return await counted

    counted = Counted(make(), wait, lambda: loop.call_soon(task.cancel))
    task = asyncio.ensure_future(run())
    try:
        return await task
    except asyncio.CancelledError:
        current = asyncio.current_task()
        if current is not None and current.cancelling():
            raise
        return None


Cancelling = Callable[[Callable[[], Coroutine[Any, Any, T]]], Awaitable[T | None]]


async def for_every_wait(scenario: Callable[[Cancelling[T]], Awaitable[bool]]) -> int:
    """Run a scenario anew for every wait of the coroutine that it passes on; how many there are.

    The scenario returns whether that coroutine came to its end, so that there is no later wait.
    """
    wait = 1
    while not await scenario(partial(cancelled_at, wait)):
        wait += 1
    return wait - 1
