"""How do bytes move between two worker processes? One two-rank process group per lane.

`gloo` and `nccl` are the same code. Every blocking call runs in the lane's own thread, without
the interpreter lock, and ends by a timeout: a thread that waits for a peer cannot be woken.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import torch

from ripresa.workers.errors import ConfigError, RipresaError, Unavailable
from ripresa.workers.transfer.base import Lane, LaneConfig, LaneEndpoint
from ripresa.workers.transfer.checksum import CHECKSUM_BYTES, RunningChecksum, corrupt
from ripresa.workers.transfer.process_group import (
    RECEIVER_RANK,
    SENDER_RANK,
    LaneGroup,
    StoreServer,
    Work,
    require_nccl,
)

_CHUNKS_UNDER_WAY = 4

T = TypeVar("T")


class ProcessGroupTransport:
    """Makes the lanes of one worker over Gloo or NCCL.

    Args:
        name: "gloo" (payloads on or staged to the host) or "nccl" (payloads on the GPU).
        host: address at which the other workers reach this one.
        config: chunk size and timeouts.
        device: where payloads are staged; the host for gloo, the worker's GPU for nccl.

    Raises:
        ConfigError: `nccl` without NCCL, without a GPU, or with an error handling mode that tears
            the process down when a peer dies.
    """

    def __init__(
        self,
        name: str,
        host: str,
        config: LaneConfig | None = None,
        device: torch.device | None = None,
    ) -> None:
        if name not in ("gloo", "nccl"):
            raise ConfigError("lanes.transport", f"{name!r} is not a process group; use gloo, nccl")
        self._name = name
        self._host = host
        self._config = config or LaneConfig()
        self._device = device or torch.device("cuda" if name == "nccl" else "cpu")
        if name == "nccl":
            require_nccl(self._device)
        self.store: StoreServer | None = None

    @property
    def name(self) -> str:
        return self._name

    def address(self) -> tuple[str, int]:
        """This worker's store, started on first use."""
        if self.store is None:
            self.store = StoreServer(self._host)
        return self.store.address

    def sending_end(self, endpoint: LaneEndpoint) -> Lane:
        return self._end(endpoint, SENDER_RANK)

    def receiving_end(self, endpoint: LaneEndpoint) -> Lane:
        return self._end(endpoint, RECEIVER_RANK)

    def close(self) -> None:
        self.store = None

    def _end(self, endpoint: LaneEndpoint, rank: int) -> Lane:
        endpoint.require_transport(self._name)
        return ProcessGroupLane(endpoint, rank, self._host, self._device, self._config)


