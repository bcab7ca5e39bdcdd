"""What do transfer tests put on both sides? A recording sink, a control way, small manifests."""

from __future__ import annotations

import asyncio
import pickle
import struct
import threading
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from ripresa.workers.errors import ErrorCode, RipresaError
from ripresa.workers.replay import TailVariant, cold_recipe
from ripresa.workers.transfer.base import (
    Accept,
    ControlMessage,
    Manifest,
    Peer,
    Section,
    SectionKind,
)
from ripresa.workers.transfer.checksum import payload_checksum

T = TypeVar("T")

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
    """A sink that keeps what it was told; `written` holds checksums of what really arrived."""

    block_bytes: int = BLOCK_BYTES
    opened: list[str] = field(default_factory=list)
    written: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    ended: dict[str, list[str]] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def open(self, manifest: Manifest) -> None:
        if manifest.layout_digest != DIGEST:
            raise RipresaError(ErrorCode.FAILED_PRECONDITION, "the layouts differ")
        self.opened.append(manifest.transfer_id)

    def section_bytes(self, manifest: Manifest, section: Section) -> int:
        if section.kind is SectionKind.STATE:
            return STATE_BYTES
        return (section.last_block - section.first_block) * self.block_bytes

    def write(self, manifest: Manifest, section: Section, payload: torch.Tensor) -> None:
        record = (section.index, payload_checksum(payload))
        self.written.setdefault(manifest.transfer_id, []).append(record)

    def complete(self, manifest: Manifest) -> None:
        self._end(manifest, "complete")

    def fail(self, manifest: Manifest, reason: str) -> None:
        self._end(manifest, f"failed: {reason}")

    def _end(self, manifest: Manifest, how: str) -> None:
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


class ThreadPeer:
    """The control way to a receiver on another loop."""

    def __init__(self, thread: LoopThread, receiver: Peer) -> None:
        self._thread = thread
        self._receiver = receiver

    async def deliver(self, message: ControlMessage) -> Accept | None:
        # Pickled like on every real way: what crosses is a copy.
        copied = pickle.loads(pickle.dumps(message))
        return await self._thread.run(self._receiver.deliver(copied))  # type: ignore[arg-type]


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
