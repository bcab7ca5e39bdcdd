"""The contract that carries prompts' state between workers: hand-overs, pulls and moves of blocks.

    sender                                   receiver
                    ◀──────────────────────── pull: only where the receiver asked for it
    offer(manifest) ───────────────────────▶ accept: checks generation, layout, reservation
    send(section, payload), in order ──────▶ expects exactly the bytes its own layout derives
    complete(checksum) ────────────────────▶ compares, then the request may decode
    fail(reason), at any moment ───────────▶ pages are released exactly once

Control messages travel by `Peer`; payload bytes travel by a `Lane` that a `Transport` makes (a
process group, or a hand-over in process). Every message is idempotent by (transfer id, generation).
`outbound.py` is the sender half and `inbound.py` the receiver half; both know lanes only by the
protocols below, so every transport runs the same code and the same contract suite.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol, TypeVar

import torch

from ripresa.workers.address import WorkerAddress
from ripresa.workers.errors import ConfigError, Unavailable
from ripresa.workers.prefix_sources import PrefixOutcome
from ripresa.workers.replay import Recipe


class TransferState(StrEnum):
    """Where a transfer stands; `TRANSITIONS` lists every legal move."""

    OFFERED = "offered"
    SENDING = "sending"
    COMPLETE = "complete"
    FAILED = "failed"


TRANSITIONS: Mapping[TransferState, frozenset[TransferState]] = {
    # A pull of which nothing is there any more is complete without a section.
    TransferState.OFFERED: frozenset(
        {TransferState.SENDING, TransferState.COMPLETE, TransferState.FAILED}
    ),
    TransferState.SENDING: frozenset({TransferState.COMPLETE, TransferState.FAILED}),
    TransferState.COMPLETE: frozenset(),
    TransferState.FAILED: frozenset(),
}


class SectionKind(StrEnum):
    """BLOCKS: whole KV blocks. WINDOW: one native encoder window. ROWS: encoder output of W tail
    rows before the last ones. STATE: everything else of a hand-over, once, last. IMAGE: a session's
    parked state, once, first."""

    BLOCKS = "blocks"
    WINDOW = "window"
    ROWS = "rows"
    STATE = "state"
    IMAGE = "image"


@dataclass(frozen=True, slots=True)
class Manifest:
    """The hand-over of a prompt's state; the first message of its transfer.

    Attributes:
        transfer_id: unique for ever.
        request_id, generation: whose state it is; an older generation is refused as stale.
        sender: worker id of the encoder.
        layout_digest: digest of the KV layout; both ends must agree byte for byte.
        num_tokens: L, the prompt's positions.
        first_block: number of the first block that the sender can send. The receiver names the
            first one that it lacks when it accepts.
        recipe: what the encoder really computed.
        prefix: what the encoder brought from others and held.
    """

    transfer_id: str
    request_id: str
    generation: int
    sender: str
    layout_digest: bytes
    num_tokens: int
    first_block: int
    recipe: Recipe
    prefix: PrefixOutcome = field(default_factory=PrefixOutcome)

    @property
    def subject(self) -> str:
        """A newer generation of one subject replaces an older one."""
        return self.request_id

    @property
    def has_state(self) -> bool:
        """It is complete only after a STATE section."""
        return True


@dataclass(frozen=True, slots=True)
class PullManifest:
    """Cached blocks and windows that the receiver asked for by a `Pull`.

    It may be completed after any section: what was not sent is not there.

    Attributes:
        transfer_id: the pull's id.
        generation: always 0.
        sender: worker id.
        layout_digest: digest of the KV layout; both ends must agree byte for byte.
        first_block: number of the first block that is sent, the first of the pull.
        restarts: lineage of the chain that the blocks belong to; each block has those of them
            that lie below its end.
        image: what the session followed whose parked state is sent; None if none is.
    """

    transfer_id: str
    sender: str
    layout_digest: bytes
    first_block: int
    restarts: tuple[int, ...]
    generation: int = 0
    image: Recipe | None = None

    @property
    def subject(self) -> str:
        return self.transfer_id

    @property
    def has_state(self) -> bool:
        return False


class MovedBlock(NamedTuple):
    """A cached block that its worker would evict.

    Attributes:
        hash, restarts: its identity.
        tenant, first, parent: where it stands among all prompts.
        producer: which kind of step made its last row.
        age_s: seconds since its last use.
    """

    hash: bytes
    restarts: tuple[int, ...]
    tenant: str
    first: bytes
    parent: bytes | None
    producer: str
    age_s: float


@dataclass(frozen=True, slots=True)
class MoveManifest:
    """Cached blocks that the receiver may keep instead of the sender.

    Attributes:
        transfer_id: unique for ever.
        sender: worker id.
        layout_digest: digest of the KV layout; both ends must agree byte for byte.
        rules_version: of the replay rules that the blocks follow.
        blocks: the longest unused first. They are numbered from 0 in sections and in the accept,
            which leaves out the first ones if there is no room for all.
        generation: always 0.
        first_block: always 0.
    """

    transfer_id: str
    sender: str
    layout_digest: bytes
    rules_version: str
    blocks: tuple[MovedBlock, ...]
    generation: int = 0
    first_block: int = 0

    @property
    def subject(self) -> str:
        return self.transfer_id

    @property
    def has_state(self) -> bool:
        return False


AnyManifest = Manifest | PullManifest | MoveManifest
M_contra = TypeVar("M_contra", contravariant=True)


@dataclass(frozen=True, slots=True)
class Section:
    """One piece of a transfer; sections are sent in order of `index`.

    Attributes:
        first_block, last_block: for BLOCKS, the half-open range of block numbers; for WINDOW, the
            block that it ends with, as a range; for ROWS, the number of the W rows from the
            recipe's `decoder_start` on, as a range; else (0, 0).
        num_bytes: payload size; the receiver refuses a size its own layout does not derive.
        producers: for BLOCKS of a pull, which kind of step made each block's last row.
    """

    index: int
    kind: SectionKind
    first_block: int
    last_block: int
    num_bytes: int
    producers: tuple[str, ...] = ()


class Sink(Protocol[M_contra]):
    """What a receiving engine offers to the transfer layer. Called on the engine's event loop.

    After an `open` that returned, exactly one of `complete` and `fail` is called, once, last.
    """

    def open(self, manifest: M_contra) -> int:
        """Check reservation, generation and layout; the number of the first block to send.

        The blocks below it are held, and stay until the transfer has ended. Raises RipresaError to
        refuse.
        """

    def section_bytes(self, manifest: M_contra, section: Section) -> int:
        """Bytes that this worker's own layout derives for a section."""

    def write(self, manifest: M_contra, section: Section, payload: torch.Tensor) -> None:
        """Store a verified payload (uint8 [num_bytes], on the transport's device).

        The payload is staging memory that the next section overwrites: it is valid during this call
        only. Copy what must outlive it.
        """

    def complete(self, manifest: M_contra) -> None:
        """All sections are stored and the checksum agreed; the request may go on."""

    def fail(self, manifest: M_contra, reason: str) -> None:
        """The transfer is over without success; the request waits for another one."""


