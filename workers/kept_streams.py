"""How does a stream outlive its reader? A decode worker keeps its events and lets others read them.

    engine.generate ──▶ task ──▶ kept events ──▶ reader (the gateway that asked)
                                             ──▶ reader (another one, which resumes)

A gateway that dies looks to its worker exactly like one that closes its call. So the end of a call
ends no work: the reader says goodbye where it means that (`let_go`). Without a goodbye the stream
goes on, to its end or its deadline.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from ripresa.workers.detached_calls import Goodbyes
from ripresa.workers.errors import ErrorCode, RipresaError
from ripresa.workers.replay import Recipe
from ripresa.workers.request import (
    Bringing,
    EngineEvent,
    Failed,
    Finished,
    GenerationRequest,
    StreamTicket,
    Tokens,
)

logger = logging.getLogger(__name__)

EVENT_BYTES = 200
TOKEN_BYTES = 40
LOGPROB_BYTES = 80
"""What kept events take, about: each, for a token of it, for each of its log probabilities."""


class Engine(Protocol):
    """What runs the requests."""

    def generate(
        self, request: GenerationRequest, *, local: bool
    ) -> AsyncGenerator[EngineEvent, None]:
        """See `DecodeEngine.generate`."""


@dataclass(frozen=True, slots=True)
class KeptPrompt:
    """What a kept stream goes on from, in any process.

    Attributes:
        ticket: as it came with the request.
        generation: of the execution whose events are kept.
        token_ids: the prompt.
        recipe: if it was fixed when the execution began.
        is_good: it runs, or has finished: no newer execution of it is needed.
    """

    ticket: StreamTicket
    generation: int
    token_ids: tuple[int, ...]
    recipe: Recipe | None
    is_good: bool


class _Stream:
    """One execution's events, from the `base`th on.

    Attributes:
        readers: who reads it now, and the next event that each will get.
        known_readers: these and those that have stopped.
        is_kept: a new reader may begin at its first event.
    """

    def __init__(self, request: GenerationRequest, ticket: StreamTicket) -> None:
        self.request = request
        self.ticket = ticket
        self.events: list[EngineEvent] = []
        self.base = 0
        self.num_bytes = 4 * request.num_tokens + len(ticket.origin)
        self.readers: dict[str, int] = {}
        self.known_readers: set[str] = set()
        self.is_kept = True
        self.is_over = False
        self.was_reserved = False
        self.let_go = False
        self.task: asyncio.Task[None] | None = None
        self.expiry: asyncio.TimerHandle | None = None
        self._grown = asyncio.Event()

    @property
    def is_good(self) -> bool:
        if not self.is_over:
            return not self.let_go
        return bool(self.events) and isinstance(self.events[-1], Finished)

    def append(self, event: EngineEvent) -> None:
        self.events.append(event)
        self.num_bytes += _size(event)
        self._tell()

    def end(self) -> None:
        self.is_over = True
        self._tell()

    def trim(self) -> None:
        """Forget what every reader has read."""
        position = min(self.readers.values(), default=self.base + len(self.events))
        dropped = self.events[: position - self.base]
        del self.events[: position - self.base]
        self.base = position
        self.num_bytes -= sum(map(_size, dropped))

    async def read(self, reader: str, start: int) -> AsyncGenerator[tuple[EngineEvent, ...]]:
        """The events from the `start`th on, as many at a time as there are."""
        self.readers[reader] = start
        self.known_readers.add(reader)
        try:
            while True:
                batch = tuple(self.events[self.readers[reader] - self.base :])
                if batch:
                    self.readers[reader] += len(batch)
                    yield batch
                    if reader not in self.readers:
                        return
                elif self.is_over:
                    return
                else:
                    await self._grown.wait()
                    if reader not in self.readers:
                        return
        finally:
            self.readers.pop(reader, None)

    def _tell(self) -> None:
        self._grown.set()
        self._grown = asyncio.Event()


class KeptStreams:
    """The streams of one decode worker. Lives on the engine's event loop.

    Args:
        keep_s: how long a stream is kept after its end.
        max_bytes: what all of them may take, about. Streams that have ended make room, oldest
            first; then the largest running one is kept for its own readers alone.
    """

    def __init__(self, engine: Engine, keep_s: float = 60.0, max_bytes: int = 64 << 20) -> None:
        self._engine = engine
        self._keep_s = keep_s
        self._max_bytes = max_bytes
        self._streams: dict[tuple[str, int], _Stream] = {}
        self._running: set[_Stream] = set()
        self._ended: dict[_Stream, None] = {}
        self._by_reader: dict[str, _Stream] = {}
        self._goodbyes = Goodbyes()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """What the kept streams take, about."""
        return self._num_bytes

    async def generate(
        self, request: GenerationRequest, *, local: bool, reader: str
    ) -> AsyncGenerator[EngineEvent]:
        """See `DecodeEngine.generate`. A request with a ticket goes on when this is closed.

        A refusal is a `Failed` too: an exception would stand in the worker's log as a crash, with
        what of the request its text quotes.

        Args:
            reader: who reads; new with every call.

        Raises:
            RipresaError: CANCELLED; the reader has said goodbye before it came.
        """
        ticket = request.stream
        if ticket is None:
            try:
                async with aclosing(self._engine.generate(request, local=local)) as events:
                    async for event in events:
                        yield event
            except RipresaError as error:
                yield Failed(error)
            return
        self._goodbyes.check(reader)
        stream = self._begin(request, ticket, local)
        self._by_reader[reader] = stream
        async with aclosing(stream.read(reader, len(ticket.earlier))) as batches:
            async for batch in batches:
                for event in batch:
                    yield event

    def find(self, stream_id: str, choice: int) -> KeptPrompt | None:
        """What is kept of a stream; None if it is not known here, or no more."""
        stream = self._streams.get((stream_id, choice))
        if stream is None or not stream.is_kept:
            return None
        request = stream.request
        return KeptPrompt(
            stream.ticket,
            request.generation,
            request.token_ids[: request.num_prompt_tokens],
            request.recipe,
            stream.is_good,
        )

    async def resume(
        self, stream_id: str, choice: int, *, reader: str
    ) -> AsyncGenerator[tuple[EngineEvent, ...]]:
        """The execution's events from the first one on; those known now come at once, as one tuple,
        which may be empty.

        Raises:
            RipresaError: NOT_FOUND; the stream is not kept here, or CANCELLED as `generate`.
        """
        stream = self._streams.get((stream_id, choice))
        if stream is None or not stream.is_kept:
            raise RipresaError(ErrorCode.NOT_FOUND, "the stream is not kept here any more")
        self._goodbyes.check(reader)
        self._by_reader[reader] = stream
        if not stream.events:
            yield ()
        async with aclosing(stream.read(reader, 0)) as batches:
            async for batch in batches:
                yield batch

    def let_go(self, reader: str) -> None:
        """A reader goes on purpose; if nobody else reads its stream, the work ends."""
        stream = self._by_reader.get(reader)
        if stream is None:
            self._goodbyes.add(reader)
            return
        stream.readers.pop(reader, None)
        if not stream.readers:
            self._stop(stream)

    async def quiet(self) -> None:
        """Return once no stream runs."""
        while tasks := [stream.task for stream in self._running if stream.task is not None]:
            await asyncio.wait(tasks)

    async def close(self) -> None:
        """End what runs, and forget everything."""
        tasks = [stream.task for stream in self._running if stream.task is not None]
        for stream in tuple(self._running):
            self._stop(stream)
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in tuple(self._ended):
            self._forget(stream)

    def check_integrity(self) -> None:
        """Raise RipresaError (INTERNAL) unless the books agree."""
        known = {*self._running, *self._ended}
        num_bytes = sum(stream.num_bytes for stream in known)
        readers = {reader for stream in known for reader in stream.known_readers}
        if num_bytes != self._num_bytes or not set(self._streams.values()) <= known:
            raise RipresaError(ErrorCode.INTERNAL, "kept streams are counted wrongly")
        if not set(self._by_reader) <= readers or any(s.is_over for s in self._running):
            raise RipresaError(ErrorCode.INTERNAL, "readers or streams are left over")

    def _begin(self, request: GenerationRequest, ticket: StreamTicket, local: bool) -> _Stream:
        stream = _Stream(request, ticket)
        stream.events += ticket.earlier
        stream.num_bytes += sum(map(_size, ticket.earlier))
        self._num_bytes += stream.num_bytes
        self._streams[ticket.stream_id, ticket.choice] = stream
        self._running.add(stream)
        stream.task = asyncio.create_task(self._run(stream, local), name="kept-stream")
        # Not in `_run`, of which a task that is cancelled at once runs nothing.
        stream.task.add_done_callback(lambda _: self._end(stream))
        self._make_room()
        return stream

    async def _run(self, stream: _Stream, local: bool) -> None:
        """Carry the engine's events to the stream."""
        try:
            await self._make_way(stream)
            async with aclosing(self._engine.generate(stream.request, local=local)) as events:
                async for event in events:
                    stream.was_reserved |= not isinstance(event, Bringing | Failed)
                    self._append(stream, event)
        except RipresaError as error:
            self._append(stream, Failed(error))
        except Exception as error:
            logger.exception("request %s failed unexpectedly", stream.request.request_id)
            text = f"the decode worker failed: {error!r}"
            self._append(stream, Failed(RipresaError(ErrorCode.INTERNAL, text)))

    async def _make_way(self, stream: _Stream) -> None:
        """End streams of the same request id that nobody reads: the client asks again."""
        request_id = stream.request.request_id
        abandoned = [
            other
            for other in self._running
            if other is not stream
            and other.request.request_id == request_id
            and other.ticket.stream_id != stream.ticket.stream_id
            and not other.readers
        ]
        for other in abandoned:
            self._stop(other)
        tasks = [other.task for other in abandoned if other.task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)

    def _append(self, stream: _Stream, event: EngineEvent) -> None:
        before = stream.num_bytes
        stream.append(event)
        if not stream.is_kept:
            stream.trim()
        self._num_bytes += stream.num_bytes - before
        self._make_room()

    def _end(self, stream: _Stream) -> None:
        last = stream.events[-1] if stream.events else None
        if not isinstance(last, Finished | Failed):
            error = RipresaError(ErrorCode.CANCELLED, "the request was cancelled by its client")
            self._append(stream, Failed(error))
        stream.end()
        self._running.discard(stream)
        self._ended[stream] = None
        if not stream.was_reserved or not stream.is_kept:
            # Nobody has heard of it but its own reader.
            self._forget(stream)
            return
        loop = asyncio.get_running_loop()
        stream.expiry = loop.call_later(self._keep_s, self._forget, stream)

    def _stop(self, stream: _Stream) -> None:
        if stream.is_over or stream.let_go or stream.task is None:
            return
        stream.let_go = True
        stream.task.cancel()

    def _make_room(self) -> None:
        while self._num_bytes > self._max_bytes and self._ended:
            self._forget(next(iter(self._ended)))
        if self._num_bytes > self._max_bytes:
            kept = [stream for stream in self._running if stream.is_kept]
            if kept:
                largest = max(kept, key=lambda stream: stream.num_bytes)
                largest.is_kept = False
                logger.warning("a stream is too long to be kept (decoders.kept_streams_bytes)")
                if not largest.readers:
                    self._stop(largest)

    def _forget(self, stream: _Stream) -> None:
        """Give up what is kept of a stream that has ended; who reads it now goes on."""
        if stream.expiry is not None:
            stream.expiry.cancel()
        if self._ended.pop(stream, self) is self:
            return
        key = (stream.ticket.stream_id, stream.ticket.choice)
        if self._streams.get(key) is stream:
            del self._streams[key]
        for reader in stream.known_readers:
            self._by_reader.pop(reader, None)
        self._num_bytes -= stream.num_bytes


def _size(event: EngineEvent) -> int:
    if not isinstance(event, Tokens):
        return EVENT_BYTES
    num_logprobs = sum(1 + len(entry.top) for entry in event.logprobs)
    return EVENT_BYTES + TOKEN_BYTES * len(event.token_ids) + LOGPROB_BYTES * num_logprobs
