"""Is a client told of everything that ends a stream which has begun?"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator

import httpx
import pytest
from fastapi import FastAPI, Request, Response

from ripresa.cluster.gateway.http_stream import Message, openai_failure, respond
from ripresa.workers.errors import ErrorCode, RipresaError


def app(failure: Exception) -> FastAPI:
    application = FastAPI()

    @application.get("/")
    async def stream(request: Request) -> Response:
        async def messages() -> AsyncGenerator[Message]:
            yield Message('{"text": "a"}')
            raise failure

        request.state.request_id = "r-7"
        return await respond(
            request, messages(), last="[DONE]", failed=openai_failure, max_unread_s=60.0
        )

    return application


@pytest.mark.parametrize(
    ("failure", "code", "words"),
    [
        (RipresaError(ErrorCode.UNAVAILABLE, "no worker"), "unavailable", "no worker"),
        (KeyError("x"), "engine_error", "the gateway's log has it under request r-7"),
        (TimeoutError(), "engine_error", "the gateway's log has it under request r-7"),
    ],
)
async def test_a_failure_is_the_last_event_whatever_it_is(
    failure: Exception, code: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    transport = httpx.ASGITransport(app(failure))
    with caplog.at_level(logging.ERROR):
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            answer = await client.get("/")
    first, last = answer.text.strip().split("\n\n")
    assert first == 'data: {"text": "a"}'
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["code"] == code
    assert words in error["message"]
    unforeseen = not isinstance(failure, RipresaError)
    assert any("request r-7 failed" in line for line in caplog.messages) == unforeseen
