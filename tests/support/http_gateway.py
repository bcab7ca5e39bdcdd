"""How does a real HTTP client meet a gateway in a test? uvicorn on a free port of this loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn

from ripresa.cluster.gateway.http_server import http_app
from ripresa.cluster.gateway.service import InferenceService


@asynccontextmanager
async def http_gateway(service: InferenceService) -> AsyncIterator[str]:
    """Serve while the body runs; gives `http://host:port`."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen()  # clients may come before uvicorn does
    config = uvicorn.Config(
        http_app(lambda: service), log_level="error", lifespan="off", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
        listening.close()
