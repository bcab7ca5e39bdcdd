"""Does a request end as expected, whenever and however it turns out that its client has gone?"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
from typing import Any

import pytest
from in_process_router import InProcessRouter
from ray.exceptions import TaskCancelledError

from ripresa.cluster.gateway.chat_encoding import ChatEncoding
from ripresa.cluster.gateway.http_server import http_app
from ripresa.cluster.gateway.served_model import ServedModel
from ripresa.cluster.gateway.service import InferenceService
from ripresa.cluster.gateway.tokenizer import Tokenizer
from ripresa.cluster.observability.metrics import GatewayMetrics

GONE = {"type": "http.disconnect"}
BODY = json.dumps({"prompt": "hi", "max_tokens": 40}).encode()
STREAMED = json.dumps({"prompt": "hi", "max_tokens": 40, "stream": True}).encode()


class Client:
    """One request's messages, and what comes back.

    Args:
        parts: of the body, in order.
        is_cut: the client goes when it has sent them; else once `leaves` is set.
        how: what its going looks like, here: a message, or what Ray raises, once.
    """

    def __init__(self, parts: list[bytes], how: Any, *, is_cut: bool = False) -> None:
        self._parts = parts
        self._how = how
        self._is_cut = is_cut
        self.leaves = asyncio.Event()
        self.told: asyncio.Queue[Any] = asyncio.Queue()

    async def receive(self) -> Any:
        if self._parts:
            part = self._parts.pop(0)
            more = bool(self._parts) or self._is_cut
            return {"type": "http.request", "body": part, "more_body": more}
        if not self._is_cut:
            await self.leaves.wait()
        if self._how is None:
            await asyncio.Event().wait()  # it has failed before
        if isinstance(self._how, Exception):
            how, self._how = self._how, None
            raise how
        return self._how

    async def send(self, message: Any) -> None:
        await self.told.put(message)


def scope() -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "root_path": "",
        "scheme": "http",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }


async def test_a_client_that_takes_nothing_holds_no_place(
    router: InProcessRouter, chat_model: ServedModel, demo: Tokenizer, encoding: ChatEncoding
) -> None:
    """Its connection stays open."""
    service = InferenceService(
        router, chat_model, demo, GatewayMetrics(), encoding=encoding, max_unread_s=0.1
    )
    app = http_app(lambda: service)
    client = Client([STREAMED], GONE)
    told: list[Any] = []

    async def send(message: Any) -> None:
        told.append(message)
        if message.get("body"):
            await asyncio.Event().wait()

    async with asyncio.timeout(30):
        await app(scope(), client.receive, send)
        await router.all_closed.wait()
    assert service.num_running == 0
    assert router.produced[router.seen[0].request_id] < 40
    # The response is not whole, so that its server closes the connection.
    assert all(message.get("more_body", True) for message in told)
    service.close()


@pytest.mark.parametrize("how", ["message", "failure"])
@pytest.mark.parametrize("phase", ["body", "prefill", "whole", "stream"])
async def test_a_client_that_goes_is_no_failure_of_ours(
    router: InProcessRouter,
    chat_model: ServedModel,
    demo: Tokenizer,
    encoding: ChatEncoding,
    caplog: pytest.LogCaptureFixture,
    phase: str,
    how: str,
) -> None:
    service = InferenceService(router, chat_model, demo, GatewayMetrics(), encoding=encoding)
    app = http_app(lambda: service, is_behind_serve=True)
    going: Any = GONE if how == "message" else TaskCancelledError()
    body = {"body": BODY[:9], "whole": BODY}.get(phase, STREAMED)
    client = Client([body], going, is_cut=phase == "body")
    (router.hold if phase == "stream" else router.hold_prefill).clear()
    gc.collect()  # what earlier tests left may be logged when it goes
    with caplog.at_level(logging.WARNING):
        request = asyncio.create_task(app(scope(), client.receive, client.send))
        async with asyncio.timeout(30):
            if phase == "stream":
                assert (await client.told.get())["type"] == "http.response.start"
            elif phase != "body":
                await router.opened.wait()
            client.leaves.set()
            await request
            await router.all_closed.wait()
    assert not caplog.records
    assert service.num_running == 0
    assert len(router.seen) == (phase != "body")
    service.close()