@dataclass(frozen=True, slots=True)
class LaneConfig:
    """Limits of both halves; every wait of the transfer layer ends by one of them.

    Attributes:
        chunk_bytes: a section crosses a lane in pieces of this size.
        chunk_timeout_s: longest wait for one chunk; a dead or hung peer costs one of these.
        open_timeout_s: longest wait for the peer's end of a new lane. A `TCPStore` looks up the
            name of each address it connects to, and the C library waits 5 s, twice, for a name
            server that does not answer: below 10 s a lost datagram costs a lane.
        control_timeout_s: longest wait for the answer to a control message.
        idle_timeout_s: a receiver fails a transfer whose sender was silent for this long. Senders
            that have nothing to say send `KeepAlive` three times as often.
        max_lanes: open lanes a worker and direction; the least recently used idle one makes room.
        max_bytes_in_flight: payload bytes that one sender has under way over all lanes; a receiver
            stages at most one section a lane.
    """

    chunk_bytes: int = 4 * 1024 * 1024
    chunk_timeout_s: float = 2.0
    open_timeout_s: float = 12.0
    control_timeout_s: float = 5.0
    idle_timeout_s: float = 10.0
    max_lanes: int = 16
    max_bytes_in_flight: int = 256 * 1024 * 1024

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not value > 0:
                raise ConfigError(f"lanes.{name}", f"must be above zero, got {value}")


