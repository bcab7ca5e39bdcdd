"""What do clients do to a gateway that leave, stop reading, idle, send too much or wait too little?

However a client ends, its work ends with it: the router's stream is closed, nothing is counted as
running, and the gateway's memory is as it was.
"""

from __future__ import annotations

import asyncio
import gc
import json
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx2 as httpx
import pytest
from chat_support import GET_WEATHER, calls_block, encode_output
from http_gateway import http_gateway
from in_process_router import InProcessRouter

from ripresa.cluster.gateway.chat_encoding import ChatEncoding
from ripresa.cluster.gateway.grpc_server import GrpcServer
from ripresa.cluster.gateway.served_model import ServedModel
from ripresa.cluster.gateway.service import InferenceService
from ripresa.cluster.gateway.tokenizer import Tokenizer
from ripresa.cluster.observability.metrics import GatewayMetrics
from ripresa.protos import ripresa_pb2 as pb
from ripresa.protos import ripresa_pb2_grpc

EOS = 1
SAID = "Need it.</think>Look." + calls_block([("get_weather", [("city", "true", "Oslo")])])
SCHEMA = json.dumps(GET_WEATHER["function"]["parameters"])
WEATHER = pb.ToolDefinition(name="get_weather", description="Weather", parameters_json=SCHEMA)
TEN_MB = 10_000_000
NUM_IDLE = 200
GRPC = {
    "generate": ("Generate", pb.GenerateRequest(text="hi")),
    "chat": (
        "Chat",
        pb.ChatRequest(
            full=pb.FullConversation(
                config=pb.ConversationConfig(tools=[WEATHER]),
                messages=[pb.Message(role=pb.ROLE_USER, content="Weather in Oslo?")],
            )
        ),
    ),
}
ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Weather in Oslo?"}],
    "tools": [GET_WEATHER],
    "max_tokens": 400,
    "stream": True,
}
HTTP: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": ASKED,
    "/v1/completions": {"prompt": "hi", "max_tokens": 40, "stream": True},
    "/v1/responses": {"input": "hi", "stream": True},
    "/v1/messages": {**ASKED, "tools": []},
}


@pytest.fixture
async def hard_service(
    router: InProcessRouter, demo: Tokenizer, encoding: ChatEncoding
) -> AsyncIterator[InferenceService]:
    """A gateway with room for long prompts and answers; nothing may be left of its requests."""
    router.script = (*encode_output(SAID), EOS)
    model = ServedModel("deepseek-demo", 1 << 20, demo.num_ids, EOS, "ab12")
    service = InferenceService(router, model, demo, GatewayMetrics(), encoding=encoding)
    yield service
    await asyncio.wait_for(router.all_closed.wait(), 20)
    assert service.num_running == 0
    service.close()


@pytest.fixture
async def address(hard_service: InferenceService) -> AsyncIterator[str]:
    server = GrpcServer(hard_service, host="127.0.0.1", port=0, drain_notice_s=0)
    await server.start()
    yield f"127.0.0.1:{server.port}"
    await server.stop(0)


@pytest.fixture
async def url(hard_service: InferenceService) -> AsyncIterator[str]:
    async with http_gateway(hard_service) as url:
        yield url


def request(kind: str, **sampling: Any) -> tuple[str, Any]:
    method, message = GRPC[kind]
    own = type(message)()
    own.CopyFrom(message)
    own.sampling.CopyFrom(pb.SamplingParams(**{"max_tokens": 60, **sampling}))
    return method, own


async def closed(router: InProcessRouter) -> None:
    await asyncio.wait_for(router.all_closed.wait(), 20)


@pytest.mark.parametrize("how", ["cancel", "disconnect"])
@pytest.mark.parametrize("num_choices", [1, 2])
@pytest.mark.parametrize("kind", GRPC)
async def test_a_grpc_client_leaves_after_any_message(
    address: str, router: InProcessRouter, kind: str, num_choices: int, how: str
) -> None:
    method, message = request(kind, n=num_choices)
    num_read = 0
    while True:
        async with grpc.aio.insecure_channel(address) as channel:
            call = getattr(ripresa_pb2_grpc.InferenceStub(channel), method)(message)
            for _ in range(num_read):
                if await call.read() is grpc.aio.EOF:
                    break
            else:
                if how == "cancel":
                    call.cancel()
                else:
                    await channel.close()
                await closed(router)
                num_read += 1
                continue
        break
    assert num_read > 5, "the stream was cut at each of its messages"


