"""What has arrived of one prompt's state on a decode worker?"""

from __future__ import annotations

from ripresa.workers.errors import ErrorCode, RipresaError
from ripresa.workers.models.base import EncoderOutput
from ripresa.workers.transfer.base import (
    TRANSITIONS,
    Manifest,
    Section,
    SectionKind,
    TransferState,
)


class InboundHandOver:
    """One transfer's progress: whole blocks in order, then one STATE section.

    Args:
        manifest: what was offered and accepted.
        num_whole_blocks: floor(L / W).
        first_block: the first one that is sent.

    Attributes:
        state: OFFERED until the first section is stored.
        encoder_output: the tail's rows, once STATE is stored.
        num_bytes: payload stored so far.
    """

    __slots__ = (
        "_next_block",
        "_next_index",
        "_num_whole_blocks",
        "_state",
        "encoder_output",
        "first_block",
        "manifest",
        "num_bytes",
    )

    def __init__(self, manifest: Manifest, num_whole_blocks: int, first_block: int) -> None:
        self.manifest = manifest
        self.encoder_output: EncoderOutput | None = None
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
        if section.index != self._next_index or self.encoder_output is not None:
            raise _out_of_order(f"section {section.index} came, {self._next_index} was expected")
        if section.kind is SectionKind.STATE:
            if self._next_block != self._num_whole_blocks:
                raise _out_of_order(
                    f"the state came after {self._next_block} of {self._num_whole_blocks} blocks"
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
        if section.kind is SectionKind.BLOCKS:
            self._next_block = section.last_block
        self.encoder_output = encoder_output

    def move(self, state: TransferState) -> None:
        """Change the state; raises RipresaError (INTERNAL) for a move the contract lacks."""
        if state not in TRANSITIONS[self._state]:
            raise RipresaError(
                ErrorCode.INTERNAL, f"a transfer cannot go from {self._state} to {state}"
            )
        self._state = state


def _out_of_order(message: str) -> RipresaError:
    return RipresaError(ErrorCode.FAILED_PRECONDITION, f"{message}; the sender must start again")
