"""Who computes which rows in the next step?

    add ─▶ WAITING ─ begin ─▶ PREFILL ─ last chunk ─▶ DECODE ─ last token ─▶ DONE ─ remove ─▶
                              ▲   │                   │  ▲                     ▲
                   state lost │   │              park ▼  │ resume              │
                              └───│────────────── PARKED ┘                     │
                                  └──── encoder role ──────────────────────────┘

`schedule` gives every decoding sequence one row and the rest of the token budget to prefills, by
priority and then in order of `begin`; `complete` books the step. Pages are held from `schedule` to
`complete`, so that `remove` may be called at any moment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.cache.block_table import PagePool
from ripresa.workers.config import DEFAULT_RESERVED_TOKENS
from ripresa.workers.errors import (
    ErrorCode,
    ResourceExhausted,
    RipresaError,
)
from ripresa.workers.prompt_plan import PromptPlan
from ripresa.workers.replay_query import ReplayGeometry
from ripresa.workers.request import (
    FinishReason,
    GenerationRequest,
    TokenLogprobs,
    WorkCounters,
)
from ripresa.workers.scheduling.admission import (
    check_request,
    positions_to_begin_with,
    positions_to_reserve,
    too_large,
)
from ripresa.workers.scheduling.batch import decode_row, encoder_chunk, local_chunk, tail_chunk
from ripresa.workers.scheduling.budget import check_budget, chunk_stop, prefill_rows
from ripresa.workers.scheduling.step_plan import SequenceStep, StepPlan
from ripresa.workers.sequence import Sequence, SequenceStatus


class WorkerRole(StrEnum):
    """ENCODER: prompt rows of the lower half only. DECODE: everything."""

    ENCODER = "encoder"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What bounds a schedule.

    Attributes:
        geometry: the model, as the replay rules see it.
        max_batched_tokens: rows of a step, at least 2W (see `budget.prefill_rows`).
        max_model_len: positions of the longest sequence.
        eos_token_id: the model's end of sentence; None for none.
        reserved_output_tokens: tokens of an answer whose pages are set aside at admission.
    """

    geometry: ReplayGeometry
    max_batched_tokens: int
    max_model_len: int
    eos_token_id: int | None
    reserved_output_tokens: int = DEFAULT_RESERVED_TOKENS

    @property
    def window(self) -> int:
        """W in tokens."""
        return self.geometry.window


@dataclass(frozen=True, slots=True)
class Progress:
    """What one step meant for one sequence.

    Attributes:
        sequence: whose rows they were.
        step: the rows.
        is_prefill_done: this step computed the last row of the prefill, for the first time.
        token: the token to stream; None if none was chosen or it ended the stream.
        token_position: the position of `token`.
        finish: why the sequence is over; None if it goes on.
        stop_token_id: the token that ended it, for `FinishReason.STOP`.
        logprobs: of `token`, if they were asked for.
    """

    sequence: Sequence
    step: SequenceStep
    is_prefill_done: bool
    token: int | None = None
    token_position: int | None = None
    finish: FinishReason | None = None
    stop_token_id: int | None = None
    logprobs: TokenLogprobs | None = None


