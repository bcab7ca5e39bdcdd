"""In which ways are the same tokens computed? Modes, tails and lengths of replay, as recipes.

The planner knows one length, the window. Another one is the planner's recipe with other floors,
which the engines follow like any recipe.

    encoder half    cached ......... | L1-n ▶▶▶ L1 | new rows ..................... |
    decoder half                                              | L-n ▶▶▶▶▶▶▶▶▶▶▶▶▶ L | answer ...
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ripresa.workers.errors import InvalidArgument
from ripresa.workers.replay import PlanKind, Recipe, ReplayMode, TailVariant
from ripresa.workers.replay_query import ReplayGeometry

EXACT = "exact"
LAYER_EXACT = " layer_exact"
"""Ends the names of arms with that tail, which are else as the arm without it."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way.

    Attributes:
        name: in every table.
        length: rows of replay in tokens; None for what the planner decides.
    """

    name: str
    mode: ReplayMode
    tail: TailVariant
    length: int | None = None


REFERENCE = Arm(EXACT, ReplayMode.EXACT, TailVariant.EXACT)
"""Behind a hit, and equal to a cold run of the whole model; what the others are compared with."""


def lengths(window: int) -> tuple[int, ...]:
    """0, 32, 64, 128 and 256 for a window of 128.

    Raises:
        InvalidArgument: the window is no multiple of 8, so that they would not be even.
    """
    if window % 8:
        raise InvalidArgument(
            "--checkpoint", f"its window of {window} tokens is no multiple of 8, as lengths need"
        )
    return (0, window // 4, window // 2, window, 2 * window)


def answer_arms(window: int) -> list[Arm]:
    """Those of the answer's boundary: what a served prompt can have."""
    arms = [REFERENCE]
    for mode, name in ((ReplayMode.EXACT, "decoder"), (ReplayMode.BOUNDED, "both")):
        for length in lengths(window):
            own = None if length == window else length
            arms.append(Arm(f"{name} {length}", mode, TailVariant.FLOORED, own))
        arms.append(Arm(f"{name} {window}{LAYER_EXACT}", mode, TailVariant.LAYER_EXACT))
    arms.append(Arm("canonical", ReplayMode.CANONICAL, TailVariant.FLOORED))
    arms.append(Arm(f"canonical{LAYER_EXACT}", ReplayMode.CANONICAL, TailVariant.LAYER_EXACT))
    return arms


def hit_arms(geometry: ReplayGeometry) -> list[Arm]:
    """Those of the hit's boundary, where both halves restart at one place.

    The longest replay leaves nothing to approximate.
    """
    arms = [Arm(EXACT, ReplayMode.BOUNDED, TailVariant.FULL, reach(geometry))]
    for length in lengths(geometry.window):
        arms.append(Arm(f"both {length}", ReplayMode.BOUNDED, TailVariant.FULL, length))
    return arms


def reach(geometry: ReplayGeometry) -> int:
    """How many rows before its own a row's output depends on, through the windows of all layers."""
    return (geometry.window - 1) * (geometry.num_encoder_layers + geometry.num_decoder_layers)


def answer_recipe(planned: Recipe, arm: Arm, num_tokens: int, geometry: ReplayGeometry) -> Recipe:
    """The recipe of a prompt's arm.

    Args:
        planned: what the planner decided for the prompt in the arm's mode.
        num_tokens: L, of the prompt. A tail of 0 rows has one, which foretells the answer's first
            token.
    """
    if arm.length is None:
        return planned
    first = max(0, num_tokens - max(arm.length, 1))
    match arm.mode:
        case ReplayMode.BOUNDED:
            start = max(0, planned.write_floor - arm.length)
            return replace(planned, start=start, swa_floor=start, decoder_start=max(start, first))
        case ReplayMode.EXACT:
            exact_from = min(planned.write_floor, first)
            start = max(0, exact_from - (geometry.window - 1) * geometry.num_encoder_layers)
            if planned.kind is PlanKind.COLD:
                start = 0
            return replace(planned, start=start, swa_floor=start, decoder_start=first)
        case ReplayMode.CANONICAL:
            raise InvalidArgument("arm", "mode canonical has one length of replay, its anchors'")


def hit_recipe(hit: int, length: int, seed: int) -> Recipe:
    """Both halves restart `length` rows before a hit that ends at `hit`, of exact lineage."""
    start = max(0, hit - length)
    return Recipe(
        kind=PlanKind.BOUNDED,
        start=start,
        swa_floor=start,
        write_floor=hit,
        restarts=(hit,),
        decoder_start=start,
        tail=TailVariant.FULL,
        seed=seed,
    )