@dataclass(frozen=True, slots=True)
class LaneEndpoint:
    """Where and under which name the two ends of a lane meet.

    Attributes:
        sender: worker id of the sending end.
        incarnation: differs between two lives of one worker id.
        generation: ascends over all lanes of one life: a lane that lost sync is never used again,
            its successor has a higher generation.
        transport: name of the transport; both ends must use the same.
        chunk_bytes: chunk size that both ends use.
        address: host and port of the sender's store; None in process.
    """

    sender: str
    incarnation: str
    generation: int
    transport: str
    chunk_bytes: int
    address: tuple[str, int] | None = None

    @property
    def lane_id(self) -> str:
        """Unique for ever."""
        return f"{self.sender}.{self.incarnation}#{self.generation}"

    def require_transport(self, name: str) -> None:
        """Raise Unavailable unless the lane uses this transport."""
        if self.transport != name:
            raise Unavailable(
                f"lane {self.lane_id} uses {self.transport}, this worker {name}; "
                "configure the same transport on both"
            )

    def is_older_than(self, other: LaneEndpoint) -> bool:
        """Whether `other` has replaced this lane, if they lead to the same receiver."""
        same_life = (self.sender, self.incarnation) == (other.sender, other.incarnation)
        return same_life and self.generation < other.generation


@dataclass(frozen=True, slots=True)
class Offer:
    """Asks the receiver to accept a transfer; answered by `Accept`."""

    manifest: AnyManifest


@dataclass(frozen=True, slots=True)
class OpenLane:
    """Asks the receiver to open its end; answered once the receiver has begun to."""

    endpoint: LaneEndpoint


@dataclass(frozen=True, slots=True)
class CloseLane:
    """The sender's end is closed, whatever the reason."""

    lane_id: str


@dataclass(frozen=True, slots=True)
class SendSection:
    """One section comes over a lane now; answered when its payload is verified and stored."""

    transfer_id: str
    generation: int
    lane_id: str
    section: Section


@dataclass(frozen=True, slots=True)
class Complete:
    """Everything was sent.

    Attributes:
        checksum: `checksum.transfer_checksum` of all sections' checksums, in order.
    """

    transfer_id: str
    generation: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Fail:
    """Nothing more comes."""

    transfer_id: str
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """The sender lives and is still computing."""

    transfer_id: str
    generation: int


class PulledWindow(NamedTuple):
    """A window that a pull asks for, named by the block that ends with it.

    Attributes:
        num_blocks: blocks of the prompt up to its boundary.
        hash, restarts: identity of the last of them.
    """

    num_blocks: int
    hash: bytes
    restarts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PulledImage:
    """A session's parked state that a pull asks for.

    Attributes:
        tenant_salt, session_id: whose it is.
        num_tokens: its processed positions.
        digest: of their tokens (`parked_states.token_digest`).
    """

    tenant_salt: bytes
    session_id: str
    num_tokens: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Pull:
    """Asks a worker to send blocks and windows that it holds, or is about to compute.

    Answered when the worker has begun; then it offers a `PullManifest`. A repeated one changes
    nothing.

    Attributes:
        pull_id: unique for ever.
        receiver: who asks.
        layout_digest: of the receiver.
        request_id: for which request; it never waits for its own progress.
        first_block: number of the first wanted block.
        hashes: of the wanted blocks, in order.
        restarts: lineage of the last of them; None if the leader's recipe decides.
        leader: request, or claim, whose blocks are wanted as they are completed; None to send
            what is held now.
        windows: wanted as well, sent after the blocks.
        image: wanted as well, sent before the blocks; None for none.
    """

    pull_id: str
    receiver: WorkerAddress
    layout_digest: bytes
    request_id: str
    first_block: int
    hashes: tuple[bytes, ...]
    restarts: tuple[int, ...] | None
    leader: str | None = None
    windows: tuple[PulledWindow, ...] = ()
    image: PulledImage | None = None


