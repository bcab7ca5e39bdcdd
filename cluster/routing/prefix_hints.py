"""What does the cluster know of a prompt before it is placed? Its hashes, hints, and who leads.

hashes ── lookup_or_claim ──▶ Lead                     compute what is missing
                          ──▶ Follow ── leader? ──▶    wait at the worker that computes it
                          ──▶ PlanByLoad               no hints; nothing is lost but time
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ripresa.cluster.directory.events import (
    Answer,
    Follow,
    Lead,
    Lookup,
    PlanByLoad,
    Receipt,
)
from ripresa.cluster.routing.planner import Leader
from ripresa.cluster.routing.route_plan import Candidate
from ripresa.workers.address import WorkerAddress
from ripresa.workers.config import DEFAULT_ANCHOR_INTERVAL
from ripresa.workers.prefix_sources import PrefixOutcome
from ripresa.workers.replay import PlanKind, Recipe, ReplayMode
from ripresa.workers.replay_query import ReplayGeometry
from ripresa.workers.request import CacheUse

MAX_LEADERS = 8
"""Leaders that one request asks after, before it computes by itself."""


class Directory(Protocol):
    """The prefix directory as a gateway sees it. Nothing here raises for its sake."""

    async def lookup_or_claim(
        self,
        hashes: Sequence[bytes],
        request: str,
        mode: ReplayMode = ReplayMode.BOUNDED,
        interval: int | None = None,
        gone: str | None = None,
    ) -> Answer | PlanByLoad: ...

    async def lookup(self, hashes: Sequence[bytes]) -> Lookup | None: ...

    async def leader(self, hashes: Sequence[bytes], request: str) -> tuple[str, int] | None: ...

    def release(self, hashes: Sequence[bytes], request: str) -> None: ...

    def receipt(self, receipt: Receipt) -> None: ...

    def lost(self, worker: str, incarnation: int) -> None: ...


class NoDirectory:
    """The directory of a cluster that has none."""

    async def lookup_or_claim(
        self,
        hashes: Sequence[bytes],
        request: str,
        mode: ReplayMode = ReplayMode.BOUNDED,
        interval: int | None = None,
        gone: str | None = None,
    ) -> Answer | PlanByLoad:
        return PlanByLoad("there is no prefix directory")

    async def lookup(self, hashes: Sequence[bytes]) -> Lookup | None:
        return None

    async def leader(self, hashes: Sequence[bytes], request: str) -> tuple[str, int] | None:
        return None

    def release(self, hashes: Sequence[bytes], request: str) -> None:
        return None

    def receipt(self, receipt: Receipt) -> None:
        return None

    def lost(self, worker: str, incarnation: int) -> None:
        return None


@dataclass(frozen=True, slots=True)
class Hints:
    """What is known of one prompt.

    Attributes:
        hashes: of its full blocks; () if nothing may be reused.
        lookup: who holds what; None without an answer.
        leader: whom the request follows; None for nobody.
        leads: the request holds the claim of what is missing.
        why: why there are no hints; empty if there are.
    """

    hashes: tuple[bytes, ...] = ()
    lookup: Lookup | None = None
    leader: Leader | None = None
    leads: bool = False
    why: str = ""


class PrefixHints:
    """Asks the directory for one gateway's requests, and tells it what was found.

    Args:
        geometry: the model, as the replay rules see it.
        address: of a worker by its id; None for one that is not known to live.
        anchor_interval: A of mode canonical.
    """

    def __init__(
        self,
        directory: Directory,
        geometry: ReplayGeometry,
        address: Callable[[str], WorkerAddress | None],
        anchor_interval: int = DEFAULT_ANCHOR_INTERVAL,
    ) -> None:
        self.directory = directory
        self.geometry = geometry
        self.anchor_interval = anchor_interval
        self._address = address
        self._incarnations: dict[str, int] = {}

    def interval(self, mode: ReplayMode) -> int | None:
        """A, for the mode that has anchors."""
        return self.anchor_interval if mode is ReplayMode.CANONICAL else None

    async def ask(
        self,
        hashes: tuple[bytes, ...],
        claim: str,
        cache: CacheUse,
        num_reusable: int,
        gone: str | None = None,
    ) -> Hints:
        """Look a prompt up, and settle who computes what nobody holds.

        Args:
            claim: names the request's claim, see `new_claim`.
            num_reusable: leading blocks that the request may wait for; 0 to wait for nobody.
            gone: claim of a leader whose blocks will not come.
        """
        if not hashes:
            return Hints(why="the prompt has no full block")
        if not cache.reads:
            return Hints(why="the request reads no cache")
        interval = self.interval(cache.mode)
        lookup: Lookup | None = None
        for _ in range(MAX_LEADERS):
            answer = await self.directory.lookup_or_claim(hashes, claim, cache.mode, interval, gone)
            if isinstance(answer, PlanByLoad):
                return Hints(hashes, why=answer.reason)
            lookup = answer.lookup
            self._remember(lookup)
            if isinstance(answer.flight, Lead) and not cache.writes:
                # What it computes is for nobody else: the next one shall lead.
                self.directory.release(hashes, claim)
                return Hints(hashes, answer.lookup)
            flight = answer.flight
            if not isinstance(flight, Follow) or flight.first >= num_reusable:
                return Hints(hashes, answer.lookup, leads=isinstance(flight, Lead))
            leader = await self._leader(hashes, flight)
            if leader is not None:
                return Hints(hashes, answer.lookup, leader)
            gone = None
            if flight.worker is not None:
                # Its worker is not alive, whatever the directory believes.
                gone = flight.request
        return Hints(hashes, lookup)

    async def num_held(self, hashes: tuple[bytes, ...]) -> int:
        """Leading blocks that somebody holds, as far as the directory says."""
        lookup = await self.directory.lookup(hashes) if hashes else None
        return lookup.stretches[-1].stop if lookup is not None and lookup.stretches else 0

    def release(self, hashes: Sequence[bytes], claim: str) -> None:
        """The request computes nothing any more that others could wait for."""
        if hashes:
            self.directory.release(hashes, claim)

    def lost(self, worker_id: str) -> None:
        """A worker is gone, as far as this gateway can tell."""
        self.directory.lost(worker_id, self._incarnations.get(worker_id, 0))

    def admitted(
        self, hashes: tuple[bytes, ...], route: Candidate, recipe: Recipe, outcome: PrefixOutcome
    ) -> int | None:
        """Tell the directory what the computing worker found.

        Returns by how many blocks more was planned than was reused, negative if more was; None if
        the plan did not depend on what the directory said is held.
        """
        hit, sources = route.hit, route.sources
        if PlanKind.RESUME in (hit.kind, recipe.kind) or sources.leader is not None:
            return None
        num_reused = recipe.write_floor // self.geometry.window
        # A worker that brings nothing says nothing but what it reuses.
        num_local = outcome.num_local if sources else num_reused
        self._receipt(route.computing, hashes, hit.restarts, hit.num_local, num_local)
        held = outcome.num_held
        for source in sources.blocks:
            if source.first <= held < source.stop:
                # It failed at this block; of what follows nothing is known.
                self._receipt(source.holder.worker_id, hashes, source.restarts, held + 1, held)
        for window in sources.windows:
            number = window.boundary // self.geometry.window
            if number in outcome.missing_windows and held >= number:
                self._receipt(
                    window.holder.worker_id, hashes, window.restarts, number, number, (number,)
                )
        return hit.num_blocks - num_reused

    def _receipt(
        self,
        worker_id: str,
        hashes: tuple[bytes, ...],
        restarts: tuple[int, ...],
        num_planned: int,
        num_real: int,
        missing_windows: tuple[int, ...] = (),
    ) -> None:
        incarnation = self._incarnations.get(worker_id)
        if incarnation is None or not hashes:
            return
        stop = max(num_planned, num_real, *missing_windows, 0)
        self.directory.receipt(
            Receipt(
                worker_id,
                incarnation,
                hashes[:stop] or hashes[:1],
                restarts,
                num_planned,
                num_real,
                missing_windows,
            )
        )

    def _remember(self, lookup: Lookup) -> None:
        for prefix in lookup.prefixes:
            self._incarnations[prefix.holder.worker] = prefix.holder.incarnation
        for stretch in lookup.stretches:
            for holding in stretch.holdings:
                self._incarnations[holding.worker] = holding.incarnation

    async def _leader(self, hashes: tuple[bytes, ...], follow: Follow) -> Leader | None:
        """Where the leader computes; None if that is nowhere, or it leads no more."""
        worker = follow.worker
        if worker is None:
            found = await self.directory.leader(hashes, follow.request)
            if found is None:
                return None
            worker = found[0]
        address = self._address(worker)
        if address is None:
            return None
        return Leader(follow.request, address, follow.first, follow.stop)


def new_claim() -> str:
    """A name for a request's claim that no other request of any gateway has."""
    return uuid.uuid4().hex
