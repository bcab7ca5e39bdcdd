"""How does a worker bring blocks and windows from its peers? It asks, and stores what they send.

    Pull ───────────────────▶ holder ── offers a PullManifest, sends sections ──▶ Landing
    EndPull, if given up ───▶ holder

Blocks are published as soon as their section's checksum agreed: a section is all or nothing. A
failed, slow, lying or dead holder ends one pull and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ripresa.workers.address import WorkerAddress
from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.cache.block_record import Producer
from ripresa.workers.errors import ErrorCode, RipresaError, Unavailable
from ripresa.workers.models.base import ModelRunner
from ripresa.workers.prefix_place import Landing, WantedPrefix
from ripresa.workers.prefix_sources import PullEnd
from ripresa.workers.replay import RULES_VERSION, Recipe, may_reuse
from ripresa.workers.transfer.base import (
    EndPull,
    Peer,
    Pull,
    PulledImage,
    PulledWindow,
    PullManifest,
    Section,
    SectionKind,
    TransferBackend,
)
from ripresa.workers.transfer.control import Notices, deliver

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PeerAccess:
    """How a worker reaches the others.

    Attributes:
        own: this worker.
        backend: sends what others pull; closed by whoever made it.
        resolve: the control way to a worker; raises Unavailable for one that is not known.
        control_timeout_s: longest wait for the answer to a control message.
        watch_s: seconds between two looks whether a holder still answers a pull.
    """

    own: WorkerAddress
    backend: TransferBackend
    resolve: Callable[[WorkerAddress], Peer]
    control_timeout_s: float = 5.0
    watch_s: float = 1.0


class _Pull:
    """One pull under way."""

    def __init__(
        self,
        message: Pull,
        holder: WorkerAddress,
        wanted: WantedPrefix,
        landing: Landing,
        timeout_s: float,
    ) -> None:
        self.message = message
        self.holder = holder
        self.wanted = wanted
        self.landing = landing
        self.restarts: tuple[int, ...] = ()
        self.next_block = message.first_block
        self.windows_left = {window.num_blocks: window for window in message.windows}
        self.image_left = message.image
        self.ended: asyncio.Future[PullEnd] = asyncio.get_running_loop().create_future()
        self.scope = asyncio.timeout(timeout_s)
        self._timeout_s = timeout_s

    @property
    def stop(self) -> int:
        return self.message.first_block + len(self.message.hashes)

    def heard(self) -> None:
        """Something came: the holder's time starts anew."""
        if not self.scope.expired():
            self.scope.reschedule(asyncio.get_running_loop().time() + self._timeout_s)

    def end(self, how: PullEnd) -> None:
        if not self.ended.done():
            self.ended.set_result(how)


