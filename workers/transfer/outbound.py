"""How does a prompt's state leave this worker? The sender half of every transfer backend."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ripresa.workers.address import WorkerAddress
from ripresa.workers.errors import ErrorCode, InvalidArgument, RipresaError, Unavailable, reason_of
from ripresa.workers.transfer.base import (
    TRANSITIONS,
    Accept,
    AnyManifest,
    Complete,
    Fail,
    KeepAlive,
    LaneConfig,
    LaneNotOpen,
    Offer,
    OutboundTransfer,
    Peer,
    Section,
    SendSection,
    TransferState,
    Transport,
)
from ripresa.workers.transfer.byte_budget import ByteBudget
from ripresa.workers.transfer.checksum import transfer_checksum
from ripresa.workers.transfer.control import Notices, deliver
from ripresa.workers.transfer.integrity import raise_if_left
from ripresa.workers.transfer.lane_pool import LanePool, OpenedLane

_KEEP_ALIVES_PER_TIMEOUT = 3


class OutboundTransfers:
    """The `TransferBackend` of one worker. Used on one event loop.

    Args:
        worker_id: this worker.
        resolve: the control way to a receiver; raises Unavailable for one that is not known.
        transport: makes the lanes; closed together with this object.
        config: limits and timeouts.
    """

    def __init__(
        self,
        worker_id: str,
        resolve: Callable[[WorkerAddress], Peer],
        transport: Transport,
        config: LaneConfig | None = None,
    ) -> None:
        self._config = config or LaneConfig()
        self._resolve = resolve
        self._transport = transport
        self._notices = Notices(self._config.control_timeout_s)
        self._lanes = LanePool(worker_id, transport, self._config, self._notices)
        self._budget = ByteBudget(self._config.max_bytes_in_flight)
        self._running: set[_Outbound] = set()
        self._closed = False

    async def offer(self, receiver: WorkerAddress, manifest: AnyManifest) -> OutboundTransfer:
        """Offer a manifest; returns once the receiver has accepted it.

        Raises:
            RipresaError: the receiver's refusal.
            Unavailable: the receiver cannot be reached, or this backend is closed.
        """
        if self._closed:
            raise Unavailable("the worker closed its transfers; use another worker")
        transfer = _Outbound(
            receiver.worker_id,
            self._resolve(receiver),
            manifest,
            self._config,
            self._lanes,
            self._budget,
            self._notices,
            self._running.discard,
        )
        self._running.add(transfer)
        await transfer.offer()
        return transfer

    def peer_lost(self, receiver: str) -> None:
        """The receiver died: its transfers fail now, without waiting for a timeout."""
        for transfer in [t for t in self._running if t.receiver == receiver]:
            transfer.abandon(f"{receiver} died", tell_peer=False)
        self._lanes.peer_lost(receiver)

    @property
    def num_open_lanes(self) -> int:
        return self._lanes.num_open

    async def drain(self) -> None:
        """Wait until what ended has also let go of its threads, sockets and messages."""
        await self._notices.drain()
        await self._lanes.drain()

    def check_integrity(self) -> None:
        """Call when idle and drained.

        Raises:
            RipresaError: something is left over; the message says what.
        """
        left = {
            "transfers": len(self._running),
            "lane users": self._lanes.num_users,
            "closing lanes": self._lanes.num_closing,
            "bytes in flight": self._budget.held_bytes,
            "waits for bytes": self._budget.num_waiting,
            "notices": len(self._notices),
        }
        raise_if_left("outbound transfers", left)

    async def close(self) -> None:
        self._closed = True
        for transfer in list(self._running):
            transfer.abandon("the sender is closing")
        self._lanes.close()
        await self.drain()
        self._transport.close()


class _Outbound:
    """One transfer; see `OutboundTransfer` for the contract."""

    def __init__(
        self,
        receiver: str,
        peer: Peer,
        manifest: AnyManifest,
        config: LaneConfig,
        lanes: LanePool,
        budget: ByteBudget,
        notices: Notices,
        on_end: Callable[[_Outbound], None],
    ) -> None:
        self.receiver = receiver
        self._peer = peer
        self._manifest = manifest
        self._config = config
        self._lanes = lanes
        self._budget = budget
        self._notices = notices
        self._on_end = on_end
        self._state = TransferState.OFFERED
        self._failure: str | None = None
        self._order = asyncio.Lock()
        self._checksums: list[int] = []
        self._num_bytes_sent = 0
        self._first_block = manifest.first_block
        self._keep_alive: asyncio.Task[None] | None = None
        self._last_message = 0.0

    @property
    def state(self) -> TransferState:
        return self._state

    @property
    def num_bytes_sent(self) -> int:
        return self._num_bytes_sent

    @property
    def first_block(self) -> int:
        return self._first_block

    async def offer(self) -> None:
        with self._ends_on_error():
            accept = await deliver(
                self._peer, Offer(self._manifest), self._config.control_timeout_s
            )
            if not isinstance(accept, Accept):
                raise Unavailable(f"{self.receiver} answered an offer by {accept!r}")
            self._require_running()
        self._first_block = accept.first_block
        self._touch()
        self._keep_alive = asyncio.get_running_loop().create_task(
            self._say_alive(accept.idle_timeout_s / _KEEP_ALIVES_PER_TIMEOUT)
        )

    async def send(self, section: Section, payload: torch.Tensor) -> None:
        with self._ends_on_error():
            async with self._order:
                self._require_running()
                _check_payload(section, payload)
                self._state = TransferState.SENDING
                checksum = await self._cross(section, payload)
                self._require_running()
                self._checksums.append(checksum)
                self._num_bytes_sent += section.num_bytes
                self._touch()

    async def complete(self) -> None:
        with self._ends_on_error():
            async with self._order:
                self._require_running()
                message = Complete(
                    self._manifest.transfer_id,
                    self._manifest.generation,
                    transfer_checksum(self._checksums),
                )
                await deliver(self._peer, message, self._config.control_timeout_s)
                self._require_running()
                self._end(TransferState.COMPLETE)

    async def fail(self, reason: str) -> None:
        notice = self.abandon(reason)
        if notice is not None:
            await asyncio.shield(notice)

    def abandon(self, reason: str, tell_peer: bool = True) -> asyncio.Task[None] | None:
        """End in FAILED without waiting; returns the notice to the receiver if one is sent."""
        if TransferState.FAILED not in TRANSITIONS[self._state]:
            return None
        self._failure = reason
        self._end(TransferState.FAILED)
        if not tell_peer:
            return None
        manifest = self._manifest
        return self._notices.post(
            self._peer, Fail(manifest.transfer_id, manifest.generation, reason)
        )

    @contextmanager
    def _ends_on_error(self) -> Iterator[None]:
        """Any error, cancellation included, ends the transfer in FAILED."""
        try:
            yield
        except asyncio.CancelledError:
            self.abandon("cancelled")
            raise
        except RipresaError as error:
            if self._state is TransferState.FAILED:
                # It was ended from outside, which broke the lane: the reason, not the symptom.
                raise self._failed() from error
            self.abandon(str(error))
            raise
        except BaseException as error:
            self.abandon(reason_of(error))
            raise

    async def _cross(self, section: Section, payload: torch.Tensor) -> int:
        """Move one section, over a new lane if the receiver closed the old one when idle."""
        async with self._lanes.section(self.receiver, self._peer) as turn:
            opened = await turn.lane()
            async with self._budget.hold(section.num_bytes):
                self._require_running()
                try:
                    return await self._exchange(opened, section, payload)
                except LaneNotOpen as error:
                    # It has read nothing of this section. A new lane stays until its first use.
                    turn.lose(str(error))
                    return await self._exchange(await turn.lane(), section, payload)

    async def _exchange(self, opened: OpenedLane, section: Section, payload: torch.Tensor) -> int:
        """Move the payload while its control message is under way; returns its checksum."""
        message = SendSection(
            self._manifest.transfer_id,
            self._manifest.generation,
            opened.endpoint.lane_id,
            section,
        )
        loop = asyncio.get_running_loop()
        # The receiver answers after the payload's last chunk, however long the payload takes.
        answer = loop.create_task(_answer(self._peer, message))
        moved = loop.create_task(opened.lane.send(payload))
        try:
            await asyncio.wait({answer, moved}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                # The bytes have left, or the lane broke. The receiver's word says more than the
                # lane's error, but only a successful payload is worth a long wait.
                broken = moved.exception() is not None
                patience = (
                    self._config.chunk_timeout_s if broken else self._config.control_timeout_s
                )
                await asyncio.wait({answer}, timeout=patience)
            if answer.done():
                answer.result()
            checksum = await moved
            if not answer.done():
                raise Unavailable(f"{self.receiver} took a section but did not confirm it")
            return checksum
        finally:
            running = [task for task in (answer, moved) if task.cancel()]
            await asyncio.gather(*running, return_exceptions=True)

    async def _say_alive(self, period_s: float) -> None:
        loop = asyncio.get_running_loop()
        message = KeepAlive(self._manifest.transfer_id, self._manifest.generation)
        while True:
            await asyncio.sleep(self._last_message + period_s - loop.time())
            if loop.time() < self._last_message + period_s:
                continue
            self._touch()
            try:
                await deliver(self._peer, message, self._config.control_timeout_s)
            except RipresaError as error:
                self._keep_alive = None
                self.abandon(str(error))
                return

    def _touch(self) -> None:
        self._last_message = asyncio.get_running_loop().time()

    def _require_running(self) -> None:
        if self._state is TransferState.FAILED:
            raise self._failed()
        if self._state is TransferState.COMPLETE:
            raise RipresaError(
                ErrorCode.FAILED_PRECONDITION,
                f"transfer {self._manifest.transfer_id} is complete; nothing more can be sent",
            )

    def _failed(self) -> Unavailable:
        return Unavailable(f"transfer {self._manifest.transfer_id} failed: {self._failure}")

    def _end(self, state: TransferState) -> None:
        self._state = state
        if self._keep_alive is not None:
            self._keep_alive.cancel()
            self._keep_alive = None
        self._on_end(self)


async def _answer(peer: Peer, message: SendSection) -> None:
    await deliver(peer, message, None)


def _check_payload(section: Section, payload: torch.Tensor) -> None:
    if payload.dtype != torch.uint8 or payload.dim() != 1 or not payload.is_contiguous():
        raise InvalidArgument("payload", "must be a contiguous uint8 vector")
    if payload.numel() != section.num_bytes:
        raise InvalidArgument(
            "payload", f"has {payload.numel()} bytes, the section says {section.num_bytes}"
        )
