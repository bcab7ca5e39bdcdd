"""What is measured of a case? Every arm at both boundaries, stacked boundaries, and costs.

answer     a served prompt behind a hit; distances count from the answer's first token
hit        both halves restart at the end of the hit; distances count from there
stack      the prompt's prefix was itself computed behind 0 to 16 bounded hits
growth     what prompts of growing length cost
served     answers through a gateway (`served.py`)
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from enum import StrEnum

from ripresa.cluster.evaluation.arms import (
    EXACT,
    REFERENCE,
    Arm,
    answer_arms,
    answer_recipe,
    hit_arms,
    hit_recipe,
)
from ripresa.cluster.evaluation.cases import LONGEST_DISTANCE, Case
from ripresa.cluster.evaluation.laboratory import FirstExecution, Foretelling, Laboratory
from ripresa.cluster.evaluation.measures import (
    Group,
    Match,
    differences_of,
    groups,
    matches,
)
from ripresa.cluster.evaluation.served import Hit
from ripresa.workers.errors import ErrorCode, RipresaError
from ripresa.workers.replay import ReplayMode, TailVariant
from ripresa.workers.replay_query import ReplayGeometry

SEED = 0
"""Of recipes; greedy decoding draws nothing."""
DEPTHS = (0, 1, 2, 4, 8, 16)
"""How many bounded hits lie behind one another."""
GROWTH = (2, 3, 4, 6, 8, 12, 16)
"""Lengths of prompts, in windows, whose cost is measured: from the first that can have a hit on."""
BOUNDED = Arm("bounded", ReplayMode.BOUNDED, TailVariant.FLOORED)
TRIMMED = Arm("exact, trimmed tail", ReplayMode.EXACT, TailVariant.FLOORED)
COLD = "cold, "
"""Begins the names of arms that find nothing cached."""


class Experiment(StrEnum):
    ANSWER = "answer"
    HIT = "hit"
    STACK = "stack"
    GROWTH = "growth"
    SERVED = "served"


@dataclass(frozen=True, slots=True)
class Cost:
    """A prompt up to its answer's first token.

    Attributes:
        kind: how its prefix was obtained (`PlanKind`).
        num_tokens: of the prompt.
        num_skipped: those without any row.
        encoder_row_layers, decoder_row_layers: rows computed, once for each layer.
        seconds: until the first token.
    """

    arm: str
    kind: str
    num_tokens: int
    num_skipped: int
    encoder_row_layers: int
    decoder_row_layers: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Result:
    """What one experiment says of one case.

    Attributes:
        number: the case's.
        hit: tokens of the cached prefix; None where there is not one.
        worst_exact: largest difference between a logit of the arm without approximation and the
            same one of the cold run; None where the experiment has no such arm.
        exact_start: first encoder row that this arm computed. At 0 it left nothing out, and could
            not have differed.
    """

    experiment: Experiment
    number: int
    groups: tuple[Group, ...] = ()
    matches: tuple[Match, ...] = ()
    costs: tuple[Cost, ...] = ()
    hits: tuple[Hit, ...] = ()
    hit: int | None = None
    worst_exact: float | None = None
    exact_start: int | None = None


def stack_length(geometry: ReplayGeometry) -> int:
    """Tokens of a case for `stack`: deepest prefix, the prompt's end, and a window behind it."""
    return _stack_prompt(geometry, max(DEPTHS) + 1) + geometry.window


def longest_case(geometry: ReplayGeometry) -> int:
    """Tokens of a conversation that are looked at: a prompt that deep, and all distances."""
    return stack_length(geometry) + LONGEST_DISTANCE * geometry.window


async def at_boundaries(lab: Laboratory, case: Case) -> AsyncIterator[Result]:
    """Experiments `answer` and `hit`, as far as the case has places for them."""
    starts = [s for s in (case.answer, case.hit and case.hit + 1) if s]
    if not starts:
        return
    stop = max(starts) + LONGEST_DISTANCE * lab.geometry.window
    reference = await lab.cold(case.token_ids[:stop], min(starts))
    if case.answer is not None:
        yield await at_answer(lab, case, case.answer, reference)
    if case.hit is not None:
        yield await at_hit(lab, case, case.hit, reference)


