"""From where is a prompt computed, given what is cached of it? The hit rule in its three modes.

parked image ──▶ resume
cached chain ──▶ L1, block KV reused ──▶ start, by mode:
    bounded     held window at L1, at L1-W, or replay of W rows
    exact       held window, or the windows rebuilt by the dependency triangle
    canonical   held window at L1, or restart at an anchor
"""

from __future__ import annotations

from itertools import groupby, islice
from operator import itemgetter

from ripresa.workers.replay import (
    PlanKind,
    Recipe,
    ReplayMode,
    TailVariant,
    canonical_restarts,
    decoder_start,
    follows,
)
from ripresa.workers.replay_plan import (
    EncoderPass,
    PrefillPlan,
    StateSource,
    encoder_passes,
    triangle,
)
from ripresa.workers.replay_query import ParkedImage, PrefillQuery


def plan_prefill(query: PrefillQuery) -> PrefillPlan:
    """Plan the first execution of a request (replay rules, sections 2, 5 and 6)."""
    if query.image is not None and _may_resume(query, query.image):
        return _resume(query, query.image)
    return plan_hit(query, _num_reused_blocks(query))


def plan_hit(query: PrefillQuery, num_blocks: int) -> PrefillPlan:
    """The same for a chain whose first `num_blocks` are known to be what the rules reuse of it.

    Only single blocks of the chain are looked at, so that a long one need not exist as a list.
    """
    write_floor = query.geometry.window * num_blocks
    if write_floor == 0:
        return _plan(query, 0, PlanKind.COLD, 0, 0, 0)
    match query.mode:
        case ReplayMode.BOUNDED:
            return _bounded(query, write_floor)
        case ReplayMode.EXACT:
            return _exact(query, write_floor)
        case ReplayMode.CANONICAL:
            return _canonical(query, write_floor)


