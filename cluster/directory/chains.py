"""How far does each holder's chain of blocks reach, in each lineage?

prompt      | 0 | 1 | 2 | 3 | 4 |
holdings     ───────  ─── ───────      spans of blocks with the same holders
worker A     ()   ()                   reaches 2 in lineage ()
worker B     ()   ()   (2W,)           reaches 2 in (), 3 in (2W,)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ripresa.cluster.directory.events import Lineage
from ripresa.cluster.directory.holdings import Holdings
from ripresa.workers.replay import ReplayMode

ANYONE = 1
"""The bit of no worker: in a reach it stands for all trusted workers together."""


class Span(NamedTuple):
    """Blocks [start, stop) of a prompt, which have the same holders."""

    start: int
    stop: int
    holdings: Holdings


class Reach(NamedTuple):
    """`mask`: who holds blocks [0, num_blocks), and not the next one, in this lineage."""

    restarts: Lineage
    num_blocks: int
    mask: int


def reaches(spans: Sequence[Span], window: int, trusted: int) -> list[Reach]:
    """The ends of all chains.

    Args:
        spans: contiguous from block 0.
        window: W, tokens in a block.
        trusted: bits of the workers that ANYONE stands for.
    """
    ends: list[Reach] = []
    alive: dict[Lineage, int] = {(): -1}
    for start, _, holdings in spans:
        boundary = start * window
        grown: dict[Lineage, int] = {}
        for restarts, mask in holdings.chains:
            before = alive.get(restarts, 0)
            if boundary and restarts and restarts[-1] == boundary:
                before |= alive.get(restarts[:-1], 0)
            if mask & trusted:
                mask |= ANYONE
            if mask & before:
                grown[restarts] = mask & before
        if start:
            _end(ends, alive, grown, start)
        alive = grown
        if not grown:
            return ends
    if spans:
        _end(ends, alive, {}, spans[-1].stop)
    return ends


def _end(ends: list[Reach], alive: dict[Lineage, int], grown: dict[Lineage, int], at: int) -> None:
    for restarts, mask in alive.items():
        ended = mask & ~grown.get(restarts, 0)
        if ended:
            ends.append(Reach(restarts, at, ended))


def usable_blocks(
    restarts: Lineage, num_blocks: int, window: int, mode: ReplayMode, interval: int | None = None
) -> int:
    """How many blocks of a chain a request of this mode may reuse (replay rules, section 5).

    Args:
        restarts: lineage of the chain's last block.
        window: W, tokens in a block.
        interval: A of mode canonical; None in the other modes.
    """
    match mode:
        case ReplayMode.BOUNDED:
            return num_blocks
        case ReplayMode.EXACT:
            return min(num_blocks, restarts[0] // window) if restarts else num_blocks
        case ReplayMode.CANONICAL:
            assert interval is not None
            anchors = range(interval, (len(restarts) + 1) * interval, interval)
            wrong = (min(x, a) for x, a in zip(restarts, anchors, strict=True) if x != a)
            first_wrong = next(wrong, (len(restarts) + 1) * interval)
            return min(num_blocks, first_wrong // window)


def may_serve(restarts: Lineage, mode: ReplayMode, interval: int | None) -> bool:
    """Whether a block of this lineage can be part of a chain that the mode reuses."""
    match mode:
        case ReplayMode.BOUNDED:
            return True
        case ReplayMode.EXACT:
            return not restarts
        case ReplayMode.CANONICAL:
            assert interval is not None
            return all(x == (k + 1) * interval for k, x in enumerate(restarts))
