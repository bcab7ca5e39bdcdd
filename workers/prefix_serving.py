"""How does a worker answer pulls? It sends cached blocks, and a leader's as they are completed.

held?  ── export in the step thread, pinned meanwhile ──▶ one section after another
not yet ── wait for the leader's next commit             ──▶ ...
never   ── windows, checksum: "gone at k" is where it ends
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import torch

from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.cache.parked_states import ParkedState
from ripresa.workers.config import TransferConfig
from ripresa.workers.errors import (
    ErrorCode,
    ResourceExhausted,
    RipresaError,
    Unavailable,
    reason_of,
)
from ripresa.workers.job import Job
from ripresa.workers.prefix_cache import PrefixCache
from ripresa.workers.prefix_pulls import PeerAccess
from ripresa.workers.transfer.base import (
    EndPull,
    OutboundTransfer,
    Pull,
    PullManifest,
    Section,
    SectionKind,
)

logger = logging.getLogger(__name__)

_MAX_REMEMBERED = 1024
"""Pulls that late or repeated messages are still known of."""


class LiveState(Protocol):
    """What an engine knows of its pages and requests."""

    async def read_blocks(
        self, chain: tuple[BlockIdentity, ...], *, is_use: bool = True
    ) -> torch.Tensor:
        """Published blocks as uint8; raises RipresaError (NOT_FOUND) if one is gone.

        Args:
            is_use: False if they should stay as old as they are.
        """

    async def leader(self, name: str) -> Job | None:
        """The request of this id or claim, once it is admitted; None if it does not run here."""


class PrefixServing:
    """The sender's side of the pulls of one worker. Used on one event loop.

    Args:
        prefixes: what is held.
        live: what is under way.
        peers: the way to other workers.
        config: section size and how many pulls at once.
    """

    def __init__(
        self,
        prefixes: PrefixCache,
        live: LiveState,
        peers: PeerAccess,
        config: TransferConfig,
    ) -> None:
        self._prefixes = prefixes
        self._live = live
        self._peers = peers
        self._config = config
        self._running: dict[str, asyncio.Task[None]] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._closed = False
        self.num_served = 0
        self.num_bytes = 0

    def serve(self, message: Pull | EndPull) -> None:
        """Begin to answer a pull, or stop. Nothing if it is being answered.

        Raises:
            RipresaError: NOT_FOUND (nothing of it is here, or it is over), FAILED_PRECONDITION
                (another layout), RESOURCE_EXHAUSTED, UNAVAILABLE.
        """
        if isinstance(message, EndPull):
            self._remember(message.pull_id)
            task = self._running.get(message.pull_id)
            if task is not None:
                task.cancel()
            return
        if message.pull_id in self._running:
            return
        if message.pull_id in self._ended:
            raise RipresaError(ErrorCode.NOT_FOUND, f"pull {message.pull_id} is over")
        self._check(message)
        task = asyncio.get_running_loop().create_task(self._answer(message), name="pull")
        self._running[message.pull_id] = task
        task.add_done_callback(lambda _: self._over(message.pull_id))

    async def close(self) -> None:
        """Stop answering; receivers are told. Idempotent."""
        self._closed = True
        for task in self._running.values():
            task.cancel()
        while self._running:
            await asyncio.wait(self._running.values())

    async def drain(self) -> None:
        """Wait until what is being answered has ended."""
        while self._running:
            await asyncio.wait(self._running.values())

    def check_integrity(self) -> None:
        """Raise RipresaError (INTERNAL) if an idle and drained worker still answers pulls."""
        if self._running:
            raise RipresaError(ErrorCode.INTERNAL, f"{len(self._running)} pulls are not over")

    def _check(self, pull: Pull) -> None:
        if self._closed:
            raise Unavailable("this worker is closing; pull from another one")
        if pull.layout_digest != self._prefixes.layout_digest:
            raise RipresaError(
                ErrorCode.FAILED_PRECONDITION,
                "the pull is refused: its KV layout differs; run one model and configuration "
                "everywhere",
            )
        if len(self._running) >= self._config.max_pulls_served:
            raise ResourceExhausted(
                f"{len(self._running)} pulls are answered already; pull from another worker"
            )
        has_block = bool(pull.hashes) and self._held(pull, 0, pull.restarts or ())
        has_window = any((w.hash, w.restarts) in self._prefixes.windows for w in pull.windows)
        if pull.leader is None and not has_block and not has_window and not self._image(pull):
            raise RipresaError(ErrorCode.NOT_FOUND, "nothing that the pull asks for is held here")

    def _identity(self, pull: Pull, index: int, restarts: Sequence[int]) -> BlockIdentity:
        stop = (pull.first_block + index + 1) * self._prefixes.geometry.window
        return BlockIdentity(pull.hashes[index], tuple(r for r in restarts if r < stop))

    def _held(self, pull: Pull, index: int, restarts: Sequence[int]) -> bool:
        return self._identity(pull, index, restarts) in self._prefixes.blocks

    async def _answer(self, pull: Pull) -> None:
        receiver = pull.receiver.worker_id
        try:
            await self._send(pull)
            self.num_served += 1
        except RipresaError as error:
            # The receiver computes what it did not get, and says so where it is counted.
            logger.info("pull %s of %s ended: %s", pull.pull_id, receiver, error)
        except Exception:
            logger.exception("pull %s of %s failed", pull.pull_id, receiver)

    async def _send(self, pull: Pull) -> None:
        job = None if pull.leader is None else await self._live.leader(pull.leader)
        restarts = pull.restarts
        if restarts is None:
            restarts = await _lineage(pull, job)
        state = self._image(pull)
        manifest = PullManifest(
            transfer_id=pull.pull_id,
            sender=self._peers.own.worker_id,
            layout_digest=self._prefixes.layout_digest,
            first_block=pull.first_block,
            restarts=restarts,
            image=None if state is None else state.recipe,
        )
        transfer = await self._peers.backend.offer(pull.receiver, manifest)
        try:
            index = 0
            if state is not None:
                section = Section(index, SectionKind.IMAGE, 0, 0, state.payload.numel())
                await transfer.send(section, state.payload)
                index += 1
            index = await self._send_blocks(pull, job, restarts, transfer, index)
            await self._send_windows(pull, transfer, index)
            await transfer.complete()
            if pull.image is not None and state is not None:
                self._prefixes.leases.moved(pull.image.tenant_salt, pull.image.session_id)
        except BaseException as error:
            await transfer.fail(reason_of(error))
            raise
        finally:
            self.num_bytes += transfer.num_bytes_sent

    def _image(self, pull: Pull) -> ParkedState[torch.Tensor] | None:
        """The parked state that is asked for, if it is here."""
        asked = pull.image
        if asked is None:
            return None
        return self._prefixes.parked.find_exact(
            asked.tenant_salt,
            asked.session_id,
            asked.num_tokens,
            asked.digest,
            self._prefixes.clock(),
        )

    async def _send_blocks(
        self,
        pull: Pull,
        job: Job | None,
        restarts: tuple[int, ...],
        transfer: OutboundTransfer,
        num_sections: int,
    ) -> int:
        """Send blocks until one will not come; returns the sections sent by then."""
        sent = 0
        while sent < len(pull.hashes):
            await self._until_held(pull, job, sent, restarts)
            stop = sent
            limit = min(len(pull.hashes), sent + self._config.max_section_blocks)
            while stop < limit and self._held(pull, stop, restarts):
                stop += 1
            if stop == sent:
                break
            chain = tuple(self._identity(pull, index, restarts) for index in range(sent, stop))
            records = [self._prefixes.blocks.record(identity) for identity in chain]
            producers = tuple(record.producer for record in records if record is not None)
            payload = await self._live.read_blocks(chain)
            first = pull.first_block
            section = Section(
                num_sections,
                SectionKind.BLOCKS,
                first + sent,
                first + stop,
                payload.numel(),
                producers,
            )
            await transfer.send(section, payload)
            sent = stop
            num_sections += 1
        return num_sections

    async def _until_held(
        self, pull: Pull, job: Job | None, index: int, restarts: tuple[int, ...]
    ) -> None:
        """Return when a block is held, or will not come."""
        end = (pull.first_block + index + 1) * self._prefixes.geometry.window
        while job is not None and not self._held(pull, index, restarts):
            if not _goes_on(pull, job) or job.sequence.committed >= end:
                return
            await job.moved()

    async def _send_windows(self, pull: Pull, transfer: OutboundTransfer, index: int) -> None:
        for window in pull.windows:
            payload = self._prefixes.windows.get(BlockIdentity(window.hash, window.restarts))
            if payload is None:
                continue
            last = window.num_blocks
            section = Section(index, SectionKind.WINDOW, last - 1, last, payload.numel())
            await transfer.send(section, payload)
            index += 1

    def _over(self, pull_id: str) -> None:
        del self._running[pull_id]
        self._remember(pull_id)

    def _remember(self, pull_id: str) -> None:
        self._ended[pull_id] = None
        if len(self._ended) > _MAX_REMEMBERED:
            self._ended.popitem(last=False)


async def _lineage(pull: Pull, job: Job | None) -> tuple[int, ...]:
    """The leader's lineage, once its recipe is fixed; the exact one if it is over before."""
    while job is not None:
        if job.sequence.is_fixed:
            return job.sequence.recipe.restarts
        if not _goes_on(pull, job):
            break
        await job.moved()
    return ()


def _goes_on(pull: Pull, job: Job) -> bool:
    """Whether the leader may still commit rows without the help of the one who asks."""
    return not job.is_over and job.request.request_id != pull.request_id
