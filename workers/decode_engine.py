"""How does a decode worker turn a request, or a handed-over prompt, into a stream of tokens?"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from dataclasses import replace

import torch

from ripresa.workers.address import WorkerAddress
from ripresa.workers.cache.cache_events import CacheListener, CopyAdvice, FindKeepers, Room
from ripresa.workers.config import EngineConfig
from ripresa.workers.departure import Adopt, Departure, HasOther, Tell
from ripresa.workers.engine import EngineCore, SpareTime
from ripresa.workers.errors import ErrorCode, RipresaError
from ripresa.workers.hand_over import InboundHandOver
from ripresa.workers.job import Job, OnLogits
from ripresa.workers.models.base import EncoderOutput, ModelRunner
from ripresa.workers.prefix_exchange import PrefixExchange
from ripresa.workers.prefix_pulls import PeerAccess
from ripresa.workers.replay import TailVariant
from ripresa.workers.request import (
    Bringing,
    EngineEvent,
    EngineStats,
    Failed,
    Finished,
    GenerationRequest,
    PrefillDone,
    RecipeFixed,
    Reserved,
    Tokens,
)
from ripresa.workers.scheduling.scheduler import Progress, WorkerRole
from ripresa.workers.sequence import SequenceStatus
from ripresa.workers.shadow_samples import ServedSamples
from ripresa.workers.transfer.base import Manifest, Section, SectionKind, TransferState

logger = logging.getLogger(__name__)


class _Stream:
    """The events of one request, and the encoder output its tail starts from."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[EngineEvent] = asyncio.Queue()
        self.inbound: InboundHandOver | None = None

    def on_progress(
        self,
        progress: Progress,
        encoder_output: EncoderOutput | None,
        windows: Mapping[int, torch.Tensor],
    ) -> None:
        if progress.is_prefill_done:
            if self.inbound is not None:
                self.inbound.release_rows()
            self.events.put_nowait(PrefillDone(progress.sequence.recipe))
        sequence = progress.sequence
        num_bytes = 0 if self.inbound is None else self.inbound.num_bytes
        counters = replace(sequence.counters, transfer_bytes=num_bytes)
        if progress.token is not None and progress.token_position is not None:
            logprobs = () if progress.logprobs is None else (progress.logprobs,)
            tokens = Tokens(progress.token_position, (progress.token,), logprobs, counters)
            self.events.put_nowait(tokens)
        if progress.finish is not None:
            finished = Finished(
                reason=progress.finish,
                stop_token_id=progress.stop_token_id,
                num_generated_tokens=sequence.num_generated_tokens,
                counters=counters,
            )
            self.events.put_nowait(finished)

    def on_failed(self, error: RipresaError) -> None:
        self.events.put_nowait(Failed(error))

    def inbound_rows(self, start: int, stop: int) -> EncoderOutput:
        if self.inbound is None:
            raise RipresaError(ErrorCode.INTERNAL, "nothing was handed over")
        return self.inbound.rows(start, stop)


