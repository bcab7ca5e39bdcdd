"""Do kept streams stay within their memory, and lose no reader for it?"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

import pytest
from hash_requests import make_request

from ripresa.workers.errors import ErrorCode, InvalidArgument, RipresaError
from ripresa.workers.kept_streams import KeptStreams
from ripresa.workers.request import (
    EngineEvent,
    Failed,
    Finished,
    FinishReason,
    GenerationRequest,
    Reserved,
    StreamTicket,
    Tokens,
)

NUM_TOKENS = 20


class SteppedEngine:
    """Streams its tokens when it is told to, and then finishes.

    Attributes:
        may_go: by the request's id.
        cut: ids of requests that were closed before their ends.
    """

    def __init__(self) -> None:
        self.may_go: dict[str, asyncio.Event] = {}
        self.cut: list[str] = []

    async def generate(
        self, request: GenerationRequest, *, local: bool
    ) -> AsyncGenerator[EngineEvent]:
        try:
            yield Reserved("d0", local)
            await self.may_go.setdefault(request.request_id, asyncio.Event()).wait()
            for place in range(NUM_TOKENS):
                # A step, in which others have their turn.
                await asyncio.sleep(0)
                yield Tokens(place, (place,))
        except (asyncio.CancelledError, GeneratorExit):
            self.cut.append(request.request_id)
            raise
        yield Finished(FinishReason.LENGTH, None, NUM_TOKENS)

    def go(self, name: str) -> None:
        self.may_go.setdefault(name, asyncio.Event()).set()


def open_stream(streams: KeptStreams, name: str) -> AsyncGenerator[EngineEvent]:
    ticket = StreamTicket(name, 0, b"origin")
    request = replace(make_request(request_id=name), stream=ticket)
    return streams.generate(request, local=True, reader=f"reader of {name}")


async def rest_of(stream: AsyncGenerator[EngineEvent]) -> list[EngineEvent]:
    async with aclosing(stream):
        return [event async for event in stream]


async def resumed(streams: KeptStreams, name: str) -> list[EngineEvent]:
    batches = streams.resume(name, 0, reader=f"another reader of {name}")
    async with aclosing(batches):
        return [event async for batch in batches for event in batch]


@pytest.fixture
async def answer_bytes() -> int:
    """What one whole stream takes."""
    engine = SteppedEngine()
    streams = KeptStreams(engine)
    engine.go("a")
    await rest_of(open_stream(streams, "a"))
    num_bytes = streams.num_bytes
    await streams.close()
    assert streams.num_bytes == 0
    return num_bytes


async def test_streams_that_have_ended_make_room_oldest_first(answer_bytes: int) -> None:
    engine = SteppedEngine()
    streams = KeptStreams(engine, max_bytes=2 * answer_bytes)
    told = {}
    for name in "abc":
        engine.go(name)
        told[name] = await rest_of(open_stream(streams, name))
        assert len(told[name]) == NUM_TOKENS + 2
        await streams.quiet()
        assert streams.num_bytes <= 2 * answer_bytes
        streams.check_integrity()
    assert streams.find("a", 0) is None
    with pytest.raises(RipresaError) as caught:
        await resumed(streams, "a")
    assert caught.value.code is ErrorCode.NOT_FOUND
    for name in "bc":
        assert await resumed(streams, name) == told[name]
    await streams.close()


async def test_a_stream_too_long_to_be_kept_is_told_whole_to_its_own_reader(
    answer_bytes: int,
) -> None:
    engine = SteppedEngine()
    streams = KeptStreams(engine, max_bytes=answer_bytes // 2)
    reading = open_stream(streams, "a")
    first = await anext(reading)
    assert streams.find("a", 0) is not None
    engine.go("a")
    told = [first, *await rest_of(reading)]
    await streams.quiet()
    assert len(told) == NUM_TOKENS + 2
    assert engine.cut == []
    assert streams.find("a", 0) is None
    streams.check_integrity()
    assert streams.num_bytes == 0


async def test_a_stream_too_long_to_be_kept_that_nobody_reads_ends(answer_bytes: int) -> None:
    engine = SteppedEngine()
    streams = KeptStreams(engine, max_bytes=answer_bytes // 2)
    reading = open_stream(streams, "a")
    await anext(reading)
    await reading.aclose()
    engine.go("a")
    await streams.quiet()
    assert engine.cut == ["a"]
    streams.check_integrity()
    assert streams.num_bytes == 0


async def test_a_refusal_is_told_and_not_raised() -> None:
    """Serve would log an exception as a crash, with the client's schema in it."""

    class Refusing:
        async def generate(
            self, request: GenerationRequest, *, local: bool
        ) -> AsyncGenerator[EngineEvent]:
            raise InvalidArgument("sampling.constraint", "no text satisfies it")
            yield

    streams = KeptStreams(Refusing())
    request = make_request(request_id="a")
    for asked in (request, replace(request, stream=StreamTicket("a", 0, b"origin"))):
        (told,) = await rest_of(streams.generate(asked, local=True, reader="r"))
        assert isinstance(told, Failed)
        assert isinstance(told.error, InvalidArgument)
    await streams.close()
