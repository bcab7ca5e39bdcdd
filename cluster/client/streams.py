"""How does a stream meet its caller? Blocking and asynchronous iterators over one `Exchange`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import TracebackType
from typing import Any

import grpc

from ripresa.cluster.client.events import Answer, Event
from ripresa.cluster.client.exchange import Exchange, NextCall, Request


class Stream(Iterator[Event]):
    """The events of one answer, as they come. Leaving its `with` block, or `close`, ends the work.

    A stream whose connection breaks goes on through another one, from where it stopped.
    """

    def __init__(self, exchange: Exchange, start: Callable[[NextCall], Any]) -> None:
        self._exchange = exchange
        self._open = start
        self._events = self._run()
        self._call: Any = None
        self._closed = threading.Event()

    @property
    def request(self) -> Request:
        """What was sent."""
        return self._exchange.request

    def __next__(self) -> Event:
        """Raises CallError if the request is refused or fails."""
        return next(self._events)

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the request, if it is not over; any thread may call it."""
        self._closed.set()
        if self._call is not None:
            self._call.cancel()

    def answer(self) -> Answer:
        """Read to the end.

        Returns everything that the stream said, also what was iterated over before.

        Raises:
            CallError: the request is refused or fails.
        """
        for _ in self._events:
            pass
        return self._exchange.reader.answer

    def _run(self) -> Iterator[Event]:
        exchange = self._exchange
        try:
            while not exchange.reader.is_complete:
                call = exchange.next_call()
                if self._closed.wait(call.pause_s):
                    return
                self._call = self._open(call)
                if self._closed.is_set():
                    return
                try:
                    for response in self._call:
                        yield from exchange.read(response)
                    exchange.ended()
                except grpc.RpcError as error:
                    if self._closed.is_set():
                        return
                    exchange.failed(error)
        finally:
            self.close()


class AsyncStream(AsyncIterator[Event]):
    """The events of one answer, as they come. Leaving its `async with` block ends the work.

    A stream whose connection breaks goes on through another one, from where it stopped.
    """

    def __init__(self, exchange: Exchange, start: Callable[[NextCall], Awaitable[Any]]) -> None:
        self._exchange = exchange
        self._open = start
        self._events = self._run()
        self._call: Any = None

    @property
    def request(self) -> Request:
        """What was sent."""
        return self._exchange.request

    async def __anext__(self) -> Event:
        """Raises CallError if the request is refused or fails."""
        return await anext(self._events)

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the request, if it is not over."""
        if self._call is not None:
            self._call.cancel()

    async def answer(self) -> Answer:
        """Read to the end.

        Returns everything that the stream said, also what was iterated over before.

        Raises:
            CallError: the request is refused or fails.
        """
        async for _ in self._events:
            pass
        return self._exchange.reader.answer

    async def _run(self) -> AsyncIterator[Event]:
        exchange = self._exchange
        try:
            while not exchange.reader.is_complete:
                call = exchange.next_call()
                await asyncio.sleep(call.pause_s)
                self._call = await self._open(call)
                try:
                    async for response in self._call:
                        for event in exchange.read(response):
                            yield event
                    exchange.ended()
                except grpc.aio.AioRpcError as error:
                    exchange.failed(error)
        finally:
            self.close()
