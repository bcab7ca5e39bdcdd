"""Which process keeps the sessions, and how do gateways reach it? One named actor.

It outlives gateways and workers. Its transcripts are in its memory alone: if its own process dies,
its successor begins empty, and its clients open their sessions anew, or send whole conversations.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any, Protocol

import ray
from ray.exceptions import ActorDiedError

from ripresa.cluster.directory.link import NAMESPACE
from ripresa.cluster.sessions.books import (
    Key,
    Refusal,
    SessionBooks,
    SessionFacts,
    SessionHead,
    SessionPath,
    TurnRecord,
)
from ripresa.workers.remote_worker import failures

ACTOR_NAME = "ripresa-session-store"
TIMEOUT_S = 5.0
"""Longest wait for the store's answer."""


class SessionStore(Protocol):
    """Where sessions are kept. Every method raises RipresaError (UNAVAILABLE) where it is out of
    reach; see `SessionBooks` for what they do."""

    async def open(self, key: Key, head: SessionHead) -> SessionFacts | Refusal: ...

    async def get(self, key: Key) -> SessionFacts | Refusal: ...

    async def path(self, key: Key, turn_id: str) -> SessionPath | Refusal: ...

    async def append(self, key: Key, turn: TurnRecord) -> Refusal | None: ...

    async def close(self, key: Key) -> SessionHead | Refusal: ...


class LocalSessionStore:
    """A store in this process, and the actor's class."""

    def __init__(self, max_bytes: int = 1 << 30) -> None:
        self._books = SessionBooks(max_bytes)

    async def open(self, key: Key, head: SessionHead) -> SessionFacts | Refusal:
        return self._books.open(key, head, time.time())

    async def get(self, key: Key) -> SessionFacts | Refusal:
        return self._books.get(key, time.time())

    async def path(self, key: Key, turn_id: str) -> SessionPath | Refusal:
        return self._books.path(key, turn_id, time.time())

    async def append(self, key: Key, turn: TurnRecord) -> Refusal | None:
        return self._books.append(key, turn, time.time())

    async def close(self, key: Key) -> SessionHead | Refusal:
        return self._books.close(key, time.time())


class RemoteSessionStore:
    """A gateway's way to the actor; implements `SessionStore`.

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

    async def append(self, key: Key, turn: TurnRecord) -> Refusal | None:
        answer: Refusal | None = await self._call("append", key, turn)
        return answer

    async def close(self, key: Key) -> SessionHead | Refusal:
        answer: SessionHead | Refusal = await self._call("close", key)
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
    """

    max_bytes: int

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
            .remote(self.max_bytes)
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
