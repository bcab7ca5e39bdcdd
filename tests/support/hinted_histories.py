"""Random histories over workers that pull from each other as a real directory and planner say.

    engines ── listeners ─▶ outboxes ── late, or lossy ─▶ PrefixIndex ── lookup ─▶ plan_route
       ▲                                                                              │
       └────────────────────── sources, some of them lies ────────────────────────────┘

The directory forgets everything now and then, and leaders are cancelled like anybody else.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace

from hash_machine import GEOMETRY, WINDOW
from hash_requests import ask
from histories import History, Watch, nobody, random_config
from peer_cluster import PeerCluster, peer_cluster
from split_cluster import Stream

from ripresa.cluster.directory.events import Accepted, Answer, Follow, Lead
from ripresa.cluster.directory.index import DirectorySettings, PrefixIndex
from ripresa.cluster.directory.outbox import Item, Outbox
from ripresa.cluster.routing.planner import Leader, RouteQuery, plan_route
from ripresa.cluster.routing.worker_load import PlannerSettings, WorkerLoad
from ripresa.workers.address import WorkerAddress
from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.cache.cache_events import HeldKind, Origin, Tier
from ripresa.workers.errors import LeaderGone
from ripresa.workers.prefix_sources import (
    BlockSource,
    LeaderSource,
    PrefixSources,
    WindowSource,
)
from ripresa.workers.replay import ReplayMode
from ripresa.workers.request import GenerationRequest

WORKERS = ("e0", "d0", "d1")
MAX_LEADERS_LOST = 3


class HintedDirectory:
    """A prefix index that hears of workers late, and not of everything."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._num_restarts = 0
        self.outboxes = {name: Outbox(name, 1) for name in WORKERS}
        self.restart()

    def restart(self) -> None:
        """Forget everything; workers tell it again."""
        self._num_restarts += 1
        settings = DirectorySettings(window=WINDOW)
        self.index = PrefixIndex(settings, f"run {self._num_restarts}")

    def listener(self, name: str) -> LossyListener:
        return LossyListener(self.outboxes[name], self._rng)

    def look_up(
        self, hashes: Sequence[bytes], claim: str, mode: ReplayMode, interval: int, gone: str | None
    ) -> Answer:
        """What it knows, after most workers told it what is new."""
        for outbox in self.outboxes.values():
            if self._rng.random() < 0.8:
                self._hear(outbox)
        anchors = interval if mode is ReplayMode.CANONICAL else None
        return self.index.lookup_or_claim(hashes, claim, 0.0, mode, anchors, gone)

    def _hear(self, outbox: Outbox) -> None:
        while True:
            reply = self.index.report(outbox.next_report(), 0.0)
            outbox.take(reply)
            if isinstance(reply, Accepted) and not outbox.has_changes:
                return


class LossyListener:
    """Tells an outbox what a cache holds; now and then what is gone stays told."""

    def __init__(self, outbox: Outbox, rng: random.Random) -> None:
        self._outbox = outbox
        self._rng = rng

    def held(self, identity: BlockIdentity, origin: Origin, kind: HeldKind, tier: Tier) -> None:
        self._outbox.hold(Item(kind, identity, tier), origin)

    def dropped(self, identity: BlockIdentity, kind: HeldKind, tier: Tier) -> None:
        if self._rng.random() < 0.95:
            self._outbox.drop(Item(kind, identity, tier))

    def lead(self, claim: str, hashes: Sequence[bytes]) -> None:
        self._outbox.lead(claim, hashes)

    def finish(self, claim: str) -> None:
        self._outbox.finish(claim)


class HintedCluster:
    """Routes requests as a gateway does."""

    def __init__(
        self,
        cluster: PeerCluster,
        directory: HintedDirectory,
        interval: int,
        rng: random.Random,
    ) -> None:
        self._cluster = cluster
        self._directory = directory
        self._interval = interval
        self._rng = rng

    async def run(self, request: GenerationRequest) -> Stream:
        """A request's stream, wherever the planner sends it."""
        hashes = tuple(self._cluster.decoder("d0")._core._prefixes.open(request).hashes)
        claim, gone = f"claim of {request.request_id}", None
        mode = request.cache.mode
        for attempt in range(MAX_LEADERS_LOST + 1):
            answer = self._directory.look_up(hashes, claim, mode, self._interval, gone)
            leader = self._leader(answer.flight) if attempt < MAX_LEADERS_LOST else None
            query = RouteQuery(
                GEOMETRY,
                request.num_tokens,
                hashes,
                mode,
                self._interval if mode is ReplayMode.CANONICAL else None,
                request.tail,
                answer.lookup,
                leader,
                recipe=request.recipe,
            )
            plan = plan_route(query, self._loads(), PlannerSettings())
            sources = plan.chosen.sources
            if attempt == 0 and self._rng.random() < 0.15:
                sources = self._lie(len(hashes))
            tried = replace(
                request,
                generation=attempt,
                sources=sources,
                claim=claim if isinstance(answer.flight, Lead) else None,
            )
            try:
                return await self._cluster.run(plan.decoder, tried, plan.encoder or "")
            except LeaderGone:
                gone = None if leader is None else leader.request_id
            finally:
                self._directory.index.release(claim)
        raise AssertionError("a request that follows nobody lost its leader")

    def _address(self, name: str) -> WorkerAddress:
        return self._cluster.address(name)

    def _leader(self, flight: Lead | Follow | None) -> Leader | None:
        if not isinstance(flight, Follow) or flight.worker is None:
            return None
        return Leader(flight.request, self._address(flight.worker), flight.first, flight.stop)

    def _loads(self) -> list[WorkerLoad]:
        return [
            WorkerLoad(self._address(name), queued_rows=self._rng.randint(0, 400))
            for name in WORKERS
        ]

    def _lie(self, num_blocks: int) -> PrefixSources:
        """Sources that nobody named: of blocks, of a window, perhaps of a leader."""
        holder = self._address(self._rng.choice(WORKERS))
        stop = self._rng.randint(1, num_blocks + 1)
        restarts = self._rng.choice(((), (2 * WINDOW,), (3 * WINDOW, 5 * WINDOW)))
        return PrefixSources(
            (BlockSource(holder, restarts, self._rng.randint(0, stop - 1), stop),),
            (WindowSource(holder, restarts, self._rng.randint(1, stop) * WINDOW),),
            self._rng.choice((None, LeaderSource(holder, "nobody", 0, stop))),
        )


async def over_hinted_peers(seed: int, num_bursts: int = 8, watch: Watch = nobody) -> None:
    """An encoder worker and two decode workers that pull from each other."""
    rng = random.Random(2000 + seed)
    history = History(rng)
    config = random_config(rng)
    directory = HintedDirectory(rng)
    async with peer_cluster(
        1,
        2,
        config=config,
        num_blocks=rng.choice((80, 300)),
        listener=directory.listener,
        num_drafts=2,
    ) as cluster:
        for worker in cluster.workers.values():
            watch(worker.engine._core, worker.machine)
        history.engines = tuple(cluster.decoder(name) for name in ("d0", "d1"))
        hinted = HintedCluster(cluster, directory, config.anchor_interval, rng)
        for burst in range(num_bursts):
            if rng.random() < 0.15:
                directory.restart()
            requests = [history.next(3 * burst + k) for k in range(3)]
            await asyncio.gather(*(history.play(request, hinted.run) for request in requests))
            for worker in cluster.workers.values():
                worker.engine.check_integrity()
            directory.index.check_integrity()
        for name in ("d0", "d1"):
            await cluster.run(name, ask((3,), "last"))