class DecodeEngine:
    """All layers of the model: local prefill, or the tail of a handed-over one, and decode.

    It is the `Sink` of the transfers that other workers offer to it.

    Args:
        worker_id: this worker's name in the cluster.
        runner: the model with its KV memory.
        config: the engine's settings.
        clock: seconds since the epoch.
        listener: hears of what the cache holds.
        peers: the way to other workers' caches; None for a worker that reaches none.
        find_keepers: asks who should keep what this worker has to evict; None if nobody knows.
        samples, spare: see `EngineCore`.
    """

    def __init__(
        self,
        worker_id: str,
        runner: ModelRunner,
        config: EngineConfig,
        clock: Callable[[], float] = time.time,
        listener: CacheListener | None = None,
        peers: PeerAccess | None = None,
        find_keepers: FindKeepers | None = None,
        samples: ServedSamples | None = None,
        spare: SpareTime | None = None,
    ) -> None:
        self._worker_id = worker_id
        self._runner = runner
        self._hand_over_timeout_s = config.transfer.hand_over_timeout_s
        self._core = EngineCore(
            WorkerRole.DECODE,
            runner,
            config,
            clock,
            listener,
            peers,
            find_keepers,
            samples,
            spare,
        )
        self._streams: dict[Job, _Stream] = {}

    async def start(self) -> None:
        """Begin to run steps. Raises RipresaError (FAILED_PRECONDITION) the second time."""
        await self._core.start()

    async def stop(self) -> None:
        """Fail every stream with UNAVAILABLE, wait for the running step, free everything."""
        await self._core.stop()

    async def generate(
        self, request: GenerationRequest, *, local: bool, on_logits: OnLogits | None = None
    ) -> AsyncGenerator[EngineEvent, None]:
        """Stream a request: Reserved, PrefillDone, Tokens.., then Finished or Failed.

        Bringing comes first if peers or a disk are asked for blocks, or a constraint is to be
        compiled; RecipeFixed comes before
        PrefillDone if Reserved has no recipe.

        Closing the iterator, or cancelling the task that reads it, ends the work within a step.
        A stop token is not in any Tokens event; Finished names it and counts it.

        Args:
            local: this worker prefills by itself; otherwise the request waits for a transfer.
            on_logits: hears what each of the request's decoder rows foretells, those of the
                prompt's tail included.

        Raises:
            RipresaError: before Reserved, see `EngineCore.admit`. Later failures are events.
        """
        stream = _Stream()
        if request.sampling.constraint is not None or self._core.exchange.supply.asks(request):
            yield Bringing(self._worker_id)
        job = await self._core.admit(request, stream, is_inbound=not local, on_logits=on_logits)
        self._streams[job] = stream
        try:
            if local:
                self._core.begin(job)
            else:
                self._core.wait_at_most(job, self._hand_over_timeout_s)
            recipe = job.sequence.recipe if job.sequence.is_fixed else None
            yield Reserved(self._worker_id, local, recipe, job.outcome)
            while True:
                event = await stream.events.get()
                yield event
                if isinstance(event, Finished | Failed):
                    return
        finally:
            del self._streams[job]
            self._core.retire(job)

    def abort(self, request_id: str) -> bool:
        """End a request with CANCELLED; False if it does not run here."""
        return self._core.abort(request_id)

    def lease(self, request_id: str, tools: Collection[str]) -> bool:
        """See `EngineCore.lease`."""
        return self._core.lease(request_id, tools)

    def end_session(self, tenant_salt: bytes, session_id: str) -> None:
        """See `EngineCore.end_session`."""
        self._core.end_session(tenant_salt, session_id)

    def departure(
        self,
        own: WorkerAddress,
        adopt: Adopt,
        tell: Tell,
        has_other: HasOther,
        on_change: Callable[[], None],
    ) -> Departure:
        """The engine's way out; see `Departure`."""
        return Departure(self._core, own, adopt, tell, has_other, on_change)

    async def adopt(self, request: GenerationRequest) -> bool:
        """See `EngineCore.adopt`."""
        return await self._core.adopt(request)

    @property
    def exchange(self) -> PrefixExchange:
        """What the worker exchanges with its peers' caches."""
        return self._core.exchange

    async def flush(self, tenant: str | None) -> int:
        """See `EngineCore.flush`."""
        return await self._core.flush(tenant)

    async def flush_disk(self) -> None:
        """See `EngineCore.flush_disk`."""
        await self._core.flush_disk()

    def advise(self, advice: CopyAdvice) -> None:
        """See `EngineCore.advise`."""
        self._core.advise(advice)

    def room(self) -> Room | None:
        """See `EngineCore.room`."""
        return self._core.room()

    def lend(self, on_idle: Callable[[], None]) -> SpareTime:
        """See `EngineCore.lend`."""
        return self._core.lend(on_idle)

    def wake(self) -> None:
        """See `EngineCore.wake`."""
        self._core.wake()

    def stats(self) -> EngineStats:
        return self._core.stats()

    def check_integrity(self) -> None:
        """Raise RipresaError (INTERNAL) unless pools, queues and inbound transfers agree."""
        self._core.check_integrity()
        for job, stream in self._streams.items():
            if job.is_over or not job.sequence.is_inbound:
                continue
            inbound = stream.inbound
            has_arrived = inbound is not None and inbound.state is TransferState.COMPLETE
            if has_arrived is (job.sequence.status is SequenceStatus.WAITING):
                raise RipresaError(
                    ErrorCode.INTERNAL,
                    f"request {job.request.request_id} is {job.sequence.status} but its transfer "
                    f"is {'missing' if inbound is None else inbound.state}",
                )

    def open(self, manifest: Manifest) -> int:
        """Accept an offer for a request that waits here, in place of an older or failed one.

        The request follows the manifest's recipe from now on. Returns the first block to send.

        Raises:
            RipresaError: NOT_FOUND (no such request waits), FAILED_PRECONDITION (stale, or of
                another layout, length or recipe), ALREADY_EXISTS (its state has arrived),
                INVALID_ARGUMENT, RESOURCE_EXHAUSTED or UNAVAILABLE (see `EngineCore.fix`).
        """
        job, stream = self._waiting(manifest)
        request = job.request
        if manifest.layout_digest != self._runner.layout_digest:
            raise _refused("its KV layout differs; run one model and configuration everywhere")
        inbound = stream.inbound
        if inbound is not None and inbound.is_open and inbound.manifest == manifest:
            return inbound.first_block
        newest = request.generation - 1 if inbound is None else inbound.manifest.generation
        if manifest.generation <= newest:
            raise _refused(f"generation {manifest.generation} is stale, {newest} was seen")
        if manifest.num_tokens != request.num_tokens:
            raise _refused("its length differs from the reserved request's")
        was_fixed = job.sequence.is_fixed
        num_held = self._core.fix(job, manifest.recipe)
        if not was_fixed:
            stream.events.put_nowait(RecipeFixed(manifest.recipe, manifest.prefix))
        if manifest.first_block > num_held:
            raise _refused(
                f"it starts at block {manifest.first_block}; {num_held} blocks are held here"
            )
        if inbound is not None and inbound.is_open:
            inbound.move(TransferState.FAILED)
        window = self._runner.window
        num_blocks = request.num_tokens // window
        stream.inbound = InboundHandOver(manifest, num_blocks, num_held, window)
        # From here to `complete` or `fail` the transfer layer watches the sender.
        self._core.wait_at_most(job, None)
        return num_held

    def section_bytes(self, manifest: Manifest, section: Section) -> int:
        """Bytes that this worker's own layout derives for a section.

        Raises RipresaError as `write` does for a section that does not come next.
        """
        _, _, inbound = self._arriving(manifest)
        if not inbound.has(section):
            inbound.check(section)
        match section.kind:
            case SectionKind.BLOCKS:
                return self._runner.block_bytes(section.last_block - section.first_block)
            case SectionKind.WINDOW:
                return self._runner.window_bytes
            case SectionKind.ROWS:
                return self._runner.rows_bytes(self._runner.window)
            case SectionKind.STATE:
                return self._runner.state_bytes(
                    manifest.num_tokens, inbound.state_rows_start, _sends_source_window(manifest)
                )
            case SectionKind.IMAGE:
                raise _refused("a session's parked state is no part of a hand-over")

    def write(self, manifest: Manifest, section: Section, payload: torch.Tensor) -> None:
        """Store a payload (uint8 [num_bytes]); a repeated section is ignored.

        Raises:
            RipresaError: NOT_FOUND (the request is over), FAILED_PRECONDITION (the transfer is
                over, or the section is out of order or of another size).
        """
        job, _, inbound = self._arriving(manifest)
        if inbound.has(section):
            return
        expected = self.section_bytes(manifest, section)
        if not section.num_bytes == payload.numel() == expected:
            raise _refused(
                f"section {section.index} has {payload.numel()} bytes, {expected} are expected"
            )
        pages = job.sequence.pages
        output = None
        window = self._runner.window
        match section.kind:
            case SectionKind.BLOCKS:
                block_ids = pages.blocks[section.first_block : section.last_block]
                self._runner.import_blocks(block_ids, payload)
            case SectionKind.WINDOW:
                self._core.window_arrived(job, section.last_block, payload)
            case SectionKind.ROWS:
                start = manifest.recipe.decoder_start + section.first_block * window
                output = self._runner.import_rows(start, window, payload)
            case SectionKind.STATE:
                output = self._runner.import_state(
                    pages.slot,
                    pages.blocks,
                    manifest.num_tokens,
                    inbound.state_rows_start,
                    _sends_source_window(manifest),
                    payload,
                )
        inbound.stored(section, output)
        if section.kind is SectionKind.BLOCKS:
            self._core.arrived(job, section.last_block)
        self._core.count_transfer(section.num_bytes)

    def complete(self, manifest: Manifest) -> None:
        """The checksum agreed: the request goes on to its tail. Idempotent.

        Raises RipresaError: as `write`, and FAILED_PRECONDITION if sections are missing.
        """
        job = self._core.find(manifest.request_id)
        inbound = None if job is None else self._streams[job].inbound
        if (
            inbound is not None
            and inbound.state is TransferState.COMPLETE
            and inbound.manifest == manifest
        ):
            return
        job, _, inbound = self._arriving(manifest)
        if not inbound.has_state:
            raise _refused("it is complete without its state section")
        inbound.move(TransferState.COMPLETE)
        self._core.begin(job)

    def fail(self, manifest: Manifest, reason: str) -> None:
        """The transfer is over; the request waits for one of a higher generation. Idempotent."""
        job = self._core.find(manifest.request_id)
        inbound = None if job is None else self._streams[job].inbound
        if job is None or inbound is None or inbound.manifest != manifest or not inbound.is_open:
            return
        logger.warning("transfer %s failed: %s", manifest.transfer_id, reason)
        inbound.move(TransferState.FAILED)
        self._core.wait_at_most(job, self._hand_over_timeout_s)

    def _waiting(self, manifest: Manifest) -> tuple[Job, _Stream]:
        job = self._core.find(manifest.request_id)
        if job is None or not job.sequence.is_inbound:
            raise RipresaError(
                ErrorCode.NOT_FOUND,
                f"request {manifest.request_id} does not wait for a transfer on "
                f"{self._worker_id}; it was cancelled, finished or never reserved",
            )
        if job.sequence.status is not SequenceStatus.WAITING:
            raise RipresaError(
                ErrorCode.ALREADY_EXISTS,
                f"the state of request {manifest.request_id} is complete on {self._worker_id}",
            )
        return job, self._streams[job]

    def _arriving(self, manifest: Manifest) -> tuple[Job, _Stream, InboundHandOver]:
        job, stream = self._waiting(manifest)
        inbound = stream.inbound
        if inbound is None or inbound.manifest != manifest or not inbound.is_open:
            raise _refused("it is over, or was replaced by a newer one")
        return job, stream, inbound


def _sends_source_window(manifest: Manifest) -> bool:
    return manifest.recipe.tail is TailVariant.LAYER_EXACT


def _refused(reason: str) -> RipresaError:
    return RipresaError(ErrorCode.FAILED_PRECONDITION, f"the transfer is refused: {reason}")
