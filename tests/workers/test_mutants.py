"""Do the random histories notice every way in which the replay rules are usually broken?

Each mutant patches the code that workers run. A mutant that does not apply any more, because what
it patches has another name or is never called, fails its test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hash_machine import WINDOW, HashMachine
from hinted_histories import over_hinted_peers
from histories import on_one_worker, over_a_cluster

from ripresa.workers import engine, prefix_cache, prompt_plan
from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.engine import EngineCore
from ripresa.workers.prefix_cache import RequestPrefix
from ripresa.workers.prompt_plan import PromptPlan
from ripresa.workers.replay import Recipe, decoder_start
from ripresa.workers.scheduling import batch, scheduler
from ripresa.workers.scheduling.step_plan import SequenceStep, StepPlan
from ripresa.workers.sequence import Sequence as Request

SEEDS = range(40)
"""Within so many histories of each kind a mutant must be found.

Some are noticed by one in six only, and what happens in a history also depends on its timing.
"""


@dataclass
class Patcher:
    """Replaces functions by mutants and counts how often those run."""

    monkeypatch: pytest.MonkeyPatch
    num_calls: int = 0

    def wrap(self, owner: object, name: str, mutant: Callable[..., Any]) -> None:
        """`mutant(original, *args, **kwargs)` takes the function's place."""
        original = getattr(owner, name)

        def mutated(*args: Any, **kwargs: Any) -> Any:
            self.num_calls += 1
            return mutant(original, *args, **kwargs)

        self.monkeypatch.setattr(owner, name, mutated)


Mutant = Callable[[Patcher], None]
MUTANTS: list[Mutant] = []


def mutant(apply: Mutant) -> Mutant:
    MUTANTS.append(apply)
    return apply


def change_steps(patcher: Patcher, change: Callable[[Request, SequenceStep], SequenceStep]) -> None:
    """Every step that the scheduler makes is another one."""

    def mutated(original: Any, sequence: Request, *args: Any, **kwargs: Any) -> SequenceStep:
        return change(sequence, original(sequence, *args, **kwargs))

    patcher.wrap(batch, "_step", mutated)


@mutant
def read_floor_too_high(patcher: Patcher) -> None:
    change_steps(patcher, lambda _, step: replace(step, swa_floor=step.swa_floor + 1))


@mutant
def read_floor_too_low(patcher: Patcher) -> None:
    """By one, where a replay begins: the row before it is read, if a ring has it."""
    change_steps(patcher, lambda _, step: replace(step, swa_floor=max(0, step.swa_floor - 1)))


@mutant
def decoder_floor_too_high(patcher: Patcher) -> None:
    change_steps(patcher, lambda _, step: replace(step, decoder_floor=step.decoder_floor + 1))


@mutant
def write_floor_too_high(patcher: Patcher) -> None:
    change_steps(patcher, lambda _, step: replace(step, write_floor=step.write_floor + 1))


@mutant
def write_floor_too_low(patcher: Patcher) -> None:
    change_steps(patcher, lambda _, step: replace(step, write_floor=max(0, step.write_floor - 1)))


@mutant
def start_kept_relative(patcher: Patcher) -> None:
    """Floors count from the first computed row instead of from 0."""

    def relative(sequence: Request, step: SequenceStep) -> SequenceStep:
        floor = step.decoder_floor - sequence.recipe.start
        return replace(step, decoder_floor=max(0, floor))

    change_steps(patcher, relative)


@mutant
def a_row_too_many_left_out(patcher: Patcher) -> None:
    """A rebuilt window's layers begin one row late."""

    def late(_: Request, step: SequenceStep) -> SequenceStep:
        return step if step.exact_from is None else replace(step, exact_from=step.exact_from + 1)

    change_steps(patcher, late)


@mutant
def decoder_floor_planned_again_on_resume(patcher: Patcher) -> None:
    def again(original: Any, recipe: Recipe, num_tokens: int, *args: Any) -> PromptPlan:
        plan: PromptPlan = original(recipe, num_tokens, *args)
        floor = decoder_start(num_tokens, WINDOW, recipe.tail, recipe.start)
        return replace(plan, recipe=replace(plan.recipe, decoder_start=floor, source_floor=None))

    patcher.wrap(prefix_cache, "re_execution", again)


@mutant
def published_before_acknowledged(patcher: Patcher) -> None:
    """Blocks are found by others when their rows are scheduled."""

    def early(original: Any, core: EngineCore, plan: StepPlan) -> StepPlan:
        for step in plan.sequences:
            job = core._by_slot[step.slot]
            committed = job.sequence.committed
            job.sequence.committed = max(committed, step.encoder_stop)
            job.prefix.publish(job.sequence)
            job.sequence.committed = committed
        return original(core, plan)  # type: ignore[no-any-return]

    patcher.wrap(EngineCore, "_with_outputs", early)


