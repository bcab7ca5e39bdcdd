"""Which rows, with which floors, does one sequence bring into a step?

All numbers come from the recipe and the pass and are absolute, so that no result depends on where
chunks end:

    0        write_floor   decoder_start (= decoder floor)            stop
    |-------------|--------------|--------------------------------------|
    encoder rows  [a, b)      decoder rows  [max(a, decoder_start), b)
"""

from __future__ import annotations

from ripresa.workers.replay import Recipe, TailVariant
from ripresa.workers.scheduling.step_plan import SequenceStep
from ripresa.workers.sequence import Sequence

LOOKBACK = 3
"""True tokens before the first row that n-gram hashing may read."""


def source_floor(recipe: Recipe) -> int:
    """Lowest layer-E window row that a decoder row may read (replay rules, section 2)."""
    if recipe.source_floor is not None:
        return recipe.source_floor
    return recipe.swa_floor if recipe.tail is TailVariant.LAYER_EXACT else recipe.decoder_start


def encoder_chunk(sequence: Sequence, stop: int) -> SequenceStep:
    """Rows [position, stop) on an encoder worker; the tail's encoder output leaves the step."""
    first = _first_output(sequence)
    return _step(
        sequence,
        encoder_stop=stop,
        decoder=(stop, stop),
        hand_over_from=first if stop > first else None,
    )


def local_chunk(sequence: Sequence, stop: int) -> SequenceStep:
    """Rows [position, stop) on a decode worker that prefills by itself."""
    first = max(sequence.position, _first_output(sequence))
    return _step(sequence, encoder_stop=stop, decoder=(min(first, stop), stop))


def tail_chunk(sequence: Sequence, stop: int) -> SequenceStep:
    """Decoder rows [position, stop) that start from handed-over encoder output."""
    return _step(sequence, encoder_stop=None, decoder=(sequence.position, stop), inbound=True)


def decode_row(sequence: Sequence) -> SequenceStep:
    """The row of the last sampled token, through both halves.

    In mode canonical the encoder half restarts with the row of an anchor: the W rows below it are
    recomputed in the same step.
    """
    stop = sequence.num_tokens
    return _step(sequence, encoder_stop=stop, decoder=(stop - 1, stop))


def _first_output(sequence: Sequence) -> int:
    """First row whose encoder output the decoder half takes from the pass under way."""
    return max(sequence.recipe.decoder_start, sequence.encoder_pass.output_from)


def _step(
    sequence: Sequence,
    *,
    encoder_stop: int | None,
    decoder: tuple[int, int],
    inbound: bool = False,
    hand_over_from: int | None = None,
) -> SequenceStep:
    recipe, rows = sequence.recipe, sequence.encoder_pass
    start = sequence.position if encoder_stop is not None else sequence.prefill_stop
    stop = encoder_stop if encoder_stop is not None else start
    samples = decoder[0] < decoder[1] == sequence.num_tokens
    has_source_window = start < stop and recipe.tail is TailVariant.LAYER_EXACT
    return SequenceStep(
        slot=sequence.pages.slot,
        block_table=sequence.pages.blocks,
        token_ids=tuple(sequence.token_ids[start:stop]),
        lookback_ids=tuple(sequence.token_ids[max(0, start - LOOKBACK) : start]),
        encoder_start=start,
        swa_floor=rows.swa_floor,
        write_floor=rows.write_floor,
        decoder_start=decoder[0],
        decoder_stop=decoder[1],
        decoder_floor=recipe.decoder_start,
        source_floor=source_floor(recipe),
        source_window_from=rows.output_from if has_source_window else None,
        exact_from=rows.exact_from,
        inbound=inbound,
        hand_over_from=hand_over_from,
        sampling=sequence.sampling if samples else None,
        rules=sequence.history.rules() if samples else None,
    )
