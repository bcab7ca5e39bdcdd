"""The contract that carries a prompt's state from an encoder worker to a decode worker.

    sender                                   receiver
    offer(manifest) ───────────────────────▶ accept: checks generation, layout, reservation
    send(section, payload), in order ──────▶ expects exactly the bytes its own layout derives
    complete(checksum) ────────────────────▶ compares, then the request may decode
    fail(reason), at any moment ───────────▶ pages are released exactly once

Control messages travel by `Peer`; payload bytes travel by the backend (a lane, the object store,
or a function call in process). Every message is idempotent by (transfer id, generation).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch

from ripresa.workers.replay import Recipe


class TransferState(StrEnum):
    """Where a transfer stands; `TRANSITIONS` lists every legal move."""

    OFFERED = "offered"
    SENDING = "sending"
    COMPLETE = "complete"
    FAILED = "failed"


TRANSITIONS: Mapping[TransferState, frozenset[TransferState]] = {
    TransferState.OFFERED: frozenset({TransferState.SENDING, TransferState.FAILED}),
    TransferState.SENDING: frozenset({TransferState.COMPLETE, TransferState.FAILED}),
    TransferState.COMPLETE: frozenset(),
    TransferState.FAILED: frozenset(),
}


class SectionKind(StrEnum):
    """BLOCKS: whole KV blocks. STATE: everything else, once, last."""

    BLOCKS = "blocks"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class Manifest:
    """What will be sent; the first message of a transfer.

    Attributes:
        transfer_id: unique for ever.
        request_id, generation: whose state it is; an older generation is refused as stale.
        sender: worker id of the encoder.
        layout_digest: digest of the KV layout; both ends must agree byte for byte.
        num_tokens: L, the prompt's positions.
        first_block: number of the first block that is sent (0 when nothing is held).
        recipe: what the encoder really computed.
    """

    transfer_id: str
    request_id: str
    generation: int
    sender: str
    layout_digest: bytes
    num_tokens: int
    first_block: int
    recipe: Recipe


@dataclass(frozen=True, slots=True)
class Section:
    """One piece of a transfer; sections are sent in order of `index`.

    Attributes:
        first_block, last_block: for BLOCKS, the half-open range of block numbers; else (0, 0).
        num_bytes: payload size; the receiver refuses a size its own layout does not derive.
    """

    index: int
    kind: SectionKind
    first_block: int
    last_block: int
    num_bytes: int


class Sink(Protocol):
    """What a receiving engine offers to the transfer layer. Called on the engine's event loop."""

    def open(self, manifest: Manifest) -> None:
        """Check reservation, generation and layout; raise RipresaError to refuse."""

    def section_bytes(self, manifest: Manifest, section: Section) -> int:
        """Bytes that this worker's own layout derives for a section."""

    def write(self, manifest: Manifest, section: Section, payload: torch.Tensor) -> None:
        """Store a verified payload (uint8 [num_bytes])."""

    def complete(self, manifest: Manifest) -> None:
        """All sections are stored and the checksum agreed; the request may go on."""

    def fail(self, manifest: Manifest, reason: str) -> None:
        """The transfer is over without success; the request waits for another one."""


class OutboundTransfer(Protocol):
    """One transfer as its sender sees it. Any failure raises RipresaError and ends in FAILED."""

    @property
    def state(self) -> TransferState: ...

    @property
    def num_bytes_sent(self) -> int: ...

    async def send(self, section: Section, payload: torch.Tensor) -> None:
        """Deliver one section (uint8 [num_bytes], CPU or the lane's device)."""

    async def complete(self) -> None:
        """Send the checksum of all payload bytes and wait for the receiver's agreement."""

    async def fail(self, reason: str) -> None:
        """Tell the receiver that nothing more comes. Idempotent; never raises."""


class TransferBackend(Protocol):
    """Opens outbound transfers to a decode worker that was named by its worker id."""

    async def offer(self, receiver: str, manifest: Manifest) -> OutboundTransfer:
        """Offer a manifest; returns once the receiver has accepted it."""

    async def close(self) -> None:
        """Release lanes and threads; running transfers fail. Idempotent."""
