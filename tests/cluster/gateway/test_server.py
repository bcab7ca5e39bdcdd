"""Does the server start, tell its health, describe itself, drain and stop as promised?"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from ripresa.cluster.gateway.grpc_server import GrpcServer, free_port
from ripresa.cluster.gateway.validation import tenant_salt
from ripresa.protos import ripresa_pb2 as pb
from ripresa.protos import ripresa_pb2_grpc
from ripresa.workers.errors import ConfigError

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def test_tokenize_and_back(stub: Any) -> None:
    text = "héllo <think> 日本"
    tokens = await stub.Tokenize(pb.TokenizeRequest(text=text))
    assert (tokens.prompt, tokens.max_model_len, tokens.cached_tokens) == (text, 64, 0)
    back = await stub.Detokenize(pb.DetokenizeRequest(token_ids=tokens.token_ids))
    assert back.text == text


async def test_tokenize_says_what_is_held_for_the_salt(stub: Any, router: Any) -> None:
    router.num_held[b""] = 2
    router.num_held[tenant_salt("", "mine")] = 3
    for salt, held in (("", 2), ("mine", 3), ("other", 0)):
        answer = await stub.Tokenize(pb.TokenizeRequest(text="hello", cache_salt=salt))
        assert answer.cached_tokens == held
    with pytest.raises(grpc.aio.AioRpcError, match="cache_salt"):
        await stub.Tokenize(pb.TokenizeRequest(text="hello", cache_salt="x" * 10_000))


async def test_list_models(stub: Any, tokenizer: Any) -> None:
    (model,) = (await stub.ListModels(pb.ListModelsRequest())).models
    assert (model.id, model.max_model_len, model.eos_token_id) == ("tiny", 64, 1)
    assert model.build.tokenizer_digest == tokenizer.digest


UNARY_REFUSALS = [
    ("Tokenize", pb.TokenizeRequest(), "INVALID_ARGUMENT", "input: give `text`"),
    ("Tokenize", pb.TokenizeRequest(model="x", text="a"), "NOT_FOUND", "model: model 'x'"),
    (
        "Tokenize",
        pb.TokenizeRequest(conversation=pb.FullConversation()),
        "FAILED_PRECONDITION",
        "the served model's tokenizer lacks",
    ),
    (
        "Detokenize",
        pb.DetokenizeRequest(token_ids=[40, 9999]),
        "INVALID_ARGUMENT",
        "token_ids[1]: token id 9999",
    ),
    ("Abort", pb.AbortRequest(), "INVALID_ARGUMENT", "request_id: name the request"),
]


@pytest.mark.parametrize(("method", "request_", "code", "words"), UNARY_REFUSALS)
async def test_unary_refusals(stub: Any, method: str, request_: Any, code: str, words: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await getattr(stub, method)(request_)
    assert caught.value.code().name == code
    assert (caught.value.details() or "").startswith(words)


async def test_a_gateway_that_keeps_no_sessions_says_so(channel: grpc.aio.Channel) -> None:
    calls = (ripresa_pb2_grpc.SessionsStub(channel).OpenSession(pb.OpenSessionRequest()),)
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError, match="not served by this version yet") as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_operators_have_another_port(channel: grpc.aio.Channel) -> None:
    stub = ripresa_pb2_grpc.AdminStub(channel)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.GetClusterStatus(pb.GetClusterStatusRequest())
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_health_follows_the_router(channel: grpc.aio.Channel, router: Any) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service="ripresa.v1.Inference")
    assert (await health.Check(request)).status == SERVING
    watch = health.Watch(request)
    assert (await watch.read()).status == SERVING
    router.is_ready = False
    assert (await health.Check(request)).status == NOT_SERVING
    assert (await watch.read()).status == NOT_SERVING
    router.is_ready = True
    assert (await watch.read()).status == SERVING
    watch.cancel()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await health.Check(health_pb2.HealthCheckRequest(service="nobody"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_reflection_names_what_is_served(channel: grpc.aio.Channel) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    services = {service.name for service in (await call.read()).list_services_response.service}
    await call.write(
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="ripresa.v1.Inference")
    )
    files = (await call.read()).file_descriptor_response.file_descriptor_proto
    await call.done_writing()
    assert {"ripresa.v1.Inference", "grpc.health.v1.Health"} <= services
    assert any(b"ripresa.proto" in file for file in files)


async def test_a_stopping_server_finishes_its_streams(
    server: GrpcServer, channel: grpc.aio.Channel, stub: Any, router: Any
) -> None:
    router.hold.clear()
    call = stub.Generate(pb.GenerateRequest(text="hi", sampling=pb.SamplingParams(max_tokens=3)))
    assert (await call.read()).HasField("started")
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
    assert (await watch.read()).status == SERVING
    stopping = asyncio.create_task(server.stop(grace_s=30))
    assert (await watch.read()).status == NOT_SERVING
    watch.cancel()
    router.hold.set()
    events = []
    while (response := await call.read()) is not grpc.aio.EOF:
        events.append(response.WhichOneof("event"))
    assert events[-1] == "completed"
    await stopping


async def test_a_stop_without_grace_closes_the_router(
    server: GrpcServer, stub: Any, router: Any
) -> None:
    router.hold.clear()
    call = stub.Generate(pb.GenerateRequest(text="hi"))
    assert (await call.read()).HasField("started")
    await server.stop(0)
    await asyncio.wait_for(router.all_closed.wait(), 10)


async def test_a_taken_port_names_the_setting(server: GrpcServer, service: Any) -> None:
    second = GrpcServer(service, host="127.0.0.1", port=server.port)
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{server.port}") as caught:
        await second.start()
    assert caught.value.field == "gateway.grpc_port"
    await second.stop(0)
    with pytest.raises(ConfigError, match="Address already in use"):
        free_port("127.0.0.1", server.port, "gateway.grpc_port")


async def test_two_servers_share_a_port_when_told(service: Any) -> None:
    first = GrpcServer(service, host="127.0.0.1", port=0, reuse_port=True)
    await first.start()
    second = GrpcServer(service, host="127.0.0.1", port=first.port, reuse_port=True)
    await second.start()
    assert second.port == first.port
    await first.stop(0)
    await second.stop(0)


def test_a_free_port_passes() -> None:
    with socket.socket() as probe:
        # Held, so that nobody else takes it meanwhile; only a listener makes it taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        assert free_port("127.0.0.1", port, "gateway.http_port") == port
    assert free_port("127.0.0.1", 0, "gateway.http_port") > 0
