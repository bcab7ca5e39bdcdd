"""How do the processes of a cluster come to its prefix directory? A picklable way for each of them.

    app ── DirectoryLink ──▶ worker: a publisher         told by the worker's cache
                         ──▶ gateway: a client           asked before every plan

Whoever comes first starts the actors; they are named and detached, so that no process's end is
theirs, and whoever started the cluster stops them with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray

from ripresa.cluster.directory.client import DirectoryActors, DirectoryClient
from ripresa.cluster.directory.index import DirectorySettings
from ripresa.cluster.directory.prefix_directory import ACTOR_NAME, start_directory
from ripresa.cluster.directory.publisher import DirectoryPublisher
from ripresa.workers.cache.cache_events import CacheAnnouncer

NAMESPACE = "ripresa"
"""Ray namespace of the actors; Serve's replicas and the starting process have others."""

FIRST_INCARNATION = 1
"""A worker's id is new with every process, so a process has others only after it was taken for
dead."""


@dataclass(frozen=True, slots=True)
class DirectoryLink:
    """The way to one cluster's directory; plain values.

    Attributes:
        settings: of each shard.
        num_shards: how many there are.
        lookup_timeout_s: what a hint is worth waiting for.
    """

    settings: DirectorySettings
    num_shards: int = 1
    lookup_timeout_s: float = 0.010

    def start(self) -> Sequence[Any]:
        """The actors of all shards, started where they do not run. Blocks on Ray."""
        return start_directory(self.settings, self.num_shards, namespace=NAMESPACE)

    def stop(self) -> None:
        """End the actors that run. Blocks on Ray."""
        for shard in range(self.num_shards):
            try:
                actor = ray.get_actor(f"{ACTOR_NAME}-{shard}", namespace=NAMESPACE)
            except ValueError:
                continue
            ray.kill(actor)

    async def client(self) -> DirectoryClient:
        """A gateway's view of the directory."""
        # A leader is told, or its claim is over, within one `claim_s`.
        leader_timeout_s = self.settings.claim_s + 1.0
        return DirectoryClient(await self._actors(), self.lookup_timeout_s, leader_timeout_s)

    async def announcer(self, worker_id: str) -> CacheAnnouncer:
        """A worker's publisher; an `AnnouncerFactory`."""
        actors = await self._actors()
        sends = [actors.send_to(shard) for shard in range(self.num_shards)]

        def go_on_as(lowest_incarnation: int) -> None:
            publisher.restart(lowest_incarnation)

        publisher = DirectoryPublisher(
            worker_id,
            FIRST_INCARNATION,
            sends,
            go_on_as,
            asks=[actors.ask_for(worker_id, shard) for shard in range(self.num_shards)],
            heartbeat_s=min(0.3, 0.3 * self.settings.late_s, 0.3 * self.settings.claim_s),
        )
        return publisher

    async def _actors(self) -> DirectoryActors:
        return DirectoryActors(await asyncio.to_thread(self.start), self.start)
