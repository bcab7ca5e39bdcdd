"""Does a prefill that follows its plan compute what its lineage says, value by value?

A value is the number of everything it depends on: two values are equal if and only if the same
tokens reached them by the same paths. The reference defines each value by lineage alone, without
cache, plan or order; the machine executes a plan on cached blocks and windows and fails on any row
that it needs and does not have.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.replay import (
    PlanKind,
    ReplayMode,
    TailVariant,
    canonical_restarts,
)
from ripresa.workers.replay_plan import PrefillPlan, StateSource
from ripresa.workers.replay_planner import plan_prefill
from ripresa.workers.replay_query import PrefillQuery, ReplayGeometry

_numbers: dict[Hashable, int] = {}


def number(*parts: Hashable) -> int:
    """The same number for the same parts, another one for any others."""
    return _numbers.setdefault(parts, len(_numbers))


class Reference:
    """Values by definition; layer l's value is its input, so layer E's is the encoder's output.

    Rows at and after a restart X see no window row below X - W, and see rows [X-W, X) as they are
    when nothing below X - W exists. Pools hold one entry a position, from layer 1 and layer E.
    """

    def __init__(self, geometry: ReplayGeometry, restarts: Iterable[int]) -> None:
        self.geometry = geometry
        self.restarts = tuple(restarts)
        self.encoder = cache(self._encoder)
        self.pool = cache(self._pool)

    def floor(self, position: int) -> int:
        """Lowest window row of the segment that `position` belongs to."""
        window = self.geometry.window
        return max((x - window for x in self.restarts if x <= position), default=0)

    def native(self, layer: int, position: int) -> int:
        return self.encoder(layer, position, self.floor(position))

    def _encoder(self, layer: int, position: int, floor: int) -> int:
        if layer == 0:
            return number("token", position)
        below, window = layer - 1, self.geometry.window
        rows = range(max(floor, position - window + 1), position + 1)
        inputs = tuple(self.encoder(below, row, floor) for row in rows)
        return number("encoder", below, inputs, self.pool(below, position))

    def _pool(self, layer: int, position: int) -> int:
        """What layer `layer` may read of the pools at a position, all of it native."""
        source = min(layer, 1)
        if source == 0 or position < 0:
            return number("nothing")
        return number("pool", self.pool(layer, position - 1), self.native(source, position))

    def source_pool(self, position: int) -> int:
        if position < 0:
            return number("nothing")
        entry = self.native(self.geometry.num_encoder_layers, position)
        return number("pool", self.source_pool(position - 1), entry)

    def decoder(self, num_tokens: int, first: int, source_floor: int) -> list[dict[int, int]]:
        """Values of every decoder layer for rows [first, L), all computed."""
        geometry = self.geometry
        output = geometry.num_encoder_layers
        layers = [{p: self.native(output, p) for p in range(source_floor, num_tokens)}]
        pools = {p: self.source_pool(p) for p in range(num_tokens)}
        for layer in range(geometry.num_decoder_layers):
            layers.append(
                decoder_layer(layers[-1], layer, first, num_tokens, geometry.window, pools)
            )
        return layers


def decoder_layer(
    inputs: dict[int, int],
    layer: int,
    first: int,
    stop: int,
    window: int,
    pools: dict[int, int],
) -> dict[int, int]:
    """Rows [first, stop) of a decoder layer over the input rows that there are."""
    lowest = min(inputs)
    return {
        p: number(
            "decoder",
            layer,
            tuple(inputs[j] for j in range(max(lowest, p - window + 1), p + 1)),
            pools[p],
        )
        for p in range(first, stop)
    }


class Machine:
    """Executes a plan, row by row, with the trimming that its layer starts allow."""

    def __init__(self, plan: PrefillPlan, geometry: ReplayGeometry, cached: Reference) -> None:
        self.plan = plan
        self.geometry = geometry
        self.num_layers = geometry.num_encoder_layers
        below = range(plan.write_floor)
        self.pool = {p: cached.pool(1, p) for p in below}
        self.source_pool = {p: cached.source_pool(p) for p in below}
        self.written: list[int] = []
        self.output: dict[int, int] = {}
        self.rings: list[dict[int, int]] = [{} for _ in range(self.num_layers)]
        if plan.source is StateSource.HELD_WINDOW:
            for position in range(plan.start - geometry.window, plan.start):
                for layer in range(self.num_layers):
                    self.rings[layer][position] = cached.native(layer, position)
        for index, rows in enumerate(plan.passes):
            if index:
                self.rings = [{} for _ in range(self.num_layers)]
            starts = plan.layer_starts if index == 0 else (rows.start,) * self.num_layers
            self._encode(rows.start, rows.stop, rows.swa_floor, rows.write_floor, starts)

    def _encode(
        self, start: int, stop: int, floor: int, write_floor: int, starts: tuple[int, ...]
    ) -> None:
        window = self.geometry.window
        values = {p: number("token", p) for p in range(start, stop)}
        for layer, first in enumerate(starts):
            ring = self.rings[layer]
            ring.update(values)
            if layer == 1:
                for p in range(write_floor, stop):
                    self.pool[p] = number("pool", self._before(self.pool, p), values[p])
            values = {
                p: number(
                    "encoder",
                    layer,
                    tuple(ring[j] for j in range(max(floor, p - window + 1), p + 1)),
                    self.pool[p] if layer else number("nothing"),
                )
                for p in range(first, stop)
            }
        for p in range(write_floor, stop):
            self.source_pool[p] = number("pool", self._before(self.source_pool, p), values[p])
            self.written.append(p)
        for p, value in values.items():
            self.output.setdefault(p, value)

    @staticmethod
    def _before(pool: dict[int, int], position: int) -> int:
        return pool[position - 1] if position else number("nothing")

    def decoder(self) -> list[dict[int, int]]:
        plan, window = self.plan, self.geometry.window
        layers = [{p: self.output[p] for p in range(plan.source_floor, plan.num_tokens)}]
        for layer, first in enumerate(plan.decoder_layer_starts):
            layers.append(
                decoder_layer(layers[-1], layer, first, plan.num_tokens, window, self.source_pool)
            )
        return layers


def chain_of(restarts: tuple[int, ...], num_blocks: int, window: int) -> tuple[BlockIdentity, ...]:
    return tuple(
        BlockIdentity(b"%d" % k, tuple(x for x in restarts if x < (k + 1) * window))
        for k in range(num_blocks)
    )


@st.composite
def queries(draw: st.DrawFn, modes: tuple[ReplayMode, ...] = tuple(ReplayMode)) -> PrefillQuery:
    window = draw(st.sampled_from([2, 4]))
    geometry = ReplayGeometry(
        window, draw(st.integers(0, 3)), draw(st.integers(2, 4)), draw(st.integers(1, 4))
    )
    num_tokens = draw(st.integers(1, 24 * window))
    num_blocks = draw(st.integers(0, 26))
    mode = draw(st.sampled_from(modes))
    interval = None
    restarts: tuple[int, ...] = ()
    if mode is ReplayMode.CANONICAL:
        interval = window * draw(st.integers(1, 6))
        restarts = canonical_restarts(num_blocks * window, interval)
    elif mode is ReplayMode.BOUNDED and num_blocks > 2:
        numbers = draw(st.sets(st.integers(2, num_blocks - 1), max_size=4))
        restarts = tuple(k * window for k in sorted(numbers))
    chain = chain_of(restarts, num_blocks, window)
    held = draw(st.sets(st.sampled_from(chain))) if chain else set()
    tails = set(TailVariant) if mode is ReplayMode.EXACT else set(TailVariant) - {TailVariant.EXACT}
    tail = draw(st.sampled_from(sorted(tails)))
    return PrefillQuery(
        geometry, num_tokens, chain, held, None, mode, tail, anchor_interval=interval
    )


def cached_by(query: PrefillQuery) -> Reference:
    return Reference(query.geometry, query.chain[-1].restarts if query.chain else ())


@given(queries())
@settings(max_examples=250)
def test_new_rows_have_the_values_of_the_lineage_that_the_plan_names(query: PrefillQuery) -> None:
    plan = plan_prefill(query)
    machine = Machine(plan, query.geometry, cached_by(query))
    assert plan.num_tokens - 1 in machine.decoder()[-1]
    reference = Reference(query.geometry, plan.recipe.restarts)
    stop, window = plan.num_tokens, query.geometry.window
    assert sorted(machine.written) == list(range(plan.write_floor, stop))
    for p in range(plan.write_floor, stop):
        assert machine.pool[p] == reference.pool(1, p)
        assert machine.source_pool[p] == reference.source_pool(p)
    for layer, ring in enumerate(machine.rings):
        for p in range(max(0, stop - window + 1), stop):
            assert ring[p] == reference.encoder(layer, p, reference.floor(stop - 1))


@given(queries((ReplayMode.EXACT, ReplayMode.CANONICAL)))
@settings(max_examples=250)
def test_a_hit_equals_a_cold_run_with_the_same_tail(query: PrefillQuery) -> None:
    plan = plan_prefill(query)
    layers = Machine(plan, query.geometry, cached_by(query)).decoder()
    stop, window = plan.num_tokens, query.geometry.window
    match query.tail:
        case TailVariant.EXACT | TailVariant.FULL:
            first, source_floor = 0, 0
        case TailVariant.FLOORED:
            first = source_floor = max(0, stop - window)
        case TailVariant.LAYER_EXACT:
            first, source_floor = max(0, stop - window), max(0, stop - 2 * window + 1)
    reference = Reference(query.geometry, plan.recipe.restarts)
    expected = reference.decoder(stop, first, source_floor)
    assert layers[-1][stop - 1] == expected[-1][stop - 1]
    for layer, values in enumerate(layers[:-1]):
        for p in range(max(first, stop - window + 1), stop):
            assert values[p] == expected[layer][p]


@given(queries((ReplayMode.BOUNDED,)))
def test_an_exact_continuation_is_one_whose_lineage_does_not_grow(query: PrefillQuery) -> None:
    plan = plan_prefill(query)
    assert plan.is_encoder_exact is (plan.recipe.kind is not PlanKind.BOUNDED)
    assert plan.recipe.restarts == plan.recipe.restarts[: -1 if plan.new_restarts else None] + (
        plan.new_restarts
    )


def test_a_window_before_a_restart_of_the_chain_is_no_previous_window() -> None:
    """The rows after the restart did not see that window, so going on from it is no lineage."""
    geometry = ReplayGeometry(4, 2, 2, 2)
    chain = chain_of((8,), 3, 4)
    plan = plan_prefill(PrefillQuery(geometry, 20, chain, {chain[1]}))
    assert plan.recipe.kind is PlanKind.BOUNDED
    assert plan.recipe.restarts == (8, 12)


@pytest.mark.parametrize("layers", [1, 2, 3, 5])
@pytest.mark.parametrize("window", [2, 4, 6])
@pytest.mark.parametrize("num_blocks", [1, 2, 5, 40])
def test_the_triangle_is_what_the_rows_depend_on(layers: int, window: int, num_blocks: int) -> None:
    """Collects every (layer, row) below `exact_from` that some row at or above it needs."""
    exact_from = num_blocks * window
    needed: set[tuple[int, int]] = set()
    embeddings = {exact_from}
    inputs = {exact_from}
    for layer in reversed(range(layers)):
        inputs = {j for p in inputs for j in range(max(0, p - window + 1), p + 1)}
        embeddings = inputs
        needed |= {(layer - 1, p) for p in inputs if p < exact_from and layer}
    chain = chain_of((), num_blocks, window)
    num_tokens = exact_from + 2 * window
    plan = plan_prefill(
        PrefillQuery(ReplayGeometry(window, 0, layers, 1), num_tokens, chain, mode=ReplayMode.EXACT)
    )
    assert plan.write_floor == exact_from
    assert plan.num_recomputed_row_layers == len(needed)
    assert plan.start == min(embeddings)
    for layer, start in enumerate(plan.layer_starts):
        assert {p for at, p in needed if at == layer} == set(range(start, exact_from))
