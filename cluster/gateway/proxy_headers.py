"""Which headers may pass Serve's proxy? Those it can read: it decodes them before we see them.

The proxy calls `middlewares` at its start, if its environment names it (`PROXY_CALLBACK`).
"""

from __future__ import annotations

import uuid

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from ripresa.cluster.gateway.http_failure import REQUEST_ID, failure
from ripresa.workers.errors import InvalidArgument

PROXY_CALLBACK = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "ripresa.cluster.gateway.proxy_headers:middlewares"
}
"""The environment of the processes of a Ray cluster that serves us."""


def middlewares() -> list[Middleware]:
    """What stands before the proxy's own application."""
    return [Middleware(ReadableHeaders)]


class ReadableHeaders:
    """Refuses headers that are no UTF-8, and takes away an id that is empty: it counts as none."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = _refusal(scope["headers"])
        if refusal is not None:
            request_id = uuid.uuid4().hex
            answer = failure(scope, refusal, request_id)
            answer.headers[REQUEST_ID] = request_id
            await answer(scope, receive, send)
            return
        named = [(name, value) for name, value in scope["headers"] if not _is_no_id(name, value)]
        await self._app({**scope, "headers": named}, receive, send)


def _refusal(headers: list[tuple[bytes, bytes]]) -> InvalidArgument | None:
    for name, value in headers:
        try:
            name.decode(), value.decode()
        except UnicodeDecodeError:
            return InvalidArgument(name.decode(errors="replace"), "is a header that is not UTF-8")
    return None


def _is_no_id(name: bytes, value: bytes) -> bool:
    return name.decode() == REQUEST_ID and not value.strip()
