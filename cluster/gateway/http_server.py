"""What does the gateway answer over HTTP, and how does it fail? The application, put together."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as ASGIMessage

from ripresa.cluster.gateway.http_body import authenticated, call_of
from ripresa.cluster.gateway.http_chat import chat_routes
from ripresa.cluster.gateway.http_completions import completion_routes
from ripresa.cluster.gateway.http_disconnect import Disconnects
from ripresa.cluster.gateway.http_document import errors
from ripresa.cluster.gateway.http_failure import REQUEST_ID, failure
from ripresa.cluster.gateway.http_stream import CLOSED
from ripresa.cluster.gateway.http_tokens import token_routes
from ripresa.cluster.gateway.service import InferenceService
from ripresa.cluster.gateway.status import unexpected_failure
from ripresa.cluster.gateway.validation import check_request_id, scoped_id
from ripresa.cluster.observability.metrics import CONTENT_TYPE
from ripresa.cluster.version import VERSION
from ripresa.workers.errors import ErrorCode, RipresaError, Unavailable

log = logging.getLogger(__name__)


def http_app(
    service: Callable[[], InferenceService],
    explain: Callable[[str], Awaitable[list[str]]] | None = None,
    *,
    is_behind_serve: bool = False,
) -> FastAPI:
    """The gateway's ASGI application; a failure is an OpenAI-shaped error body.

    Args:
        service: asked at each request, since a Serve replica makes it after the application.
        explain: how a request was placed, whichever gateway did; None asks this one alone.
        is_behind_serve: Serve's proxy gives every request its id and every response its header.
    """
    app = FastAPI(
        title="ripresa", version=VERSION, docs_url=None, redoc_url=None, responses=errors()
    )
    app.add_middleware(RequestIds, sets_header=not is_behind_serve)
    app.add_middleware(Disconnects)
    authentication = [authenticated(service)]
    for routes in (chat_routes, completion_routes, token_routes):
        app.include_router(routes(service), dependencies=authentication)

    async def explain_here(request_id: str) -> list[str]:
        return service().explain(request_id)

    explain = explain or explain_here

    @app.get("/health", response_class=Response)
    async def health() -> Response:
        """The process is alive."""
        return Response(status_code=200)

    @app.get("/ready", response_class=Response)
    async def ready() -> Response:
        """A request could be served now; 503 until then and while draining."""
        if not await service().ready():
            raise Unavailable("no worker is ready, or this gateway is draining")
        return Response(status_code=200)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": VERSION}

    @app.get("/admin/plans/{request_id:path}", dependencies=authentication)
    async def plan(request: Request, request_id: str) -> dict[str, list[str]]:
        """How a request of the caller was placed, and what of it came true."""
        return {"lines": await explain(scoped_id(call_of(request).tenant, request_id))}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Every series of this gateway in Prometheus's text format."""
        return Response(service().metrics.render(), media_type=CONTENT_TYPE)

    @app.exception_handler(RipresaError)
    async def failed(request: Request, error: RipresaError) -> JSONResponse:
        if error.code is ErrorCode.INTERNAL:
            log.error("request %s failed", request.state.request_id, exc_info=error)
        return failure(request.scope, error, request.state.request_id)

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> JSONResponse:
        """The client left while its body was read: nobody will see this answer."""
        left = RipresaError(ErrorCode.CANCELLED, CLOSED)
        return failure(request.scope, left, request.state.request_id)

    @app.exception_handler(HTTPException)
    async def unroutable(request: Request, error: HTTPException) -> JSONResponse:
        """Starlette's own refusals: no such path, or no such method on it."""
        code = ErrorCode.NOT_FOUND if error.status_code == 404 else ErrorCode.INVALID_ARGUMENT
        refusal = RipresaError(code, f"{error.detail}: {request.method} {request.url.path}")
        answer = failure(request.scope, refusal, request.state.request_id, error.status_code)
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        request_id = request.state.request_id
        log.error("request %s failed unexpectedly", request_id, exc_info=error)
        told = RipresaError(ErrorCode.INTERNAL, unexpected_failure(request_id))
        answer = failure(request.scope, told, request_id)
        if not is_behind_serve:
            answer.headers[REQUEST_ID] = request_id  # this answer passes by `RequestIds`
        return answer

    return app


class RequestIds:
    """Gives every request an id, its client's if that is a good one, and every response its header.

    Args:
        sets_header: nobody in front does. Serve's proxy answers with the id that it sent on, which
            is the request's own; only a client's bad id is another.

    No `BaseHTTPMiddleware`: that one keeps a client's disconnect from a streaming response.
    """

    def __init__(self, app: ASGIApp, *, sets_header: bool) -> None:
        self._app = app
        self._sets_header = sets_header

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = Headers(scope=scope).get(REQUEST_ID, "")
        request_id = uuid.uuid4().hex
        refusal: RipresaError | None = None
        try:
            check_request_id(asked, REQUEST_ID)
            request_id = asked or request_id
        except RipresaError as error:
            refusal = error
        scope.setdefault("state", {})["request_id"] = request_id

        async def with_id(message: ASGIMessage) -> None:
            if message["type"] == "http.response.start" and self._sets_header:
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        if refusal is not None:
            await failure(scope, refusal, request_id)(scope, receive, with_id)
        else:
            await self._app(scope, receive, with_id)
