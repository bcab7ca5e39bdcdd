"""What the engines need of a model on a worker: run a step, export and import state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ripresa.workers.errors import RipresaError
from ripresa.workers.models.vocabulary import Vocabulary
from ripresa.workers.replay_query import ReplayGeometry
from ripresa.workers.request import TokenLogprobs
from ripresa.workers.sampler import TokenMask
from ripresa.workers.scheduling.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class EncoderOutput:
    """The stream between layer E-1 and layer E, for rows [start, start + len) of a sequence.

    Attributes:
        start: position of the first row.
        hidden: [rows, n, d] float32, all hyper-connection streams.
        pre_mix: [rows, n] float32, the mix that layer E's attention site collapses with.
    """

    start: int
    hidden: torch.Tensor
    pre_mix: torch.Tensor

    @property
    def stop(self) -> int:
        return self.start + int(self.hidden.shape[0])


@dataclass(slots=True)
class StepOutput:
    """What one step produced, by slot.

    Attributes:
        sampled: the chosen next token.
        errors: why a slot has none; its request cannot go on.
        logprobs: of the chosen token, for sequences that ask for them.
        encoder_output: rows at or above the sequence's `hand_over_from`.
        logits: [decoder rows, vocab] float32 where they were asked for.
        sampled_logits: [vocab] float32 on the host, which the token was chosen from before any
            parameter changed them, where they were asked for.
        windows: encoder windows by slot and boundary, uint8, as `import_window` takes them.
        num_encoder_rows, num_decoder_rows: rows really computed in each half.
        num_row_layers: the encoder rows, counted once for each layer that they passed.
    """

    sampled: dict[int, int] = field(default_factory=dict)
    errors: dict[int, RipresaError] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    encoder_output: dict[int, EncoderOutput] = field(default_factory=dict)
    logits: dict[int, torch.Tensor] = field(default_factory=dict)
    sampled_logits: dict[int, torch.Tensor] = field(default_factory=dict)
    windows: dict[int, dict[int, torch.Tensor]] = field(default_factory=dict)
    num_encoder_rows: int = 0
    num_decoder_rows: int = 0
    num_row_layers: int = 0


class StepMasks(Protocol):
    """What constraints allow the rows of one step."""

    def of(self, slot: int) -> TokenMask | None:
        """The tokens that a slot's next one may be, waited for; None for any."""


class ModelRunner(Protocol):
    """One rank's model with its KV memory. `execute` runs in the engine's step thread.

    The byte counts and the digest come from the worker's KV layout; both ends of a transfer
    derive the same ones or refuse each other.
    """

    @property
    def window(self) -> int:
        """W: sliding window and block size in tokens."""

    @property
    def geometry(self) -> ReplayGeometry:
        """What the replay rules need to know of the model."""

    @property
    def layout_digest(self) -> bytes: ...

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""

    @property
    def num_slots(self) -> int:
        """Sequences that can hold rings at once."""

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def max_model_len(self) -> int: ...

    def vocabulary(self) -> Vocabulary:
        """Read what the token ids stand for.

        Raises:
            RipresaError: the checkpoint has no usable tokenizer (CheckpointError), or the model no
                end of sentence.
        """

    def execute(
        self,
        plan: StepPlan,
        inbound: Mapping[int, EncoderOutput] | None = None,
        masks: StepMasks | None = None,
    ) -> StepOutput:
        """Run one step; `inbound` gives handed-over encoder output by slot."""

    def block_bytes(self, num_blocks: int) -> int: ...

    def export_blocks(self, block_ids: Sequence[int]) -> torch.Tensor:
        """Whole blocks as uint8 [block_bytes(len(block_ids))], contiguous."""

    @property
    def window_bytes(self) -> int:
        """Bytes of an encoder window, as `StepOutput.windows` has them."""

    def import_blocks(self, block_ids: Sequence[int], payload: torch.Tensor) -> None: ...

    def state_bytes(self, num_tokens: int, output_start: int, source_window: bool) -> int: ...

    def rows_bytes(self, num_rows: int) -> int:
        """Bytes of encoder output rows."""

    def export_rows(self, output: EncoderOutput) -> torch.Tensor:
        """Encoder output as uint8 [rows_bytes(...)]."""

    def import_rows(self, start: int, num_rows: int, payload: torch.Tensor) -> EncoderOutput:
        """What `export_rows` made, in memory of its own."""

    def export_state(
        self,
        slot: int,
        block_table: Sequence[int],
        num_tokens: int,
        output: EncoderOutput,
        source_window: bool,
    ) -> torch.Tensor:
        """Partial block, encoder windows' last W rows, open pairs, layer E's own window rows
        (if `source_window`) and the encoder output rows, as uint8 [state_bytes(...)]."""

    def import_state(
        self,
        slot: int,
        block_table: Sequence[int],
        num_tokens: int,
        output_start: int,
        source_window: bool,
        payload: torch.Tensor,
    ) -> EncoderOutput: ...

    def import_window(self, slot: int, boundary: int, payload: torch.Tensor) -> None:
        """Put a window that a step cut at `boundary` into a slot's rings."""

    def export_image(self, slot: int, block_table: Sequence[int], num_tokens: int) -> torch.Tensor:
        """A sequence's state but whole blocks, uint8: all rings, open pairs, the partial block."""

    def image_bytes(self, num_tokens: int) -> int:
        """Bytes of a sequence's image after so many tokens."""

    def import_image(
        self, slot: int, block_table: Sequence[int], num_tokens: int, payload: torch.Tensor
    ) -> None: ...

    def release_slot(self, slot: int) -> None:
        """Forget a slot's rings and open pairs: nothing of it may be readable by the next one."""
