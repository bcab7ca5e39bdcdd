"""How does a worker use a store of blocks: what it keeps there, and what it brings back?

    step done ── published blocks ── missing? ──▶ copied in the step thread ──▶ written behind
    admission ── which chain? ── read and verified in threads ──▶ landed in the local cache

Looks and reads are bounded in time, since requests wait for them, and pages do. A store that hangs
is then left alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from ripresa.workers.cache.block_file import BlockFormat
from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.cache.block_record import PublishedBlock
from ripresa.workers.cache.block_store import BlockStore, StoredBlock, StoreStats
from ripresa.workers.cache.disk_store import DiskStore
from ripresa.workers.cache.write_behind import WriteBehind
from ripresa.workers.config import DiskConfig
from ripresa.workers.errors import ResourceExhausted
from ripresa.workers.models.base import ModelRunner
from ripresa.workers.prefix_place import Landing, WantedPrefix
from ripresa.workers.replay import follows

logger = logging.getLogger(__name__)

T = TypeVar("T")

READ_TIMEOUT_S = 2.0
"""Longest wait for a look or for the next few blocks."""
RETRY_S = 10.0
"""How long a store that hung is not read from."""
BLOCKS_A_READ = 16
BLOCKS_A_COPY = 8
"""Blocks that are copied between two steps."""

_NUM_READERS = 4
_ABSENT_FOR_S = 60.0
_BLOCK_ORDER_S = 1e-6


class DiskTier:
    """The store of one worker; implements `PrefixPlace`. Used on one event loop.

    Args:
        store: where blocks are kept, for any number of workers.
        runner: exports blocks.
        read_timeout_s: see `READ_TIMEOUT_S`.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        store: BlockStore,
        runner: ModelRunner,
        read_timeout_s: float = READ_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._runner = runner
        self._read_timeout_s = read_timeout_s
        self._clock = clock
        self._writer = WriteBehind(store, clock)
        self._readers = ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="store-reader")
        self._unread_until: float | None = None
        self._absent: set[BlockIdentity] = set()
        self._absent_since = clock()
        self._num_timeouts = 0

    @property
    def name(self) -> str:
        return "disk"

    # -- keeping ---------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """Whether a block that is copied now would be taken."""
        return self._writer.has_room

    def skip(self, num_blocks: int) -> None:
        """Count blocks that were not copied for want of room."""
        self._writer.drop(num_blocks)

    async def missing(
        self, blocks: Sequence[PublishedBlock], used_at: float
    ) -> list[PublishedBlock]:
        """Those of them that the store lacks; the others count as used.

        None of them if the store does not answer in time: all are counted as dropped then.

        Args:
            used_at: seconds since the epoch at which their request came.
        """
        identities = [published.record.identity for published in blocks]
        held = await self._read(lambda: [self._store.contains(each) for each in identities])
        if held is None:
            self._writer.drop(len(blocks))
            return []
        self._writer.used(
            [
                (published.record.identity, used_at_of(published.number, used_at))
                for published, is_held in zip(blocks, held, strict=True)
                if is_held
            ]
        )
        return [block for block, is_held in zip(blocks, held, strict=True) if not is_held]

    async def holds(self, identities: Sequence[BlockIdentity]) -> Sequence[bool]:
        """Which blocks the store has; none of them if it does not answer in time."""
        held = await self._read(lambda: [self._store.contains(each) for each in identities])
        return [False] * len(identities) if held is None else held

    def keep(self, blocks: Sequence[PublishedBlock], used_at: float) -> None:
        """Copy blocks and queue them. Called in the step thread, while their pages are held.

        It never waits for the store: a store that hangs must not hold up a step.
        """
        for published in blocks:
            at = used_at_of(published.number, used_at)
            if self._writer.has_room:
                payload = self._runner.export_blocks((published.block,))
                stored = StoredBlock(published.record, payload.cpu().numpy().tobytes())
                self._writer.offer([(stored, at)])
            else:
                self._writer.drop(1)

    def used(self, chain: Sequence[BlockIdentity], used_at: float) -> None:
        """A request reuses these leading blocks: they are to be kept for longer."""
        self._writer.used(
            [(identity, used_at_of(number, used_at)) for number, identity in enumerate(chain)]
        )

    # -- bringing --------------------------------------------------------------------------

    async def chain(self, wanted: WantedPrefix) -> tuple[BlockIdentity, ...]:
        now = self._clock()
        if now - self._absent_since >= _ABSENT_FOR_S:
            self._absent.clear()
            self._absent_since = now
        # The thread reads the cache's books while the loop changes them: a look-up is atomic, and
        # a wrong answer costs a read.
        found = await self._read(lambda: self._find(wanted))
        return () if found is None else found

    async def read(self, chain: Sequence[BlockIdentity]) -> list[StoredBlock] | None:
        """The leading blocks of `chain` that are there; None if the store did not answer in time.

        Args:
            chain: at most `BLOCKS_A_READ`.
        """
        return await self._read(partial(self._get, chain))

    async def bring(
        self,
        wanted: WantedPrefix,
        chain: Sequence[BlockIdentity],
        first: int,
        stop: int,
        landing: Landing,
    ) -> None:
        for start in range(first, stop, BLOCKS_A_READ):
            asked = chain[start : min(stop, start + BLOCKS_A_READ)]
            blocks = await self.read(asked)
            for number, block in enumerate(blocks or (), start):
                payload = torch.frombuffer(bytearray(block.payload), dtype=torch.uint8)
                record = block.record
                try:
                    landing.land(number, (record.identity,), (record.producer,), payload)
                except ResourceExhausted:
                    return
            if blocks is None or len(blocks) < len(asked):
                return

    def stats(self) -> StoreStats:
        return self._writer.stats()

    @property
    def num_timeouts(self) -> int:
        """Reads that took too long."""
        return self._num_timeouts

    async def flush(self) -> None:
        """Wait until all that was kept so far is written or dropped."""
        await asyncio.to_thread(self._writer.flush)

    async def forget(self, tenant: str | None) -> int:
        """Remove a tenant's blocks, None for everybody's, those that wait to be written included.

        How many went.

        Raises:
            RipresaError: UNAVAILABLE; the store cannot be reached.
        """
        await self.flush()
        return await asyncio.to_thread(self._store.forget, tenant)

    async def close(self) -> None:
        """Write what waits. Idempotent."""
        await asyncio.to_thread(self._writer.close)
        self._readers.shutdown(wait=False, cancel_futures=True)

    async def _read(self, work: Callable[[], T]) -> T | None:
        """Run a read in a thread; None if it takes too long, or the last one did."""
        if self._unread_until is not None and self._clock() < self._unread_until:
            return None
        try:
            async with asyncio.timeout(self._read_timeout_s):
                return await asyncio.get_running_loop().run_in_executor(self._readers, work)
        except TimeoutError:
            self._num_timeouts += 1
            self._unread_until = self._clock() + RETRY_S
            logger.warning(
                "the store did not answer in %g s; it is not read from for %g s",
                self._read_timeout_s,
                RETRY_S,
            )
            return None

    # Everything below runs in a reader's thread.

    def _get(self, identities: Sequence[BlockIdentity]) -> list[StoredBlock]:
        """The leading ones that are there."""
        blocks = []
        for identity in identities:
            block = self._store.get(identity)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _find(self, wanted: WantedPrefix) -> tuple[BlockIdentity, ...]:
        """The longest chain that local cache and store complete; then the fewest restarts."""
        if wanted.recipe is not None:
            chain = []
            for number in range(len(wanted.hashes)):
                identity = wanted.identity(number, wanted.recipe.restarts)
                if not self._is_held(identity, wanted.blocks):
                    break
                chain.append(identity)
            return tuple(chain)
        alive: list[tuple[int, ...]] = [()]
        num_blocks = 0
        for number, block_hash in enumerate(wanted.hashes):
            grown = self._grow(wanted, alive, number, block_hash)
            if not grown:
                break
            alive, num_blocks = grown, number + 1
        lineage = min(alive, key=lambda restarts: (len(restarts), restarts))
        return tuple(wanted.identity(number, lineage) for number in range(num_blocks))

    def _grow(
        self, wanted: WantedPrefix, alive: list[tuple[int, ...]], number: int, block_hash: bytes
    ) -> list[tuple[int, ...]]:
        """Lineages of the next block that go on from `alive` and are held."""
        boundary = number * wanted.window
        grown = []
        for before in alive:
            if follows(wanted.mode, before, before, boundary, wanted.interval) and self._is_held(
                BlockIdentity(block_hash, before), wanted.blocks
            ):
                grown.append(before)
        for before in alive:
            after = (*before, boundary)
            if boundary == 0 or not follows(wanted.mode, before, after, boundary, wanted.interval):
                continue
            identity = BlockIdentity(block_hash, after)
            # Of a chain that goes on as it is, other endings are looked for now and then.
            if grown and identity in self._absent and identity not in wanted.blocks:
                continue
            if self._is_held(identity, wanted.blocks):
                grown.append(after)
            elif grown:
                self._absent.add(identity)
        return grown

    def _is_held(self, identity: BlockIdentity, local: Container[BlockIdentity]) -> bool:
        return identity in local or self._store.contains(identity)


def open_disk_tier(config: DiskConfig, runner: ModelRunner) -> DiskTier | None:
    """The tier that a worker's settings ask for; None for none.

    Raises:
        ConfigError: the directory cannot be used.
    """
    if config.path is None:
        return None
    form = BlockFormat(
        layout_digest=runner.layout_digest,
        weights=runner.layout_digest.hex(),
        block_bytes=runner.block_bytes(1),
    )
    store = DiskStore(
        Path(config.path), form, config.capacity_bytes, 3600 * config.max_age_h, time.time
    )
    return DiskTier(store, runner)


def used_at_of(number: int, used_at: float) -> float:
    """Seconds since the epoch: of one prompt, the last block counts as used first.

    A chain that lost its first block is worth nothing, one that lost its last is nearly whole.
    """
    return used_at - number * _BLOCK_ORDER_S