@pytest.mark.parametrize("path", HTTP)
async def test_an_http_client_leaves_after_any_event(
    url: str, router: InProcessRouter, path: str
) -> None:
    num_read = 0
    while True:
        # Held, so that the stream cannot be over before the client has left.
        router.hold.clear()
        async with (
            httpx.AsyncClient(base_url=url, timeout=20) as client,
            client.stream("POST", path, json=HTTP[path]) as response,
        ):
            assert response.status_code == 200
            lines = response.aiter_lines()
            for _ in range(num_read):
                if router.open:
                    router.hold.set()
                if await anext(lines, None) is None:
                    break
                router.hold.clear()
            else:
                num_read += 3
                continue
        break
    router.hold.set()
    await closed(router)
    assert num_read > 20, "the stream was cut at its events, one by one"


@pytest.mark.parametrize("path", HTTP)
async def test_an_http_client_leaves_before_the_first_byte(
    url: str, router: InProcessRouter, path: str
) -> None:
    for body in (HTTP[path], {**HTTP[path], "stream": False}):
        router.hold_prefill.clear()
        router.opened.clear()
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            post = asyncio.create_task(client.post(path, json=body))
            await asyncio.wait_for(router.opened.wait(), 10)
            post.cancel()
            await asyncio.gather(post, return_exceptions=True)
        await closed(router)
    router.hold_prefill.set()


async def test_a_slow_grpc_reader_holds_back_its_own_stream_alone(
    address: str, router: InProcessRouter
) -> None:
    router.script, router.batch = (40, 41, 42, 43), 20
    asked = pb.SamplingParams(max_tokens=40_000, logprobs=20)
    async with grpc.aio.insecure_channel(address) as channel:
        stub = ripresa_pb2_grpc.InferenceStub(channel)
        slow = stub.Generate(pb.GenerateRequest(text="slow", sampling=asked))
        assert (await slow.read()).HasField("started")
        quick = pb.SamplingParams(max_tokens=4_000)
        for _ in range(3):
            stream = stub.Generate(pb.GenerateRequest(text="quick", sampling=quick))
            assert sum([1 async for _ in stream]) == 4_000 // 20 + 3
        produced = router.produced[router.seen[0].request_id]
        assert produced < 40_000, "the gateway would hold the whole answer for its reader"
        # What was held back is not lost.
        num_tokens = 0
        while (response := await slow.read()) is not grpc.aio.EOF:
            num_tokens += len(response.delta.logprobs)
    assert num_tokens == 40_000


async def test_a_slow_http_reader_holds_back_its_own_stream_alone(
    url: str, router: InProcessRouter
) -> None:
    router.script, router.batch = tuple(encode_output("word ")), 20
    body = {"prompt": "slow", "max_tokens": 40_000, "stream": True, "logprobs": 5}
    quick = {"prompt": "quick", "max_tokens": 500, "stream": True}
    async with (
        httpx.AsyncClient(base_url=url, timeout=60) as client,
        client.stream("POST", "/v1/completions", json=body) as slow,
    ):
        for _ in range(3):
            assert (await client.post("/v1/completions", json=quick)).text.endswith("[DONE]\n\n")
        produced = router.produced[router.seen[0].request_id]
        assert produced < 40_000, "the gateway would hold the whole answer for its reader"
        last = [line async for line in slow.aiter_lines() if line][-1]
    assert last == "data: [DONE]"