@dataclass(frozen=True, slots=True)
class EndPull:
    """Nothing more of a pull is wanted. Idempotent; it may overtake its `Pull`."""

    pull_id: str


ControlMessage = (
    Offer | OpenLane | CloseLane | SendSection | Complete | Fail | KeepAlive | Pull | EndPull
)


@dataclass(frozen=True, slots=True)
class Accept:
    """The receiver holds all that the transfer needs.

    Attributes:
        idle_timeout_s: the receiver fails the transfer when it hears nothing for this long.
        first_block: number of the first block that the receiver lacks.
    """

    transfer_id: str
    generation: int
    idle_timeout_s: float
    first_block: int


class Peer(Protocol):
    """The control way to one receiver: a Ray handle in production, the receiver itself in process.

    `deliver` may be called again with an equal message after a lost answer: every message is
    idempotent. A refusal raises the receiver's RipresaError; any other exception means that the
    peer cannot be reached. Cancelling the call need not cancel the work at the receiver.
    """

    async def deliver(self, message: ControlMessage) -> Accept | None:
        """Hand over one message; `Offer` is answered by an `Accept`, the others by None."""


class LaneNotOpen(Unavailable):
    """The receiver closed this lane or never had it; nothing was read, a new lane will do."""


class Lane(Protocol):
    """One end of a one-way byte path between two workers. Used on one event loop.

    Carries one section at a time, in order. After any failure, and after the cancellation of any
    of its calls, it is lost for good. Failures raise Unavailable.
    """

    async def open(self) -> None:
        """Meet the other end; at most `open_timeout_s`."""

    async def send(self, payload: torch.Tensor) -> int:
        """Move a payload (uint8 [num_bytes], contiguous) and its checksum to the other end.

        The payload is hashed while it leaves. Returns its `checksum.payload_checksum`.
        """

    async def receive(self, num_bytes: int) -> tuple[torch.Tensor, int]:
        """The next payload (uint8 [num_bytes], valid until the next call) and its checksum.

        Raises:
            RipresaError: DATA_LOSS if the payload does not have the checksum that came with it.
        """

    def discard(self, reason: str) -> None:
        """Give the lane up: running calls raise at once. Never blocks, idempotent."""

    async def wait_closed(self) -> None:
        """After `discard`: returns when threads and sockets are gone; at most one timeout later."""


class Transport(Protocol):
    """Makes the ends of lanes for one worker."""

    @property
    def name(self) -> str: ...

    def address(self) -> tuple[str, int] | None:
        """Where receivers meet this worker's sending ends; None in process."""

    def sending_end(self, endpoint: LaneEndpoint) -> Lane: ...

    def receiving_end(self, endpoint: LaneEndpoint) -> Lane: ...

    def close(self) -> None:
        """Release what the lanes shared; call when every lane is closed. Idempotent."""


class OutboundTransfer(Protocol):
    """One transfer as its sender sees it. Any failure raises RipresaError and ends in FAILED."""

    @property
    def state(self) -> TransferState: ...

    @property
    def num_bytes_sent(self) -> int: ...

    @property
    def first_block(self) -> int:
        """Number of the first block that the receiver lacks."""

    async def send(self, section: Section, payload: torch.Tensor) -> None:
        """Deliver one section (uint8 [num_bytes], CPU or the lane's device).

        The payload must stay unchanged until this returns. A cancelled call ends the transfer.
        """

    async def complete(self) -> None:
        """Send the checksum of all payload bytes and wait for the receiver's agreement."""

    async def fail(self, reason: str) -> None:
        """Tell the receiver that nothing more comes. Idempotent; never raises."""


class TransferBackend(Protocol):
    """Opens outbound transfers to other workers."""

    async def offer(self, receiver: WorkerAddress, manifest: AnyManifest) -> OutboundTransfer:
        """Offer a manifest; returns once the receiver has accepted it."""

    async def close(self) -> None:
        """Release lanes and threads; running transfers fail. Idempotent."""
