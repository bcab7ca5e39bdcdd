"""How does a worker come to hold more of a prompt than it holds, before it plans the request?

    session's image ─▶ disk ─▶ named peers ─▶ windows ─▶ leader ─▶ admitted
                           └ each block lands under its identity, pinned ┘

What does not come is computed. Two requests that want one block bring it once: the second waits for
the first's, and asks by itself only if that failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace

import torch

from ripresa.workers.address import WorkerAddress
from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.cache.block_record import BlockRecord, Producer
from ripresa.workers.cache.block_table import PageLoan, PagePool
from ripresa.workers.config import TransferConfig
from ripresa.workers.errors import ErrorCode, ResourceExhausted, RipresaError
from ripresa.workers.job import Job
from ripresa.workers.models.base import ModelRunner
from ripresa.workers.peer_place import PeerPlace, missing_windows
from ripresa.workers.prefix_cache import PrefixCache, RequestPrefix
from ripresa.workers.prefix_place import PrefixPlace, WantedPrefix
from ripresa.workers.prefix_pulls import PeerPulls
from ripresa.workers.prefix_sources import (
    LeaderSource,
    PrefixOutcome,
    PrefixSources,
    PullEnd,
    WindowSource,
)
from ripresa.workers.replay import Recipe
from ripresa.workers.request import GenerationRequest


class PrefixHold:
    """What was brought for one request: it stays until the request is admitted or given up.

    Implements `Landing`. Made by `PrefixSupply.bring`, which ends it.

    Attributes:
        request: for which.
        error: why it was given up; None if it was not.
    """

    def __init__(self, supply: PrefixSupply, request: GenerationRequest) -> None:
        self.request = request
        self.error: RipresaError | None = None
        self.ended = asyncio.Event()
        self._scope: asyncio.Timeout | None = None
        self.outcome = PrefixOutcome()
        self._supply = supply
        self._prefix: RequestPrefix | None = None
        self._loans: list[PageLoan] = []
        self._pinned: set[BlockIdentity] = set()
        self.brought: dict[str, list[int]] = {}
        self.place = ""
        self.num_windows = 0
        self.has_image = False

    def abort(self, error: RipresaError) -> None:
        """Give the request up: whoever waits for it raises `error`. Idempotent."""
        if self.error is None:
            self.error = error
            if self._scope is not None and not self._scope.expired():
                self._scope.reschedule(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def until_aborted(self) -> AsyncIterator[None]:
        """Raises TimeoutError in its block once the request is given up."""
        async with asyncio.timeout(None) as self._scope:
            try:
                yield
            finally:
                self._scope = None

    def begin(self, prefix: RequestPrefix) -> None:
        self._prefix = prefix

    def keep(self, chain: Sequence[BlockIdentity], first: int) -> int:
        """Pin the held blocks of `chain` from `first` on; the number of the first missing one."""
        stop = first
        while stop < len(chain) and chain[stop] in self._supply.blocks:
            stop += 1
        new = [identity for identity in chain[first:stop] if identity not in self._pinned]
        if new:
            self._loans.append(self._supply.pages.borrow(new))
            self._pinned.update(new)
        return stop

    def land(
        self,
        first: int,
        identities: Sequence[BlockIdentity],
        producers: Sequence[Producer],
        payload: torch.Tensor,
    ) -> None:
        self.stage(first, identities, producers, payload).publish()

    def stage(
        self,
        first: int,
        identities: Sequence[BlockIdentity],
        producers: Sequence[Producer],
        payload: torch.Tensor,
        num_spared: int = 0,
    ) -> Staged:
        pages = self._supply.pages
        if num_spared and pages.num_available_blocks < len(identities) + num_spared:
            raise ResourceExhausted(f"the last {num_spared} KV blocks are for what comes before")
        loan = pages.borrow_new(len(identities))
        try:
            self._supply.runner.import_blocks(loan.blocks, payload)
        except BaseException:
            loan.end()
            raise
        return Staged(self, first, identities, producers, loan)

    def publish(
        self,
        first: int,
        identities: Sequence[BlockIdentity],
        producers: Sequence[Producer],
        loan: PageLoan,
    ) -> None:
        """Publish blocks that are stored in a loan's pages, and end it."""
        assert self._prefix is not None
        supply = self._supply
        try:
            for index, (identity, producer) in enumerate(zip(identities, producers, strict=True)):
                origin = self._prefix.origin(first + index)
                record = BlockRecord(identity, producer, supply.weights, origin)
                offer = supply.blocks.offer(loan.blocks[index], record)
                supply.blocks.acknowledge(offer, rank=0)
            # Also of those whose identity somebody else has published first.
            self.keep(identities, 0)
        finally:
            loan.end()
        self.brought.setdefault(self.place, []).extend(range(first, first + len(identities)))
        supply.arrived(identity.hash for identity in identities)

    def land_image(self, num_tokens: int, recipe: Recipe, payload: torch.Tensor) -> None:
        assert self._prefix is not None
        self._prefix.take_image(num_tokens, recipe, payload.detach().cpu().clone())
        self.has_image = True

    def land_window(self, identity: BlockIdentity, payload: torch.Tensor) -> None:
        assert self._prefix is not None
        number = self._prefix.hashes.index(identity.hash)
        origin = self._prefix.origin(number)
        self._supply.windows.put(identity, payload.detach().cpu().clone(), origin)
        self.num_windows += 1

    def let_go(self) -> None:
        """Unpin everything. Idempotent."""
        loans, self._loans = self._loans, []
        self._pinned.clear()
        for loan in loans:
            loan.end()


