"""How does an encoder worker turn a prompt into state on a decode worker?

    offer ─ accepted ─▶ chunk 0 │ chunk 1 │ chunk 2 │ ...
                             blocks 0.. ─▶ blocks k.. ─▶ ... ─▶ state ─▶ checksum

Blocks are sent while later chunks compute. What waits to be sent are pages that the request holds
anyway, so a slow receiver delays its own request only and nothing queues up.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from ripresa.workers.address import WorkerAddress, WorkerKind
from ripresa.workers.cache.cache_events import CacheListener, CopyAdvice, FindKeepers, Room
from ripresa.workers.config import EngineConfig
from ripresa.workers.departure import Adopt, Departure, HasOther, Tell
from ripresa.workers.engine import EngineCore
from ripresa.workers.errors import ErrorCode, RipresaError, reason_of
from ripresa.workers.hand_over import num_row_sections
from ripresa.workers.job import Job
from ripresa.workers.models.base import EncoderOutput, ModelRunner
from ripresa.workers.prefix_exchange import PrefixExchange
from ripresa.workers.prefix_pulls import PeerAccess
from ripresa.workers.replay import TailVariant
from ripresa.workers.request import EngineStats, GenerationRequest, WorkCounters
from ripresa.workers.scheduling.scheduler import Progress, WorkerRole
from ripresa.workers.transfer.base import (
    Manifest,
    OutboundTransfer,
    Section,
    SectionKind,
    TransferBackend,
)

_MAX_WINDOWS = 4
"""Windows that wait for a slow receiver."""


class _Prompt:
    """How far a prompt is computed, for the task that sends it.

    Args:
        window_period: windows at its multiples are handed over.

    Attributes:
        position: rows below it are computed.
    """

    def __init__(self, window_period: int) -> None:
        self.position = 0
        self.is_done = False
        self._windows: dict[int, torch.Tensor] = {}
        self._window_period = window_period
        self.scope = asyncio.timeout(None)
        self._outputs: list[EncoderOutput] = []
        self._moved = asyncio.Event()

    def on_progress(
        self,
        progress: Progress,
        encoder_output: EncoderOutput | None,
        windows: Mapping[int, torch.Tensor],
    ) -> None:
        for boundary, payload in windows.items():
            if boundary % self._window_period == 0:
                self._windows[boundary] = payload
        while len(self._windows) > _MAX_WINDOWS:
            # The first one may be sent soonest.
            del self._windows[sorted(self._windows)[1]]
        if encoder_output is not None:
            self._outputs.append(encoder_output)
        self.position = progress.sequence.committed
        self.is_done = progress.is_prefill_done
        self._moved.set()

    def on_failed(self, error: RipresaError) -> None:
        # Ends whatever `prefill` waits for: an answer, a slow receiver, the next chunk.
        self.scope.reschedule(asyncio.get_running_loop().time())

    def inbound_rows(self, start: int, stop: int) -> EncoderOutput:
        raise RipresaError(ErrorCode.INTERNAL, "an encoder worker receives no encoder output")

    async def moved(self) -> None:
        """Wait for the next step."""
        self._moved.clear()
        await self._moved.wait()

    def take_window(self, stop: int) -> tuple[int, torch.Tensor] | None:
        """The newest window to hand over at or below `stop`, and its boundary; it and those before
        it are forgotten."""
        ready = sorted(boundary for boundary in self._windows if boundary <= stop)
        payloads = [self._windows.pop(boundary) for boundary in ready]
        return (ready[-1], payloads[-1]) if ready else None

    @property
    def num_rows(self) -> int:
        """Tail rows that are computed and not taken yet."""
        return sum(output.stop - output.start for output in self._outputs)

    def take_rows(self, num_rows: int) -> EncoderOutput:
        """The encoder output of the next tail rows, in order; it is forgotten here."""
        start = self._outputs[0].start
        parts: list[EncoderOutput] = []
        while num_rows:
            output = self._outputs.pop(0)
            count = min(num_rows, output.stop - output.start)
            parts.append(EncoderOutput(output.start, output.hidden[:count], output.pre_mix[:count]))
            if count < output.stop - output.start:
                rest = (output.hidden[count:], output.pre_mix[count:])
                self._outputs.insert(0, EncoderOutput(output.start + count, *rest))
            num_rows -= count
        hidden = torch.cat([part.hidden for part in parts])
        return EncoderOutput(start, hidden, torch.cat([part.pre_mix for part in parts]))


class EncoderEngine:
    """The lower half of the model: prompts in, block KV and encoder output out.

    Args:
        worker_id: this worker's name in the cluster.
        runner: the encoder half with its KV memory.
        backend: how state travels to decode workers; closed by whoever made it.
        config: the engine's settings.
        clock: seconds since the epoch.
        listener: hears of what the cache holds.
        peers: the way to other workers' caches; None for a worker that reaches none.
        find_keepers: asks who should keep what this worker has to evict; None if nobody knows.
    """

    def __init__(
        self,
        worker_id: str,
        runner: ModelRunner,
        backend: TransferBackend,
        config: EngineConfig,
        clock: Callable[[], float] = time.time,
        listener: CacheListener | None = None,
        peers: PeerAccess | None = None,
        find_keepers: FindKeepers | None = None,
    ) -> None:
        self._worker_id = worker_id
        self._runner = runner
        self._backend = backend
        self._max_section_blocks = config.transfer.max_section_blocks
        self._window_period = config.transfer.hand_over_window_blocks * runner.window
        self._core = EngineCore(
            WorkerRole.ENCODER, runner, config, clock, listener, peers, find_keepers
        )

    async def start(self) -> None:
        """Begin to run steps. Raises RipresaError (FAILED_PRECONDITION) the second time."""
        await self._core.start()

    async def stop(self) -> None:
        """Fail every prefill with UNAVAILABLE, wait for the running step, free everything."""
        await self._core.stop()

    async def prefill(self, request: GenerationRequest, receiver: str) -> WorkCounters:
        """Compute a prompt and hand its state over to the decode worker `receiver`.

        Returns once the receiver has agreed to the checksum. Cancelling it stops the work within
        a step and tells the receiver.

        Raises:
            RipresaError: see `EngineCore.admit`; CANCELLED or DEADLINE_EXCEEDED; INTERNAL (a step
                failed); or what the transfer raised. The receiver was told in every case.
        """
        prompt = _Prompt(self._window_period)
        job = await self._core.admit(request, prompt)
        prompt.position = job.sequence.committed
        try:
            async with prompt.scope:
                return await self._hand_over(job, prompt, receiver)
        except TimeoutError:
            if job.error is None:
                raise
            raise job.error from None
        finally:
            self._core.retire(job)

    def abort(self, request_id: str) -> bool:
        """End a prefill with CANCELLED; False if it does not run here."""
        return self._core.abort(request_id)

    @property
    def exchange(self) -> PrefixExchange:
        """What the worker exchanges with its peers' caches."""
        return self._core.exchange

    def departure(
        self,
        own: WorkerAddress,
        adopt: Adopt,
        tell: Tell,
        has_other: HasOther,
        on_change: Callable[[], None],
    ) -> Departure:
        """The engine's way out; see `Departure`. It parks no sessions."""
        return Departure(self._core, own, adopt, tell, has_other, on_change)

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

    def stats(self) -> EngineStats:
        return self._core.stats()

    def check_integrity(self) -> None:
        """Raise RipresaError (INTERNAL) unless pools, queues and prefills agree."""
        self._core.check_integrity()

    async def _hand_over(self, job: Job, prompt: _Prompt, receiver: str) -> WorkCounters:
        request = job.request
        manifest = Manifest(
            transfer_id=uuid.uuid4().hex,
            request_id=request.request_id,
            generation=request.generation,
            sender=self._worker_id,
            layout_digest=self._runner.layout_digest,
            num_tokens=request.num_tokens,
            first_block=0,
            recipe=job.sequence.recipe,
            prefix=job.outcome,
        )
        decoder = WorkerAddress(receiver, WorkerKind.DECODE)
        transfer = await self._backend.offer(decoder, manifest)
        try:
            self._core.begin(job)
            num_sections = await self._send_parts(job, prompt, transfer)
            await self._send_state(job, prompt, transfer, num_sections)
            await transfer.complete()
            job.is_prefilled = True
        except BaseException as error:
            self._core.retire(job)
            await transfer.fail(reason_of(job.error or error))
            raise
        finally:
            self._core.count_transfer(transfer.num_bytes_sent)
        return replace(job.sequence.counters, transfer_bytes=transfer.num_bytes_sent)

    async def _send_parts(self, job: Job, prompt: _Prompt, transfer: OutboundTransfer) -> int:
        """Send the whole blocks that the receiver lacks, now and then a window, and all tail rows
        but the last W, each in order, as they are finished.

        Returns the sections sent.
        """
        window, request = self._runner.window, job.request
        num_blocks = request.num_tokens // window
        num_rows = num_row_sections(job.sequence.recipe, request.num_tokens, window)
        sent, rows, index = transfer.first_block, 0, 0
        while sent < num_blocks or rows < num_rows:
            stop = min(prompt.position // window, num_blocks, sent + self._max_section_blocks)
            cut = prompt.take_window(sent * window)
            if cut is not None:
                number, payload = cut[0] // window, cut[1]
                section = Section(index, SectionKind.WINDOW, number - 1, number, payload.numel())
            elif stop > sent:
                payload = await self._core.in_step_thread(
                    job, self._runner.export_blocks, job.sequence.pages.blocks[sent:stop]
                )
                section = Section(index, SectionKind.BLOCKS, sent, stop, payload.numel())
                sent = stop
            elif rows < num_rows and prompt.num_rows >= window:
                payload = self._runner.export_rows(prompt.take_rows(window))
                section = Section(index, SectionKind.ROWS, rows, rows + 1, payload.numel())
                rows += 1
            else:
                await prompt.moved()
                continue
            await transfer.send(section, payload)
            index += 1
        return index

    async def _send_state(
        self, job: Job, prompt: _Prompt, transfer: OutboundTransfer, index: int
    ) -> None:
        request = job.request
        while not prompt.is_done:
            await prompt.moved()
        payload = await self._core.in_step_thread(
            job,
            self._runner.export_state,
            job.sequence.pages.slot,
            job.sequence.pages.blocks,
            request.num_tokens,
            prompt.take_rows(prompt.num_rows),
            job.sequence.recipe.tail is TailVariant.LAYER_EXACT,
        )
        await transfer.send(Section(index, SectionKind.STATE, 0, 0, payload.numel()), payload)
