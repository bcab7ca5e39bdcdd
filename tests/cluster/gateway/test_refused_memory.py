"""Does a refused prompt go with its refusal, without waiting for the garbage collector?"""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import grpc
import pytest
from http_gateway import http_gateway
from in_process_router import InProcessRouter

from ripresa.cluster.gateway.chat_encoding import ChatEncoding
from ripresa.cluster.gateway.grpc_server import GrpcServer
from ripresa.cluster.gateway.served_model import ServedModel
from ripresa.cluster.gateway.service import InferenceService
from ripresa.cluster.gateway.tokenizer import Tokenizer
from ripresa.cluster.observability.metrics import GatewayMetrics
from ripresa.protos import ripresa_pb2 as pb

MAX_BYTES = 1 << 18
LONG = "a long log line " * 4000
"""Fits into a message, and into no model's context."""
HUGE = LONG * 5
MESSAGES = (pb.ChatRequest, pb.GenerateRequest, pb.TokenizeRequest, pb.OpenSessionRequest)


def chat(text: str) -> pb.ChatRequest:
    messages = [pb.Message(role=pb.ROLE_USER, content=text)]
    return pb.ChatRequest(full=pb.FullConversation(messages=messages))


GRPC: dict[str, tuple[str, Any]] = {
    "chat": ("Chat", chat(LONG)),
    "generate": ("Generate", pb.GenerateRequest(text=LONG)),
    "too large": ("Chat", chat(HUGE)),
    "wrong": ("Chat", pb.ChatRequest(full=chat(LONG).full, options={"session_id": "s" * 2000})),
}


@pytest.fixture
async def small(
    router: InProcessRouter, chat_model: ServedModel, demo: Tokenizer, encoding: ChatEncoding
) -> AsyncIterator[InferenceService]:
    service = InferenceService(
        router,
        chat_model,
        demo,
        GatewayMetrics(),
        encoding=encoding,
        max_message_bytes=MAX_BYTES,
    )
    yield service
    assert not router.seen
    service.close()


@pytest.fixture
def garbage() -> Iterator[list[Any]]:
    """What only the collector would find from now on."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    yield gc.garbage
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


async def check(garbage: list[Any], refused: Callable[[], Awaitable[None]]) -> None:
    """Nothing of a prompt is left behind by its refusal but what nobody refers to."""
    await refused()
    gc.collect()
    garbage.clear()
    await refused()
    # Threads and callbacks let go of what they have just handed on.
    for _ in range(3):
        await asyncio.sleep(0)
    gc.collect()
    for thing in garbage:
        for held in (thing, *gc.get_referents(thing)):
            assert not isinstance(held, MESSAGES), thing
            assert not isinstance(held, str | bytes) or len(held) < len(LONG), thing


@pytest.mark.parametrize("name", GRPC)
async def test_by_grpc(small: InferenceService, garbage: list[Any], name: str) -> None:
    method, request = GRPC[name]
    raw = request.SerializeToString()
    server = GrpcServer(
        small, host="127.0.0.1", port=0, drain_notice_s=0, max_message_bytes=MAX_BYTES
    )
    await server.start()

    async def refused() -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            # Bytes, so that no message of the client's is among the garbage.
            call = channel.unary_stream(f"/ripresa.v1.Inference/{method}")(raw)
            code = await call.code()
        assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)

    await check(garbage, refused)
    await server.stop(0)


def body(text: str, **fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": text}], **fields}).encode()


HTTP: dict[str, tuple[str, bytes]] = {
    "chat": ("/v1/chat/completions", body(LONG)),
    "messages": ("/v1/messages", body(LONG, max_tokens=4)),
    "responses": ("/v1/responses", json.dumps({"input": LONG}).encode()),
    "completions": ("/v1/completions", json.dumps({"prompt": LONG}).encode()),
    "too large": ("/v1/chat/completions", body(HUGE)),
    "wrong": ("/v1/chat/completions", body(LONG, temperature=-1)),
    "an unknown field": ("/v1/chat/completions", body(LONG, tomato=1)),
    "no JSON": ("/v1/chat/completions", body(LONG)[:-1]),
    "a role": (
        "/v1/chat/completions",
        json.dumps({"messages": [{"role": "judge", "content": LONG}]}).encode(),
    ),
}


def large() -> dict[int, str]:
    """Whatever of a prompt's size any object refers to: its place in memory, and who refers."""
    found = {}
    for thing in gc.get_objects():
        for held in gc.get_referents(thing):
            if type(held) in (str, bytes, bytearray) and len(held) >= len(LONG):
                found[id(held)] = f"{type(held).__name__} of {thing!r:.300}"
    return found


async def until_none(find: Callable[[], list[str]], within_s: float = 30.0) -> list[str]:
    """What is found at last; nothing, as soon as nothing is."""
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + within_s
    while (found := find()) and loop.time() < give_up_at:  # noqa: ASYNC110 -- nobody tells
        await asyncio.sleep(0.01)
    return found


@pytest.mark.parametrize("name", HTTP)
async def test_by_http(small: InferenceService, garbage: list[Any], name: str) -> None:
    path, raw = HTTP[name]
    async with http_gateway(small) as url:
        address = urlsplit(url)

        async def refused() -> None:
            # No HTTP client, so that nothing of one's own is among what is found.
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            head = f"POST {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n"
            writer.write(f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw)
            answer = await reader.read()
            writer.close()
            await writer.wait_closed()
            assert answer.startswith(b"HTTP/1.1 4"), answer

        await refused()
        gc.collect()
        garbage.clear()
        before = large()
        await refused()
        # A thread may hold for a moment yet what it has just answered; a cycle holds it for ever.
        left = await until_none(
            lambda: [by for place, by in large().items() if place not in before]
        )
        assert not left
