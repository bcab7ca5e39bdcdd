"""Do all schedules of a request compute the same stream, the one its definition gives?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hash_machine import EOS, GEOMETRY, WINDOW, HashMachine, reference_stream
from hash_requests import cold_plan, make_request
from hypothesis import given, settings
from hypothesis import strategies as st

from ripresa.workers.cache.block_cache import BlockCache
from ripresa.workers.cache.block_pool import BlockPool, SlotPool
from ripresa.workers.cache.block_table import PagePool
from ripresa.workers.errors import (
    ConfigError,
    InvalidArgument,
    ResourceExhausted,
    RipresaError,
)
from ripresa.workers.models.base import EncoderOutput
from ripresa.workers.replay import TailVariant
from ripresa.workers.request import FinishReason, GenerationRequest, WorkCounters
from ripresa.workers.scheduling.scheduler import Progress, Scheduler, SchedulerLimits, WorkerRole
from ripresa.workers.scheduling.step_plan import SequenceStep, StepPlan
from ripresa.workers.sequence import Sequence, SequenceStatus

TAILS = (TailVariant.FLOORED, TailVariant.LAYER_EXACT, TailVariant.FULL)


class Worker:
    """A scheduler and a hash machine, driven step by step without an engine."""

    def __init__(
        self,
        role: WorkerRole = WorkerRole.DECODE,
        budget: int = 2 * WINDOW,
        num_blocks: int = 64,
        num_slots: int = 16,
        max_model_len: int = 512,
        alter: Callable[[SequenceStep], SequenceStep] = lambda step: step,
    ) -> None:
        self.machine = HashMachine(num_blocks, num_slots, max_model_len)
        blocks = BlockCache(BlockPool(num_blocks), WINDOW)
        self.pages = PagePool(
            blocks, num_blocks, SlotPool(num_slots), WINDOW, self.machine.release_slot
        )
        limits = SchedulerLimits(GEOMETRY, budget, max_model_len, EOS)
        self.scheduler = Scheduler(role, self.pages, limits)
        self.budget = budget
        self.streams: dict[str, list[int]] = {}
        self.finished: dict[str, Progress] = {}
        self.outputs: dict[str, list[EncoderOutput]] = {}
        self.inbound: dict[str, EncoderOutput] = {}
        self.plans: list[StepPlan] = []
        self._live: dict[int, Sequence] = {}
        self._alter = alter

    def add(self, request: GenerationRequest, *, is_inbound: bool = False) -> Sequence:
        plan = None if is_inbound else cold_plan(request)
        sequence = self.scheduler.add(request, plan)
        if is_inbound:
            assert request.recipe is not None
            sequence.fix(request.recipe)
        self._live[sequence.pages.slot] = sequence
        self.streams[request.request_id] = []
        self.outputs[request.request_id] = []
        if not is_inbound:
            self.scheduler.begin(sequence)
        return sequence

    def step(self, during: Callable[[], None] = lambda: None) -> bool:
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        self.plans.append(plan)
        inbound = {step.slot: self._inbound_rows(step) for step in plan.sequences if step.inbound}
        altered = StepPlan(plan.step, tuple(self._alter(step) for step in plan.sequences))
        output = self.machine.execute(altered, inbound)
        during()
        for progress in self.scheduler.complete(output.sampled):
            request_id = progress.sequence.request.request_id
            if progress.token is not None:
                self.streams[request_id].append(progress.token)
            if progress.step.slot in output.encoder_output:
                self.outputs[request_id].append(output.encoder_output[progress.step.slot])
            if progress.finish is not None:
                self.finished[request_id] = progress
                self.scheduler.remove(progress.sequence)
        self.scheduler.check_integrity()
        return True

    def run(self) -> None:
        while self.step():
            pass

    def _inbound_rows(self, step: SequenceStep) -> EncoderOutput:
        output = self.inbound[self._live[step.slot].request.request_id]
        rows = slice(step.decoder_start - output.start, step.decoder_stop - output.start)
        return EncoderOutput(step.decoder_start, output.hidden[rows], output.pre_mix[rows])

    def assert_empty(self) -> None:
        self.scheduler.check_integrity()
        assert self.pages.num_available_blocks == self.pages.num_blocks
        assert self.pages.num_free_slots == self.pages.num_slots
        assert self.machine.violations == []


def hand_over(encoder: Worker, done: Sequence, decoder: Worker, waiting: Sequence) -> None:
    """Move a finished prompt's state as a transfer does, then let the receiver go on."""
    request = done.request
    whole = request.num_tokens // WINDOW
    payload = encoder.machine.export_blocks(done.pages.blocks[:whole])
    decoder.machine.import_blocks(waiting.pages.blocks[:whole], payload)
    outputs = encoder.outputs[request.request_id]
    output = EncoderOutput(
        outputs[0].start,
        torch.cat([part.hidden for part in outputs]),
        torch.cat([part.pre_mix for part in outputs]),
    )
    assert output.start == request.recipe.decoder_start
    source = request.recipe.tail is TailVariant.LAYER_EXACT
    state = encoder.machine.export_state(
        done.pages.slot, done.pages.blocks, request.num_tokens, output, source
    )
    decoder.inbound[request.request_id] = decoder.machine.import_state(
        waiting.pages.slot, waiting.pages.blocks, request.num_tokens, output.start, source, state
    )
    decoder.scheduler.begin(waiting)
    encoder.scheduler.remove(done)


