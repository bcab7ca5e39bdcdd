"""What has arrived of one prompt's state on a decode worker?"""

from __future__ import annotations

import torch

from ripresa.workers.errors import ErrorCode, RipresaError
from ripresa.workers.models.base import EncoderOutput
from ripresa.workers.replay import Recipe, TailVariant
from ripresa.workers.transfer.base import (
    TRANSITIONS,
    Manifest,
    Section,
    SectionKind,
    TransferState,
)


class InboundHandOver:
    """One transfer's progress: whole blocks and tail rows, each in order, then one STATE section.

    Args:
        manifest: what was offered and accepted.
        num_whole_blocks: floor(L / W).
        first_block: the first one that is sent.
        window: W.

    Attributes:
        state: OFFERED until the first section is stored.
        has_state: STATE is stored.
        num_bytes: payload stored so far.
    """

    __slots__ = (
        "_next_block",
        "_next_index",
        "_next_rows",
        "_num_whole_blocks",
        "_outputs",
        "_state",
        "_window",
        "first_block",
        "has_state",
        "manifest",
        "num_bytes",
    )

    def __init__(
        self, manifest: Manifest, num_whole_blocks: int, first_block: int, window: int
    ) -> None:
        self.manifest = manifest
        self.has_state = False
        self._outputs: list[EncoderOutput] = []
        self._next_rows = 0
        self._window = window
        self.num_bytes = 0
        self._num_whole_blocks = num_whole_blocks
        self.first_block = first_block
        self._next_block = first_block
        self._next_index = 0
        self._state = TransferState.OFFERED

    @property
    def state(self) -> TransferState:
        return self._state

    @property
    def is_open(self) -> bool:
        return self._state in (TransferState.OFFERED, TransferState.SENDING)

    def has(self, section: Section) -> bool:
        """Whether the section is stored already (a repeated message)."""
        return section.index < self._next_index

    def check(self, section: Section) -> None:
        """Raise RipresaError (FAILED_PRECONDITION) unless this section comes next."""
        if section.index != self._next_index or self.has_state:
            raise _out_of_order(f"section {section.index} came, {self._next_index} was expected")
        if section.kind is SectionKind.STATE:
            if self._next_block != self._num_whole_blocks:
                raise _out_of_order(
                    f"the state came after {self._next_block} of {self._num_whole_blocks} blocks"
                )
            if self._next_rows != self.num_row_sections:
                raise _out_of_order(
                    f"the state came after {self._next_rows} of {self.num_row_sections} sections "
                    "of rows"
                )
        elif section.kind is SectionKind.ROWS:
            if not section.first_block == self._next_rows == section.last_block - 1 or (
                self._next_rows >= self.num_row_sections
            ):
                raise _out_of_order(
                    f"rows {section.first_block} came, {self._next_rows} of "
                    f"{self.num_row_sections} were expected"
                )
        elif section.kind is SectionKind.WINDOW:
            if not 0 < section.last_block == section.first_block + 1 <= self._next_block:
                raise _out_of_order(
                    f"a window behind block {section.last_block} came after {self._next_block}"
                )
        elif not (self._next_block == section.first_block < section.last_block) or (
            section.last_block > self._num_whole_blocks
        ):
            raise _out_of_order(
                f"blocks [{section.first_block}, {section.last_block}) came, block "
                f"{self._next_block} of {self._num_whole_blocks} was expected"
            )

    def stored(self, section: Section, encoder_output: EncoderOutput | None) -> None:
        """Book a section whose payload is in the worker's memory."""
        if self._state is TransferState.OFFERED:
            self.move(TransferState.SENDING)
        self._next_index = section.index + 1
        self.num_bytes += section.num_bytes
        match section.kind:
            case SectionKind.BLOCKS:
                self._next_block = section.last_block
            case SectionKind.ROWS:
                self._next_rows = section.last_block
            case SectionKind.STATE:
                self.has_state = True
        if encoder_output is not None:
            self._outputs.append(encoder_output)

    @property
    def num_row_sections(self) -> int:
        """Sections of W tail rows that come before the state, which has the last ones."""
        return num_row_sections(self.manifest.recipe, self.manifest.num_tokens, self._window)

    @property
    def state_rows_start(self) -> int:
        """First tail row of the STATE section."""
        return self.manifest.recipe.decoder_start + self.num_row_sections * self._window

    def rows(self, start: int, stop: int) -> EncoderOutput:
        """Encoder output of tail rows [start, stop).

        Raises RipresaError (INTERNAL): they have not come, or were released.
        """
        outputs = [o for o in self._outputs if o.start < stop and start < o.stop]
        if not outputs or not outputs[0].start <= start < stop <= outputs[-1].stop:
            raise RipresaError(
                ErrorCode.INTERNAL, f"encoder output of rows [{start}, {stop}) was not handed over"
            )
        rows = slice(start - outputs[0].start, stop - outputs[0].start)
        return EncoderOutput(
            start,
            torch.cat([output.hidden for output in outputs])[rows],
            torch.cat([output.pre_mix for output in outputs])[rows],
        )

    def release_rows(self) -> None:
        """The tail is computed."""
        self._outputs = []

    def move(self, state: TransferState) -> None:
        """Change the state; raises RipresaError (INTERNAL) for a move the contract lacks."""
        if state not in TRANSITIONS[self._state]:
            raise RipresaError(
                ErrorCode.INTERNAL, f"a transfer cannot go from {self._state} to {state}"
            )
        self._state = state


def num_row_sections(recipe: Recipe, num_tokens: int, window: int) -> int:
    """Sections of W tail rows each that a hand-over sends before its state."""
    if recipe.tail is TailVariant.LAYER_EXACT:
        # The window before the first tail row travels with it.
        return 0
    return (num_tokens - recipe.decoder_start - 1) // window


def _out_of_order(message: str) -> RipresaError:
    return RipresaError(ErrorCode.FAILED_PRECONDITION, f"{message}; the sender must start again")
