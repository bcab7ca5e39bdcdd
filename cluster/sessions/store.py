"""Which process keeps the sessions, and how do gateways reach it? One named actor.

It outlives gateways and workers, and they tell each other there what models said. All of it is in
its memory alone: if its own process dies, its successor begins empty, and its clients open their
sessions anew, or send whole conversations.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import ray
from ray.exceptions import ActorDiedError

from ripresa.cluster.directory.link import NAMESPACE
from ripresa.cluster.sessions.books import (
    Key,
    Refusal,
    SessionBooks,
    SessionEnd,
    SessionFacts,
    SessionHead,
    SessionPath,
    TurnRecord,
)
from ripresa.cluster.sessions.said_feed import FeedPlace, SaidAnswer, SaidFeed, SaidNews
from ripresa.workers.remote_worker import failures

ACTOR_NAME = "ripresa-session-store"
TIMEOUT_S = 5.0
"""Longest wait for the store's answer."""
NEWS_WAIT_S = 2.0
"""So long the store waits for something new to tell; well within `TIMEOUT_S`."""


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What a store holds, and how many of its sessions have ended.

    Attributes:
        num_bytes: what sessions take, about.
        num_said_tokens: the room of answers that gateways tell each other.
    """

    num_sessions: int
    num_bytes: int
    num_said_tokens: int
    ended: dict[SessionEnd, int]


class SessionStore(Protocol):
    """Where sessions are kept. Every method raises RipresaError (UNAVAILABLE) where it is out of
    reach; see `SessionBooks` for what they do."""

    async def open(self, key: Key, head: SessionHead) -> SessionFacts | Refusal: ...

    async def get(self, key: Key) -> SessionFacts | Refusal: ...

    async def path(self, key: Key, turn_id: str) -> SessionPath | Refusal: ...

    async def append(self, key: Key, incarnation: str, turn: TurnRecord) -> Refusal | None: ...

    async def close(self, key: Key) -> SessionHead | Refusal: ...

    async def stats(self) -> StoreStats: ...


class SaidStore(Protocol):
    """Where gateways tell each other what models said. Both methods raise RipresaError
    (UNAVAILABLE) where it is out of reach; see `SaidFeed` for what they do."""

    async def share(self, gateway: str, answers: Sequence[SaidAnswer]) -> None: ...

    async def news(self, gateway: str, place: FeedPlace) -> SaidNews:
        """As soon as there are any; after `NEWS_WAIT_S` also none."""


class LocalSessionStore:
    """A store in this process, and the actor's class; a `SessionStore` and a `SaidStore`.

    Args:
        max_bytes: what sessions may take, about.
        max_said_tokens: the room of answers that gateways tell each other.
    """

    def __init__(self, max_bytes: int = 1 << 30, max_said_tokens: int = 4_000_000) -> None:
        self._books = SessionBooks(max_bytes)
        self._said = SaidFeed(max_said_tokens)
        self._added = asyncio.Event()

    async def open(self, key: Key, head: SessionHead) -> SessionFacts | Refusal:
        return self._books.open(key, head, time.time())

    async def get(self, key: Key) -> SessionFacts | Refusal:
        return self._books.get(key, time.time())

    async def path(self, key: Key, turn_id: str) -> SessionPath | Refusal:
        return self._books.path(key, turn_id, time.time())

    async def append(self, key: Key, incarnation: str, turn: TurnRecord) -> Refusal | None:
        return self._books.append(key, incarnation, turn, time.time())

    async def close(self, key: Key) -> SessionHead | Refusal:
        return self._books.close(key, time.time())

    async def stats(self) -> StoreStats:
        books, ended = self._books, self._books.ended(time.time())
        return StoreStats(books.num_sessions, books.num_bytes, self._said.num_tokens, ended)

    async def share(self, gateway: str, answers: Sequence[SaidAnswer]) -> None:
        self._said.add(gateway, answers)
        self._added.set()
        self._added = asyncio.Event()

    async def news(self, gateway: str, place: FeedPlace) -> SaidNews:
        news = self._said.news(gateway, place)
        with suppress(TimeoutError):
            async with asyncio.timeout(NEWS_WAIT_S):
                while not news.answers:
                    await self._added.wait()
                    news = self._said.news(gateway, news.place)
        return news


class RemoteSessionStore:
    """A gateway's way to the actor; a `SessionStore` and a `SaidStore`.

    Args:
        link: finds the actor again when it turns out to be dead for good.
    """

    def __init__(self, link: SessionLink, actor: Any) -> None:
        self._link = link
        self._actor = actor

    async def open(self, key: Key, head: SessionHead) -> SessionFacts | Refusal:
        answer: SessionFacts | Refusal = await self._call("open", key, head)
        return answer

    async def get(self, key: Key) -> SessionFacts | Refusal:
        answer: SessionFacts | Refusal = await self._call("get", key)
        return answer

    async def path(self, key: Key, turn_id: str) -> SessionPath | Refusal:
        answer: SessionPath | Refusal = await self._call("path", key, turn_id)
        return answer

    async def append(self, key: Key, incarnation: str, turn: TurnRecord) -> Refusal | None:
        answer: Refusal | None = await self._call("append", key, incarnation, turn)
        return answer

    async def close(self, key: Key) -> SessionHead | Refusal:
        answer: SessionHead | Refusal = await self._call("close", key)
        return answer

    async def stats(self) -> StoreStats:
        answer: StoreStats = await self._call("stats")
        return answer

    async def share(self, gateway: str, answers: Sequence[SaidAnswer]) -> None:
        await self._call("share", gateway, answers)

    async def news(self, gateway: str, place: FeedPlace) -> SaidNews:
        answer: SaidNews = await self._call("news", gateway, place)
        return answer

    async def _call(self, method: str, *args: object) -> Any:
        async with failures("the session store"), asyncio.timeout(TIMEOUT_S):
            try:
                return await getattr(self._actor, method).remote(*args)
            except ActorDiedError:
                self._actor = await asyncio.to_thread(self._link.start)
                raise


@dataclass(frozen=True, slots=True)
class SessionLink:
    """The way to one cluster's session store; plain values.

    Attributes:
        max_bytes: what its sessions may take, about.
        max_said_tokens: the room of answers that gateways tell each other; 0 for none.
    """

    max_bytes: int
    max_said_tokens: int

    def start(self) -> Any:
        """The actor, started where it does not run. Blocks on Ray."""
        return (
            ray.remote(LocalSessionStore)
            .options(
                name=ACTOR_NAME,
                namespace=NAMESPACE,
                get_if_exists=True,
                lifetime="detached",
                max_restarts=-1,
                num_cpus=0,
            )
            .remote(self.max_bytes, self.max_said_tokens)
        )

    def stop(self) -> None:
        """End the actor if it runs. Blocks on Ray."""
        try:
            actor = ray.get_actor(ACTOR_NAME, namespace=NAMESPACE)
        except ValueError:
            return
        ray.kill(actor)

    async def store(self) -> RemoteSessionStore:
        """A gateway's way to the actor."""
        return RemoteSessionStore(self, await asyncio.to_thread(self.start))
