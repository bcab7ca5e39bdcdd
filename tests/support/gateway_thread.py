"""How does a blocking client meet a gateway in a test? One on a thread and loop of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

from in_process_router import InProcessRouter

from ripresa.cluster.gateway.api_keys import KeyFile
from ripresa.cluster.gateway.chat_encoding import ChatEncoding
from ripresa.cluster.gateway.grpc_server import GrpcServer
from ripresa.cluster.gateway.served_model import ServedModel
from ripresa.cluster.gateway.service import InferenceService
from ripresa.cluster.gateway.tokenizer import Tokenizer
from ripresa.cluster.observability.metrics import GatewayMetrics


@dataclass
class GatewayThread:
    """A running gateway. Its router lives on another thread: read it once calls are over."""

    address: str
    port: int
    router: InProcessRouter
    loop: asyncio.AbstractEventLoop


@contextmanager
def gateway_thread(
    model: ServedModel,
    tokenizer: Tokenizer,
    port: int = 0,
    encoding: ChatEncoding | None = None,
    keys: KeyFile | None = None,
) -> Iterator[GatewayThread]:
    """Serve while the body runs; stop without grace afterwards."""
    started: Future[GatewayThread] = Future()
    over = threading.Event()

    async def serve() -> None:
        router = InProcessRouter()
        service = InferenceService(
            router, model, tokenizer, GatewayMetrics(), encoding=encoding, keys=keys
        )
        server = GrpcServer(service, host="127.0.0.1", port=port, drain_notice_s=0)
        try:
            await server.start()
        except BaseException as error:
            started.set_exception(error)
            raise
        address = f"127.0.0.1:{server.port}"
        loop = asyncio.get_running_loop()
        started.set_result(GatewayThread(address, server.port, router, loop))
        await asyncio.to_thread(over.wait)
        await server.stop(0)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        yield started.result(30)
    finally:
        over.set()
        thread.join()