@dataclass(frozen=True, slots=True)
class Staged:
    """Implements `StagedBlocks`: blocks in pages that are lent for one request."""

    hold: PrefixHold
    first: int
    identities: Sequence[BlockIdentity]
    producers: Sequence[Producer]
    loan: PageLoan

    def publish(self) -> None:
        self.hold.publish(self.first, self.identities, self.producers, self.loan)

    def drop(self) -> None:
        self.loan.end()


class PrefixSupply:
    """Brings cached state for the requests of one worker. Used on one event loop.

    Args:
        pages, prefixes: the worker's local cache.
        runner: stores payloads.
        config: timeouts.
        places: tried in order before the peers, whether or not a request names sources.
        pulls: the way to peers; None for a worker that reaches none.
        clock: seconds since the epoch.
        own: this worker; None for one that nobody names.
        leader: finds a request of this worker by id or claim, once it is admitted.
    """

    def __init__(
        self,
        pages: PagePool,
        prefixes: PrefixCache,
        runner: ModelRunner,
        config: TransferConfig,
        clock: Callable[[], float],
        places: Sequence[PrefixPlace] = (),
        pulls: PeerPulls | None = None,
        *,
        own: WorkerAddress | None,
        leader: Callable[[str], Awaitable[Job | None]],
    ) -> None:
        self._own = own
        self._leader = leader
        self.pages = pages
        self.blocks = prefixes.blocks
        self.windows = prefixes.windows
        self.weights = prefixes.weights
        self.runner = runner
        self._clock = clock
        self._pulls = pulls
        self._peers = None if pulls is None else PeerPlace(pulls, config)
        self._places = (*places,) if self._peers is None else (*places, self._peers)
        self._follow_timeout_s = config.follow_timeout_s
        self._pull_timeout_s = config.pull_timeout_s
        self._window_period = config.hand_over_window_blocks
        self._arriving: dict[bytes, asyncio.Event] = {}
        self._num_bringing = 0
        self._holds: dict[str, PrefixHold] = {}

    @property
    def num_holds(self) -> int:
        """Requests for which something is being brought."""
        return len(self._holds)

    def holding(self, request_id: str) -> PrefixHold | None:
        """What is being brought for a request."""
        return self._holds.get(request_id)

    def find(self, name: str) -> PrefixHold | None:
        """The same for a request of this id or claim."""
        claims = (hold for hold in self._holds.values() if hold.request.claim == name)
        return self._holds.get(name) or next(claims, None)

    def abort_all(self, error: RipresaError) -> None:
        for hold in self._holds.values():
            hold.abort(error)

    async def ended(self) -> None:
        """Return when nothing is brought any more."""
        while self._holds:
            await next(iter(self._holds.values())).ended.wait()

    @asynccontextmanager
    async def bring(
        self, request: GenerationRequest, prefix: RequestPrefix, needed_blocks: int
    ) -> AsyncIterator[PrefixHold]:
        """Bring what the request's sources, and the places, have and this worker lacks.

        Inside the block it stays; admit the request there. Nothing is brought for a request that
        could not be admitted anyway for want of pages.

        Args:
            needed_blocks: pages that the request will reserve.

        Raises:
            RipresaError: the request was given up meanwhile (`PrefixHold.abort`).
        """
        hold = PrefixHold(self, request)
        self._holds[request.request_id] = hold
        try:
            if self._may_bring(request, needed_blocks):
                hold.begin(prefix)
                await self._bring(hold, prefix)
            if hold.error is not None:
                raise hold.error
            yield hold
        finally:
            hold.let_go()
            del self._holds[request.request_id]
            hold.ended.set()

    def asks(self, request: GenerationRequest) -> bool:
        """Whether peers or places are asked for the request, which may take a while."""
        has_place = any(place is not self._peers for place in self._places)
        return request.cache.reads and (bool(request.sources) or has_place)

    def _may_bring(self, request: GenerationRequest, needed_blocks: int) -> bool:
        has_room = self.pages.num_free_slots > 0
        has_room = has_room and self.pages.num_available_blocks >= needed_blocks
        return has_room and self.asks(request)

    async def _bring(self, hold: PrefixHold, prefix: RequestPrefix) -> None:
        request = hold.request
        wanted = prefix.wanted()
        local = planned = len(prefix.held(wanted))
        due_s = None if request.deadline is None else request.deadline - self._clock()
        try:
            async with asyncio.timeout(due_s), hold.until_aborted():
                await self._bring_image(wanted, prefix, hold)
                for place in self._places:
                    chain = await place.chain(wanted)
                    planned = max(planned, len(chain))
                    hold.place = place.name
                    await self._complete(place, wanted, chain, hold)
                num_held = hold.keep(prefix.held(wanted), 0)
                if self._peers is not None:
                    await self._peers.bring_windows(wanted, num_held, hold)
                planned = max(planned, self._planned_to_follow(wanted, planned))
                await self._follow(wanted, prefix, hold)
                if self._peers is not None:
                    wanted.sources = self._with_handed_over(wanted)
                    num_held = len(prefix.held(wanted))
                    await self._peers.bring_windows(wanted, num_held, hold)
        except TimeoutError:
            # Given up, or overdue: admission says so.
            return
        num_held = len(prefix.held(wanted))
        wanted.sources = request.sources
        missing = missing_windows(wanted, len(wanted.hashes))
        hold.outcome = PrefixOutcome(
            num_planned=planned,
            num_local=local,
            num_held=num_held,
            from_peers=_ranges(hold.brought.get("peers", [])),
            from_disk=_ranges(hold.brought.get("disk", [])),
            num_windows_from_peers=hold.num_windows,
            missing_windows=tuple(w.boundary // wanted.window for w in missing),
            gone_at=self._gone_at(wanted, num_held),
            has_image=hold.has_image,
        )

    async def _bring_image(
        self, wanted: WantedPrefix, prefix: RequestPrefix, hold: PrefixHold
    ) -> None:
        """Bring the session's parked state; then more of its blocks are wanted."""
        source, asked = wanted.sources.image, prefix.wanted_image()
        if source is None or asked is None or self._pulls is None or source.holder == self._own:
            return
        how = await self._pulls.pull(
            wanted,
            source.holder,
            hold,
            first=0,
            stop=0,
            restarts=(),
            image=asked,
            timeout_s=self._pull_timeout_s,
        )
        if how not in (PullEnd.COMPLETE, PullEnd.SHORT, PullEnd.REFUSED):
            wanted.lost.add(source.holder)
        wanted.hashes = prefix.wanted().hashes

    def _with_handed_over(self, wanted: WantedPrefix) -> PrefixSources:
        """The sources, and the windows that a prefill which is taken over may have handed over."""
        leader, recipe = wanted.sources.leader, wanted.recipe
        if leader is None or recipe is None or leader.request_id != wanted.request_id:
            return wanted.sources
        period = self._window_period * wanted.window
        first = (recipe.write_floor // period + 1) * period
        boundaries = range(first, recipe.decoder_start + 1, period)
        handed_over = (
            WindowSource(leader.holder, recipe.restarts_below(boundary), boundary)
            for boundary in boundaries
        )
        return replace(wanted.sources, windows=(*wanted.sources.windows, *handed_over))

    async def _complete(
        self,
        place: PrefixPlace,
        wanted: WantedPrefix,
        chain: Sequence[BlockIdentity],
        hold: PrefixHold,
    ) -> None:
        """Bring what is missing of a chain, until a block does not come."""
        joined: set[bytes] = set()
        number = 0
        while (number := hold.keep(chain, number)) < len(chain):
            if await self._join(chain[number].hash, joined):
                continue
            stop = number + 1
            while (
                stop < len(chain)
                and chain[stop] not in self.blocks
                and chain[stop].hash not in self._arriving
            ):
                stop += 1
            with self.bringing(identity.hash for identity in chain[number:stop]):
                await place.bring(wanted, chain, number, stop, hold)
            if chain[number] not in self.blocks:
                return

    async def _follow(self, wanted: WantedPrefix, prefix: RequestPrefix, hold: PrefixHold) -> None:
        """Bring what a leader computes, until its next block will not come."""
        leader = wanted.sources.leader
        if leader is None:
            return
        stop = min(leader.stop, len(wanted.hashes))
        if leader.holder == self._own:
            await self._wait_here(wanted, leader, stop, prefix, hold)
            return
        if self._pulls is None:
            return
        joined: set[bytes] = set()
        hold.place = "peers"
        while True:
            number = hold.keep(prefix.held(wanted), 0)
            if not leader.first <= number < stop:
                return
            if not await self._join(wanted.hashes[number], joined):
                break
        with self.bringing(wanted.hashes[number:stop]):
            await self._pulls.pull(
                wanted,
                leader.holder,
                hold,
                first=number,
                stop=stop,
                restarts=None,
                leader=leader.request_id,
                timeout_s=self._follow_timeout_s,
            )

    async def _wait_here(
        self,
        wanted: WantedPrefix,
        leader: LeaderSource,
        stop: int,
        prefix: RequestPrefix,
        hold: PrefixHold,
    ) -> None:
        """Wait for what a request of this worker computes, until its next block will not come."""
        job = await self._leader(leader.request_id)
        while job is not None:
            number = hold.keep(prefix.held(wanted), 0)
            end = (number + 1) * wanted.window
            if not leader.first <= number < stop or job.is_over or job.sequence.committed >= end:
                return
            await job.moved()

    @staticmethod
    def _planned_to_follow(wanted: WantedPrefix, planned: int) -> int:
        leader = wanted.sources.leader
        if leader is None or leader.first > planned:
            return planned
        return min(leader.stop, len(wanted.hashes))

    @staticmethod
    def _gone_at(wanted: WantedPrefix, num_held: int) -> int | None:
        leader = wanted.sources.leader
        if leader is None or num_held >= min(leader.stop, len(wanted.hashes)):
            return None
        return num_held

    async def _join(self, block_hash: bytes, joined: set[bytes]) -> bool:
        """Wait for a block that is brought for another request, once; whether there was one."""
        arrival = self._arriving.get(block_hash)
        if arrival is None or block_hash in joined:
            return False
        joined.add(block_hash)
        await arrival.wait()
        return True

    def is_arriving(self, block_hash: bytes) -> bool:
        """Whether somebody brings the block."""
        return block_hash in self._arriving

    @contextmanager
    def bringing(self, hashes: Iterable[bytes]) -> Iterator[None]:
        """Requests wait for these blocks until they landed or the block ends."""
        mine = {h: asyncio.Event() for h in hashes if h not in self._arriving}
        self._arriving.update(mine)
        self._num_bringing += 1
        try:
            yield
        finally:
            self._num_bringing -= 1
            self.arrived(h for h, event in mine.items() if self._arriving.get(h) is event)

    def arrived(self, hashes: Iterable[bytes]) -> None:
        """Nobody needs to wait for these blocks any more (for `PrefixHold`)."""
        for block_hash in list(hashes):
            event = self._arriving.pop(block_hash, None)
            if event is not None:
                event.set()

    def check_integrity(self) -> None:
        """Raise RipresaError (INTERNAL) if blocks arrive that nobody brings."""
        if self._arriving and not self._num_bringing:
            raise RipresaError(
                ErrorCode.INTERNAL, f"{len(self._arriving)} KV blocks arrive that nobody brings"
            )


def _ranges(numbers: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Half-open ranges of these numbers, ascending."""
    ranges: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if ranges and ranges[-1][1] == number:
            ranges[-1] = (ranges[-1][0], number + 1)
        else:
            ranges.append((number, number + 1))
    return tuple(ranges)