async def test_idle_streams_cost_little_and_hold_up_nobody(
    address: str, url: str, router: InProcessRouter
) -> None:
    """Half of them by gRPC and half by HTTP; none has a token for a long time."""
    router.hold.clear()
    async with (
        grpc.aio.insecure_channel(address) as channel,
        httpx.AsyncClient(
            base_url=url, timeout=60, limits=httpx.Limits(max_connections=NUM_IDLE)
        ) as client,
    ):
        stub = ripresa_pb2_grpc.InferenceStub(channel)
        asked = pb.SamplingParams(max_tokens=4)
        calls = [
            stub.Generate(pb.GenerateRequest(text="idle", sampling=asked))
            for _ in range(NUM_IDLE // 2)
        ]
        for call in calls:
            assert (await call.read()).HasField("started")
        body = json.dumps(HTTP["/v1/completions"])
        responses = [
            await client.send(
                client.build_request("POST", "/v1/completions", content=body), stream=True
            )
            for _ in range(NUM_IDLE // 2)
        ]
        assert len(router.open) == NUM_IDLE
        models = await stub.ListModels(pb.ListModelsRequest())
        assert [model.id for model in models.models] == ["deepseek-demo"]
        tokens = await stub.Tokenize(pb.TokenizeRequest(text="not held up"))
        assert tokens.token_ids
        router.hold.set()
        for call in calls:
            last = None
            while (response := await call.read()) is not grpc.aio.EOF:
                last = response
            assert last is not None
            assert last.HasField("completed")
        for response in responses:
            assert (await response.aread()).endswith(b"data: [DONE]\n\n")
            await response.aclose()


async def test_a_request_of_ten_megabytes_is_refused_by_its_size(
    address: str, url: str, router: InProcessRouter
) -> None:
    text = "a long log line " * (TEN_MB // 16)
    async with grpc.aio.insecure_channel(address) as channel:
        stub = ripresa_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Tokenize(pb.TokenizeRequest(text=text))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        response = await client.post("/v1/completions", json={"prompt": text})
    assert response.status_code == 413
    assert "gateway.max_message_bytes" in response.json()["error"]["message"]
    assert not router.seen


@pytest.mark.slow
async def test_ten_megabytes_that_may_come_are_served_and_forgotten(
    router: InProcessRouter, demo: Tokenizer
) -> None:
    model = ServedModel("deepseek-demo", 16 << 20, demo.num_ids, EOS, "ab12")
    service = InferenceService(router, model, demo, GatewayMetrics(), max_message_bytes=2 * TEN_MB)
    server = GrpcServer(
        service, host="127.0.0.1", port=0, drain_notice_s=0, max_message_bytes=2 * TEN_MB
    )
    await server.start()
    text = "a long log line\n" * (TEN_MB // 16)
    tracemalloc.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            stub = ripresa_pb2_grpc.InferenceStub(channel)
            long = stub.Generate(pb.GenerateRequest(text=text))
            # Short texts do not wait for it.
            assert (await stub.Tokenize(pb.TokenizeRequest(text="short"))).token_ids
            assert (await long.read()).HasField("started")
        await closed(router)
        assert len(router.seen[0].token_ids) > 1_000_000
        router.seen.clear()
        del long
        # What served the call ends a moment after its stream.
        for _ in range(300):
            gc.collect()
            held, _ = tracemalloc.get_traced_memory()
            if held < len(text) // 4:
                break
            await asyncio.sleep(0.1)
    finally:
        tracemalloc.stop()
    assert held < len(text) // 4
    await server.stop(0)
    assert service.num_running == 0
    service.close()


@pytest.mark.parametrize("kind", GRPC)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_a_deadline_ends_the_work_in_every_phase(
    address: str, router: InProcessRouter, kind: str, phase: str
) -> None:
    """In the queue of texts: `test_tokenizing.py`; with real workers: `tests/e2e`."""
    (router.hold_prefill if phase == "prefill" else router.hold).clear()
    method, message = request(kind)
    num_calls = 0
    async with grpc.aio.insecure_channel(address) as channel:
        # A loaded machine may take longer than that to reach the router.
        while not router.seen and num_calls < 6:
            num_calls += 1
            call = getattr(ripresa_pb2_grpc.InferenceStub(channel), method)(
                message, timeout=2**num_calls / 4
            )
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in call:
                    pass
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await closed(router)
    assert 1 <= len(router.seen) <= num_calls