async def at_answer(lab: Laboratory, case: Case, answer: int, reference: Foretelling) -> Result:
    """A prompt that ends where an answer begins, in every arm.

    Args:
        reference: the cold run's, of the case's tokens from `answer` on.
    """
    geometry, window = lab.geometry, lab.geometry.window
    stop = min(len(case.token_ids), answer + LONGEST_DISTANCE * window)
    token_ids, prompt = case.token_ids[:stop], case.token_ids[:answer]
    expected = reference.cut(answer, stop)
    num_blocks = (answer - window - geometry.rewind) // window
    for mode in (ReplayMode.EXACT, ReplayMode.CANONICAL):
        await lab.fill(token_ids, num_blocks, mode)
    tally = _Tally(Experiment.ANSWER, case, window, answer, num_blocks * window)
    planned: dict[tuple[ReplayMode, TailVariant], FirstExecution] = {}
    for arm in answer_arms(window):
        own = replace(arm, length=None)
        key = arm.mode, arm.tail
        if key not in planned:
            planned[key] = await lab.plan(prompt, token_ids[answer], own)
        run = planned[key]
        recipe = answer_recipe(run.recipe, arm, answer, geometry)
        if arm.length is not None:
            run = await lab.plan(prompt, token_ids[answer], arm, recipe)
        told = await lab.foretell(token_ids, answer, arm, recipe)
        tally.add(arm.name, expected, told, recipe.start if arm == REFERENCE else None)
        tally.costs.append(_cost(arm.name, answer, run))
    return tally.result


