"""How does a running request become an HTTP response: one body, or server-sent events?"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Message as ASGIMessage
from starlette.types import Receive, Scope, Send

from ripresa.cluster.gateway.status import http_error, unexpected_failure
from ripresa.workers.errors import ErrorCode, RipresaError

log = logging.getLogger(__name__)

PING_INTERVAL_S = 15.0
"""A comment line this often keeps proxies from closing a stream whose prefill is long."""

CLOSED = "the client closed its connection"

_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


@dataclass(frozen=True, slots=True)
class Message:
    """A JSON text of the answer.

    Attributes:
        event: the name of its server-sent event; None for none.
        is_whole: it is the whole response body.
    """

    data: str
    event: str | None = None
    is_whole: bool = False


ErrorMessage = Callable[[RipresaError], Message]


async def respond(
    request: Request,
    messages: AsyncGenerator[Message],
    *,
    last: str | None,
    failed: ErrorMessage,
    max_unread_s: float,
) -> Response:
    """Answer with a body if the first message is whole, else with a stream of all of them.

    A client that goes away ends the work.

    Args:
        last: data of the stream's last event; None for none.
        failed: the last event of a stream that fails once it has begun.
        max_unread_s: how long a stream waits for a client that takes nothing of it; then it ends.

    Raises:
        RipresaError: the request failed before there was anything to send.
    """
    try:
        first = await _unless_gone(request, anext(messages))
    except BaseException:
        await messages.aclose()
        raise
    if first.is_whole:
        await messages.aclose()
        return Response(first.data, media_type="application/json")
    events = _events(first, messages, last, failed, request.state.request_id)
    return _EventStream(events, messages, max_unread_s)


class _EventStream(StreamingResponse):
    """Closes the messages whatever ends the response, a client that takes nothing of it, too."""

    def __init__(
        self,
        events: AsyncIterator[bytes],
        messages: AsyncGenerator[Message],
        max_unread_s: float,
    ) -> None:
        super().__init__(events, media_type="text/event-stream", headers=_HEADERS)
        self._events = events
        self._messages = messages
        self._max_unread_s = max_unread_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def in_time(message: ASGIMessage) -> None:
            async with asyncio.timeout(self._max_unread_s):
                await send(message)

        try:
            await super().__call__(scope, receive, in_time)
        except TimeoutError:
            # Whoever serves us closes a connection whose response is not whole.
            log.warning("nothing of a stream was read for %g s: it is over", self._max_unread_s)
        except ClientDisconnect:
            log.debug(CLOSED)
        finally:
            if isinstance(self._events, AsyncGenerator):
                await self._events.aclose()
            await self._messages.aclose()


async def _events(
    first: Message,
    messages: AsyncGenerator[Message],
    last: str | None,
    failed: ErrorMessage,
    request_id: str,
) -> AsyncGenerator[bytes]:
    yield _event(first)
    try:
        async with aclosing(_with_pings(messages)) as pinged:
            async for message in pinged:
                yield b": ping\n\n" if message is None else _event(message)
    except RipresaError as error:
        if error.code is ErrorCode.INTERNAL:
            log.error("a stream failed", exc_info=error)
        yield _event(failed(error))
        return
    except Exception:
        # The status has been sent, so this event is the only place where the client can be told.
        log.exception("the stream of request %s failed unexpectedly", request_id)
        yield _event(failed(RipresaError(ErrorCode.INTERNAL, unexpected_failure(request_id))))
        return
    if last is not None:
        yield _event(Message(last))


async def _with_pings(messages: AsyncGenerator[Message]) -> AsyncGenerator[Message | None]:
    """The messages; None whenever none came for a while."""
    coming: asyncio.Future[Message] | None = None
    try:
        while True:
            if coming is None:
                coming = asyncio.ensure_future(anext(messages))
            done, _ = await asyncio.wait({coming}, timeout=PING_INTERVAL_S)
            if not done:
                yield None
                continue
            task, coming = coming, None
            try:
                message = task.result()
            except StopAsyncIteration:
                return
            yield message
    finally:
        if coming is not None:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)


async def _unless_gone(request: Request, coming: Awaitable[Message]) -> Message:
    """The first message; CANCELLED if the client goes away before it."""
    work = asyncio.ensure_future(coming)
    gone = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        raise RipresaError(ErrorCode.CANCELLED, CLOSED)
    finally:
        for task in (work, gone):
            task.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    """Returns once the client has closed its connection; the body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(message: Message) -> bytes:
    name = "" if message.event is None else f"event: {message.event}\n"
    return f"{name}data: {message.data}\n\n".encode()


def openai_failure(error: RipresaError) -> Message:
    """The error event that OpenAI's clients raise."""
    _, _, body = http_error(error)
    return Message(json.dumps(body))
