"""How do tests put thousands of requests to the HTTP endpoints? In process, without a server."""

from __future__ import annotations

import asyncio

import httpx2 as httpx
from in_process_router import InProcessRouter

from ripresa.cluster.gateway.chat_encoding import ChatEncoding
from ripresa.cluster.gateway.http_server import http_app
from ripresa.cluster.gateway.served_model import ServedModel
from ripresa.cluster.gateway.service import InferenceService
from ripresa.cluster.gateway.tokenizer import Tokenizer
from ripresa.cluster.observability.metrics import GatewayMetrics
from ripresa.workers.demo.checkpoint import DEMO_MODEL


class ChatGateway:
    """The application, called in this process, on a loop of its own.

    Attributes:
        app: the ASGI application.
    """

    def __init__(self) -> None:
        tokenizer = Tokenizer(DEMO_MODEL / "tokenizer.json")
        encoding = ChatEncoding(tokenizer, DEMO_MODEL / "tokenizer.json", "deepseek-demo")
        model = ServedModel("deepseek-demo", 2048, tokenizer.num_ids, 1, "ab12")
        self.runner = asyncio.Runner()
        self.router = InProcessRouter(batch=40)
        self.service = InferenceService(
            self.router, model, tokenizer, GatewayMetrics(), encoding=encoding, max_running=8
        )
        self.app = http_app(lambda: self.service)
        transport = httpx.ASGITransport(self.app)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=60)

    def post(self, path: str, content: bytes) -> httpx.Response:
        return self.runner.run(self.client.post(path, content=content))

    def close(self) -> None:
        self.runner.run(self.client.aclose())
        self.service.close()
        self.runner.close()
