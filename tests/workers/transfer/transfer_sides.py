"""What do transfer tests put on both sides? A recording sink, a control way, small manifests."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pytest
import torch

from ripresa.workers.address import WorkerAddress, WorkerKind
from ripresa.workers.errors import ErrorCode, RipresaError
from ripresa.workers.replay import TailVariant, cold_recipe
from ripresa.workers.transfer.base import (
    Accept,
    ControlMessage,
    LaneConfig,
    Manifest,
    Peer,
    Section,
    SectionKind,
    Transport,
)
from ripresa.workers.transfer.checksum import CHECKSUM_BYTES, payload_checksum
from ripresa.workers.transfer.faults import Fault, FaultyPeer
from ripresa.workers.transfer.inbound import InboundTransfers
from ripresa.workers.transfer.loopback import LoopbackTransport
from ripresa.workers.transfer.outbound import OutboundTransfers
from ripresa.workers.transfer.process_group import SENDER_RANK, LaneGroup, Work
from ripresa.workers.transfer.registry import create_transport

T = TypeVar("T")

DECODER = WorkerAddress("decoder-0", WorkerKind.DECODE)
DIGEST = b"layout of the tests."
BLOCK_BYTES = 3_001
STATE_BYTES = 7_777


def manifest(transfer_id: str, *, generation: int = 0, request_id: str | None = None) -> Manifest:
    return Manifest(
        transfer_id=transfer_id,
        request_id=request_id or f"request of {transfer_id}",
        generation=generation,
        sender="encoder-0",
        layout_digest=DIGEST,
        num_tokens=37,
        first_block=0,
        recipe=cold_recipe(37, 8, TailVariant.FLOORED, 0),
    )


def blocks(index: int, first: int, last: int, block_bytes: int = BLOCK_BYTES) -> Section:
    return Section(index, SectionKind.BLOCKS, first, last, (last - first) * block_bytes)


def state(index: int) -> Section:
    return Section(index, SectionKind.STATE, 0, 0, STATE_BYTES)


def payload(section: Section, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1_000 * seed + section.index)
    return torch.randint(0, 256, (section.num_bytes,), dtype=torch.uint8, generator=generator)


@dataclass
class RecordingSink:
    """A sink that keeps what it was told; `written` holds checksums of what really arrived.

    `violations` lists calls that the contract forbids: before `open`, or after the end.
    `keep_record` false drops payloads unread (benchmarks).
    """

    block_bytes: int = BLOCK_BYTES
    keep_record: bool = True
    opened: list[str] = field(default_factory=list)
    written: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    ended: dict[str, list[str]] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def open(self, manifest: Manifest) -> int:
        if manifest.layout_digest != DIGEST:
            raise RipresaError(ErrorCode.FAILED_PRECONDITION, "the layouts differ")
        if manifest.transfer_id in self.opened:
            self.violations.append(f"open again: {manifest.transfer_id}")
        self.opened.append(manifest.transfer_id)
        return manifest.first_block

    def section_bytes(self, manifest: Manifest, section: Section) -> int:
        if section.kind is SectionKind.STATE:
            return STATE_BYTES
        return (section.last_block - section.first_block) * self.block_bytes

    def write(self, manifest: Manifest, section: Section, payload: torch.Tensor) -> None:
        self._must_be_open("write", manifest)
        if not self.keep_record:
            return
        record = (section.index, payload_checksum(payload))
        self.written.setdefault(manifest.transfer_id, []).append(record)
        self.changed.set()

    def complete(self, manifest: Manifest) -> None:
        self._end(manifest, "complete")

    def fail(self, manifest: Manifest, reason: str) -> None:
        self._end(manifest, f"failed: {reason}")

    def _must_be_open(self, call: str, manifest: Manifest) -> None:
        if manifest.transfer_id not in self.opened or manifest.transfer_id in self.ended:
            self.violations.append(f"{call}: {manifest.transfer_id}")

    def _end(self, manifest: Manifest, how: str) -> None:
        self._must_be_open(how, manifest)
        self.ended.setdefault(manifest.transfer_id, []).append(how)
        self.changed.set()

    async def end_of(self, transfer_id: str) -> str:
        """How a transfer ended, once it has."""
        while transfer_id not in self.ended:
            self.changed.clear()
            await self.changed.wait()
        return self.ended[transfer_id][0]


class LoopThread:
    """An event loop in a thread of its own: the other side of an in-process test."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


