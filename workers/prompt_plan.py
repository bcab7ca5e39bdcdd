"""How does one worker run a prompt: which blocks does it adopt, which encoder rows does it compute?

    first execution   planner ──▶ recipe, one pass over [start, L)
    any later one     recipe ──▶ rows behind every restart whose blocks are missing, then the rest

        blocks held   ██████████░░░░░░░░░░░░░░
        pass 0        ──────────────▶ X                floor 0,    writes from the held blocks on
        pass 1                    ▶▶▶▶│────────────▶ L  floor X-W,  writes from X on

Pure: no torch, ray, clock or randomness. Positions are absolute; ranges are half-open.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.cache.parked_states import ParkedState
from ripresa.workers.replay import PlanKind, Recipe, TailVariant
from ripresa.workers.replay_plan import EncoderPass, PrefillPlan, encoder_passes


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """What a worker holds of a prompt and computes of it.

    Attributes:
        recipe: fixed for all executions.
        chain: cached blocks to adopt, contiguous from block 0.
        passes: encoder rows in order of computing.
        window: the held window that the first row goes on from; None for none.
        parked: the session's state that the first row goes on from; None for none.
    """

    recipe: Recipe
    chain: tuple[BlockIdentity, ...]
    passes: tuple[EncoderPass, ...]
    window: BlockIdentity | None = None
    parked: ParkedState[Any] | None = None


def block_identity(
    recipe: Recipe, hashes: Sequence[bytes], number: int, window: int
) -> BlockIdentity:
    """Identity of block `number` of a request that follows `recipe`."""
    stop = (number + 1) * window
    return BlockIdentity(hashes[number], recipe.restarts_below(stop))


def held_chain(
    recipe: Recipe,
    hashes: Sequence[bytes],
    window: int,
    blocks: Container[BlockIdentity],
) -> tuple[BlockIdentity, ...]:
    """The leading blocks that are held in the recipe's lineage; others count as missing."""
    chain = []
    for number in range(len(hashes)):
        identity = block_identity(recipe, hashes, number, window)
        if identity not in blocks:
            break
        chain.append(identity)
    return tuple(chain)


def first_execution(plan: PrefillPlan, chain: Sequence[BlockIdentity]) -> PromptPlan:
    """What the planner decided for the cached `chain` that it was shown."""
    boundary = plan.window_from
    return PromptPlan(
        recipe=plan.recipe,
        chain=tuple(chain[: plan.num_reused_blocks]),
        passes=plan.passes,
        window=None if boundary is None else chain[boundary // plan.window - 1],
    )


def re_execution(
    recipe: Recipe,
    num_tokens: int,
    window: int,
    hashes: Sequence[bytes],
    blocks: Container[BlockIdentity],
    windows: Container[BlockIdentity],
) -> PromptPlan:
    """Follow a recipe with what is held here, however little (replay rules, section 3).

    It goes on from the blocks and the newest window of an execution that ended early.

    Args:
        num_tokens: prompt, and tokens that were streamed before.
        hashes: of the prompt's full blocks.
        blocks, windows: what is held.
    """
    needed = min(recipe.decoder_start, recipe.source_floor or recipe.decoder_start)
    reach = max(recipe.write_floor, needed) // window
    chain = held_chain(recipe, hashes[:reach], window, blocks)
    held, floor = len(chain) * window, recipe.write_floor
    direct = EncoderPass(
        recipe.start, num_tokens, recipe.swa_floor, floor, exact_from=_exact_from(recipe)
    )
    is_canonical = recipe.anchor_interval is not None
    restarts = recipe.restarts_below(num_tokens)
    for boundary in range(held, floor, -window):
        # Another execution got so far; no row below is needed any more.
        if boundary in restarts:
            rows = EncoderPass(boundary - window, num_tokens, boundary - window, held, boundary)
            later = tuple(restart for restart in restarts if restart > boundary)
            passes = encoder_passes(rows, later, window, is_canonical=True)
            return PromptPlan(recipe, chain, passes)
        source = chain[boundary // window - 1]
        if source in windows:
            rows = EncoderPass(boundary, num_tokens, boundary - window + 1, boundary)
            later = tuple(restart for restart in restarts if restart > boundary)
            passes = encoder_passes(rows, later, window, is_canonical=is_canonical)
            return PromptPlan(recipe, chain[: boundary // window], passes, source)
    chain = chain[: floor // window]
    held = len(chain) * window
    if recipe.kind is PlanKind.REBUILD:
        # Its first rows, which a decoder half with tail full reads, are those of no native pass.
        before = (EncoderPass(0, floor, 0, held, floor),) if held < floor else ()
        return PromptPlan(recipe, chain, (*before, direct))
    if held == floor and recipe.kind in (PlanKind.WINDOW, PlanKind.PREVIOUS_WINDOW):
        source = chain[recipe.start // window - 1]
        if source in windows:
            later = tuple(restart for restart in restarts if restart > recipe.start)
            passes = encoder_passes(direct, later, window, is_canonical=is_canonical)
            return PromptPlan(recipe, chain, passes, source)
    # Without a window its rows are computed again from the restart before them: the same values.
    rows = EncoderPass(0, num_tokens, 0, 0)
    passes = encoder_passes(rows, restarts, window, is_canonical=is_canonical)
    if recipe.kind is PlanKind.BOUNDED:
        # Its own replay, which is one window unless an evaluation's recipe says otherwise.
        own = replace(passes[-1], start=recipe.start, swa_floor=recipe.swa_floor)
        passes = (*passes[:-1], own)
    first = max(
        number
        for number, rows in enumerate(passes)
        if rows.write_floor <= held and rows.start <= recipe.start
    )
    if recipe.kind is PlanKind.ANCHOR:
        passes = tuple(_from_anchor(rows, recipe.start) for rows in passes)
    rows = replace(passes[first], write_floor=held)
    return PromptPlan(recipe, chain, (rows, *passes[first + 1 :]))


def _exact_from(recipe: Recipe) -> int | None:
    """The same as the planner has found for the rows of a first execution."""
    if recipe.kind is not PlanKind.REBUILD or recipe.tail is TailVariant.FULL:
        return None
    lowest = recipe.decoder_start if recipe.source_floor is None else recipe.source_floor
    return min(recipe.write_floor, lowest)


def _from_anchor(rows: EncoderPass, start: int) -> EncoderPass:
    """A pass as it is for a first execution that began with the restart at row `start`."""
    if rows.start < start:
        return replace(rows, output_from=rows.stop)
    return replace(rows, output_from=start) if rows.start == start else rows
