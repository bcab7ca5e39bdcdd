"""Do sequences that share too few pages all come to their end, whatever happens in between?"""

from __future__ import annotations

from dataclasses import replace

from hash_machine import EOS, GEOMETRY, WINDOW
from hash_requests import cold_plan, make_request
from hypothesis import given, settings
from hypothesis import strategies as st

from ripresa.workers.cache.block_cache import BlockCache
from ripresa.workers.cache.block_pool import BlockPool, SlotPool
from ripresa.workers.cache.block_table import PagePool
from ripresa.workers.errors import ResourceExhausted
from ripresa.workers.prompt_plan import re_execution
from ripresa.workers.scheduling.scheduler import Scheduler, SchedulerLimits, WorkerRole
from ripresa.workers.sequence import Sequence, SequenceStatus

NUM_BLOCKS = 10


class Machine:
    """A scheduler and its pages; tokens are made up."""

    def __init__(self, reserved: int) -> None:
        blocks = BlockCache(BlockPool(NUM_BLOCKS), WINDOW)
        self.pages = PagePool(blocks, NUM_BLOCKS, SlotPool(4), WINDOW, lambda slot: None)
        limits = SchedulerLimits(GEOMETRY, 2 * WINDOW, 512, EOS, reserved)
        self.scheduler = Scheduler(WorkerRole.DECODE, self.pages, limits)
        self.live: list[Sequence] = []
        self.num_parked: dict[int, int] = {}

    def add(self, num_tokens: int, max_tokens: int, priority: int) -> None:
        request = replace(make_request(num_tokens, max_tokens=max_tokens), priority=priority)
        try:
            sequence = self.scheduler.add(request, cold_plan(request))
        except ResourceExhausted:
            return
        self.scheduler.begin(sequence)
        self.live.append(sequence)

    def step(self, *, is_kept: bool, fails: bool = False) -> bool:
        """One round of the engine's loop; False if nothing was computed."""
        while (victim := self.scheduler.make_room()) is not None:
            decoding = [s for s in self.live if s.status is SequenceStatus.DECODE]
            assert victim.rank == max(s.rank for s in decoding)
            self.scheduler.park(victim)
            self.scheduler.check_integrity()
        while (sequence := self.scheduler.next_parked) is not None:
            plan = None
            if not is_kept:
                empty: frozenset[object] = frozenset()
                total = sequence.num_tokens
                plan = re_execution(sequence.recipe, total, WINDOW, (), empty, empty)
            try:
                self.scheduler.resume(sequence, (), plan)
            except ResourceExhausted:
                break
            self.scheduler.check_integrity()
        plan_of_step = self.scheduler.schedule()
        if plan_of_step is None:
            return False
        for step in plan_of_step.sequences:
            stop = max(step.encoder_stop, step.decoder_stop)
            assert stop <= len(step.block_table) * WINDOW, "a row without a page"
        if fails:
            for sequence in self.scheduler.abandon():
                self.remove(sequence)
            return True
        asked = {s.slot: 5 for s in plan_of_step.sequences if s.sampling is not None}
        for progress in self.scheduler.complete(asked):
            if progress.finish is not None:
                self.remove(progress.sequence)
        self.scheduler.check_integrity()
        return True

    def remove(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        self.live.remove(sequence)


ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 60), st.integers(1, 80)),
    st.tuples(st.just("step"), st.booleans(), st.just(0)),
    st.tuples(st.just("fail"), st.booleans(), st.just(0)),
    st.tuples(st.just("remove"), st.integers(0, 9), st.just(0)),
)


@settings(deadline=None)
@given(st.integers(1, 20), st.lists(ACTIONS, max_size=60), st.booleans())
def test_every_sequence_ends_and_gives_its_pages_back(
    reserved: int, actions: list[tuple[str, int, int]], is_kept: bool
) -> None:
    machine = Machine(reserved)
    for action, first, second in actions:
        if action == "add" and first + second <= NUM_BLOCKS * WINDOW:
            machine.add(first, second, priority=second % 3 - 1)
        elif action in ("step", "fail"):
            machine.step(is_kept=bool(first), fails=action == "fail")
        elif action == "remove" and machine.live:
            machine.remove(machine.live[first % len(machine.live)])
        machine.scheduler.check_integrity()
    for _ in range(2000):
        if not machine.step(is_kept=is_kept):
            break
    assert machine.live == []
    assert machine.scheduler.num_parked == 0
    assert machine.pages.num_available_blocks == NUM_BLOCKS
    assert machine.pages.num_free_slots == 4
