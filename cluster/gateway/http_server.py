"""What does the gateway answer over HTTP? Liveness, readiness, version and metrics so far."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from ripresa.cluster.gateway.service import InferenceService
from ripresa.cluster.gateway.status import http_error
from ripresa.cluster.observability.metrics import CONTENT_TYPE
from ripresa.cluster.version import VERSION
from ripresa.workers.errors import RipresaError, Unavailable


def http_app(
    service: Callable[[], InferenceService],
    explain: Callable[[str], Awaitable[list[str]]] | None = None,
) -> FastAPI:
    """The gateway's ASGI application; a failure is an OpenAI-shaped error body.

    Args:
        service: asked at each request, since a Serve replica makes it after the application.
        explain: how a request was placed, whichever gateway did; None asks this one alone.
    """
    app = FastAPI(title="ripresa", version=VERSION)

    async def explain_here(request_id: str) -> list[str]:
        return service().explain(request_id)

    explain = explain or explain_here

    @app.get("/health")
    async def health() -> Response:
        """The process is alive."""
        return Response(status_code=200)

    @app.get("/ready")
    async def ready() -> Response:
        """A request could be served now; 503 until then and while draining."""
        if not await service().ready():
            raise Unavailable("no worker is ready, or this gateway is draining")
        return Response(status_code=200)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": VERSION}

    @app.get("/admin/plans/{request_id:path}")
    async def plan(request_id: str) -> dict[str, list[str]]:
        """How a request was placed, and what of it came true."""
        return {"lines": await explain(request_id)}

    @app.get("/metrics")
    async def metrics() -> Response:
        """Every series of this gateway in Prometheus's text format."""
        return Response(service().metrics.render(), media_type=CONTENT_TYPE)

    @app.exception_handler(RipresaError)
    async def failed(request: Request, error: RipresaError) -> JSONResponse:
        code, headers, body = http_error(error)
        return JSONResponse(body, code, headers)

    return app
