"""What does a prefill compute, read, write and publish? Every number that follows from its recipe.

Positions are absolute; ranges are half-open.

    0 ........ start ............ write_floor (L1) .......... decoder_start ......... num_tokens (L)
    |  skipped  |     recomputed       |                  new                             |
                |<----------------------- encoder rows ---------------------------------->|
                                       |<------------ block KV written ------------------>|
                                                              |<---- decoder rows ------->|
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from ripresa.workers.replay import PlanKind, Recipe


class StateSource(StrEnum):
    """Where the window rows just below the first encoder row come from."""

    NOTHING = "nothing"
    HELD_WINDOW = "held_window"
    PARKED_IMAGE = "parked_image"


@dataclass(frozen=True, slots=True)
class EncoderPass:
    """Consecutive encoder rows with one read floor.

    A later pass of a plan begins W rows before the earlier one ends: it recomputes them with a
    floor of its own into a second ring, which replaces the first for all rows after.

    Attributes:
        start, stop: rows.
        swa_floor: lowest window row that they may read.
        write_floor: rows below it write no block KV.
        output_from: the decoder half, and layer E's own window, take rows from here on; those
            below it come from another pass.
        exact_from: nobody reads what the encoder half makes of the rows below it, so a layer
            computes of them only what those from here on depend on; None if all are read.
    """

    start: int
    stop: int
    swa_floor: int
    write_floor: int
    output_from: int = 0
    exact_from: int | None = None

    def layer_starts(self, window: int, num_layers: int) -> tuple[int, ...]:
        """First row that each encoder layer computes."""
        if self.exact_from is None:
            return (self.start,) * num_layers
        return tuple(max(self.start, s) for s in triangle(self.exact_from, window, num_layers))

    def num_row_layers(self, position: int, window: int, num_layers: int) -> int:
        """Rows from `position` on, counted once for each layer that computes them."""
        if self.exact_from is None:
            return num_layers * max(0, self.stop - max(position, self.start))
        starts = self.layer_starts(window, num_layers)
        return sum(max(0, self.stop - max(position, start)) for start in starts)


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """One prefill, planned. Stored: what the rules decide; properties: what follows from it.

    Attributes:
        recipe: what admission fixes.
        num_tokens: L, positions after the prefill.
        window: W, also the block size.
        num_reused_blocks: cached blocks read; the request owns the blocks after them.
        new_restarts: restarts that this request adds to the lineage of the blocks it reuses.
        source: whence the state below the first row.
        passes: encoder rows in order of computing; one pass unless rows restart on the way.
        num_encoder_layers: E.
        decoder_first: first decoder row computed. Above `recipe.decoder_start`, the read floor,
            when a parked image's decoder rings go on.
        decoder_layer_starts: first row that each decoder layer has to compute.
    """

    recipe: Recipe
    num_tokens: int
    window: int
    num_reused_blocks: int
    new_restarts: tuple[int, ...]
    source: StateSource
    passes: tuple[EncoderPass, ...]
    num_encoder_layers: int
    decoder_first: int
    decoder_layer_starts: tuple[int, ...]

    @property
    def start(self) -> int:
        """First encoder row."""
        return self.passes[0].start

    @property
    def write_floor(self) -> int:
        """Rows below it write no block KV."""
        return self.passes[0].write_floor

    @property
    def layer_starts(self) -> tuple[int, ...]:
        """First row that each encoder layer computes in the first pass."""
        return self.passes[0].layer_starts(self.window, self.num_encoder_layers)

    @property
    def window_from(self) -> int | None:
        """Boundary X of the held `swa@X` that the first row goes on from."""
        return self.start if self.source is StateSource.HELD_WINDOW else None

    @property
    def replay(self) -> tuple[int, int] | None:
        """Rows of a bounded replay; None for every other kind."""
        if self.recipe.kind is not PlanKind.BOUNDED:
            return None
        return self.start, self.write_floor

    @property
    def encoder_rows(self) -> tuple[int, int]:
        return self.start, self.num_tokens

    @property
    def decoder_rows(self) -> tuple[int, int]:
        return self.decoder_first, self.num_tokens

    @property
    def num_tail_rows(self) -> int:
        """Encoder output rows that travel to a decode worker."""
        return self.num_tokens - self.decoder_first

    @property
    def source_floor(self) -> int:
        """Lowest of layer E's own window rows that a decoder row may read."""
        floor = self.recipe.source_floor
        return self.recipe.decoder_start if floor is None else floor

    def entries_written(self, ratio: int) -> tuple[int, int]:
        """Pool entries of a Full layer that the new rows complete."""
        return self.write_floor // ratio, self.num_tokens // ratio

    @property
    def open_pair_position(self) -> int | None:
        """The position that waits for its partner in the ratio-2 pools after the prefill."""
        return self.num_tokens - 1 if self.num_tokens % 2 else None

    @property
    def blocks_completed(self) -> range:
        """Blocks that become full, to be published once committed."""
        return range(self.write_floor // self.window, self.num_tokens // self.window)

    def restarts_of_block(self, number: int) -> tuple[int, ...]:
        """Lineage of block `number` of this request."""
        stop = (number + 1) * self.window
        return self.recipe.restarts_below(stop)

    @property
    def num_skipped(self) -> int:
        """Tokens without any row: what the client is told as cached."""
        return self.start

    @property
    def num_recomputed(self) -> int:
        """Tokens whose rows are computed although their block KV is cached."""
        return self.write_floor - self.start

    @property
    def num_replayed(self) -> int:
        """Those of the recomputed ones that are a bounded replay."""
        return self.num_recomputed if self.recipe.kind is PlanKind.BOUNDED else 0

    @property
    def num_new(self) -> int:
        """Tokens whose block KV is written."""
        return self.num_tokens - self.write_floor

    @property
    def num_new_blocks(self) -> int:
        """Blocks to allocate; recomputed rows need none."""
        return -(-self.num_tokens // self.window) - self.num_reused_blocks

    @property
    def num_compute_rows(self) -> int:
        """Encoder rows to charge to the compute budget, restarts on the way included."""
        return sum(rows.stop - rows.start for rows in self.passes)

    @property
    def num_row_layers(self) -> int:
        """Encoder rows, counted once for each layer that computes them."""
        window, layers = self.window, self.num_encoder_layers
        return sum(rows.num_row_layers(rows.start, window, layers) for rows in self.passes)

    @property
    def num_recomputed_row_layers(self) -> int:
        """Rows below the write floor times the encoder layers that need them."""
        floor = self.write_floor
        return sum(floor - min(start, floor) for start in self.layer_starts)

    @property
    def num_decoder_row_layers(self) -> int:
        return sum(self.num_tokens - start for start in self.decoder_layer_starts)

    @property
    def is_encoder_exact(self) -> bool:
        """The prefill adds no restart: the encoder state is as exact as the reused blocks."""
        return not self.new_restarts


def encoder_passes(
    rows: EncoderPass, restarts: Sequence[int], window: int, *, is_canonical: bool
) -> tuple[EncoderPass, ...]:
    """Cut `rows` at restarts: from X on they go on from rows [X-W, X) with floor X-W.

    Args:
        is_canonical: the decoder half does not restart: it takes the rows below X from the pass
            before. Else these passes repeat those of requests before, and the decoder half knows
            the rows of the last one only.
    """
    passes = []
    for restart in restarts:
        output_from = rows.output_from if is_canonical else restart
        passes.append(replace(rows, stop=restart, output_from=output_from))
        before = restart - window
        write_floor = max(restart, rows.write_floor)
        output_from = restart if is_canonical else 0
        rows = EncoderPass(before, rows.stop, before, write_floor, output_from)
    return (*passes, rows)


def triangle(exact_from: int, window: int, num_layers: int) -> tuple[int, ...]:
    """First row that each layer computes so that all rows from `exact_from` on are exact.

    Layer l's window rows of the W-1 positions below its first row need that many more rows of the
    layer below, so layer l starts (W-1)(E-1-l) rows earlier, or at 0 (replay rules, section 5).
    """
    return tuple(
        max(0, exact_from - (window - 1) * (num_layers - 1 - layer)) for layer in range(num_layers)
    )
