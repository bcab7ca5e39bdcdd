"""A gateway over real loopback channels, with a small in-process router behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest
from in_process_router import InProcessRouter

from ripresa.cluster.gateway.chat_encoding import ChatEncoding
from ripresa.cluster.gateway.grpc_server import GrpcServer
from ripresa.cluster.gateway.served_model import ServedModel
from ripresa.cluster.gateway.service import InferenceService
from ripresa.cluster.gateway.tokenizer import Tokenizer
from ripresa.cluster.observability.metrics import GatewayMetrics
from ripresa.protos import ripresa_pb2_grpc

MAX_MESSAGE_BYTES = 1 << 16


@pytest.fixture
async def router() -> InProcessRouter:
    return InProcessRouter()


@pytest.fixture
async def service(
    router: InProcessRouter, model: ServedModel, tokenizer: Tokenizer
) -> InferenceService:
    metrics = GatewayMetrics(backends=("gloo",))
    return InferenceService(router, model, tokenizer, metrics, max_running=3)


@pytest.fixture
async def server(service: InferenceService) -> AsyncIterator[GrpcServer]:
    server = GrpcServer(
        service,
        host="127.0.0.1",
        port=0,
        max_message_bytes=MAX_MESSAGE_BYTES,
        ready_interval_s=0.02,
        drain_notice_s=0.05,
    )
    await server.start()
    yield server
    await server.stop(0)


@pytest.fixture
async def channel(server: GrpcServer) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        yield channel


@pytest.fixture
async def stub(channel: grpc.aio.Channel) -> ripresa_pb2_grpc.InferenceAsyncStub:
    return ripresa_pb2_grpc.InferenceStub(channel)


@pytest.fixture
async def chat_stub(
    router: InProcessRouter, chat_model: ServedModel, demo: Tokenizer, encoding: ChatEncoding
) -> AsyncIterator[ripresa_pb2_grpc.InferenceAsyncStub]:
    """A client of a gateway that serves the demo model's chats."""
    metrics = GatewayMetrics(backends=("gloo",))
    service = InferenceService(router, chat_model, demo, metrics, encoding=encoding)
    server = GrpcServer(service, host="127.0.0.1", port=0, drain_notice_s=0)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        yield ripresa_pb2_grpc.InferenceStub(channel)
    assert service.num_running == 0
    await server.stop(0)
    service.close()