def _num_reused_blocks(query: PrefillQuery) -> int:
    """L1 / W: blocks below the cap, contiguous from block 0 and of one lineage."""
    window, interval = query.geometry.window, query.anchor_interval
    cap = query.num_tokens - (window + query.geometry.rewind)
    limit = max(cap, 0) // window
    lineage: tuple[int, ...] = ()
    number = 0
    for restarts, group in groupby(islice(query.chain, limit), key=itemgetter(1)):
        boundary = number * window
        if not follows(query.mode, lineage, restarts, boundary, interval):
            break
        number += len(list(group))
        lineage = restarts
        if interval is not None:
            anchor = (boundary // interval + 1) * interval
            if number * window > anchor:
                # No block behind an anchor has the lineage of those before it.
                return anchor // window
    return number


def _bounded(query: PrefillQuery, write_floor: int) -> PrefillPlan:
    window = query.geometry.window
    before = write_floor - window
    if query.holds_window(write_floor):
        floor = write_floor - window + 1
        return _plan(query, write_floor, PlanKind.WINDOW, write_floor, floor, write_floor)
    if before == 0:
        return _plan(query, write_floor, PlanKind.FROM_ZERO, 0, 0, 0)
    # A chain that restarts at this boundary did not go on from the native window.
    restarts_here = before in query.chain[write_floor // window - 1].restarts
    if query.holds_window(before) and not restarts_here:
        floor = before - window + 1
        return _plan(query, write_floor, PlanKind.PREVIOUS_WINDOW, before, floor, before)
    return _plan(query, write_floor, PlanKind.BOUNDED, before, before, write_floor)


def _exact(query: PrefillQuery, write_floor: int) -> PrefillPlan:
    window, num_layers = query.geometry.window, query.geometry.num_encoder_layers
    exact_from = _exact_from(query, write_floor)
    start = max(0, exact_from - (window - 1) * num_layers)
    # With tail full every encoder row becomes a decoder row, so no layer can leave one out.
    is_trimmed = query.tail is not TailVariant.FULL
    rebuilt = EncoderPass(start, exact_from, start, 0, 0, exact_from if is_trimmed else None)
    cost = rebuilt.num_row_layers(start, window, num_layers)
    for boundary in range(exact_from // window * window, 0, -window):
        if (exact_from - boundary) * num_layers > cost:
            break
        if query.holds_window(boundary):
            floor = boundary - window + 1
            return _plan(query, write_floor, PlanKind.WINDOW, boundary, floor, boundary)
    return _plan(query, write_floor, PlanKind.REBUILD, start, start, start, rebuilt.exact_from)


def _canonical(query: PrefillQuery, write_floor: int) -> PrefillPlan:
    assert query.anchor_interval is not None
    window, interval = query.geometry.window, query.anchor_interval
    exact_from = _exact_from(query, write_floor)
    # The rows at and after an anchor do not go on from the native window before it.
    goes_on = exact_from == write_floor and write_floor % interval != 0
    if goes_on and query.holds_window(write_floor):
        floor = write_floor - window + 1
        return _plan(query, write_floor, PlanKind.WINDOW, write_floor, floor, write_floor)
    anchor = exact_from // interval * interval
    start = max(0, anchor - window)
    # The row below L1 too, so that the rows leave a whole window at L1.
    trimmed = None if query.tail is TailVariant.FULL else min(exact_from, write_floor - 1)
    return _plan(query, write_floor, PlanKind.ANCHOR, start, start, anchor, trimmed)


def _exact_from(query: PrefillQuery, write_floor: int) -> int:
    """First position whose encoder output must be that of a cold run with the same tail.

    The rows at and above L1 write block KV; tail layer_exact reads layer E's rows of one more
    window; the last row of an untrimmed decoder half depends on the last 1 + (W-1)D positions.
    """
    geometry, num_tokens = query.geometry, query.num_tokens
    match query.tail:
        case TailVariant.FLOORED:
            lowest = num_tokens - geometry.window
        case TailVariant.LAYER_EXACT:
            lowest = num_tokens - 2 * geometry.window + 1
        case TailVariant.EXACT | TailVariant.FULL:
            lowest = num_tokens - 1 - (geometry.window - 1) * geometry.num_decoder_layers
    return min(write_floor, max(0, lowest))


def _may_resume(query: PrefillQuery, image: ParkedImage) -> bool:
    if image.num_tokens >= query.num_tokens:
        return False
    match query.mode:
        case ReplayMode.BOUNDED:
            return True
        case ReplayMode.EXACT:
            return query.tail is TailVariant.EXACT and image.is_exact
        case ReplayMode.CANONICAL:
            return False


def _resume(query: PrefillQuery, image: ParkedImage) -> PrefillPlan:
    """The parked request going on; its decoder rings too, unless a fresh tail needs none."""
    geometry, start, stop = query.geometry, image.num_tokens, query.num_tokens
    fresh = _decoder_start(query, start)
    short = stop - start < geometry.window
    goes_on = fresh < start if query.tail is TailVariant.EXACT else short
    tail = image.tail if goes_on else query.tail
    first = start if goes_on else fresh
    recipe = Recipe(
        kind=PlanKind.RESUME,
        start=start,
        swa_floor=image.swa_floor,
        write_floor=start,
        restarts=image.restarts,
        decoder_start=image.decoder_start if goes_on else fresh,
        tail=tail,
        seed=query.seed,
        source_floor=image.source_floor if goes_on else _source_floor(query, start, fresh),
    )
    return PrefillPlan(
        recipe=recipe,
        num_tokens=stop,
        window=geometry.window,
        num_reused_blocks=start // geometry.window,
        new_restarts=(),
        source=StateSource.PARKED_IMAGE,
        passes=(EncoderPass(start, stop, image.swa_floor, start),),
        num_encoder_layers=geometry.num_encoder_layers,
        decoder_first=first,
        decoder_layer_starts=_decoder_layer_starts(query, first),
    )


def _plan(
    query: PrefillQuery,
    write_floor: int,
    kind: PlanKind,
    start: int,
    swa_floor: int,
    last_restart: int,
    exact_from: int | None = None,
) -> PrefillPlan:
    """The plan of every kind but resume.

    Args:
        last_restart: restarts above it happen on the way.
        exact_from: see `EncoderPass`.
    """
    geometry, num_tokens = query.geometry, query.num_tokens
    reused = query.chain[write_floor // geometry.window - 1].restarts if write_floor else ()
    restarts = _restarts(query, kind, reused, write_floor)
    first = _decoder_start(query, start)
    recipe = Recipe(
        kind=kind,
        start=start,
        swa_floor=swa_floor,
        write_floor=write_floor,
        restarts=restarts,
        decoder_start=first,
        tail=query.tail,
        seed=query.seed,
        anchor_interval=query.anchor_interval,
        source_floor=_source_floor(query, start, first),
    )
    has_window = kind in (PlanKind.WINDOW, PlanKind.PREVIOUS_WINDOW)
    return PrefillPlan(
        recipe=recipe,
        num_tokens=num_tokens,
        window=geometry.window,
        num_reused_blocks=write_floor // geometry.window,
        new_restarts=restarts[len(reused) :],
        source=StateSource.HELD_WINDOW if has_window else StateSource.NOTHING,
        passes=encoder_passes(
            EncoderPass(start, num_tokens, swa_floor, write_floor, exact_from=exact_from),
            tuple(restart for restart in restarts if restart > last_restart),
            geometry.window,
            is_canonical=True,
        ),
        num_encoder_layers=geometry.num_encoder_layers,
        decoder_first=first,
        decoder_layer_starts=_decoder_layer_starts(query, first),
    )


def _restarts(
    query: PrefillQuery, kind: PlanKind, reused: tuple[int, ...], write_floor: int
) -> tuple[int, ...]:
    if query.anchor_interval is not None:
        return canonical_restarts(query.num_tokens, query.anchor_interval)
    return (*reused, write_floor) if kind is PlanKind.BOUNDED else reused


def _decoder_start(query: PrefillQuery, start: int) -> int:
    geometry = query.geometry
    return decoder_start(
        query.num_tokens, geometry.window, query.tail, start, geometry.num_decoder_layers
    )


def _source_floor(query: PrefillQuery, start: int, first: int) -> int | None:
    if query.tail is not TailVariant.LAYER_EXACT:
        return None
    return max(start, first - query.geometry.window + 1)


def _decoder_layer_starts(query: PrefillQuery, first: int) -> tuple[int, ...]:
    geometry = query.geometry
    num_layers = geometry.num_decoder_layers
    if query.tail is not TailVariant.EXACT:
        return (first,) * num_layers
    # The last row's own triangle, which also leaves every layer's window for the next token.
    starts = triangle(query.num_tokens - 1, geometry.window, num_layers)
    return tuple(max(first, layer_start) for layer_start in starts)