async def at_hit(lab: Laboratory, case: Case, hit: int, reference: Foretelling) -> Result:
    """Both halves restart where the cached prefix ends, in every arm.

    Args:
        reference: the cold run's, of the case's tokens behind the first one of `hit` on.
    """
    window = lab.geometry.window
    stop = min(len(case.token_ids), hit + LONGEST_DISTANCE * window)
    token_ids = case.token_ids[:stop]
    expected = reference.cut(hit + 1, stop)
    await lab.fill(token_ids, hit // window, ReplayMode.EXACT)
    tally = _Tally(Experiment.HIT, case, window, hit, hit)
    for number, arm in enumerate(hit_arms(lab.geometry)):
        assert arm.length is not None
        recipe = hit_recipe(hit, arm.length, SEED)
        told = await lab.foretell(token_ids, stop - 1, arm, recipe, start=hit + 1)
        tally.add(arm.name, expected, told, None if number else recipe.start)
    return tally.result


async def stacked(lab: Laboratory, case: Case) -> Result:
    """One prompt, whose prefix was computed behind more and more bounded hits, and the arm without
    approximation behind an exact one.

    Every turn brings one window of new tokens, as a tool's answer does, and goes on from the blocks
    of the turn before, which are as approximate as that one was.

    Raises:
        RipresaError: INTERNAL; a turn did not hit what the one before has left.
    """
    geometry, window = lab.geometry, lab.geometry.window
    num_blocks = (len(case.token_ids) - window - _rest(geometry)) // window
    length = _stack_prompt(geometry, num_blocks)
    prompt, following = case.token_ids[:length], case.token_ids[length]
    expected = await lab.cold(case.token_ids, length)
    tally = _Tally(Experiment.STACK, case, window, length, num_blocks * window)
    for depth in (depth for depth in DEPTHS if depth < num_blocks):
        salt = f"stack {case.number} {depth}".encode()
        first = num_blocks - max(depth, 1) + 1
        await lab.fill(case.token_ids, first, ReplayMode.EXACT, salt)
        for end in range(first, num_blocks):
            turn = _stack_prompt(geometry, end)
            await lab.step(case.token_ids[:turn], case.token_ids[turn], salt)
        arms = {str(depth): BOUNDED} if depth else {EXACT: REFERENCE, str(depth): TRIMMED}
        for name, arm in arms.items():
            run = await lab.plan(prompt, following, arm, salt=salt)
            recipe = run.recipe
            if len(recipe.restarts) != depth or recipe.write_floor != num_blocks * window:
                raise RipresaError(
                    ErrorCode.INTERNAL,
                    f"{len(recipe.restarts)} hits up to {recipe.write_floor} lie behind one "
                    f"another, {depth} up to {num_blocks * window} were asked for",
                )
            told = await lab.foretell(case.token_ids, length, arm, recipe, salt)
            tally.add(name, expected, told, recipe.start if arm == REFERENCE else None)
            tally.costs.append(_cost(name, length, run))
    return tally.result


async def growth(lab: Laboratory, case: Case, num_repeats: int) -> Result:
    """What prompts of growing length cost behind a hit that leaves as little as the rules allow,
    and without one.

    Args:
        num_repeats: of every prompt, arm after arm, so that a slow minute of the machine is in the
            times of all of them.
    """
    geometry = lab.geometry
    costs = []
    for windows in GROWTH:
        length = _stack_prompt(geometry, windows - 1)
        if length >= len(case.token_ids):
            break
        prompt, following = case.token_ids[:length], case.token_ids[length]
        await lab.fill(case.token_ids, windows - 1, ReplayMode.EXACT)
        for _ in range(num_repeats):
            for arm in (REFERENCE, TRIMMED, BOUNDED):
                costs.append(_cost(arm.name, length, await lab.plan(prompt, following, arm)))
            for arm in (REFERENCE, TRIMMED):
                run = await lab.plan(prompt, following, arm, salt=b"nothing is cached")
                costs.append(_cost(f"{COLD}{arm.name}", length, run))
    return Result(Experiment.GROWTH, case.number, costs=tuple(costs))


@dataclass(frozen=True, slots=True)
class Check:
    """Two computations of the same logits.

    Attributes:
        difference: the largest one.
        start: first encoder row of the one that leaves rows out; None if both have the same rows.
    """

    what: str
    difference: float
    start: int | None = None


async def self_test(lab: Laboratory, case: Case, num_decoded: int = 16) -> list[Check]:
    """Compare what must be equal: bit for bit in deterministic numerics.

    Args:
        num_decoded: tokens that are also decoded one by one.

    Raises:
        RipresaError: FAILED_PRECONDITION; the case has no place for a hit.
    """
    if case.answer is None or case.hit is None:
        raise RipresaError(
            ErrorCode.FAILED_PRECONDITION,
            f"conversation {case.number} is too short for a hit; choose longer ones",
        )
    checks = []
    async for result in at_boundaries(lab, case):
        assert result.worst_exact is not None
        what = f"{result.experiment}: exact behind a hit, and a cold run"
        checks.append(Check(what, result.worst_exact, result.exact_start))
    stop = min(len(case.token_ids), case.answer + num_decoded)
    token_ids, prompt = case.token_ids[:stop], case.token_ids[: case.answer]
    for arm in (REFERENCE, TRIMMED, BOUNDED):
        run = await lab.plan(prompt, token_ids[case.answer], arm)
        at_once = await lab.foretell(token_ids, case.answer, arm, run.recipe)
        one_by_one = await lab.decode(token_ids, case.answer, arm)
        what = f"{arm.name}: an answer at once, and token by token"
        checks.append(Check(what, _worst(at_once, one_by_one)))
    return checks


class _Tally:
    """Gathers a result, arm by arm."""

    def __init__(
        self, experiment: Experiment, case: Case, window: int, boundary: int, hit: int
    ) -> None:
        self.costs: list[Cost] = []
        self._experiment = experiment
        self._case = case
        self._window = window
        self._boundary = boundary
        self._hit = hit
        self._supervised = case.supervised
        self._groups: list[Group] = []
        self._matches: list[Match] = []
        self._worst: float | None = None
        self._exact_start: int | None = None

    def add(
        self,
        arm: str,
        expected: Foretelling,
        told: Foretelling,
        exact_start: int | None = None,
    ) -> None:
        """Take in what an arm says; `exact_start` is that of the arm without approximation."""
        case = self._case
        differences = differences_of(expected, told, case.token_ids)
        self._groups += groups(
            arm, expected, told, differences, self._boundary, self._window, self._supervised
        )
        placement = case.placement if self._experiment is Experiment.HIT else None
        self._matches += matches(arm, differences, told.start, case.answers, placement)
        if exact_start is not None:
            self._worst, self._exact_start = _worst(expected, told), exact_start

    @property
    def result(self) -> Result:
        return Result(
            self._experiment,
            self._case.number,
            tuple(self._groups),
            tuple(self._matches),
            tuple(self.costs),
            hit=self._hit,
            worst_exact=self._worst,
            exact_start=self._exact_start,
        )


def _worst(expected: Foretelling, told: Foretelling) -> float:
    return float((expected.logits - told.logits).abs().max())


def _cost(arm: str, num_tokens: int, run: FirstExecution) -> Cost:
    return Cost(
        arm,
        run.recipe.kind.value,
        num_tokens,
        run.recipe.start,
        run.encoder_row_layers,
        run.decoder_row_layers,
        run.seconds,
    )


def _rest(geometry: ReplayGeometry) -> int:
    """Rows behind a hit that the rules leave native."""
    return geometry.window + geometry.rewind


def _stack_prompt(geometry: ReplayGeometry, num_blocks: int) -> int:
    """Length of the shortest prompt that hits so many blocks."""
    return num_blocks * geometry.window + _rest(geometry)
