"""When does a worker read back what it had to evict of a session that is about to go on?

    turn over, leased ── expected_at - lead ──▶ leading blocks that are gone ── disk ──▶ free pages,
                                                                                or older blocks'

A lease pins its blocks, so nothing is gone unless it gave up its pins or lapsed. All of it happens
behind the requests, one session after the other: allocation never waits for it, and what comes
back takes nobody's place that was used later, or is leased (`BlockKeeping.take`). A request that
wants one of these blocks meanwhile waits for it instead of reading it a second time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import torch

from ripresa.workers.block_moves import BlockKeeping
from ripresa.workers.cache.block_cache import BlockCache
from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.cache.block_record import UnusedBlock
from ripresa.workers.cache.block_store import StoredBlock
from ripresa.workers.cache.block_table import PagePool
from ripresa.workers.cache.expected_turns import ExpectedTurn
from ripresa.workers.cache.session_leases import SessionLeases
from ripresa.workers.config import LeaseConfig
from ripresa.workers.disk_tier import BLOCKS_A_READ, DiskTier
from ripresa.workers.models.base import ModelRunner
from ripresa.workers.prefix_supply import PrefixSupply

logger = logging.getLogger(__name__)


class Prefetch:
    """Of one worker. Used on its event loop.

    Args:
        leases: whose blocks are expected to be wanted, and when.
        blocks, pages, runner: the local cache.
        keeping: lets blocks in.
        supply: brings blocks for requests; a block is read for it or for this, not for both.
        disk: where they are read.
        config: how far ahead, and how much.
        clock: as the leases'.
        done: called when a session's blocks are brought, or will not come.
    """

    def __init__(
        self,
        leases: SessionLeases,
        blocks: BlockCache,
        pages: PagePool,
        runner: ModelRunner,
        keeping: BlockKeeping,
        supply: PrefixSupply,
        disk: DiskTier,
        config: LeaseConfig,
        clock: Callable[[], float],
        done: Callable[[], None],
    ) -> None:
        self._leases = leases
        self._blocks = blocks
        self._pages = pages
        self._runner = runner
        self._keeping = keeping
        self._supply = supply
        self._disk = disk
        self._lead_s = config.prefetch_lead_s
        self._max_blocks = config.prefetch_max_bytes // runner.block_bytes(1)
        self._clock = clock
        self._done = done
        self._task: asyncio.Task[None] | None = None

    @property
    def next_start(self) -> float | None:
        """When `advance` will have something to do; None for never, or not before `done`."""
        expected_at = self._leases.expected.next_at
        if self._task is not None or expected_at is None:
            return None
        return expected_at - self._lead_s

    def advance(self) -> None:
        """Begin to bring back what is gone of the session that is expected next, if it is time."""
        while (start := self.next_start) is not None and start <= self._clock():
            turn = self._leases.expected.take()
            if self._gone(turn, self._max_blocks):
                self._task = asyncio.create_task(self._run(turn), name="prefetch")

    async def close(self) -> None:
        """Bring nothing more. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, turn: ExpectedTurn) -> None:
        try:
            await self._bring(turn)
        except Exception:
            logger.exception("the KV blocks of an expected session were not brought back")
        finally:
            self._task = None
            self._done()

    async def _bring(self, turn: ExpectedTurn) -> None:
        num_left = self._max_blocks
        while gone := self._gone(turn, num_left):
            with self._supply.bringing(identity.hash for identity in gone):
                stored = await self._disk.read(gone) or []
                if not self._leases.expected.awaits(turn):
                    return
                num_landed = self._land(turn, stored)
            if num_landed < len(gone):
                return
            num_left -= num_landed

    def _gone(self, turn: ExpectedTurn, num_left: int) -> Sequence[BlockIdentity]:
        """The first blocks in a row that are gone, that nobody brings and that may come in."""
        chain = turn.chain
        first = next((n for n, each in enumerate(chain) if each not in self._blocks), len(chain))
        most = min(BLOCKS_A_READ, num_left, len(chain) - first)
        limit = first + self._blocks.room_for([self._age_s(turn)] * most)
        stop = first
        while (
            stop < limit
            and chain[stop] not in self._blocks
            and not self._supply.is_arriving(chain[stop].hash)
        ):
            stop += 1
        return chain[first:stop]

    def _land(self, turn: ExpectedTurn, stored: Sequence[StoredBlock]) -> int:
        """Let blocks of the turn in, as old as the turn is; of how many there is nothing to do."""
        new = [block for block in stored if block.record.identity not in self._blocks]
        # The others of the turn, of a lapsed lease or copies, are not to make room for these.
        loan = self._pages.borrow([e for e in turn.chain if e in self._blocks], is_use=False)
        try:
            age_s = self._age_s(turn)
            new = new[: self._blocks.room_for([age_s] * len(new))]
            unused = [UnusedBlock(block.record, age_s) for block in new]
            self._keeping.take(unused, lambda blocks: self._fill(blocks, new))
        finally:
            loan.end()
        if new:
            self._leases.brought(turn, [block.record.identity for block in new])
        return sum(block.record.identity in self._blocks for block in stored)

    def _fill(self, blocks: Sequence[int], stored: Sequence[StoredBlock]) -> None:
        for block, each in zip(blocks, stored, strict=True):
            payload = torch.frombuffer(bytearray(each.payload), dtype=torch.uint8)
            self._runner.import_blocks((block,), payload)

    def _age_s(self, turn: ExpectedTurn) -> float:
        return max(0.0, self._clock() - turn.ended_at)
