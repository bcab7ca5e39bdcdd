"""Does a line of waiting requests keep its order, whoever comes, leaves, gives up or is aborted?"""

from __future__ import annotations

import asyncio
import random

import pytest

from ripresa.cluster.routing.waiting_line import QueueTimeout, Wait, WaitingLine
from ripresa.workers.errors import ErrorCode, RipresaError


class Pool:
    """So many rooms; requests try to get one, and keep it until they are let go.

    Attributes:
        admitted: the requests that got one, in order.
        tried: how often each tried.
    """

    def __init__(self, num_rooms: int) -> None:
        self.num_free = num_rooms
        self.admitted: list[str] = []
        self.tried: dict[str, int] = {}
        self._report = asyncio.Event()
        self.line = WaitingLine(self._reported)
        self._done: dict[str, asyncio.Event] = {}

    async def _reported(self) -> None:
        await self._report.wait()

    def report(self) -> None:
        self._report.set()
        self._report = asyncio.Event()

    async def request(
        self, name: str, priority: int = 0, max_s: float = 60.0, *, is_started: bool = False
    ) -> None:
        done = self._done[name] = asyncio.Event()
        with Wait(self.line, priority, max_s) as self.last:
            wait = self.last
            if is_started:
                wait.started()
            while True:
                await wait.turn()
                self.tried[name] = self.tried.get(name, 0) + 1
                await asyncio.sleep(0)
                if self.num_free:
                    break
                if not wait.refused():
                    raise RipresaError(ErrorCode.RESOURCE_EXHAUSTED, "full")
            self.num_free -= 1
            wait.admitted()
            self.admitted.append(name)
            try:
                await done.wait()
            finally:
                self.num_free += 1

    def start(self, name: str, priority: int = 0, **options: float | bool) -> asyncio.Task[None]:
        return asyncio.create_task(self.request(name, priority, **options))  # type: ignore[arg-type]

    def let_go(self, name: str) -> None:
        self._done[name].set()


async def settle() -> None:
    """Let every task go on as far as it can without news."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_by_priority_then_by_arrival() -> None:
    pool = Pool(1)
    tasks = [pool.start("first")]
    await settle()
    asked = (("a", 0), ("b", 5), ("c", 0), ("d", -1), ("e", 5))
    for name, priority in asked:
        tasks.append(pool.start(name, priority))
        await settle()
    assert len(pool.line) == 5
    for name in ("first", "d", "a", "c", "b", "e"):
        assert pool.admitted[-1] == name
        pool.let_go(name)
        await settle()
    await asyncio.gather(*tasks)
    assert len(pool.line) == 0


async def test_only_the_first_one_tries_and_only_on_news() -> None:
    pool = Pool(0)
    tasks = [pool.start(name) for name in "abc"]
    await settle()
    before = dict(pool.tried)
    await settle()
    assert pool.tried == before
    pool.report()
    await settle()
    assert pool.tried == {**before, "a": before["a"] + 1}
    # Another worker's pool, of which only its report tells.
    pool.num_free = 2
    pool.report()
    await settle()
    assert pool.admitted == ["a", "b"]
    for name in "abc":
        pool.let_go(name)
    await asyncio.gather(*tasks)


async def test_nobody_overtakes_the_line() -> None:
    pool = Pool(1)
    tasks = [pool.start("first"), pool.start("waits")]
    await settle()
    with pytest.raises(QueueTimeout, match="1 requests wait"):
        await pool.request("impatient", max_s=0.0)
    tasks.append(pool.start("urgent", -1))
    await settle()
    pool.let_go("first")
    await settle()
    assert pool.admitted == ["first", "urgent"]
    pool.let_go("urgent")
    pool.let_go("waits")
    await asyncio.gather(*tasks)


async def test_without_a_line_the_refusal_is_the_worker_s_own() -> None:
    with pytest.raises(RipresaError, match="full"):
        await Pool(0).request("impatient", max_s=0.0)


async def test_a_stream_that_has_begun_comes_first_whatever_it_asked() -> None:
    pool = Pool(1)
    tasks = [pool.start("first"), pool.start("urgent", -(2**31))]
    await settle()
    tasks.append(pool.start("begun", 5, max_s=0.0, is_started=True))
    await settle()
    pool.let_go("first")
    await settle()
    assert pool.admitted == ["first", "begun"]
    pool.let_go("begun")
    pool.let_go("urgent")
    await asyncio.gather(*tasks)


async def test_a_wait_ends_by_its_time_by_an_abort_and_by_a_cancel() -> None:
    pool = Pool(1)
    first = pool.start("first")
    await settle()
    with pytest.raises(QueueTimeout, match=r"within 0\.01 s"):
        await pool.request("timed", max_s=0.01)
    aborted = pool.start("aborted")
    await settle()
    assert pool.last.abort()
    with pytest.raises(RipresaError, match="aborted") as caught:
        await aborted
    assert caught.value.code is ErrorCode.CANCELLED
    cancelled = pool.start("cancelled")
    await settle()
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert len(pool.line) == 0
    pool.let_go("first")
    await first
    assert not pool.last.abort()


@pytest.mark.parametrize("seed", range(20))
async def test_every_request_gets_its_turn_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    pool = Pool(rng.randint(1, 3))
    tasks: dict[str, asyncio.Task[None]] = {}
    for number in range(60):
        name = f"r{number}"
        tasks[name] = pool.start(name, rng.randint(-2, 2))
        for _ in range(rng.randint(0, 3)):
            await asyncio.sleep(0)
        if rng.random() < 0.2:
            tasks[rng.choice(sorted(tasks))].cancel()
        if rng.random() < 0.3:
            pool.report()
        if pool.admitted and rng.random() < 0.7:
            pool.let_go(rng.choice(pool.admitted))
    for name in tasks:
        await settle()
        if name in pool._done:
            pool.let_go(name)
    await settle()
    outcomes = await asyncio.wait_for(
        asyncio.gather(*tasks.values(), return_exceptions=True), timeout=10
    )
    for name, outcome in zip(tasks, outcomes, strict=True):
        assert name in pool.admitted or isinstance(outcome, asyncio.CancelledError)
    assert len(pool.line) == 0