class Scheduler:
    """Continuous batching for one worker. Pure: no clock, no thread, no tensor."""

    def __init__(self, role: WorkerRole, pages: PagePool, limits: SchedulerLimits) -> None:
        check_budget(limits.max_batched_tokens, limits.window)
        self._role = role
        self._pages = pages
        self._limits = limits
        # By slot, in order of arrival in the status.
        self._waiting: dict[int, Sequence] = {}
        self._prefill: dict[int, Sequence] = {}
        self._decode: dict[int, Sequence] = {}
        self._done: dict[int, Sequence] = {}
        # By arrival.
        self._parked: dict[int, Sequence] = {}
        self._num_arrivals = 0
        self._num_preemptions = 0
        self._in_flight: tuple[tuple[Sequence, SequenceStep], ...] | None = None
        self._num_steps = 0
        self._counters = WorkCounters()

    @property
    def num_waiting(self) -> int:
        """Sequences that hold pages and have no row to compute yet."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences in prefill or decode."""
        return len(self._prefill) + len(self._decode)

    @property
    def num_decoding(self) -> int:
        """Sequences that take one row of each step."""
        return len(self._decode)

    @property
    def num_parked(self) -> int:
        """Sequences that wait for pages to go on with."""
        return len(self._parked)

    @property
    def num_preemptions(self) -> int:
        """Times that a sequence had to give up its pages."""
        return self._num_preemptions

    @property
    def num_queued_rows(self) -> int:
        """Prompt rows of both halves that are planned and not computed yet.

        Encoder rows that come by transfer are another worker's.
        """
        return sum(
            self._rows_left(sequence)
            for queue in (self._waiting, self._prefill)
            for sequence in queue.values()
            if sequence.is_fixed
        )

    @property
    def num_steps(self) -> int:
        return self._num_steps

    @property
    def counters(self) -> WorkCounters:
        """Rows of all steps, those of sequences that were removed meanwhile included."""
        return self._counters

    def check(self, request: GenerationRequest) -> None:
        """Raise InvalidArgument for a request that this worker could never run."""
        limits = self._limits
        check_request(request, limits.geometry, limits.max_model_len)
        positions, capacity = self._positions(request), self._pages.num_tokens
        if positions > capacity:
            generates = self._role is WorkerRole.DECODE
            raise too_large(request.num_prompt_tokens, positions, capacity, generates=generates)

    def num_needed_blocks(self, request: GenerationRequest) -> int:
        """KV blocks that the request reserves, adopted ones included."""
        return self._pages.blocks_for(self._positions_at_first(request))

    def add(
        self,
        request: GenerationRequest,
        plan: PromptPlan | None,
        chain: tuple[BlockIdentity, ...] = (),
    ) -> Sequence:
        """Reserve the pages of the prompt and of the answer's beginning; it waits until `begin`.

        Args:
            plan: how its encoder rows are computed; None if they come by transfer (decode role
                only).
            chain: without a plan, cached blocks that the transfer will probably not bring.

        Raises:
            InvalidArgument: see `check`.
            ResourceExhausted: the pages are not free, or parked sequences wait for theirs.
            RipresaError: NOT_FOUND; a block of the chain is gone since it was planned.
        """
        if plan is None and self._role is not WorkerRole.DECODE:
            raise ValueError("an encoder worker receives no encoder output")
        self.check(request)
        chain = chain if plan is None else plan.chain
        if self._parked:
            raise ResourceExhausted(
                f"{len(self._parked)} parked requests wait for KV blocks and come first; retry "
                "when running requests have finished"
            )
        pages = self._pages.reserve(self._positions_at_first(request), chain)
        self._num_arrivals += 1
        sequence = Sequence(
            request,
            pages,
            plan,
            self._limits.window,
            self._limits.eos_token_id,
            self._num_arrivals,
        )
        self._waiting[pages.slot] = sequence
        return sequence

    def begin(self, sequence: Sequence) -> None:
        """What the sequence's first row depends on is there: it joins the prefill queue."""
        sequence.move(SequenceStatus.PREFILL)
        if sequence.is_inbound:
            sequence.committed = sequence.prefill_stop
        del self._waiting[sequence.pages.slot]
        self._prefill[sequence.pages.slot] = sequence

    def make_room(self) -> Sequence | None:
        """Give every decoding sequence the page of its next row, by priority and arrival.

        Returns the last one if there are too few: `park` it and call this again. The first one
        keeps its pages, so that some sequence always goes on.
        """
        for sequence in sorted(self._decode.values(), key=_by_rank):
            if sequence.num_tokens <= len(sequence.pages.blocks) * self._limits.window:
                continue
            try:
                self._pages.extend(sequence.pages)
            except ResourceExhausted:
                return max(self._decode.values(), key=_by_rank)
        return None

    def park(self, sequence: Sequence) -> None:
        """A decoding sequence gives up its pages; whoever calls keeps its state, if anybody."""
        if self._in_flight is not None:
            raise RipresaError(ErrorCode.INTERNAL, "a sequence is parked during a step")
        del self._decode[sequence.pages.slot]
        sequence.move(SequenceStatus.PARKED)
        self._parked[sequence.arrival] = sequence
        self._num_preemptions += 1
        sequence.pages.retire()

    @property
    def next_parked(self) -> Sequence | None:
        """The parked sequence that goes on first, by priority and arrival."""
        return min(self._parked.values(), key=_by_rank, default=None)

    def resume(
        self, sequence: Sequence, chain: tuple[BlockIdentity, ...], plan: PromptPlan | None
    ) -> None:
        """A parked sequence goes on.

        Args:
            chain: cached blocks that become its leading ones.
            plan: how everything is computed once more; None if its state was kept, and the caller
                puts it into the new pages.

        Raises:
            ResourceExhausted: the pages are not free; it stays parked.
            RipresaError: NOT_FOUND; a block of the chain is gone since it was planned.
        """
        # One page more than now, lest it be parked again at once.
        most = self._positions(sequence.request)
        positions = min(most, sequence.num_tokens + self._limits.window)
        pages = self._pages.reserve(positions, chain)
        del self._parked[sequence.arrival]
        sequence.pages = pages
        if plan is None:
            sequence.move(SequenceStatus.DECODE)
        else:
            sequence.restart(plan)
            sequence.move(SequenceStatus.PREFILL)
        self._queue(sequence.status)[pages.slot] = sequence

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, at any moment; idempotent.

        Its pages are free when this returns, or when its step in flight is completed.
        """
        if sequence.status is SequenceStatus.REMOVED:
            return
        if sequence.status is SequenceStatus.PARKED:
            del self._parked[sequence.arrival]
            sequence.move(SequenceStatus.REMOVED)
            return
        del self._queue(sequence.status)[sequence.pages.slot]
        sequence.move(SequenceStatus.REMOVED)
        sequence.pages.retire()

    def schedule(self) -> StepPlan | None:
        """The next step, or None if no sequence has a row to compute."""
        if self._in_flight is not None:
            raise RipresaError(ErrorCode.INTERNAL, "a step is scheduled while another one runs")
        batch = self._decode_rows()
        window = self._limits.window
        num_rows = sum(step.num_encoder_rows for _, step in batch)
        rows = prefill_rows(self._limits.max_batched_tokens, num_rows, window)
        for sequence in sorted(self._prefill.values(), key=_by_priority):
            if rows == 0:
                break
            end = sequence.prefill_stop if sequence.is_inbound else sequence.encoder_pass.stop
            stop = chunk_stop(sequence.position, end, self._chunk_rows(sequence, rows), window)
            if stop is not None:
                batch.append((sequence, self._chunk(sequence, stop)))
                rows -= stop - sequence.position
        if not batch:
            return None
        for sequence, _ in batch:
            sequence.pages.hold()
        self._in_flight = tuple(batch)
        self._num_steps += 1
        return StepPlan(step=self._num_steps, sequences=tuple(step for _, step in batch))

    def _chunk_rows(self, sequence: Sequence, rows: int) -> int:
        """Rows that a chunk may have: less than the budget where streams wait for the step."""
        bound = sequence.request.max_chunk_rows
        if bound is None or not self._decode:
            return rows
        return min(rows, max(bound, 2 * self._limits.window))

    def complete(self, sampled: Mapping[int, int]) -> tuple[Progress, ...]:
        """Book the step in flight: advance its sequences, free those removed meanwhile.

        Args:
            sampled: the next token by slot, for every slot whose step asked for one; those of
                sequences removed meanwhile may miss.

        Raises:
            RipresaError: INTERNAL; a token is missing. Nothing is booked; call `abandon`.
        """
        batch = self._batch_in_flight()
        asked = {step.slot for _, step in batch if step.sampling is not None}
        removed = {s.slot for seq, s in batch if seq.status is SequenceStatus.REMOVED}
        if not asked - removed <= set(sampled) <= asked:
            raise RipresaError(
                ErrorCode.INTERNAL,
                f"tokens were asked for slots {sorted(asked)} and came for {sorted(sampled)}",
            )
        self._in_flight = None
        progress = []
        for sequence, step in batch:
            self._count(sequence, step)
            if sequence.status is not SequenceStatus.REMOVED:
                progress.append(self._advance(sequence, step, sampled.get(step.slot)))
            sequence.pages.drop()
        return tuple(progress)

    def abandon(self) -> tuple[Sequence, ...]:
        """The step in flight failed: its sequences, less those removed meanwhile, unchanged.

        Their rows are in an unknown state, so the caller must remove them.
        """
        batch = self._batch_in_flight()
        self._in_flight = None
        for sequence, _ in batch:
            sequence.pages.drop()
        return tuple(s for s, _ in batch if s.status is not SequenceStatus.REMOVED)

    def check_integrity(self) -> None:
        """Raise RipresaError (INTERNAL) unless queues, statuses and pages agree."""
        self._pages.check_integrity()
        live = 0
        for sequence in self._parked.values():
            if sequence.status is not SequenceStatus.PARKED or not sequence.pages.is_retired:
                raise RipresaError(ErrorCode.INTERNAL, "a parked sequence holds pages")
        for status in _WITH_PAGES:
            for slot, sequence in self._queue(status).items():
                live += 1
                if sequence.status is not status or sequence.pages.slot != slot:
                    raise RipresaError(ErrorCode.INTERNAL, f"slot {slot} is in a wrong queue")
                if sequence.pages.is_retired:
                    raise RipresaError(ErrorCode.INTERNAL, f"slot {slot} is queued but retired")
        owned = self._pages.num_owned_slots
        if owned != live:
            raise RipresaError(
                ErrorCode.INTERNAL, f"{owned} slots are owned and {live} sequences are queued"
            )

    def _rows_left(self, sequence: Sequence) -> int:
        stop = sequence.prefill_stop
        tail = stop - max(sequence.position, sequence.recipe.decoder_start)
        if sequence.is_inbound:
            return tail
        num_layers = self._limits.geometry.num_encoder_layers
        encoder = -(-sequence.num_row_layers_left(num_layers) // num_layers)
        return encoder if self._role is WorkerRole.ENCODER else encoder + tail

    def _positions(self, request: GenerationRequest) -> int:
        generates = self._role is WorkerRole.DECODE
        return positions_to_reserve(request, self._limits.max_model_len, generates=generates)

    def _positions_at_first(self, request: GenerationRequest) -> int:
        limits, generates = self._limits, self._role is WorkerRole.DECODE
        return positions_to_begin_with(
            request, limits.max_model_len, limits.reserved_output_tokens, generates=generates
        )

    def _queue(self, status: SequenceStatus) -> dict[int, Sequence]:
        return {
            SequenceStatus.WAITING: self._waiting,
            SequenceStatus.PREFILL: self._prefill,
            SequenceStatus.DECODE: self._decode,
            SequenceStatus.DONE: self._done,
        }[status]

    def _batch_in_flight(self) -> tuple[tuple[Sequence, SequenceStep], ...]:
        if self._in_flight is None:
            raise RipresaError(ErrorCode.INTERNAL, "no step is in flight")
        return self._in_flight

    def _decode_rows(self) -> list[tuple[Sequence, SequenceStep]]:
        """One row a sequence. Restarts at anchors that exceed the budget wait, but for one."""
        batch: list[tuple[Sequence, SequenceStep]] = []
        left = self._limits.max_batched_tokens - len(self._decode)
        has_restart = False
        for sequence in self._decode.values():
            step = decode_row(sequence)
            extra = step.num_encoder_rows - 1
            if extra and has_restart and extra > left:
                continue
            has_restart = has_restart or extra > 0
            left -= extra
            batch.append((sequence, step))
        return batch

    def _chunk(self, sequence: Sequence, stop: int) -> SequenceStep:
        if self._role is WorkerRole.ENCODER:
            return encoder_chunk(sequence, stop)
        return tail_chunk(sequence, stop) if sequence.is_inbound else local_chunk(sequence, stop)

    def _count(self, sequence: Sequence, step: SequenceStep) -> None:
        if step.decoder_stop > sequence.prefill_stop:
            added = WorkCounters(
                encoder_rows=step.num_encoder_rows - step.num_decoder_rows,
                decoder_rows=step.num_decoder_rows,
            )
        else:
            added = WorkCounters(
                encoder_rows=step.num_encoder_rows, decoder_prefill_rows=step.num_decoder_rows
            )
        sequence.counters = _sum(sequence.counters, added)
        self._counters = _sum(self._counters, added)

    def _advance(self, sequence: Sequence, step: SequenceStep, token: int | None) -> Progress:
        in_prefill = sequence.status is SequenceStatus.PREFILL
        stop = step.decoder_stop if step.inbound else step.encoder_stop
        is_prefill_done = in_prefill and sequence.is_last_pass and stop == sequence.prefill_stop
        sequence.advance(stop)
        is_news = is_prefill_done and not sequence.is_restarted
        if token is None:
            if is_prefill_done:
                self._requeue(sequence, SequenceStatus.DONE)
            return Progress(sequence, step, is_news)
        position = sequence.num_tokens
        sequence.append(token)
        finish = self._finish(sequence, token)
        if finish is not None:
            self._requeue(sequence, SequenceStatus.DONE)
        elif in_prefill:
            self._requeue(sequence, SequenceStatus.DECODE)
        if finish is FinishReason.STOP:
            return Progress(sequence, step, is_news, finish=finish, stop_token_id=token)
        return Progress(sequence, step, is_news, token, position, finish)

    def _requeue(self, sequence: Sequence, status: SequenceStatus) -> None:
        del self._queue(sequence.status)[sequence.pages.slot]
        sequence.move(status)
        self._queue(status)[sequence.pages.slot] = sequence

    def _finish(self, sequence: Sequence, token: int) -> FinishReason | None:
        sampling = sequence.sampling
        is_eos = token == self._limits.eos_token_id and not sampling.ignore_eos
        is_end = is_eos or token in sampling.stop_token_ids
        if is_end and not sequence.request.given:
            return FinishReason.STOP
        if sequence.num_generated_tokens >= sampling.max_tokens:
            return FinishReason.LENGTH
        if sequence.num_tokens >= self._limits.max_model_len:
            return FinishReason.LENGTH
        return None


_WITH_PAGES = (
    SequenceStatus.WAITING,
    SequenceStatus.PREFILL,
    SequenceStatus.DECODE,
    SequenceStatus.DONE,
)


def _by_rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank


def _by_priority(sequence: Sequence) -> int:
    return sequence.request.priority


def _sum(left: WorkCounters, right: WorkCounters) -> WorkCounters:
    return replace(
        left,
        encoder_rows=left.encoder_rows + right.encoder_rows,
        decoder_prefill_rows=left.decoder_prefill_rows + right.decoder_prefill_rows,
        decoder_rows=left.decoder_rows + right.decoder_rows,
    )