@mutant
def tail_per_chunk(patcher: Patcher) -> None:
    """Chunks end anywhere, and each one's last window is a tail of its own."""

    def anywhere(original: Any, position: int, stop: int, rows: int, window: int) -> int:
        return min(stop, position + rows)

    def own_tail(sequence: Request, step: SequenceStep) -> SequenceStep:
        if step.inbound or step.decoder_start == step.decoder_stop:
            return step
        if step.decoder_stop > sequence.prefill_stop:
            return step
        return replace(step, decoder_floor=step.decoder_start)

    patcher.wrap(scheduler, "chunk_stop", anywhere)
    change_steps(patcher, own_tail)


@mutant
def trimmed_rows_change_a_number(patcher: Patcher) -> None:
    """One decoder row too many is left out, and nobody reads it."""

    def trim(sequence: Request, step: SequenceStep) -> SequenceStep:
        if step.inbound or step.num_decoder_rows < 2:
            return step
        first = step.decoder_start + 1
        floor = max(step.decoder_floor, first)
        return replace(step, decoder_start=first, decoder_floor=floor)

    change_steps(patcher, trim)


@mutant
def replayed_window_published_as_native(patcher: Patcher) -> None:
    def any_row(original: Any, prefix: RequestPrefix, sequence: Request) -> int:
        return sequence.encoder_pass.start

    patcher.wrap(RequestPrefix, "_native_from", any_row)


@mutant
def lineages_mixed_in_one_chain(patcher: Patcher) -> None:
    """Blocks are found by their tokens alone."""

    def by_hash(
        original: Any, recipe: Recipe, hashes: Sequence[bytes], number: int, window: int
    ) -> BlockIdentity:
        return BlockIdentity(hashes[number], ())

    patcher.wrap(prefix_cache, "block_identity", by_hash)
    patcher.wrap(prompt_plan, "block_identity", by_hash)


@mutant
def ring_of_one_window(patcher: Patcher) -> None:
    """W rows instead of W + R: rejected drafts overwrite rows that are still read."""

    def short(original: Any, machine: HashMachine, *args: Any) -> None:
        machine.ring_rows = WINDOW
        original(machine, *args)

    patcher.wrap(HashMachine, "_run_drafts", short)


@mutant
def odd_boundary(patcher: Patcher) -> None:
    """A hit ends one position early, at an odd one, in the middle of a cached block."""

    def odd(original: Any, plan: Any, chain: Any) -> PromptPlan:
        found: PromptPlan = original(plan, chain)
        rows = found.passes[0]
        if rows.write_floor == 0 or found.parked is not None or found.window is not None:
            return found
        rows = replace(rows, write_floor=rows.write_floor - 1)
        return replace(found, passes=(rows, *found.passes[1:]))

    patcher.wrap(prefix_cache, "first_execution", odd)


@mutant
def stale_window_after_a_cancel(patcher: Patcher) -> None:
    """The windows that a cancelled request cut are kept for its slot, and the next one's name."""
    left: dict[int, dict[int, torch.Tensor]] = {}

    def stale(
        original: Any,
        prefix: RequestPrefix,
        sequence: Request,
        cut: Mapping[int, torch.Tensor],
        *,
        is_turn_over: bool,
    ) -> None:
        slot = sequence.pages.slot
        known = left.setdefault(slot, {})
        merged = {x: known.get(x, payload) for x, payload in cut.items()}
        known.update(cut)
        if is_turn_over:
            left.pop(slot)
        original(prefix, sequence, merged, is_turn_over=is_turn_over)

    patcher.wrap(RequestPrefix, "keep_windows", stale)


HISTORIES = (on_one_worker, over_a_cluster, over_hinted_peers)


@pytest.mark.parametrize("apply", MUTANTS, ids=lambda apply: apply.__name__)
async def test_a_mutant_is_noticed(apply: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    patcher = Patcher(monkeypatch)
    apply(patcher)
    # Broken steps are logged with their tracebacks; here they are the purpose.
    monkeypatch.setattr(engine.logger, "disabled", True)
    noticed = await first_difference()
    assert patcher.num_calls, "the mutant was never called: it has to be written anew"
    assert noticed is not None, f"{len(HISTORIES) * len(SEEDS)} histories did not notice it"
    # An engine answers, a pool or a machine objects: but never the mutant's own code.
    assert not isinstance(noticed, (TypeError, AttributeError, NameError)), repr(noticed)


async def first_difference() -> Exception | None:
    for seed in SEEDS:
        for history in HISTORIES:
            try:
                await history(seed)
            except Exception as error:  # noqa: BLE001  whatever notices it is right
                return error
    return None


@pytest.mark.slow
async def test_without_a_mutant_the_same_histories_pass() -> None:
    assert await first_difference() is None
