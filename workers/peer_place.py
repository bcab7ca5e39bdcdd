"""Which blocks do the peers that a request names complete, and in which order are they asked?"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from ripresa.workers.address import WorkerAddress
from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.config import TransferConfig
from ripresa.workers.prefix_place import Landing, WantedPrefix
from ripresa.workers.prefix_pulls import PeerPulls
from ripresa.workers.prefix_sources import BlockSource, PullEnd, WindowSource
from ripresa.workers.range_landing import RangeLanding
from ripresa.workers.replay import may_reuse
from ripresa.workers.transfer.base import PulledWindow

_FAILED = frozenset({PullEnd.REFUSED, PullEnd.UNREACHABLE, PullEnd.LATE, PullEnd.FAILED})


class PeerPlace:
    """Implements `PrefixPlace` for `PrefixSources.blocks` and `.windows`.

    Args:
        pulls: this worker's.
        config: timeouts, and how many ranges at once.
    """

    def __init__(self, pulls: PeerPulls, config: TransferConfig) -> None:
        self._pulls = pulls
        self._timeout_s = config.pull_timeout_s
        self._max_at_once = config.max_pulls_at_once

    @property
    def name(self) -> str:
        return "peers"

    async def chain(self, wanted: WantedPrefix) -> tuple[BlockIdentity, ...]:
        sources = [s for s in wanted.sources.blocks if _is_accepted(wanted, s)]
        lineages = dict.fromkeys(source.restarts for source in sources)
        chains = [self._chain(wanted, sources, restarts) for restarts in lineages]
        return max(chains, key=lambda chain: (len(chain), -_num_restarts(chain)), default=())

    def _chain(
        self, wanted: WantedPrefix, sources: Iterable[BlockSource], restarts: tuple[int, ...]
    ) -> tuple[BlockIdentity, ...]:
        """As far as blocks of this lineage are held here or by a source."""
        window = wanted.window
        fitting = [
            source
            for source in sources
            if source.restarts == tuple(r for r in restarts if r < source.stop * window)
        ]
        chain: list[BlockIdentity] = []
        stop = 0
        for number in range(len(wanted.hashes)):
            identity = wanted.identity(number, restarts)
            if number >= stop:
                stop = max((s.stop for s in fitting if s.first <= number < s.stop), default=stop)
            if number >= stop and identity not in wanted.blocks:
                break
            chain.append(identity)
        return tuple(chain)

    async def bring(
        self,
        wanted: WantedPrefix,
        chain: Sequence[BlockIdentity],
        first: int,
        stop: int,
        landing: Landing,
    ) -> None:
        """Pull the ranges of several sources at once; a block is published after all before it."""
        ranges: list[RangeLanding] = []
        turns = asyncio.Semaphore(self._max_at_once)
        asked: set[BlockIdentity] = set()
        for start, end in _ranges(wanted, chain, first, stop):
            ranges.append(RangeLanding(landing, start, end, tuple(ranges)))
        try:
            async with asyncio.TaskGroup() as group:
                pulls = [
                    group.create_task(self._bring_range(wanted, chain, each, asked, turns))
                    for each in ranges
                ]
                for each, pull in zip(ranges, pulls, strict=True):
                    each.come_to_front()
                    await pull
                    if each.num_missing:
                        break
                for pull in pulls:
                    pull.cancel()
        finally:
            for each in ranges:
                each.drop()

    async def _bring_range(
        self,
        wanted: WantedPrefix,
        chain: Sequence[BlockIdentity],
        landing: RangeLanding,
        asked: set[BlockIdentity],
        turns: asyncio.Semaphore,
    ) -> None:
        """Ask one source after another until the range is whole, or none is left.

        Args:
            asked: windows that a pull of the request asks for.
            turns: of the ranges that are pulled at once.
        """
        async with turns:
            while source := _source(wanted, chain, landing.next, landing.stop):
                last = min(landing.stop, source.stop)
                windows = [
                    w
                    for w in missing_windows(wanted, last)
                    if w.holder == source.holder and window_identity(wanted, w) not in asked
                ]
                asked.update(window_identity(wanted, window) for window in windows)
                how = await self._pulls.pull(
                    wanted,
                    source.holder,
                    landing,
                    first=landing.next,
                    stop=last,
                    restarts=chain[last - 1].restarts,
                    windows=[_pulled(wanted, window) for window in windows],
                    timeout_s=self._timeout_s,
                )
                if landing.must_wait:
                    await landing.at_front()
                elif how in _FAILED or landing.next < last:
                    wanted.lost.add(source.holder)

    async def bring_windows(self, wanted: WantedPrefix, num_blocks: int, landing: Landing) -> None:
        """Ask for the windows that `num_blocks` held blocks reach and that are still missing."""
        asked = missing_windows(wanted, num_blocks)
        for holder in dict.fromkeys(window.holder for window in asked):
            if holder in wanted.lost:
                continue
            # Another holder may have sent them meanwhile.
            windows = [w for w in missing_windows(wanted, num_blocks) if w.holder == holder]
            if not windows:
                continue
            how = await self._pulls.pull(
                wanted,
                holder,
                landing,
                first=0,
                stop=0,
                restarts=(),
                windows=[_pulled(wanted, window) for window in windows],
                timeout_s=self._timeout_s,
            )
            if how in _FAILED:
                wanted.lost.add(holder)


def _source(
    wanted: WantedPrefix, chain: Sequence[BlockIdentity], number: int, stop: int
) -> BlockSource | None:
    """The first source that may send block `number` of the chain, and what follows below `stop`."""
    for source in wanted.sources.blocks:
        last = min(stop, source.stop)
        if source.holder in wanted.lost or not source.first <= number < last:
            continue
        lineage = tuple(r for r in source.restarts if r < last * wanted.window)
        if lineage == chain[last - 1].restarts:
            return source
    return None


def _ranges(
    wanted: WantedPrefix, chain: Sequence[BlockIdentity], first: int, stop: int
) -> list[tuple[int, int]]:
    """Blocks [first, stop) as far as sources reach, in half-open ranges of one holder each."""
    ranges: list[tuple[int, int]] = []
    holder: WorkerAddress | None = None
    while source := _source(wanted, chain, first, stop):
        start = ranges.pop()[0] if source.holder == holder else first
        first, holder = min(stop, source.stop), source.holder
        ranges.append((start, first))
    return ranges


def missing_windows(wanted: WantedPrefix, num_blocks: int) -> list[WindowSource]:
    """Named windows at the end of one of the first `num_blocks` blocks that are not held."""
    window = wanted.window
    return [
        source
        for source in wanted.sources.windows
        if 0 < source.boundary // window <= num_blocks
        and source.boundary % window == 0
        and window_identity(wanted, source) not in wanted.windows
    ]


def window_identity(wanted: WantedPrefix, source: WindowSource) -> BlockIdentity:
    """The name of a window: that of the block that ends with it."""
    return BlockIdentity(wanted.hashes[source.boundary // wanted.window - 1], source.restarts)


def _pulled(wanted: WantedPrefix, source: WindowSource) -> PulledWindow:
    identity = window_identity(wanted, source)
    return PulledWindow(source.boundary // wanted.window, identity.hash, identity.restarts)


def _num_restarts(chain: Sequence[BlockIdentity]) -> int:
    return len(chain[-1].restarts) if chain else 0


def _is_accepted(wanted: WantedPrefix, source: BlockSource) -> bool:
    """Whether the request may reuse blocks of the source's lineage."""
    if not 0 <= source.first < source.stop:
        return False
    if wanted.recipe is not None:
        stop = source.stop * wanted.window
        return source.restarts == tuple(r for r in wanted.recipe.restarts if r < stop)
    return may_reuse(wanted.mode, source.restarts, wanted.interval)
