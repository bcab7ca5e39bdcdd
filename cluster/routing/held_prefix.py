"""Who holds what of one prompt, from the side of a worker that would compute it?

    best chain     0 ──────────────────────────── n        longest that workers hold together
    this worker    0 ───────── k                           its own part of it
    sources                     [k, m) from A, [m, n) from B, windows where they help

Pure: from the directory's answer to places that the worker can ask. All of it is a hint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import overload

from ripresa.cluster.directory.chains import usable_blocks
from ripresa.cluster.directory.events import HeldKind, Holding, Lineage, Lookup, Standing
from ripresa.workers.address import WorkerAddress
from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.prefix_sources import BlockSource, WindowSource
from ripresa.workers.replay import ReplayMode

NUM_WINDOWS = 16
"""Boundaries below a hit whose windows are looked for: further back, a replay is cheaper."""


@dataclass(frozen=True, slots=True)
class PrefixChain:
    """Leading blocks of one lineage; `restarts` are those of the last one."""

    restarts: Lineage = ()
    num_blocks: int = 0


class HintedChain(Sequence[BlockIdentity]):
    """A chain as the replay planner reads it, made block by block where it looks."""

    def __init__(self, hashes: Sequence[bytes], chain: PrefixChain, window: int) -> None:
        self._hashes = hashes
        self._chain = chain
        self._window = window

    def __len__(self) -> int:
        return self._chain.num_blocks

    @overload
    def __getitem__(self, number: int) -> BlockIdentity: ...

    @overload
    def __getitem__(self, number: slice) -> list[BlockIdentity]: ...

    def __getitem__(self, number: int | slice) -> BlockIdentity | list[BlockIdentity]:
        if isinstance(number, slice):
            return [self[n] for n in range(*number.indices(len(self)))]
        if not 0 <= number < self._chain.num_blocks:
            raise IndexError(number)
        return BlockIdentity(
            self._hashes[number], lineage_at(self._chain.restarts, number, self._window)
        )


def lineage_at(restarts: Lineage, number: int, window: int) -> Lineage:
    """Lineage of block `number` of a chain that ends with these restarts."""
    stop = (number + 1) * window
    return tuple(restart for restart in restarts if restart < stop)


def common_blocks(one: PrefixChain, other: PrefixChain, window: int) -> int:
    """Leading blocks that two chains of a prompt have in common."""
    shortest = min(one.num_blocks, other.num_blocks)
    apart = set(one.restarts) ^ set(other.restarts)
    return min(shortest, min(apart) // window) if apart else shortest


class HeldPrefix:
    """What the directory says of a prompt, for planning.

    Args:
        lookup: its answer; None if there is none.
        hashes: of the prompt's full blocks.
        window: W.
        max_blocks: blocks that the request could reuse at most.
        mode, interval: how it may reuse them.
        recipe: lineage that alone counts, of a request that is executed again; None for any.
        workers: that are known to live; nobody else is asked.
    """

    def __init__(
        self,
        lookup: Lookup | None,
        hashes: Sequence[bytes],
        window: int,
        max_blocks: int,
        mode: ReplayMode,
        interval: int | None,
        recipe: Lineage | None,
        workers: Mapping[str, WorkerAddress],
    ) -> None:
        self._lookup = lookup or Lookup((), (), ())
        self._hashes = hashes
        self._window = window
        self._max_blocks = min(max_blocks, len(hashes))
        self._mode = mode
        self._interval = interval
        self._recipe = recipe
        self._workers = workers
        self._blind = {
            prefix.holder.worker
            for prefix in self._lookup.prefixes
            if prefix.holder.standing is Standing.BLIND
        }
        self._windows: dict[PrefixChain, list[tuple[int, list[str]]]] = {}
        self._local: dict[str, list[PrefixChain]] = {}
        chains = [self._usable(*chain) for chain in self._lookup.chains]
        self._best = max(chains, key=_worth, default=PrefixChain())
        self._parts: dict[PrefixChain, list[_Part]] = {}
        for prefix in self._lookup.prefixes:
            chain = self._usable(prefix.restarts, prefix.num_blocks)
            if chain.num_blocks and prefix.holder.worker in workers:
                self._local.setdefault(prefix.holder.worker, []).append(chain)

    @property
    def best(self) -> PrefixChain:
        """The longest chain that workers hold together, of the fewest restarts."""
        return self._best

    def local(self, worker: str) -> PrefixChain:
        """The longest chain that a worker holds by itself."""
        return max(self._local.get(worker, ()), key=_worth, default=PrefixChain())

    def share(self, worker: str, chain: PrefixChain) -> int:
        """Leading blocks of a chain that a worker holds."""
        own = self._local.get(worker)
        return max(common_blocks(one, chain, self._window) for one in own) if own else 0

    def bring(self, worker: str, chain: PrefixChain) -> tuple[tuple[BlockSource, ...], int]:
        """Where a worker can have the rest of a chain from, and how long the chain then is.

        Each part comes from the holder of the part before it if that one goes on; else from the
        one that reaches furthest.
        """
        first = self.share(worker, chain)
        sources: list[BlockSource] = []
        parts = [part for part in self._parts_of(chain) if part.stop > first]
        for index, part in enumerate(parts):
            start = max(first, part.start)
            if sources and sources[-1].holder.worker_id in part.holders:
                last = sources.pop()
                sources.append(BlockSource(last.holder, part.restarts, last.first, part.stop))
                continue
            holders = [name for name in part.holders if name != worker]
            if not holders:
                return tuple(sources), max(first, start)
            following = parts[index + 1 :]
            holder = max(holders, key=lambda name: (_run_length(name, following), name))
            sources.append(BlockSource(self._workers[holder], part.restarts, start, part.stop))
        return tuple(sources), chain.num_blocks

    def windows(self, worker: str, chain: PrefixChain) -> dict[int, WorkerAddress | None]:
        """Holders of the chain's native windows by boundary, the newest few; None: the worker."""
        found: dict[int, WorkerAddress | None] = {}
        for boundary, holders in self._window_holders(chain):
            found[boundary] = None if worker in holders else self._workers[holders[0]]
        return found

    def _window_holders(self, chain: PrefixChain) -> list[tuple[int, list[str]]]:
        """The newest few boundaries of a chain whose windows somebody holds, and who."""
        found = self._windows.get(chain)
        if found is None:
            found = self._windows[chain] = []
            for number in range(chain.num_blocks, max(0, chain.num_blocks - NUM_WINDOWS), -1):
                restarts = lineage_at(chain.restarts, number - 1, self._window)
                holders = [
                    holding.worker
                    for holding in self._lookup.windows(number)
                    if holding.restarts == restarts and self._can_ask(holding)
                ]
                if holders:
                    found.append((number * self._window, sorted(holders)))
        return found

    def window_source(
        self, chain: PrefixChain, boundary: int, holder: WorkerAddress
    ) -> WindowSource:
        """Names a window of a chain for the worker that asks for it."""
        number = boundary // self._window - 1
        return WindowSource(holder, lineage_at(chain.restarts, number, self._window), boundary)

    def cut(self, chain: PrefixChain, num_blocks: int) -> PrefixChain:
        """Its first blocks."""
        if not num_blocks:
            return PrefixChain()
        return PrefixChain(lineage_at(chain.restarts, num_blocks - 1, self._window), num_blocks)

    def hinted(self, chain: PrefixChain) -> HintedChain:
        return HintedChain(self._hashes, chain, self._window)

    def _usable(self, restarts: Lineage, num_blocks: int) -> PrefixChain:
        """The part of a chain that the request may reuse."""
        num_blocks = min(num_blocks, self._max_blocks)
        if self._recipe is None:
            usable = usable_blocks(restarts, num_blocks, self._window, self._mode, self._interval)
        else:
            wanted = PrefixChain(self._recipe, num_blocks)
            usable = common_blocks(PrefixChain(restarts, num_blocks), wanted, self._window)
        if not usable:
            return PrefixChain()
        return PrefixChain(lineage_at(restarts, usable - 1, self._window), usable)

    def _parts_of(self, chain: PrefixChain) -> list[_Part]:
        """The chain in parts with the same holders and lineage, in order."""
        found = self._parts.get(chain)
        if found is None:
            found = self._parts[chain] = self._split(chain)
        return found

    def _split(self, chain: PrefixChain) -> list[_Part]:
        window = self._window
        cuts = sorted({restart // window for restart in chain.restarts})
        parts: list[_Part] = []
        for stretch in self._lookup.stretches:
            start, stop = stretch.start, min(stretch.stop, chain.num_blocks)
            edges = [start, *(cut for cut in cuts if start < cut < stop), stop]
            for low, high in pairwise(edges):
                if low >= high:
                    continue
                restarts = lineage_at(chain.restarts, low, window)
                holders = frozenset(
                    holding.worker
                    for holding in stretch.holdings
                    if holding.kind is HeldKind.BLOCK
                    and holding.restarts == restarts
                    and self._can_ask(holding)
                )
                parts.append(_Part(low, high, restarts, holders))
        return parts

    def _can_ask(self, holding: Holding) -> bool:
        return holding.worker in self._workers and holding.worker not in self._blind


@dataclass(frozen=True, slots=True)
class _Part:
    start: int
    stop: int
    restarts: Lineage
    holders: frozenset[str]


def _run_length(holder: str, parts: Sequence[_Part]) -> int:
    """Blocks of the next parts that one holder has without a gap."""
    length = 0
    for part in parts:
        if holder not in part.holders:
            break
        length += part.stop - part.start
    return length


def _worth(chain: PrefixChain) -> tuple[int, int]:
    return chain.num_blocks, -len(chain.restarts)