REQUESTS = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 12), st.sampled_from(TAILS)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=40, deadline=None)
@given(specs=REQUESTS, budget=st.integers(2 * WINDOW, 8 * WINDOW), data=st.data())
def test_streams_depend_on_no_chunk_and_no_batch_mate(
    specs: list[tuple[int, int, TailVariant]], budget: int, data: st.DataObject
) -> None:
    worker = Worker(budget=budget)
    requests = [
        make_request(length, request_id=f"r{i}", max_tokens=most, tail=tail, ignore_eos=False)
        for i, (length, most, tail) in enumerate(specs)
    ]
    for request in requests:
        worker.add(request)
        for _ in range(data.draw(st.integers(0, 3))):
            worker.step()
    worker.run()
    for request in requests:
        expected = reference_stream(request)
        end = worker.finished[request.request_id]
        assert tuple(worker.streams[request.request_id]) == expected.tokens
        assert (end.finish, end.stop_token_id) == (expected.reason, expected.stop_token_id)
    for plan in worker.plans:
        decoding = sum(step.num_encoder_rows == 1 for step in plan.sequences)
        rows = sum(step.num_encoder_rows for step in plan.sequences)
        assert rows <= max(budget, 2 * WINDOW + decoding)
    worker.assert_empty()


@settings(max_examples=40, deadline=None)
@given(specs=REQUESTS, budgets=st.tuples(*[st.integers(2 * WINDOW, 6 * WINDOW)] * 2))
def test_the_split_gives_the_stream_of_one_worker(
    specs: list[tuple[int, int, TailVariant]], budgets: tuple[int, int]
) -> None:
    encoder = Worker(WorkerRole.ENCODER, budgets[0])
    decoder = Worker(WorkerRole.DECODE, budgets[1])
    pairs = []
    for i, (length, most, tail) in enumerate(specs):
        request = make_request(length, request_id=f"r{i}", max_tokens=most, tail=tail)
        pairs.append((encoder.add(request), decoder.add(request, is_inbound=True)))
    encoder.run()
    for done, waiting in pairs:
        assert done.status is SequenceStatus.DONE
        assert done.counters == WorkCounters(encoder_rows=done.request.num_tokens)
        hand_over(encoder, done, decoder, waiting)
        decoder.step()
    decoder.run()
    for done, waiting in pairs:
        request = done.request
        expected = reference_stream(request)
        assert tuple(decoder.streams[request.request_id]) == expected.tokens
        tail_rows = request.num_tokens - request.recipe.decoder_start
        assert waiting.counters == WorkCounters(
            decoder_prefill_rows=tail_rows, decoder_rows=len(expected.tokens) - 1
        )
    encoder.assert_empty()
    decoder.assert_empty()


