"""How is the prefix directory asked? Within milliseconds, or the request is planned by load."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from ray.exceptions import ActorDiedError, RayError

from ripresa.cluster.directory.events import (
    Answer,
    HotPrefix,
    Lookup,
    PlanByLoad,
    Receipt,
    Reply,
    Report,
)
from ripresa.cluster.directory.index import DirectoryCounters, shard_of
from ripresa.cluster.directory.publisher import Ask, Send
from ripresa.workers.address import WorkerAddress
from ripresa.workers.cache.cache_events import Unkept
from ripresa.workers.errors import RipresaError, Unavailable, reason_of
from ripresa.workers.remote_worker import failures
from ripresa.workers.replay import ReplayMode

logger = logging.getLogger(__name__)

WHAT = "the prefix directory"
STATS_TIMEOUT_S = 5.0


class DirectoryActors:
    """The shards' actors; replaced by running ones when they turn out to be dead for good.

    Attributes:
        connect: gives the actors of all shards, in order; it may block. Called in a thread.
    """

    def __init__(self, actors: Sequence[Any], connect: Callable[[], Sequence[Any]]) -> None:
        self._actors = list(actors)
        self.connect = connect
        self._connecting: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._actors)

    async def call(self, shard: int, method: str, *args: object) -> Any:
        """Raises RipresaError if the call did not reach the actor, or did not come back."""
        async with failures(WHAT):
            try:
                return await getattr(self._actors[shard], method).remote(*args)
            except ActorDiedError:
                self._reconnect()
                raise

    def tell(self, shard: int, method: str, *args: object) -> None:
        """Call without waiting; what does not arrive is lost."""
        try:
            getattr(self._actors[shard], method).remote(*args)
        except RayError as error:
            logger.warning("%s was not told %s: %s", WHAT, method, reason_of(error))

    def send_to(self, shard: int) -> Send:
        """Carries a worker's reports to one shard."""

        async def send(report: Report) -> Reply:
            reply: Reply = await self.call(shard, "report", report)
            return reply

        return send

    def ask_for(self, worker: str, shard: int) -> Ask:
        """Carries a worker's questions to one shard."""

        async def ask(blocks: Sequence[Unkept]) -> Sequence[WorkerAddress | None]:
            found: Sequence[WorkerAddress | None] = await self.call(
                shard, "find_keepers", worker, blocks
            )
            return found

        return ask

    def _reconnect(self) -> None:
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.create_task(self._replace(), name="directory-reconnect")

    async def _replace(self) -> None:
        try:
            self._actors = list(await asyncio.to_thread(self.connect))
        except (RayError, ValueError, ConnectionError) as error:
            logger.warning("%s is still gone: %s", WHAT, reason_of(error))


class DirectoryClient:
    """A gateway's view of the directory.

    Args:
        timeout_s: what a hint is worth waiting for.
        leader_timeout_s: the same for the place of a leader.
    """

    def __init__(
        self, actors: DirectoryActors, timeout_s: float = 0.010, leader_timeout_s: float = 5.0
    ) -> None:
        self._actors = actors
        self._timeout_s = timeout_s
        self._leader_timeout_s = leader_timeout_s

    async def lookup_or_claim(
        self,
        hashes: Sequence[bytes],
        request: str,
        mode: ReplayMode = ReplayMode.BOUNDED,
        interval: int | None = None,
        gone: str | None = None,
    ) -> Answer | PlanByLoad:
        """See `PrefixIndex.lookup_or_claim`. Never raises for the directory's sake."""
        if not hashes:
            return PlanByLoad("the prompt has no full block")
        shard = self._shard(hashes)
        is_answered = False
        try:
            async with asyncio.timeout(self._timeout_s):
                answer: Answer = await self._actors.call(
                    shard, "lookup_or_claim", hashes, request, mode, interval, gone
                )
            is_answered = True
            return answer
        except TimeoutError:
            return PlanByLoad(f"{WHAT} did not answer within {self._timeout_s * 1e3:g} ms")
        except RipresaError as error:
            return PlanByLoad(str(error))
        finally:
            if not is_answered:
                # Nobody will act on a claim that this call may yet make.
                self._actors.tell(shard, "release", request)

    async def lookup(self, hashes: Sequence[bytes]) -> Lookup | None:
        """See `PrefixIndex.lookup`. None if the directory does not answer in time."""
        try:
            async with asyncio.timeout(self._timeout_s):
                found: Lookup = await self._actors.call(self._shard(hashes), "lookup", hashes)
            return found
        except (TimeoutError, RipresaError):
            return None

    async def leader(self, hashes: Sequence[bytes], request: str) -> tuple[str, int] | None:
        """Worker and incarnation that compute for a leading request, as soon as they are known.

        None if it leads no more, or the directory does not answer: ask it again, or do without.
        """
        try:
            async with asyncio.timeout(self._leader_timeout_s):
                found: tuple[str, int] | None = await self._actors.call(
                    self._shard(hashes), "leader", request
                )
            return found
        except (TimeoutError, RipresaError):
            return None

    def release(self, hashes: Sequence[bytes], request: str) -> None:
        """The request leads no more."""
        self._actors.tell(self._shard(hashes), "release", request)

    def receipt(self, receipt: Receipt) -> None:
        """Report what an admission really found."""
        self._actors.tell(self._shard(receipt.hashes), "receipt", receipt)

    def lost(self, worker: str, incarnation: int) -> None:
        """This incarnation of a worker is dead."""
        for shard in range(len(self._actors)):
            self._actors.tell(shard, "lost", worker, incarnation)

    async def counters(self) -> DirectoryCounters:
        """What happened in all shards so far.

        Raises:
            RipresaError: a shard does not answer.
        """
        total = DirectoryCounters()
        for shard in await self._of_all("counters"):
            for field in fields(DirectoryCounters):
                setattr(total, field.name, getattr(total, field.name) + getattr(shard, field.name))
        return total

    async def top(self, count: int, tenant: str | None) -> list[HotPrefix]:
        """The prefixes that are asked for most, of a tenant (`tenant_digest`) or of all.

        Raises:
            RipresaError: a shard does not answer.
        """
        found = [hot for shard in await self._of_all("top", count, tenant) for hot in shard]
        return sorted(found, key=lambda hot: (-hot.num_hits, -hot.num_blocks))[:count]

    async def _of_all(self, method: str, *args: object) -> list[Any]:
        shards = range(len(self._actors))
        try:
            async with asyncio.timeout(STATS_TIMEOUT_S):
                return await asyncio.gather(
                    *(self._actors.call(shard, method, *args) for shard in shards)
                )
        except TimeoutError as error:
            raise Unavailable(f"{WHAT} does not answer") from error

    def _shard(self, hashes: Sequence[bytes]) -> int:
        return shard_of(hashes[0], len(self._actors))
