"""What one engine step computes: plain values that can be broadcast to every rank of a gang."""

from __future__ import annotations

from dataclasses import dataclass

from ripresa.workers.request import SamplingParams
from ripresa.workers.token_history import TokenRules


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """The rows of one sequence in one step. Positions are absolute, ranges half-open.

    Encoder rows [encoder_start, encoder_start + len(token_ids)) pass the layers below E and layer
    E's KV projections. Decoder rows [decoder_start, decoder_stop) pass layers E and above; their
    input is this step's encoder output, or the output handed over by an encoder worker (`inbound`).

    Attributes:
        slot: the sequence's slot on every rank (rings, open pairs).
        block_table: KV blocks of the sequence; block k holds positions [k*W, (k+1)*W).
        token_ids: tokens of the encoder rows; empty when there are none.
        lookback_ids: the up to three true tokens before `encoder_start` (n-gram hashing).
        encoder_start: position of the first encoder row.
        swa_floor: encoder rows read no window row below it.
        write_floor: encoder rows below it write window rows but no block KV.
        decoder_start, decoder_stop: decoder rows; equal when there are none.
        decoder_floor: decoder rows read no window row below it in layers above E.
        source_floor: the same for layer E (differs for tail `layer_exact`).
        source_window_from: encoder rows from here to `decoder_floor` also write layer E's window
            rows (rows above are decoder rows, which write their own); None if no row does.
        inbound: decoder rows start from handed-over encoder output.
        exact_from: encoder layers compute of the rows below it only what those from here on depend
            on; None if all encoder rows pass all layers.
        hand_over_from: encoder output of rows at or above it leaves the step; None for none.
        sampling: how to choose the token after row `decoder_stop - 1`; None chooses none.
        rules: what the sequence's earlier tokens say about that token; None for nothing.
        return_logits: all decoder rows' logits leave the step (verification).
        return_sampled_logits: those of the row that chooses a token do.
        cut_windows: boundaries X in (encoder_start, encoder_stop] whose encoder window, the rows
            of positions [X-W, X), leaves the step.
    """

    slot: int
    block_table: tuple[int, ...]
    token_ids: tuple[int, ...] = ()
    lookback_ids: tuple[int, ...] = ()
    encoder_start: int = 0
    swa_floor: int = 0
    write_floor: int = 0
    decoder_start: int = 0
    decoder_stop: int = 0
    decoder_floor: int = 0
    source_floor: int = 0
    source_window_from: int | None = None
    exact_from: int | None = None
    inbound: bool = False
    hand_over_from: int | None = None
    sampling: SamplingParams | None = None
    rules: TokenRules | None = None
    return_logits: bool = False
    return_sampled_logits: bool = False
    cut_windows: tuple[int, ...] = ()

    @property
    def encoder_stop(self) -> int:
        return self.encoder_start + len(self.token_ids)

    @property
    def num_encoder_rows(self) -> int:
        return len(self.token_ids)

    @property
    def num_decoder_rows(self) -> int:
        return self.decoder_stop - self.decoder_start


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of one worker. A slot occurs at most once."""

    step: int
    sequences: tuple[SequenceStep, ...]