@settings(max_examples=40, deadline=None)
@given(
    length=st.integers(1, 40),
    streamed=st.integers(0, 30),
    tail=st.sampled_from(TAILS),
    budget=st.integers(2 * WINDOW, 4 * WINDOW),
    split=st.booleans(),
)
def test_a_re_execution_goes_on_where_the_first_one_stopped(
    length: int, streamed: int, tail: TailVariant, budget: int, split: bool
) -> None:
    first = make_request(length, max_tokens=31, tail=tail)
    tokens = reference_stream(first).tokens
    again = replace(first, generation=1, token_ids=first.token_ids + tokens[:streamed])
    decoder = Worker(WorkerRole.DECODE, budget)
    if split:
        encoder = Worker(WorkerRole.ENCODER, budget)
        done, waiting = encoder.add(again), decoder.add(again, is_inbound=True)
        encoder.run()
        hand_over(encoder, done, decoder, waiting)
        encoder.assert_empty()
    else:
        decoder.add(again)
    decoder.run()
    assert tuple(decoder.streams["r"]) == tokens[streamed:]
    assert decoder.finished["r"].sequence.num_generated_tokens == 31
    decoder.assert_empty()


@settings(max_examples=40, deadline=None)
@given(specs=REQUESTS, data=st.data())
def test_removing_at_any_moment_frees_pages_and_changes_no_other_stream(
    specs: list[tuple[int, int, TailVariant]], data: st.DataObject
) -> None:
    worker = Worker(budget=3 * WINDOW)
    sequences = [
        worker.add(make_request(length, request_id=f"r{i}", max_tokens=most, tail=tail))
        for i, (length, most, tail) in enumerate(specs)
    ]
    victims = {s: data.draw(st.integers(0, 12)) for s in sequences if data.draw(st.booleans())}
    in_step = data.draw(st.booleans())

    for number in range(13):
        due = [victim for victim, moment in victims.items() if moment == number]

        def remove(due: list[Sequence] = due) -> None:
            for victim in due:
                worker.scheduler.remove(victim)
                worker.scheduler.check_integrity()

        if in_step:
            worker.step(during=remove)
        else:
            remove()
            worker.step()
        remove()
        assert all(victim.pages.is_freed for victim in due)
    worker.run()
    for sequence in sequences:
        if sequence not in victims:
            request = sequence.request
            assert tuple(worker.streams[request.request_id]) == reference_stream(request).tokens
    worker.assert_empty()


def _shift_decoder_floor(step: SequenceStep) -> SequenceStep:
    return replace(step, decoder_floor=step.decoder_floor + 1)


def _re_plan_decoder_floor(step: SequenceStep) -> SequenceStep:
    return replace(step, decoder_floor=max(step.decoder_floor, step.decoder_stop - WINDOW))


def _lose_lookback(step: SequenceStep) -> SequenceStep:
    return replace(step, lookback_ids=())


def _swap_blocks(step: SequenceStep) -> SequenceStep:
    first, second, *rest = step.block_table
    swap = step.encoder_start >= WINDOW
    return replace(step, block_table=(second, first, *rest)) if swap else step


def _source_from_tail(step: SequenceStep) -> SequenceStep:
    return replace(step, source_floor=step.decoder_floor)


def _raise_swa_floor(step: SequenceStep) -> SequenceStep:
    return replace(step, swa_floor=step.encoder_start)


@pytest.mark.parametrize(
    "alter",
    [
        _shift_decoder_floor,
        _re_plan_decoder_floor,
        _lose_lookback,
        _swap_blocks,
        _source_from_tail,
        _raise_swa_floor,
    ],
)
def test_the_hash_machine_notices_a_wrong_step(
    alter: Callable[[SequenceStep], SequenceStep],
) -> None:
    first = make_request(29, max_tokens=15, tail=TailVariant.LAYER_EXACT)
    tokens = reference_stream(first).tokens
    again = replace(first, token_ids=first.token_ids + tokens[:5])
    worker = Worker(alter=alter)
    worker.add(again)
    worker.run()
    assert len(worker.streams["r"]) == 10
    assert tuple(worker.streams["r"]) != tokens[5:]


