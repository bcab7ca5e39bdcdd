"""What becomes of a last copy that its worker has to evict? Another one keeps it, if it has room.

    the next blocks to go ── on disk? held by others? ──▶ directory: who should keep them?
    giver ── MoveManifest, ages ──▶ keeper: those that displace older blocks ──▶ sections

All of it happens behind the requests: allocation never waits for a move, and what is late is
evicted as if there were none. Blocks alone move; windows and parked sessions stay.

Why it ends: a keeper takes a block only into a free page, or in place of a copy or of an older
block, and a moved block is as old there as it was here. It is not offered again, by either end,
before a request has used it. So there are at most as many moves as uses, and no two full workers
pass blocks back and forth.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Sequence

import torch

from ripresa.workers.address import WorkerAddress
from ripresa.workers.cache.block_cache import BlockCache
from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.cache.block_record import (
    BlockRecord,
    Producer,
    PublishedBlock,
    PublishOutcome,
    UnusedBlock,
)
from ripresa.workers.cache.block_table import PagePool
from ripresa.workers.cache.cache_events import FindKeepers, Origin, Unkept
from ripresa.workers.config import MoveConfig
from ripresa.workers.errors import ErrorCode, ResourceExhausted, RipresaError, reason_of
from ripresa.workers.models.base import ModelRunner
from ripresa.workers.prefix_serving import LiveState
from ripresa.workers.replay import RULES_VERSION
from ripresa.workers.transfer.base import (
    MovedBlock,
    MoveManifest,
    Section,
    SectionKind,
    TransferBackend,
)

logger = logging.getLogger(__name__)

MAX_ASKED = 64
"""Blocks of one question to the directory."""

Stored = Callable[[Sequence[BlockIdentity]], Awaitable[Sequence[bool]]]
"""Which of these blocks can be had again without another worker."""

Store = Callable[[list[PublishedBlock], float], None]
"""Copies blocks that are published here to the disk, by and by; the number is the seconds for which
they have not been used."""


def stored_nowhere(blocks: list[PublishedBlock], age_s: float) -> None:
    """The `Store` of a worker without a disk."""


class BlockGiving:
    """The giver's side. Used on one event loop.

    Args:
        own: this worker's id.
        blocks: the local cache.
        backend: sends.
        runner: for the layout.
        config: how far ahead and how fast.
        live: exports.
        find_keepers: asks the directory; None if there is none: nothing moves by itself.
        stored: whether this worker's disk has a block; None without one.
    """

    def __init__(
        self,
        own: str,
        blocks: BlockCache,
        num_blocks: int,
        backend: TransferBackend,
        runner: ModelRunner,
        config: MoveConfig,
        live: LiveState,
        find_keepers: FindKeepers | None,
        stored: Stored | None = None,
    ) -> None:
        self._own = own
        self._blocks = blocks
        self._num_ahead = max(1, int(config.ahead * num_blocks))
        self._backend = backend
        self._runner = runner
        self._config = config
        self._live = live
        self._find_keepers = find_keepers
        self._stored = stored
        self._filled = asyncio.Event()
        self._turn = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self.num_moved = 0
        self.num_refused = 0
        self.num_late = 0
        self.num_bytes = 0

    def start(self) -> None:
        """Begin to look ahead of eviction."""
        if self._find_keepers is not None and self._config.max_bytes_per_s:
            self._task = asyncio.create_task(self._run(), name="block-moves")

    async def close(self) -> None:
        """Give nothing more away. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def drain(self) -> None:
        """Wait until what is being given away has arrived, or not."""
        async with self._turn:
            return

    def filled(self) -> None:
        """The cache has changed: perhaps something is about to be evicted."""
        self._filled.set()

    async def _run(self) -> None:
        while True:
            await self._filled.wait()
            self._filled.clear()
            before = self.num_bytes
            num_moved = 0
            try:
                at_risk = self._blocks.at_risk(self._num_ahead)
                num_moved = await self.give(at_risk[:MAX_ASKED])
            except RipresaError as error:
                logger.info("no block was moved: %s", error)
            except Exception:
                logger.exception("moving blocks failed")
            if num_moved:
                # There may be more; the next ones wait until these fit the bandwidth.
                self._filled.set()
                await asyncio.sleep((self.num_bytes - before) / self._config.max_bytes_per_s)
            else:
                await asyncio.sleep(self._config.interval_s)

    async def give(self, unused: Sequence[UnusedBlock]) -> int:
        """Let other workers keep these blocks, as far as they have room; how many they took.

        Blocks that are on disk here, or that another worker holds, stay.

        Args:
            unused: the longest unused first.

        Raises:
            RipresaError: the directory does not answer, or there is none.
        """
        if self._find_keepers is None:
            raise RipresaError(ErrorCode.FAILED_PRECONDITION, "nobody says who keeps blocks")
        num_moved = 0
        for first in range(0, len(unused), MAX_ASKED):
            asked = unused[first : first + MAX_ASKED]
            num_moved += await self._give(asked, self._find_keepers)
        return num_moved

    async def _give(self, unused: Sequence[UnusedBlock], find_keepers: FindKeepers) -> int:
        """The blocks of one question; how many were taken."""
        if self._stored is not None:
            stored = await self._stored([each.record.identity for each in unused])
            unused = [e for e, on_disk in zip(unused, stored, strict=True) if not on_disk]
        if not unused:
            return 0
        asked = [Unkept(e.record.identity, e.record.origin, e.age_s) for e in unused]
        keepers = await find_keepers(asked)
        by_keeper: dict[WorkerAddress, list[UnusedBlock]] = {}
        for each, keeper in zip(unused, keepers, strict=True):
            if keeper is not None:
                by_keeper.setdefault(keeper, []).append(each)
        num_moved = 0
        size = self._config.blocks_a_move
        async with self._turn:
            for keeper, offered in by_keeper.items():
                for first in range(0, len(offered), size):
                    num_moved += await self._move(keeper, offered[first : first + size])
        return num_moved

    async def _move(self, keeper: WorkerAddress, offered: Sequence[UnusedBlock]) -> int:
        """Send one batch; how many blocks of it the keeper has now."""
        offered = [each for each in offered if each.record.identity in self._blocks]
        if not offered:
            return 0
        manifest = manifest_of(self._own, self._runner.layout_digest, offered)
        try:
            transfer = await self._backend.offer(keeper, manifest)
        except RipresaError as error:
            logger.info("%s keeps none of %d blocks: %s", keeper.worker_id, len(offered), error)
            self.num_refused += len(offered)
            return 0
        first = transfer.first_block
        self.num_refused += first
        chain = tuple(each.record.identity for each in offered[first:])
        try:
            payload = await self._live.read_blocks(chain, is_use=False)
            section = Section(0, SectionKind.BLOCKS, first, len(offered), payload.numel())
            await transfer.send(section, payload)
            await transfer.complete()
        except RipresaError as error:
            await transfer.fail(str(error))
            logger.info("%d blocks did not reach %s: %s", len(chain), keeper.worker_id, error)
            self.num_late += len(chain)
            return 0
        except BaseException as error:
            await transfer.fail(reason_of(error))
            raise
        finally:
            self.num_bytes += transfer.num_bytes_sent
        for identity in chain:
            # What they are here, copies, says the directory: when it knows the keeper.
            self._blocks.moved(identity)
        self.num_moved += len(chain)
        return len(chain)


