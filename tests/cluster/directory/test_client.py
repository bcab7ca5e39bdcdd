"""Does a gateway get its hints, or the word to plan by load, but never an error or a long wait?"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from directory_sides import SETTINGS, chain
from ray.exceptions import ActorDiedError, ActorUnavailableError

from ripresa.cluster.directory.client import DirectoryActors, DirectoryClient
from ripresa.cluster.directory.events import Answer, Lead, PlanByLoad
from ripresa.cluster.directory.index import PrefixIndex
from ripresa.workers.replay import ReplayMode

HASHES = chain("a", 4)


class Method:
    """One method of an actor handle."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def remote(self, *args: object) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self._call(*args))


class Actor:
    """A directory in this process, behind the face of an actor handle; it can fail."""

    def __init__(self) -> None:
        self.index = PrefixIndex(SETTINGS, "d1")
        self.error: Exception | None = None
        self.answers = asyncio.Event()
        self.answers.set()
        self.asked = asyncio.Event()
        self.lookup_or_claim = Method(self._lookup_or_claim)
        self.release = Method(self._release)

    async def _lookup_or_claim(
        self,
        hashes: tuple[bytes, ...],
        request: str,
        mode: ReplayMode,
        interval: int | None,
        gone: str | None,
    ) -> Answer:
        if self.error is not None:
            raise self.error
        found = self.index.lookup_or_claim(hashes, request, 0, mode, interval, gone)
        self.asked.set()
        await self.answers.wait()
        return found

    async def _release(self, request: str) -> None:
        self.index.release(request)


def client_of(*actors: Actor, timeout_s: float = 10.0) -> DirectoryClient:
    return DirectoryClient(DirectoryActors(actors, lambda: actors), timeout_s)


async def test_an_answer_is_handed_on() -> None:
    answer = await client_of(Actor()).lookup_or_claim(HASHES, "r")
    assert isinstance(answer, Answer)
    assert answer.flight == Lead(0, 4, 1.0)


async def test_a_slow_directory_means_planning_by_load_and_leaves_no_claim() -> None:
    actor = Actor()
    actor.answers.clear()
    answer = await client_of(actor, timeout_s=0.01).lookup_or_claim(HASHES, "r")
    assert isinstance(answer, PlanByLoad)
    assert "10 ms" in answer.reason
    actor.answers.set()
    follower = await client_of(actor).lookup_or_claim(HASHES, "q")
    assert isinstance(follower, Answer)
    assert isinstance(follower.flight, Lead)


async def test_a_caller_that_gives_up_leaves_no_claim() -> None:
    actor = Actor()
    actor.answers.clear()
    asking = asyncio.create_task(client_of(actor).lookup_or_claim(HASHES, "r"))
    await actor.asked.wait()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    actor.answers.set()
    answer = await client_of(actor).lookup_or_claim(HASHES, "q")
    assert isinstance(answer, Answer)
    assert isinstance(answer.flight, Lead)


@pytest.mark.parametrize(
    "error",
    [
        ActorUnavailableError("restarting", b"0" * 16),
        ActorDiedError(),
        ConnectionError("cut"),
    ],
    ids=["restarting", "dead", "cut"],
)
async def test_a_directory_that_is_gone_means_planning_by_load(error: Exception) -> None:
    actor = Actor()
    actor.error = error
    answer = await client_of(actor).lookup_or_claim(HASHES, "r")
    assert isinstance(answer, PlanByLoad)
    assert "directory" in answer.reason


async def test_a_dead_directory_is_replaced() -> None:
    dead, successor = Actor(), Actor()
    dead.error = ActorDiedError()
    connected = asyncio.Event()
    loop = asyncio.get_running_loop()

    def connect() -> list[Actor]:
        loop.call_soon_threadsafe(connected.set)
        return [successor]

    client = DirectoryClient(DirectoryActors([dead], connect), timeout_s=10)
    assert isinstance(await client.lookup_or_claim(HASHES, "r"), PlanByLoad)
    await connected.wait()
    answer: Answer | PlanByLoad = PlanByLoad("")
    async with asyncio.timeout(30):
        while isinstance(answer, PlanByLoad):
            await asyncio.sleep(0)
            answer = await client.lookup_or_claim(HASHES, "r")
    assert answer.flight == Lead(0, 4, 1.0)


async def test_a_prompt_without_a_full_block_asks_nobody() -> None:
    assert isinstance(await client_of().lookup_or_claim((), "r"), PlanByLoad)