def test_prompts_are_served_in_order_and_share_a_step() -> None:
    worker = Worker(budget=4 * WINDOW)
    for name, length in (("a", 40), ("b", 30), ("c", 5)):
        worker.add(make_request(length, request_id=name))
    worker.step()
    rows = [(step.encoder_start, step.encoder_stop) for step in worker.plans[0].sequences]
    assert rows == [(0, 32)]
    worker.step()
    rows = [(step.encoder_start, step.encoder_stop) for step in worker.plans[1].sequences]
    assert rows == [(32, 40), (0, 16), (0, 5)]


def test_decode_rows_and_chunks_share_a_step() -> None:
    worker = Worker(budget=2 * WINDOW)
    worker.add(make_request(4, request_id="a", max_tokens=20))
    worker.step()
    worker.add(make_request(40, request_id="b"))
    worker.step()
    decode, chunk = worker.plans[1].sequences
    assert (decode.encoder_start, decode.encoder_stop) == (4, 5)
    assert (decode.decoder_start, decode.decoder_stop) == (4, 5)
    assert decode.decoder_floor == 0
    assert decode.sampling is not None
    assert (chunk.encoder_start, chunk.encoder_stop, chunk.sampling) == (0, 16, None)


def test_a_bounded_prompt_takes_small_chunks_beside_streams_alone() -> None:
    worker = Worker(budget=8 * WINDOW)
    bounded = replace(make_request(12 * WINDOW, request_id="long"), max_chunk_rows=3 * WINDOW)
    worker.add(bounded)
    worker.step()
    # Nobody waits for this step.
    assert worker.plans[-1].sequences[0].num_encoder_rows == 8 * WINDOW
    stream = make_request(5, request_id="stream", max_tokens=40)
    worker.add(stream)
    other = replace(bounded, request_id="other")
    worker.add(other)
    worker.run()
    chunks = [
        step.num_encoder_rows
        for plan in worker.plans
        if any(step.decoder_stop > 5 and step.num_encoder_rows == 1 for step in plan.sequences)
        for step in plan.sequences
        if step.num_encoder_rows > 1
    ]
    assert chunks
    assert max(chunks) == 3 * WINDOW
    for request in (bounded, stream, other):
        assert tuple(worker.streams[request.request_id]) == reference_stream(request).tokens


def test_queued_rows_are_those_that_are_left() -> None:
    worker = Worker(budget=2 * WINDOW)
    worker.add(make_request(5 * WINDOW, request_id="a", max_tokens=1))
    left = []
    while True:
        left.append(worker.scheduler.num_queued_rows)
        if not worker.step():
            break
    # Both halves: every row of the prompt, and the tail of one window.
    assert left[0] == 6 * WINDOW
    assert left == sorted(left, reverse=True)
    assert left[-1] == 0


def test_only_chunks_with_tail_rows_hand_over() -> None:
    worker = Worker(WorkerRole.ENCODER, budget=2 * WINDOW)
    worker.add(make_request(37))
    worker.run()
    steps = [plan.sequences[0] for plan in worker.plans]
    assert [(s.encoder_start, s.encoder_stop) for s in steps] == [(0, 16), (16, 24), (24, 37)]
    assert [s.hand_over_from for s in steps] == [None, None, 29]
    assert all(s.num_decoder_rows == 0 and s.sampling is None for s in steps)
    full = Worker(WorkerRole.ENCODER, budget=2 * WINDOW)
    full.add(make_request(37, tail=TailVariant.FULL))
    full.run()
    assert [plan.sequences[0].hand_over_from for plan in full.plans] == [0, 0, 0]


def test_floors_follow_from_the_recipe() -> None:
    for tail, source, writes in (
        (TailVariant.FLOORED, 29, None),
        (TailVariant.LAYER_EXACT, 0, 0),
        (TailVariant.FULL, 0, None),
    ):
        worker = Worker()
        request = make_request(37, tail=tail)
        worker.add(request)
        worker.run()
        for step in (plan.sequences[0] for plan in worker.plans):
            assert step.decoder_floor == request.recipe.decoder_start
            assert (step.source_floor, step.source_window_from) == (source, writes)