class ProcessGroupLane:
    """One end of a lane; see `Lane` for the contract."""

    def __init__(
        self,
        endpoint: LaneEndpoint,
        rank: int,
        host: str,
        device: torch.device,
        config: LaneConfig,
    ) -> None:
        self._endpoint = endpoint
        self._rank = rank
        self._host = host
        self._device = device
        self._config = config
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"lane {endpoint.lane_id}")
        self._stop = threading.Event()
        self._lost: asyncio.Future[str] | None = None
        self._closing: Future[None] | None = None
        self._group: LaneGroup | None = None
        self._staging = torch.empty(0, dtype=torch.uint8, device=device)

    async def open(self) -> None:
        await self._in_thread(self._meet)

    async def send(self, payload: torch.Tensor) -> int:
        return await self._in_thread(lambda: self._send_chunks(payload))

    async def receive(self, num_bytes: int) -> tuple[torch.Tensor, int]:
        return await self._in_thread(lambda: self._receive_chunks(num_bytes))

    def discard(self, reason: str) -> None:
        if self._closing is not None:
            return
        self._stop.set()
        self._closing = self._thread.submit(self._tear_down)
        self._thread.shutdown(wait=False)
        if self._lost is not None and not self._lost.done():
            self._lost.set_result(reason)

    async def wait_closed(self) -> None:
        if self._closing is None:
            raise RuntimeError(f"lane {self._endpoint.lane_id} was not discarded")
        await asyncio.wrap_future(self._closing)
        # The thread has nothing left to do and ends by itself: this waits for microseconds.
        self._thread.shutdown(wait=True)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        if self._closing is not None:
            raise Unavailable(f"lane {self._endpoint.lane_id} is closed")
        if self._lost is None:
            self._lost = asyncio.get_running_loop().create_future()
        running = asyncio.wrap_future(self._thread.submit(work))
        running.add_done_callback(_retrieve)
        either: set[asyncio.Future[Any]] = {running, self._lost}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self.discard("cancelled")
            raise
        if not running.done():
            raise Unavailable(f"lane {self._endpoint.lane_id} was lost: {self._lost.result()}")
        try:
            return running.result()
        except RipresaError as error:
            self.discard(error.message)
            raise

    # Everything below runs in the lane's thread.

    def _meet(self) -> None:
        failure = None
        try:
            self._group = LaneGroup(
                self._endpoint, self._rank, self._host, self._config.open_timeout_s
            )
        except RuntimeError as error:
            failure = str(error)
        if failure is not None:
            raise self._unavailable("the other end did not come", failure)

    def _send_chunks(self, payload: torch.Tensor) -> int:
        """Send the payload in chunks, hashing each while it leaves, then the checksum."""
        if payload.device != self._device:
            payload = self._stage(payload.numel()).copy_(payload)
        checksum = RunningChecksum()
        under_way: list[Work] = []
        for chunk in torch.split(payload, self._endpoint.chunk_bytes):
            if len(under_way) == _CHUNKS_UNDER_WAY:
                self._wait_oldest(under_way)
            self._post(under_way, chunk)
            checksum.update(chunk)
        trailer = checksum.to_bytes().to(self._device)
        self._post(under_way, trailer)
        while under_way:
            self._wait_oldest(under_way)
        return checksum.value()

    def _receive_chunks(self, num_bytes: int) -> tuple[torch.Tensor, int]:
        """Receive what `_send_chunks` sends, hashing each chunk while the next one arrives."""
        payload = self._stage(num_bytes)
        chunks = torch.split(payload, self._endpoint.chunk_bytes)
        trailer = torch.empty(CHECKSUM_BYTES, dtype=torch.uint8, device=self._device)
        coming = [*chunks, trailer]
        checksum = RunningChecksum()
        under_way: list[Work] = []
        for chunk in chunks:
            while coming and len(under_way) < _CHUNKS_UNDER_WAY:
                self._post(under_way, coming.pop(0))
            self._wait_oldest(under_way)
            checksum.update(chunk)
        while coming or under_way:
            if coming:
                self._post(under_way, coming.pop(0))
            self._wait_oldest(under_way)
        if not torch.equal(trailer.cpu(), checksum.to_bytes()):
            raise corrupt(f"a payload of lane {self._endpoint.lane_id}")
        return payload, checksum.value()

    def _stage(self, num_bytes: int) -> torch.Tensor:
        if self._staging.numel() < num_bytes:
            self._staging = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return self._staging[:num_bytes]

    def _post(self, under_way: list[Work], chunk: torch.Tensor) -> None:
        assert self._group is not None, "a lane is opened before it is used"
        failure = None
        try:
            under_way.append(self._group.move(chunk))
        except RuntimeError as error:
            failure = str(error)
        if failure is not None:
            under_way.clear()
            raise self._unavailable("the connection broke", failure)

    def _wait_oldest(self, under_way: list[Work]) -> None:
        if self._stop.is_set():
            under_way.clear()
            raise self._unavailable("given up", "the lane was discarded")
        failure = None
        try:
            under_way.pop(0).wait(timedelta(seconds=self._config.chunk_timeout_s))
        except RuntimeError as error:
            failure = str(error)
        if failure is not None:
            # What is under way holds sockets; an exception's traceback must not keep it alive.
            under_way.clear()
            raise self._unavailable("the other end is gone or stuck", failure)

    def _tear_down(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None
        self._staging = torch.empty(0, dtype=torch.uint8, device=self._device)

    def _unavailable(self, what: str, detail: str) -> Unavailable:
        return Unavailable(f"lane {self._endpoint.lane_id}: {what} ({detail})")


def _retrieve(future: asyncio.Future[T]) -> None:
    """A lane that was given up reports by `_lost`; its thread's own error is no news then."""
    if not future.cancelled():
        future.exception()


def gloo_transport(
    host: str, device: torch.device | None = None, config: LaneConfig | None = None
) -> ProcessGroupTransport:
    """Lanes through the host's memory, whatever device the payloads come from."""
    return ProcessGroupTransport("gloo", host, config)


def nccl_transport(
    host: str, device: torch.device | None = None, config: LaneConfig | None = None
) -> ProcessGroupTransport:
    """Lanes between GPUs."""
    return ProcessGroupTransport("nccl", host, config, device)