_LENGTH = struct.Struct("<I")


async def _read_frame(reader: asyncio.StreamReader) -> Any:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return pickle.loads(await reader.readexactly(length))


def _write_frame(writer: asyncio.StreamWriter, value: object) -> None:
    frame = pickle.dumps(value)
    writer.write(_LENGTH.pack(len(frame)) + frame)


class StreamServer:
    """Answers named calls over a socket, several at a time: the control way between processes."""

    def __init__(self, calls: dict[str, Callable[..., Awaitable[Any]]]) -> None:
        self._calls = calls
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            while True:
                number, name, arguments = await _read_frame(reader)
                answer = asyncio.create_task(self._answer(writer, number, name, arguments))
                self._tasks.add(answer)
                answer.add_done_callback(self._tasks.discard)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            writer.close()

    async def _answer(
        self, writer: asyncio.StreamWriter, number: int, name: str, arguments: tuple[Any, ...]
    ) -> None:
        try:
            result, error = await self._calls[name](*arguments), None
        except RipresaError as refusal:
            result, error = None, refusal
        if not writer.is_closing():
            _write_frame(writer, (number, result, error))


class StreamClient:
    """The calling end; a `Peer` whose `deliver` is the call of that name."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._next = 0
        self._lost: Exception | None = None
        self._listener = asyncio.create_task(self._listen())

    @classmethod
    async def connect(cls, port: int) -> StreamClient:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def call(self, name: str, *arguments: Any) -> Any:
        if self._lost is not None:
            raise ConnectionError("the peer is gone") from self._lost
        number, self._next = self._next, self._next + 1
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        _write_frame(self._writer, (number, name, arguments))
        try:
            return await answer
        finally:
            self._waiting.pop(number, None)

    async def deliver(self, message: ControlMessage) -> Accept | None:
        accept: Accept | None = await self.call("deliver", message)
        return accept

    async def close(self) -> None:
        self._writer.close()
        self._listener.cancel()
        await asyncio.gather(self._listener, return_exceptions=True)

    async def _listen(self) -> None:
        try:
            while True:
                number, result, error = await _read_frame(self._reader)
                answer = self._waiting.get(number)
                if answer is None or answer.done():
                    continue
                if error is None:
                    answer.set_result(result)
                else:
                    answer.set_exception(error)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            self._lost = error
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(ConnectionError("the peer is gone"))


class Sides(Protocol):
    """A sending backend with one receiver, "decoder-0", wherever that one lives."""

    backend: OutboundTransfers
    peer: FaultyPeer
    faults: dict[int, Fault]

    async def receiver(self, name: str, *arguments: Any) -> Any:
        """Call one of `receiver_calls` at the receiver."""

    def damage_payloads(self, patch: pytest.MonkeyPatch) -> None:
        """One bit of every payload changes after it was hashed and before it arrives."""

    async def close(self) -> None: ...


def receiver_calls(
    inbound: InboundTransfers, sink: RecordingSink
) -> dict[str, Callable[..., Awaitable[Any]]]:
    """What a test may ask of a receiver."""

    async def opened() -> list[str]:
        return sink.opened

    async def written(transfer_id: str) -> list[tuple[int, int]]:
        return sink.written.get(transfer_id, [])

    async def ends(transfer_id: str) -> list[str]:
        return sink.ended.get(transfer_id, [])

    async def settle() -> None:
        await inbound.drain()
        inbound.check_integrity()
        assert not sink.violations

    async def peer_lost(sender: str) -> None:
        inbound.peer_lost(sender)

    calls = (opened, written, ends, settle, peer_lost, leftovers, sink.end_of, inbound.deliver)
    return {call.__name__: call for call in calls}


Leftovers = tuple[int, int]


async def leftovers() -> Leftovers:
    """How many threads and how many descriptors this process has now."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


async def leaked_since(before: Leftovers, count: Callable[[], Awaitable[Leftovers]]) -> Leftovers:
    """How many more threads and descriptors a process has than before, which may take a while.

    The kernel lists a thread for a moment after it was joined. Fewer than before are no leak
    either: what earlier tests left to the garbage collector goes at any time.
    """
    until = time.monotonic() + 10
    while True:
        threads, descriptors = await count()
        more = max(0, threads - before[0]), max(0, descriptors - before[1])
        if more == (0, 0) or time.monotonic() > until:
            return more
        await asyncio.sleep(0.01)


