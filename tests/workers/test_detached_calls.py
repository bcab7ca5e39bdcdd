"""Do calls outlive their callers, and end by a goodbye alone, whenever it comes?"""

from __future__ import annotations

import asyncio
import gc
import warnings

import pytest
from suspensions import Cancelling, for_every_wait

from ripresa.workers.detached_calls import MAX_GOODBYES, DetachedCalls
from ripresa.workers.errors import ErrorCode, RipresaError


class Work:
    """Something that takes until it is told."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.begun = asyncio.Event()
        self.outcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def run(self, error: Exception | None = None) -> str:
        self.begun.set()
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.outcome.set_result("cancelled")
            raise
        self.outcome.set_result("done")
        if error is not None:
            raise error
        return "result"

    async def ended(self) -> str:
        return await asyncio.wait_for(self.outcome, 10)


async def test_a_caller_gets_the_result_or_the_error() -> None:
    calls, work = DetachedCalls(), Work()
    work.may_end.set()
    assert await calls.run("a", work.run()) == "result"
    work = Work()
    work.may_end.set()
    with pytest.raises(RipresaError, match="broken"):
        await calls.run("b", work.run(RipresaError(ErrorCode.INTERNAL, "broken")))


async def test_work_outlives_its_caller_wherever_that_is_cancelled() -> None:
    async def scenario(cancelling: Cancelling[str]) -> bool:
        calls, work = DetachedCalls(), Work()
        asyncio.get_running_loop().call_later(0.01, work.may_end.set)
        result = await cancelling(lambda: calls.run("a", work.run()))
        if result is None:
            assert await work.ended() == "done"
        await calls.close()
        assert not calls._tasks
        return result is not None

    assert await for_every_wait(scenario) == 1


async def test_a_goodbye_ends_the_work_also_of_a_caller_that_is_gone() -> None:
    calls = DetachedCalls()
    for is_gone in (False, True):
        work = Work()
        caller = asyncio.create_task(calls.run(f"caller {is_gone}", work.run()))
        await work.begun.wait()
        if is_gone:
            caller.cancel()
            await asyncio.wait({caller})
            assert not work.outcome.done()
        calls.let_go(f"caller {is_gone}")
        assert await work.ended() == "cancelled"
        with pytest.raises(asyncio.CancelledError):
            await caller


async def test_a_goodbye_that_comes_first_is_remembered_once_and_boundedly() -> None:
    calls = DetachedCalls()
    calls.let_go("a")
    with warnings.catch_warnings():
        # A coroutine that is not run must be closed.
        warnings.simplefilter("error")
        with pytest.raises(RipresaError) as caught:
            await calls.run("a", Work().run())
        gc.collect()
    assert caught.value.code is ErrorCode.CANCELLED
    calls.let_go("old")
    for number in range(MAX_GOODBYES):
        calls.let_go(f"newer {number}")
    work = Work()
    work.may_end.set()
    assert await calls.run("old", work.run()) == "result"


async def test_the_end_ends_all_work() -> None:
    calls, works = DetachedCalls(), [Work(), Work()]
    callers = [
        asyncio.create_task(calls.run(str(name), work.run())) for name, work in enumerate(works)
    ]
    for work in works:
        await work.begun.wait()
    await calls.close()
    assert [await work.ended() for work in works] == ["cancelled"] * 2
    await asyncio.wait(callers)
