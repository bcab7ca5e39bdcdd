"""How does others' state arrive at this worker? The receiver half of every transfer backend."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from ripresa.workers.errors import ErrorCode, RipresaError, Unavailable, reason_of
from ripresa.workers.transfer.base import (
    TRANSITIONS,
    Accept,
    AnyManifest,
    CloseLane,
    Complete,
    ControlMessage,
    EndPull,
    Fail,
    KeepAlive,
    LaneConfig,
    Offer,
    OpenLane,
    Pull,
    Section,
    SectionKind,
    SendSection,
    Sink,
    TransferState,
    Transport,
)
from ripresa.workers.transfer.checksum import corrupt, transfer_checksum
from ripresa.workers.transfer.inbound_lanes import InboundLane, InboundLanes
from ripresa.workers.transfer.integrity import raise_if_left

_MAX_REMEMBERED = 1024
"""Ended transfers that late or repeated messages are still answered about."""


K = TypeVar("K")
V = TypeVar("V")


@dataclass(slots=True, eq=False)
class _Inbound:
    """One transfer as its receiver sees it.

    Attributes:
        first_block: the first block that is sent.
        stored: every section stored so far with its checksum, in order.
        arriving: the section on its way, and the task that receives it.
        failure: why it failed; None while it has not.
    """

    manifest: AnyManifest
    first_block: int
    state: TransferState = TransferState.OFFERED
    stored: list[tuple[Section, int]] = field(default_factory=list)
    arriving: tuple[SendSection, asyncio.Task[None]] | None = None
    failure: str | None = None
    idle_timer: asyncio.TimerHandle | None = None

    @property
    def running(self) -> bool:
        return bool(TRANSITIONS[self.state])

    @property
    def next_block(self) -> int:
        for section, _ in reversed(self.stored):
            if section.kind is SectionKind.BLOCKS:
                return section.last_block
        return self.first_block

    @property
    def has_state(self) -> bool:
        return bool(self.stored) and self.stored[-1][0].kind is SectionKind.STATE

    def move(self, state: TransferState) -> None:
        if state not in TRANSITIONS[self.state]:
            raise RipresaError(
                ErrorCode.FAILED_PRECONDITION,
                f"transfer {self.manifest.transfer_id} cannot go from {self.state} to {state}",
            )
        self.state = state


class InboundTransfers:
    """Takes every control message for one receiving worker (a `Peer`). Used on one event loop.

    A refused message raises RipresaError to its sender. A violation of the protocol, a wrong
    checksum, a lost lane and a silent sender end the transfer; `sink` hears of each end once.

    Args:
        sink: the engine that stores the payloads.
        transport: makes the receiving ends of lanes; closed together with this object.
        config: limits and timeouts.
        serve: takes what asks this worker to be the sender; None if it has nothing to send.
    """

    def __init__(
        self,
        sink: Sink[AnyManifest],
        transport: Transport,
        config: LaneConfig | None = None,
        serve: Callable[[Pull | EndPull], None] | None = None,
    ) -> None:
        self._sink = sink
        self._serve = serve
        self._transport = transport
        self._config = config or LaneConfig()
        self._lanes = InboundLanes(transport, self._config)
        self._running: dict[str, _Inbound] = {}
        self._ended: OrderedDict[str, _Inbound] = OrderedDict()
        self._withdrawn: OrderedDict[tuple[str, int], str] = OrderedDict()
        self._closed = False
        self._num_corrupt = 0

    async def deliver(self, message: ControlMessage) -> Accept | None:
        """Take one message; see `Peer`."""
        if self._closed and not isinstance(message, Fail | CloseLane | EndPull):
            raise Unavailable("this worker is closing; use another one")
        match message:
            case Offer(manifest):
                return self._offer(manifest)
            case OpenLane(endpoint):
                await self._lanes.open(endpoint)
            case CloseLane(lane_id):
                self._lanes.close(lane_id, "the sender closed it")
            case SendSection():
                await self._section(message)
            case Complete():
                self._complete(message)
            case Fail():
                self._withdraw(message)
            case KeepAlive(transfer_id, generation):
                transfer = self._find(transfer_id, generation)
                self._require_not_failed(transfer)
                self._touch(transfer)
            case Pull() | EndPull():
                if self._serve is None:
                    raise RipresaError(ErrorCode.NOT_FOUND, "this worker sends no cached blocks")
                self._serve(message)
        return None

    def abandon(self, transfer_id: str, reason: str) -> None:
        """This side wants nothing more of a transfer; its sender hears it with its next message."""
        transfer = self._running.get(transfer_id)
        if transfer is not None:
            self._fail(transfer, reason)

    def peer_lost(self, sender: str) -> None:
        """A sender died: its transfers fail now, without waiting for the idle timeout."""
        for transfer in [t for t in self._running.values() if t.manifest.sender == sender]:
            self._fail(transfer, f"{sender} died")
        self._lanes.peer_lost(sender)

    @property
    def num_open_lanes(self) -> int:
        return self._lanes.num_open

    @property
    def num_corrupt(self) -> int:
        """Sections and transfers that were refused for their checksum."""
        return self._num_corrupt

    async def drain(self) -> None:
        """Wait until what ended has also let go of its threads and sockets."""
        arriving = [t.arriving[1] for t in self._all() if t.arriving is not None]
        if arriving:
            await asyncio.wait(arriving)
        await self._lanes.drain()

    def check_integrity(self) -> None:
        """Call when idle and drained.

        Raises:
            RipresaError: something is left over; the message says what.
        """
        left = {
            "transfers": len(self._running),
            "arriving sections": sum(t.arriving is not None for t in self._all()),
            "idle timers": sum(t.idle_timer is not None for t in self._ended.values()),
            "lanes in use": self._lanes.num_in_use,
            "closing lanes": self._lanes.num_closing,
        }
        raise_if_left("inbound transfers", left)

    async def close(self) -> None:
        """Fail what runs, close every lane. Idempotent."""
        self._closed = True
        for transfer in list(self._running.values()):
            self._fail(transfer, "the receiver is closing")
        self._lanes.close_all("the receiver is closing")
        await self.drain()
        self._transport.close()

    def _all(self) -> list[_Inbound]:
        return [*self._running.values(), *self._ended.values()]

    def _offer(self, manifest: AnyManifest) -> Accept:
        transfer_id, generation = manifest.transfer_id, manifest.generation
        known = self._running.get(transfer_id) or self._ended.get(transfer_id)
        if known is not None:
            if known.manifest != manifest:
                raise _refusal(manifest, "was offered before with another manifest")
            self._require_not_failed(known)
            self._touch(known)
            return self._accept(known)
        withdrawn = self._withdrawn.get((transfer_id, generation))
        if withdrawn is not None:
            raise Unavailable(f"transfer {transfer_id} was withdrawn: {withdrawn}")
        superseded = self._running_of_older_generations(manifest)
        first_block = self._sink.open(manifest)
        for other in superseded:
            self._fail(other, f"superseded by generation {generation}")
        self._running[transfer_id] = transfer = _Inbound(manifest, first_block)
        self._touch(transfer)
        return self._accept(transfer)

    def _accept(self, transfer: _Inbound) -> Accept:
        manifest = transfer.manifest
        return Accept(
            manifest.transfer_id,
            manifest.generation,
            self._config.idle_timeout_s,
            transfer.first_block,
        )

    def _running_of_older_generations(self, manifest: AnyManifest) -> list[_Inbound]:
        """Transfers that a manifest replaces; refuses one that is itself stale or a rival."""
        same = [t for t in self._all() if t.manifest.subject == manifest.subject]
        newest = max((t.manifest.generation for t in same), default=manifest.generation)
        if manifest.generation < newest:
            raise _refusal(manifest, f"is stale: generation {newest} of the request is known")
        running = [t for t in same if t.running]
        for other in running:
            if other.manifest.generation == manifest.generation:
                raise _refusal(manifest, f"collides with running {other.manifest.transfer_id}")
        return running

    async def _section(self, message: SendSection) -> None:
        transfer = self._find(message.transfer_id, message.generation)
        if transfer.arriving is not None and transfer.arriving[0] == message:
            await asyncio.shield(transfer.arriving[1])
            return
        if any(message.section == section for section, _ in transfer.stored):
            return
        self._require_running(transfer)
        with self._ends_on_error(transfer):
            self._check_section(transfer, message.section)
        lane = self._lanes.take(message.lane_id)
        if transfer.state is TransferState.OFFERED:
            transfer.move(TransferState.SENDING)
        task = asyncio.get_running_loop().create_task(self._receive(transfer, message, lane))
        task.add_done_callback(_retrieve)
        transfer.arriving = (message, task)
        # The work goes on when only this call is cancelled: its sender then says Fail, or nothing.
        await asyncio.shield(task)

    def _check_section(self, transfer: _Inbound, section: Section) -> None:
        expected = len(transfer.stored)
        wrong: str | None = None
        if transfer.arriving is not None:
            wrong = f"came while section {expected} was arriving"
        elif section.index != expected:
            wrong = f"is out of order: expected section {expected}"
        elif transfer.has_state:
            wrong = "came after the STATE section, which is the last"
        elif section.kind is SectionKind.BLOCKS and (
            section.first_block != transfer.next_block or section.last_block <= section.first_block
        ):
            wrong = (
                f"has blocks {section.first_block}..{section.last_block}: "
                f"expected some from block {transfer.next_block} on"
            )
        else:
            num_bytes = self._sink.section_bytes(transfer.manifest, section)
            if section.num_bytes != num_bytes:
                wrong = f"has {section.num_bytes} bytes: this worker's layout gives {num_bytes}"
        if wrong is not None:
            raise _refusal(transfer.manifest, f"section {section.index} {wrong}")

    async def _receive(self, transfer: _Inbound, message: SendSection, lane: InboundLane) -> None:
        try:
            with self._ends_on_error(transfer):
                payload, checksum = await lane.receive(message.section.num_bytes)
                self._require_running(transfer)
                self._sink.write(transfer.manifest, message.section, payload)
        finally:
            transfer.arriving = None
            self._lanes.give_back(lane)
        transfer.stored.append((message.section, checksum))
        self._touch(transfer)

    def _complete(self, message: Complete) -> None:
        transfer = self._find(message.transfer_id, message.generation)
        self._require_not_failed(transfer)
        agreed = message.checksum == transfer_checksum([c for _, c in transfer.stored])
        if transfer.running:
            with self._ends_on_error(transfer):
                lacks_state = transfer.manifest.has_state and not transfer.has_state
                if transfer.arriving is not None or lacks_state:
                    raise _refusal(transfer.manifest, "was completed before its STATE section")
                if not agreed:
                    raise corrupt(f"transfer {message.transfer_id}")
            self._end(transfer, TransferState.COMPLETE)
            self._sink.complete(transfer.manifest)
        elif not agreed:
            raise _refusal(transfer.manifest, "was complete with another checksum")

    def _withdraw(self, message: Fail) -> None:
        key = (message.transfer_id, message.generation)
        transfer = self._running.get(message.transfer_id)
        if transfer is not None and transfer.manifest.generation == message.generation:
            self._fail(transfer, f"the sender gave up: {message.reason}")
        elif message.transfer_id not in self._ended:
            # It overtook its offer, which must not open anything when it comes.
            _remember(self._withdrawn, key, message.reason)

    @contextmanager
    def _ends_on_error(self, transfer: _Inbound) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if isinstance(error, RipresaError) and error.code is ErrorCode.DATA_LOSS:
                self._num_corrupt += 1
            self._fail(transfer, reason_of(error))
            raise

    def _fail(self, transfer: _Inbound, reason: str) -> None:
        """End a running transfer in FAILED; an ended one stays as it is."""
        if not transfer.running:
            return
        transfer.failure = reason
        self._end(transfer, TransferState.FAILED)
        if transfer.arriving is not None:
            self._lanes.close(transfer.arriving[0].lane_id, reason)
        self._sink.fail(transfer.manifest, reason)

    def _end(self, transfer: _Inbound, state: TransferState) -> None:
        transfer.move(state)
        if transfer.idle_timer is not None:
            transfer.idle_timer.cancel()
            transfer.idle_timer = None
        del self._running[transfer.manifest.transfer_id]
        _remember(self._ended, transfer.manifest.transfer_id, transfer)

    def _touch(self, transfer: _Inbound) -> None:
        """The sender was heard of: its idle time starts anew."""
        if not transfer.running:
            return
        if transfer.idle_timer is not None:
            transfer.idle_timer.cancel()
        transfer.idle_timer = asyncio.get_running_loop().call_later(
            self._config.idle_timeout_s, self._idle, transfer
        )

    def _idle(self, transfer: _Inbound) -> None:
        if transfer.arriving is not None:
            # A section on its way has its own timeouts.
            self._touch(transfer)
        else:
            self._fail(transfer, f"nothing came for {self._config.idle_timeout_s:g} s")

    def _find(self, transfer_id: str, generation: int) -> _Inbound:
        transfer = self._running.get(transfer_id) or self._ended.get(transfer_id)
        if transfer is None:
            raise RipresaError(
                ErrorCode.NOT_FOUND, f"transfer {transfer_id} was never offered or is forgotten"
            )
        if transfer.manifest.generation != generation:
            raise _refusal(transfer.manifest, f"got a message of generation {generation}")
        return transfer

    def _require_not_failed(self, transfer: _Inbound) -> None:
        if transfer.state is TransferState.FAILED:
            raise Unavailable(
                f"transfer {transfer.manifest.transfer_id} failed: {transfer.failure}"
            )

    def _require_running(self, transfer: _Inbound) -> None:
        self._require_not_failed(transfer)
        if transfer.state is TransferState.COMPLETE:
            raise _refusal(transfer.manifest, "is complete; nothing more can come")


def _refusal(manifest: AnyManifest, why: str) -> RipresaError:
    return RipresaError(
        ErrorCode.FAILED_PRECONDITION,
        f"transfer {manifest.transfer_id} (generation {manifest.generation}) {why}",
    )


def _retrieve(task: asyncio.Task[None]) -> None:
    """The caller of a section may be gone; its transfer has recorded the failure."""
    if not task.cancelled():
        task.exception()


def _remember(memory: OrderedDict[K, V], key: K, value: V) -> None:
    memory[key] = value
    if len(memory) > _MAX_REMEMBERED:
        memory.popitem(last=False)
