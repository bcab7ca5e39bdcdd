"""What does every HTTP request bring: a key, a bounded body, an id?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import Depends, Request

from ripresa.cluster.gateway.api_keys import api_key
from ripresa.cluster.gateway.call import Call
from ripresa.cluster.gateway.http_failure import REQUEST_ID
from ripresa.cluster.gateway.service import InferenceService
from ripresa.cluster.gateway.status import RequestError
from ripresa.workers.errors import ErrorCode

CONTENT_ENCODING = "content-encoding"


def authenticated(service: Callable[[], InferenceService]) -> Any:
    """A route's dependency: its requests have an owner, or are refused before they are read."""

    def authenticate(request: Request) -> None:
        headers = request.headers
        key = api_key(headers.get("authorization"), headers.get("x-api-key"))
        request.state.tenant = service().authenticate(key)

    return Depends(authenticate)


def call_of(request: Request) -> Call:
    """The request's own id, which `RequestIds` has checked or made, and its owner."""
    request_id: str = request.state.request_id
    return Call(request_id, tenant=request.state.tenant, id_field=REQUEST_ID, choices_field="n")


async def body_of(request: Request, max_bytes: int) -> bytes:
    """A request's body.

    Raises:
        RequestError: it is compressed, or has more than `max_bytes` bytes; the rest is not read.
    """
    encoding = request.headers.get(CONTENT_ENCODING, "").strip().lower()
    if encoding not in ("", "identity"):
        raise RequestError(
            ErrorCode.INVALID_ARGUMENT,
            "UNSUPPORTED_ENCODING",
            f"a body encoded as {encoding[:64]!r} is not read; send it as it is",
            field=CONTENT_ENCODING,
        )
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            raise RequestError(
                ErrorCode.INVALID_ARGUMENT,
                "MESSAGE_TOO_LARGE",
                f"the server accepts {max_bytes} bytes (gateway.max_message_bytes)",
                field="body",
            )
        parts.append(part)
    return b"".join(parts)