@pytest.mark.parametrize("max_tokens", [1, 3])
def test_max_tokens_ends_the_stream(max_tokens: int) -> None:
    worker = Worker()
    worker.add(make_request(9, max_tokens=max_tokens))
    worker.run()
    assert len(worker.streams["r"]) == max_tokens
    assert worker.finished["r"].finish is FinishReason.LENGTH


def test_the_context_length_ends_the_stream() -> None:
    worker = Worker(max_model_len=24)
    sequence = worker.add(make_request(20, max_tokens=50))
    assert len(sequence.pages.blocks) == 3
    worker.run()
    assert len(worker.streams["r"]) == 4
    assert worker.finished["r"].finish is FinishReason.LENGTH


def test_a_stop_id_ends_the_stream_and_is_not_part_of_it() -> None:
    tokens = reference_stream(make_request(20, max_tokens=8)).tokens
    stop = tokens[4]
    worker = Worker()
    worker.add(make_request(20, max_tokens=8, stop_token_ids=(stop,)))
    worker.run()
    before = tokens[: tokens.index(stop)]
    end = worker.finished["r"]
    assert tuple(worker.streams["r"]) == before
    assert (end.finish, end.stop_token_id) == (FinishReason.STOP, stop)
    assert end.sequence.num_generated_tokens == len(before) + 1


def test_a_full_pool_refuses_and_takes_nothing() -> None:
    worker = Worker(num_blocks=8)
    first = worker.add(make_request(40, request_id="a", max_tokens=8))
    assert len(first.pages.blocks) == 6
    with pytest.raises(ResourceExhausted, match="2 of 8 are free"):
        worker.add(make_request(20, request_id="b", max_tokens=5))
    with pytest.raises(InvalidArgument) as caught:
        worker.add(make_request(60, request_id="c", max_tokens=20))
    assert caught.value.field == "sampling.max_tokens"
    assert "lower max_tokens or raise decoders.num_blocks" in caught.value.message
    with pytest.raises(InvalidArgument) as caught:
        worker.add(make_request(70, request_id="d", max_tokens=1))
    assert caught.value.field == "token_ids"
    assert "shorten the prompt or raise decoders.num_blocks" in caught.value.message
    worker.run()
    worker.assert_empty()


def test_a_prompt_that_no_encoder_pool_holds_is_refused() -> None:
    worker = Worker(WorkerRole.ENCODER, num_blocks=8)
    with pytest.raises(InvalidArgument, match=r"raise encoders\.num_blocks") as caught:
        worker.add(make_request(70))
    assert caught.value.field == "token_ids"
    worker.assert_empty()


def test_an_encoder_reserves_the_prompt_only() -> None:
    worker = Worker(WorkerRole.ENCODER)
    assert len(worker.add(make_request(17, max_tokens=100)).pages.blocks) == 3


def test_a_failed_step_leaves_its_sequences_to_the_caller() -> None:
    worker = Worker()
    kept, removed = (worker.add(make_request(5, request_id=name)) for name in "ab")
    assert worker.scheduler.schedule() is not None
    worker.scheduler.remove(removed)
    assert not removed.pages.is_freed
    with pytest.raises(RipresaError, match="tokens were asked for"):
        worker.scheduler.complete({})
    assert worker.scheduler.abandon() == (kept,)
    assert removed.pages.is_freed
    worker.scheduler.remove(kept)
    worker.assert_empty()


def test_a_second_step_at_once_is_a_bug() -> None:
    worker = Worker()
    worker.add(make_request())
    worker.scheduler.schedule()
    with pytest.raises(RipresaError, match="while another one runs"):
        worker.scheduler.schedule()


def test_a_small_budget_is_refused() -> None:
    with pytest.raises(ConfigError, match="below twice the window"):
        Worker(budget=2 * WINDOW - 1)