class PeerPulls:
    """The pulls of one worker; the `Sink` of what they bring. Used on one event loop.

    Args:
        peers: the way to other workers.
        runner: for sizes and the layout digest.
    """

    def __init__(self, peers: PeerAccess, runner: ModelRunner) -> None:
        self._peers = peers
        self._runner = runner
        self._running: dict[str, _Pull] = {}
        self._notices = Notices(peers.control_timeout_s)
        self._abandon: Callable[[str, str], None] | None = None
        self.ends: Counter[PullEnd] = Counter()
        self.num_bytes = 0

    async def pull(
        self,
        wanted: WantedPrefix,
        holder: WorkerAddress,
        landing: Landing,
        *,
        first: int,
        stop: int,
        restarts: tuple[int, ...] | None,
        leader: str | None = None,
        windows: Sequence[PulledWindow] = (),
        image: PulledImage | None = None,
        timeout_s: float,
    ) -> PullEnd:
        """Bring blocks [first, stop) of a prompt, windows and an image from one holder.

        Returns how it ended; what came is in `landing`. Raises nothing but a cancellation.

        Args:
            restarts: lineage of the last block; None to accept the leader's.
            leader: whose blocks are followed; None to bring what is held now.
            timeout_s: longest time in which nothing comes.
        """
        message = Pull(
            pull_id=uuid.uuid4().hex,
            receiver=self._peers.own,
            layout_digest=self._runner.layout_digest,
            request_id=wanted.request_id,
            first_block=first,
            hashes=tuple(wanted.hashes[first:stop]),
            restarts=restarts,
            leader=leader,
            windows=tuple(windows),
            image=image,
        )
        pull = _Pull(message, holder, wanted, landing, timeout_s)
        self._running[message.pull_id] = pull
        how = PullEnd.FAILED
        try:
            how = await self._run(pull)
        finally:
            del self._running[message.pull_id]
            self.ends[how] += 1
        if how not in (PullEnd.COMPLETE, PullEnd.SHORT):
            logger.info("pull of blocks [%d, %d) from %s: %s", first, stop, holder.worker_id, how)
        return how

    async def _run(self, pull: _Pull) -> PullEnd:
        peer: Peer | None = None
        try:
            async with pull.scope:
                peer = self._peers.resolve(pull.holder)
                while not pull.ended.done():
                    # Asked again, a holder that lives and still answers says so.
                    await deliver(peer, pull.message, self._peers.control_timeout_s)
                    await asyncio.wait({pull.ended}, timeout=self._peers.watch_s)
                return pull.ended.result()
        except TimeoutError:
            return PullEnd.LATE
        except RipresaError as error:
            if pull.ended.done():
                return pull.ended.result()
            is_lost = isinstance(error, Unavailable)
            return PullEnd.UNREACHABLE if is_lost else PullEnd.REFUSED
        finally:
            if peer is not None and not pull.ended.done():
                self._notices.post(peer, EndPull(pull.message.pull_id))
                if self._abandon is not None:
                    self._abandon(pull.message.pull_id, "the pull was given up")

    def connect(self, abandon: Callable[[str, str], None]) -> None:
        """Say how a transfer that nobody waits for any more is ended (`InboundTransfers`)."""
        self._abandon = abandon

    # -- the sink of what comes ------------------------------------------------------------

    def open(self, manifest: PullManifest) -> int:
        """Accept what a pull of this worker asked for; the first block to send.

        Raises RipresaError: NOT_FOUND (no such pull), FAILED_PRECONDITION (it is no answer to it).
        """
        pull = self._find(manifest)
        message, wanted = pull.message, pull.wanted
        first = message.first_block
        if manifest.sender != pull.holder.worker_id:
            raise _refused(pull, f"{manifest.sender} was not asked")
        if manifest.layout_digest != self._runner.layout_digest:
            raise _refused(pull, "its KV layout differs; run one model and configuration")
        if manifest.first_block != first:
            raise _refused(pull, f"it begins at block {manifest.first_block} instead of {first}")
        expected = message.restarts
        if expected is None:
            if not _fits(wanted, manifest.restarts, first):
                raise _refused(pull, f"lineage {manifest.restarts} does not fit the request")
        elif manifest.restarts != expected:
            raise _refused(pull, f"lineage {manifest.restarts} was not asked for")
        if manifest.image is not None and manifest.image.rules_version != RULES_VERSION:
            raise _refused(pull, "its session followed other rules; run one version of ripresa")
        pull.restarts = manifest.restarts
        pull.heard()
        return first

    def section_bytes(self, manifest: PullManifest, section: Section) -> int:
        """Bytes of a section that was asked for; raises RipresaError for another one."""
        pull = self._find(manifest)
        if section.kind is SectionKind.WINDOW:
            self._window(pull, section)
            return self._runner.window_bytes
        if section.kind is SectionKind.IMAGE:
            return self._runner.image_bytes(self._image(pull, manifest, section)[0])
        num_blocks = section.last_block - section.first_block
        if (
            section.kind is not SectionKind.BLOCKS
            or section.last_block > pull.stop
            or len(section.producers) != num_blocks
            or not set(section.producers) <= set(Producer)
        ):
            raise _refused(pull, f"section {section.index} was not asked for")
        return self._runner.block_bytes(num_blocks)

    def write(self, manifest: PullManifest, section: Section, payload: torch.Tensor) -> None:
        """Land a verified section."""
        pull = self._find(manifest)
        if section.kind is SectionKind.WINDOW:
            window = self._window(pull, section)
            pull.landing.land_window(BlockIdentity(window.hash, window.restarts), payload)
            del pull.windows_left[window.num_blocks]
        elif section.kind is SectionKind.IMAGE:
            pull.landing.land_image(*self._image(pull, manifest, section), payload)
            pull.image_left = None
        else:
            numbers = range(section.first_block, section.last_block)
            pull.landing.land(
                section.first_block,
                [pull.wanted.identity(number, pull.restarts) for number in numbers],
                [Producer(name) for name in section.producers],
                payload,
            )
            pull.next_block = section.last_block
        self.num_bytes += section.num_bytes
        pull.heard()

    def complete(self, manifest: PullManifest) -> None:
        pull = self._running.get(manifest.transfer_id)
        if pull is not None:
            has_all = pull.next_block == pull.stop and not (pull.windows_left or pull.image_left)
            pull.end(PullEnd.COMPLETE if has_all else PullEnd.SHORT)

    def fail(self, manifest: PullManifest, reason: str) -> None:
        pull = self._running.get(manifest.transfer_id)
        if pull is not None:
            logger.info("pull %s failed: %s", manifest.transfer_id, reason)
            pull.end(PullEnd.FAILED)

    def peer_lost(self, worker_id: str) -> None:
        """A holder died: pulls from it end now."""
        for pull in self._running.values():
            if pull.holder.worker_id == worker_id:
                pull.end(PullEnd.UNREACHABLE)

    async def drain(self) -> None:
        """Wait until those who were told to stop have heard it."""
        await self._notices.drain()

    def check_integrity(self, num_requests: int) -> None:
        """Raise RipresaError (INTERNAL) if more is pulled than so many requests can pull."""
        owners = {pull.message.request_id for pull in self._running.values()}
        if len(owners) > num_requests:
            raise RipresaError(
                ErrorCode.INTERNAL, f"pulls of {len(owners) - num_requests} requests have no owner"
            )

    def _find(self, manifest: PullManifest) -> _Pull:
        pull = self._running.get(manifest.transfer_id)
        if pull is None or pull.ended.done():
            raise RipresaError(
                ErrorCode.NOT_FOUND, f"nobody waits for pull {manifest.transfer_id} any more"
            )
        return pull

    @staticmethod
    def _image(pull: _Pull, manifest: PullManifest, section: Section) -> tuple[int, Recipe]:
        """Length and recipe of the state that a section brings."""
        if pull.image_left is None or manifest.image is None:
            raise _refused(pull, f"section {section.index} was not asked for")
        return pull.image_left.num_tokens, manifest.image

    @staticmethod
    def _window(pull: _Pull, section: Section) -> PulledWindow:
        window = pull.windows_left.get(section.last_block)
        if window is None or section.first_block != section.last_block - 1:
            raise _refused(pull, f"window {section.last_block} was not asked for")
        return window


def _fits(wanted: WantedPrefix, restarts: tuple[int, ...], first: int) -> bool:
    """Whether a leader's lineage can go on from the chain below block `first`, in this mode."""
    if list(restarts) != sorted({r for r in restarts if r > 0 and r % wanted.window == 0}):
        return False
    if wanted.recipe is not None:
        return restarts == wanted.recipe.restarts
    if not may_reuse(wanted.mode, restarts, wanted.interval):
        return False
    return first == 0 or wanted.identity(first - 1, restarts) in wanted.blocks


def _refused(pull: _Pull, why: str) -> RipresaError:
    pull.end(PullEnd.FAILED)
    return RipresaError(
        ErrorCode.FAILED_PRECONDITION,
        f"the answer to pull {pull.message.pull_id} is refused: {why}",
    )
