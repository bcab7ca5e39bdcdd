"""Which process keeps the prefix directory? One named actor a shard, thin over the index.

It may be killed at any time: its successor begins empty, under a new incarnation, and asks every
worker that reports to send everything.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from typing import Any

import ray

from ripresa.cluster.directory.events import (
    Answer,
    Holder,
    HotPrefix,
    Lookup,
    Receipt,
    Reply,
    Report,
)
from ripresa.cluster.directory.index import DirectoryCounters, DirectorySettings, PrefixIndex
from ripresa.workers.address import WorkerAddress
from ripresa.workers.cache.cache_events import Unkept
from ripresa.workers.replay import ReplayMode

ACTOR_NAME = "ripresa-prefix-directory"


class PrefixDirectory:
    """The actor's class: `PrefixIndex` with a clock."""

    def __init__(self, settings: DirectorySettings) -> None:
        self._index = PrefixIndex(settings, uuid.uuid4().hex)
        self._claim_s = settings.claim_s
        self._claims_changed = asyncio.Event()

    async def lookup_or_claim(
        self,
        hashes: Sequence[bytes],
        request: str,
        mode: ReplayMode,
        interval: int | None,
        gone: str | None,
    ) -> Answer:
        now = time.monotonic()
        if gone is not None:
            self._tell_followers()
        return self._index.lookup_or_claim(hashes, request, now, mode, interval, gone)

    async def lookup(self, hashes: Sequence[bytes]) -> Lookup:
        return self._index.lookup(hashes, time.monotonic())

    async def leader(self, request: str) -> tuple[str, int] | None:
        """Worker and incarnation that compute for a leading request, as soon as they are known.

        None once it leads no more.
        """
        while self._index.is_claimed(request, time.monotonic()):
            found = self._index.leader(request, time.monotonic())
            if found is not None:
                return found
            try:
                async with asyncio.timeout(self._claim_s):
                    await self._claims_changed.wait()
            except TimeoutError:
                continue
        return None

    async def release(self, request: str) -> None:
        self._index.release(request)
        self._tell_followers()

    async def report(self, report: Report) -> Reply:
        reply = self._index.report(report, time.monotonic())
        if report.leading or report.ended:
            self._tell_followers()
        return reply

    async def receipt(self, receipt: Receipt) -> None:
        self._index.receipt(receipt, time.monotonic())

    async def lost(self, worker: str, incarnation: int) -> None:
        self._index.lost(worker, incarnation)

    async def num_copies(self, hashes: Sequence[bytes], restarts: tuple[int, ...]) -> list[int]:
        return self._index.num_copies(hashes, restarts, time.monotonic())

    async def find_keepers(
        self, worker: str, blocks: Sequence[Unkept]
    ) -> list[WorkerAddress | None]:
        return self._index.find_keepers(worker, blocks, time.monotonic())

    def _tell_followers(self) -> None:
        """Whoever waits for the place of a leader looks again."""
        self._claims_changed.set()
        self._claims_changed = asyncio.Event()

    async def counters(self) -> DirectoryCounters:
        return self._index.counters

    async def top(self, count: int, tenant: str | None) -> list[HotPrefix]:
        return self._index.top(count, tenant, time.monotonic())

    async def usage(self) -> dict[str, int]:
        return self._index.usage()

    async def workers(self) -> list[Holder]:
        return self._index.workers(time.monotonic())


def start_directory(
    settings: DirectorySettings,
    num_shards: int = 1,
    *,
    name: str = ACTOR_NAME,
    namespace: str | None = None,
    is_detached: bool = True,
    max_restarts: int = -1,
) -> list[Any]:
    """The actors of all shards in order; those that do not run are started. Blocks on Ray.

    Args:
        namespace: Ray namespace; None for that of this process.
        is_detached: they outlive the process that started them.
        max_restarts: how often Ray restarts each; -1 for always.
    """
    actor_class = ray.remote(PrefixDirectory)
    return [
        actor_class.options(
            name=f"{name}-{shard}",
            namespace=namespace,
            get_if_exists=True,
            lifetime="detached" if is_detached else None,
            max_restarts=max_restarts,
            num_cpus=0,
        ).remote(settings)
        for shard in range(num_shards)
    ]