class BlockKeeping:
    """The keeper's side: the `Sink` of moves, and of what comes back from disk unasked. Used on
    one event loop.

    Nothing is set aside between the offer and the payload: what has to make room goes when the
    blocks are there, and if there is no room any more the move fails.

    Args:
        store: where they are kept beyond memory: this may be all that is left of them.
    """

    def __init__(
        self,
        blocks: BlockCache,
        pages: PagePool,
        runner: ModelRunner,
        store: Store = stored_nowhere,
    ) -> None:
        self._store = store
        self._blocks = blocks
        self._pages = pages
        self._runner = runner
        self.num_taken = 0

    def open(self, manifest: MoveManifest) -> int:
        """Number of the first block that there is room for.

        Raises RipresaError: FAILED_PRECONDITION (another layout or other rules),
        RESOURCE_EXHAUSTED (none would displace an older one).
        """
        ours = (self._runner.layout_digest, RULES_VERSION)
        if (manifest.layout_digest, manifest.rules_version) != ours:
            raise RipresaError(
                ErrorCode.FAILED_PRECONDITION,
                "the blocks are refused: their KV layout or rules differ; run one model and "
                "version of ripresa everywhere",
            )
        num_kept = self._blocks.room_for([each.age_s for each in manifest.blocks])
        if not num_kept:
            raise ResourceExhausted(
                f"no block here is older than the {len(manifest.blocks)} offered ones"
            )
        return len(manifest.blocks) - num_kept

    def section_bytes(self, manifest: MoveManifest, section: Section) -> int:
        is_known = section.kind is SectionKind.BLOCKS and section.last_block <= len(manifest.blocks)
        if not is_known:
            raise RipresaError(
                ErrorCode.FAILED_PRECONDITION, f"section {section.index} was not offered"
            )
        return self._runner.block_bytes(section.last_block - section.first_block)

    def write(self, manifest: MoveManifest, section: Section, payload: torch.Tensor) -> None:
        moved = manifest.blocks[section.first_block : section.last_block]
        unused = [
            UnusedBlock(
                BlockRecord(
                    BlockIdentity(each.hash, each.restarts),
                    Producer(each.producer),
                    manifest.layout_digest.hex(),
                    Origin(each.tenant, each.first, each.parent),
                ),
                each.age_s,
            )
            for each in moved
        ]
        self.take(unused, lambda blocks: self._runner.import_blocks(blocks, payload), self._store)
        self.num_taken += len(moved)

    def take(
        self,
        unused: Sequence[UnusedBlock],
        fill: Callable[[tuple[int, ...]], None],
        store: Store = stored_nowhere,
    ) -> None:
        """Publish blocks that stay as old as they are, in place of older ones.

        Args:
            unused: the longest unused first.
            fill: writes the payloads of all of them into the blocks of these ids.
            store: where those that were not held here are kept beyond memory.

        Raises ResourceExhausted: not all of them are younger than what would have to go; none was
        taken.
        """
        if self._blocks.room_for([each.age_s for each in unused]) < len(unused):
            raise ResourceExhausted("the room was filled meanwhile by younger blocks")
        loan = self._pages.borrow_new(len(unused), is_use=False)
        try:
            fill(loan.blocks)
            taken: list[PublishedBlock] = []
            for block, each in zip(loan.blocks, unused, strict=True):
                offer = self._blocks.offer(block, each.record, each.age_s)
                if self._blocks.acknowledge(offer, rank=0) is PublishOutcome.PUBLISHED:
                    # On disk as well the longest unused one is the first to go.
                    taken.append(PublishedBlock(len(unused) - len(taken), block, each.record))
            if taken:
                store(taken, unused[-1].age_s)
        finally:
            loan.end()

    def complete(self, manifest: MoveManifest) -> None:
        return None

    def fail(self, manifest: MoveManifest, reason: str) -> None:
        logger.info("a move from %s failed: %s", manifest.sender, reason)


def manifest_of(sender: str, layout_digest: bytes, offered: Sequence[UnusedBlock]) -> MoveManifest:
    """A new move of these blocks, the longest unused first."""
    return MoveManifest(
        transfer_id=uuid.uuid4().hex,
        sender=sender,
        layout_digest=layout_digest,
        rules_version=RULES_VERSION,
        blocks=tuple(
            MovedBlock(
                *record.identity,
                record.origin.tenant,
                record.origin.first,
                record.origin.parent,
                str(record.producer),
                age_s,
            )
            for record, age_s in offered
        ),
    )
