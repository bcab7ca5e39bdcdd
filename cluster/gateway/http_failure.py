"""In whose shape does HTTP tell an error? In that of the API that was called."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import Scope

from ripresa.cluster.gateway.status import anthropic_error, http_error
from ripresa.workers.errors import RipresaError

REQUEST_ID = "x-request-id"


def failure(
    scope: Scope, error: RipresaError, request_id: str, status: int | None = None
) -> JSONResponse:
    """The answer to a request that failed: Anthropic's clients get their own shape on every path.

    Args:
        status: told instead of the error's own.
    """
    body: Mapping[str, object]
    if scope["path"].startswith("/v1/messages") or "anthropic-version" in Headers(scope=scope):
        code, headers, body = anthropic_error(error, request_id, status)
    else:
        code, headers, body = http_error(error)
    return JSONResponse(body, status or code, headers)