class _FaultySides:
    """What all sides share: a backend whose control way has faults."""

    def __init__(self, peer: Peer, transport: Transport, config: LaneConfig) -> None:
        self.faults: dict[int, Fault] = {}
        self.peer = FaultyPeer(peer, self.faults)
        self.backend = OutboundTransfers("encoder-0", lambda _: self.peer, transport, config)

    def damage_payloads(self, patch: pytest.MonkeyPatch) -> None:
        """On a gloo lane: the bytes that really leave differ from those that were hashed."""
        move = LaneGroup.move

        def damaging(group: LaneGroup, chunk: torch.Tensor) -> Work:
            is_payload = group.rank == SENDER_RANK and chunk.numel() > CHECKSUM_BYTES
            return move(group, flipped(chunk) if is_payload else chunk)

        patch.setattr(LaneGroup, "move", damaging)


def flipped(payload: torch.Tensor) -> torch.Tensor:
    """A copy with one bit changed in its middle."""
    copy = payload.clone()
    copy[copy.numel() // 2] ^= 1
    return copy


class LoopbackSides(_FaultySides):
    """Both sides on one loop."""

    def __init__(self, config: LaneConfig) -> None:
        self._transport = LoopbackTransport(config)
        sink = RecordingSink()
        self.inbound = InboundTransfers(sink, self._transport, config)
        self._calls = receiver_calls(self.inbound, sink)
        super().__init__(self.inbound, self._transport, config)

    async def receiver(self, name: str, *arguments: Any) -> Any:
        return await self._calls[name](*arguments)

    def damage_payloads(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(self._transport, "damage", flipped)

    async def close(self) -> None:
        await self.backend.close()
        await self.inbound.close()


class ThreadSides(_FaultySides):
    """Two loops in one process; bytes cross a lane of a real transport."""

    def __init__(self, config: LaneConfig, transport: str = "gloo") -> None:
        self._thread = LoopThread()
        self._config = config
        self._name = transport
        self.sending = create_transport(transport, "127.0.0.1", torch.device("cpu"), config)
        super().__init__(self, self.sending, config)

    async def start(self) -> None:
        async def build() -> InboundTransfers:
            receiving = create_transport(self._name, "127.0.0.1", torch.device("cpu"), self._config)
            sink = RecordingSink()
            inbound = InboundTransfers(sink, receiving, self._config)
            self._calls = receiver_calls(inbound, sink)
            return inbound

        self.inbound = await self._thread.run(build())

    async def deliver(self, message: ControlMessage) -> Accept | None:
        # Pickled like on every real way: what crosses is a copy.
        accept: Accept | None = await self.receiver("deliver", pickle.loads(pickle.dumps(message)))
        return accept

    async def receiver(self, name: str, *arguments: Any) -> Any:
        async def call() -> Any:
            return await self._calls[name](*arguments)

        return await self._thread.run(call())

    async def close(self) -> None:
        await self.backend.close()
        await self._thread.run(self.inbound.close())
        self._thread.stop()


class ObjectStoreSides(ThreadSides):
    """Two loops in one process; bytes go through Ray."""

    def __init__(self, config: LaneConfig) -> None:
        super().__init__(config, "object_store")

    def damage_payloads(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(self.sending, "damage", flipped)


class ProcessSides(_FaultySides):
    """The receiver is another process."""

    def __init__(self, client: StreamClient, config: LaneConfig) -> None:
        self._client = client
        transport = create_transport("gloo", "127.0.0.1", torch.device("cpu"), config)
        super().__init__(client, transport, config)

    @classmethod
    async def connect(cls, port: int, config: LaneConfig) -> ProcessSides:
        return cls(await StreamClient.connect(port), config)

    async def receiver(self, name: str, *arguments: Any) -> Any:
        return await self._client.call(name, *arguments)

    async def close(self) -> None:
        await self.backend.close()
        await self._client.close()


class ChildProcess:
    """A Python script beside this file, as a process that ends with its standard input."""

    def __init__(self, script: str, **options: object) -> None:
        folder = Path(__file__).parent
        self._process = subprocess.Popen(
            [sys.executable, str(folder / script), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.first_line = self._process.stdout.readline().strip()

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, *words: str) -> None:
        """Write one line of JSON to its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self) -> int:
        """Its exit status; the caller has ended it, or it ends by itself."""
        return self._process.wait(30)

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.wait(30)
        assert self._process.stdout is not None
        self._process.stdout.close()
