"""Are tenants kept apart over both protocols, and refused in the words of each client's API?"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import grpc
import httpx2 as httpx
import openai
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from http_gateway import http_gateway
from in_process_router import InProcessRouter
from resumable_gateways import resumable_gateways

from ripresa.cluster.gateway.api_keys import KeyFile, key_digest
from ripresa.cluster.gateway.chat_encoding import ChatEncoding
from ripresa.cluster.gateway.grpc_server import GrpcServer
from ripresa.cluster.gateway.served_model import ServedModel
from ripresa.cluster.gateway.service import InferenceService
from ripresa.cluster.gateway.tokenizer import Tokenizer
from ripresa.cluster.observability.metrics import GatewayMetrics
from ripresa.protos import ripresa_pb2 as pb
from ripresa.protos import ripresa_pb2_grpc
from ripresa.workers.cache.cache_events import tenant_digest

MODEL = "deepseek-demo"
ASKED = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Weather in Oslo?"}],
    "max_tokens": 4,
}
KEYS = f"""
tenants:
  red: {{keys: ["{key_digest("rk-red")}"], max_running: 1}}
  blue: {{keys: ["{key_digest("rk-blue")}"], tokens_per_minute: 1}}
  gone: {{keys: ["{key_digest("rk-gone")}"], models: [another]}}
"""


@pytest.fixture
async def service(
    router: InProcessRouter,
    chat_model: ServedModel,
    demo: Tokenizer,
    encoding: ChatEncoding,
    tmp_path: Path,
) -> AsyncIterator[InferenceService]:
    path = tmp_path / "keys.yaml"
    path.write_text(KEYS)
    metrics = GatewayMetrics()
    service = InferenceService(
        router, chat_model, demo, metrics, encoding=encoding, keys=KeyFile(path)
    )
    yield service
    await asyncio.wait_for(router.all_closed.wait(), 10)
    assert service.num_running == 0
    service.close()


@pytest.fixture
async def url(service: InferenceService) -> AsyncIterator[str]:
    async with http_gateway(service) as url:
        yield url


@pytest.fixture
async def raw(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, timeout=20) as client:
        yield client


def gpt(url: str, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def claude(url: str, key: str) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0)


def key(name: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer rk-{name}"),)


def generate(request_id: str = "", cache_salt: str = "") -> pb.GenerateRequest:
    options = pb.RequestOptions(request_id=request_id, cache_salt=cache_salt)
    sampling = pb.SamplingParams(max_tokens=4, ignore_eos=True)
    return pb.GenerateRequest(text="hi", sampling=sampling, options=options)


def details(error: grpc.RpcError) -> dict[str, Any]:
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    assert status is not None
    kinds = (
        error_details_pb2.ErrorInfo,
        error_details_pb2.RetryInfo,
        error_details_pb2.QuotaFailure,
        error_details_pb2.BadRequest,
    )
    found = {}
    for packed in status.details:
        for kind in kinds:
            detail = kind()
            if packed.Unpack(detail):
                found[kind.__name__] = detail
    return found


async def test_every_door_asks_for_a_key(
    raw: httpx.AsyncClient, stub: ripresa_pb2_grpc.InferenceAsyncStub, router: InProcessRouter
) -> None:
    for path in ("chat/completions", "completions", "responses", "messages"):
        for headers in ({}, {"authorization": "Bearer no"}, {"x-api-key": "no"}):
            # The body is not looked at before the key.
            answer = await raw.post(f"/v1/{path}", content=b"{", headers=headers)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["type"] == "authentication_error"
    for get in ("/v1/models", f"/v1/models/{MODEL}", "/admin/plans/r"):
        assert (await raw.get(get)).status_code == 401
    for post in ("/tokenize", "/detokenize", "/v1/messages/count_tokens"):
        assert (await raw.post(post, json={})).status_code == 401
    for free in ("/health", "/ready", "/metrics", "/version", "/openapi.json"):
        assert (await raw.get(free)).status_code == 200
    calls = (
        stub.Abort(pb.AbortRequest(request_id="r")),
        stub.Tokenize(pb.TokenizeRequest(text="a"), metadata=key("no")),
        stub.Detokenize(pb.DetokenizeRequest()),
        stub.ListModels(pb.ListModelsRequest()),
    )
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert details(refused.value)["ErrorInfo"].reason == "BAD_KEY"
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await anext(aiter(stub.Generate(generate())))
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert router.seen == []


async def test_health_needs_no_key(channel: grpc.aio.Channel) -> None:
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_clients_raise_their_own_errors(url: str) -> None:
    async with gpt(url, "no") as bad, gpt(url, "rk-gone") as forbidden:
        with pytest.raises(openai.AuthenticationError) as unknown:
            await bad.chat.completions.create(**ASKED)  # type: ignore[call-overload]
        assert unknown.value.code == "bad_key"
        with pytest.raises(openai.PermissionDeniedError) as denied:
            await forbidden.chat.completions.create(**ASKED)  # type: ignore[call-overload]
        assert denied.value.code == "tenant_forbidden"
    async with claude(url, "no") as bad_claude, claude(url, "rk-gone") as forbidden_claude:
        with pytest.raises(anthropic.AuthenticationError) as refused:
            await bad_claude.messages.create(**ASKED)  # type: ignore[call-overload]
        assert refused.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
        with pytest.raises(anthropic.PermissionDeniedError) as forbidden_error:
            await forbidden_claude.messages.create(**ASKED)  # type: ignore[call-overload]
        assert forbidden_error.value.body["error"]["type"] == "permission_error"  # type: ignore[index]


async def test_a_quota_is_a_429_with_the_time_to_come_back(
    url: str, stub: ripresa_pb2_grpc.InferenceAsyncStub
) -> None:
    async with gpt(url, "rk-blue") as client, claude(url, "rk-blue") as other:
        await client.chat.completions.create(**ASKED)  # type: ignore[call-overload]
        with pytest.raises(openai.RateLimitError) as limited:
            await client.chat.completions.create(**ASKED)  # type: ignore[call-overload]
        assert limited.value.code == "tenant_quota"
        assert limited.value.type == "rate_limit_error"
        assert int(limited.value.response.headers["retry-after"]) > 60
        with pytest.raises(anthropic.RateLimitError) as too:
            await other.messages.create(**ASKED)  # type: ignore[call-overload]
        assert too.value.body["error"]["type"] == "rate_limit_error"  # type: ignore[index]
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await anext(aiter(stub.Generate(generate(), metadata=key("blue"))))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    told = details(refused.value)
    assert told["ErrorInfo"].reason == "TENANT_QUOTA"
    assert told["QuotaFailure"].violations[0].subject == "tenant:blue"
    assert told["RetryInfo"].retry_delay.seconds > 60


async def test_one_tenant_s_running_requests_do_not_count_for_another(
    router: InProcessRouter, stub: ripresa_pb2_grpc.InferenceAsyncStub
) -> None:
    router.hold.clear()
    first = stub.Generate(generate("r"), metadata=key("red"))
    await anext(aiter(first))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await anext(aiter(stub.Generate(generate(), metadata=key("red"))))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    # Another tenant may even use the same id.
    second = stub.Generate(generate("r"), metadata=key("blue"))
    started = await anext(aiter(second))
    assert started.started.request_id == "r"
    router.hold.set()
    assert [r async for r in second][-1].HasField("completed")
    assert [r async for r in first][-1].HasField("completed")
    assert [r async for r in stub.Generate(generate(), metadata=key("red"))]


async def test_more_choices_than_a_tenant_may_ever_have_are_no_quota_to_wait_for(
    url: str, stub: ripresa_pb2_grpc.InferenceAsyncStub, router: InProcessRouter
) -> None:
    async with gpt(url, "rk-red") as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(**ASKED, n=2)  # type: ignore[call-overload]
    assert (refused.value.param, refused.value.type) == ("n", "invalid_request_error")
    assert "retry-after" not in refused.value.response.headers
    request = generate()
    request.sampling.n = 2
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await anext(aiter(stub.Generate(request, metadata=key("red"))))
    assert ended.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    told = details(ended.value)
    assert told["ErrorInfo"].reason == "INVALID_REQUEST"
    assert told["BadRequest"].field_violations[0].field == "sampling.n"
    assert told.keys() == {"ErrorInfo", "BadRequest"}
    assert router.seen == []


async def test_nobody_ends_or_explains_another_tenant_s_request(
    router: InProcessRouter,
    stub: ripresa_pb2_grpc.InferenceAsyncStub,
    raw: httpx.AsyncClient,
) -> None:
    router.hold.clear()
    running = stub.Generate(generate("mine"), metadata=key("red"))
    await anext(aiter(running))
    abort = pb.AbortRequest(request_id="mine")
    assert not (await stub.Abort(abort, metadata=key("blue"))).found
    blue, red = ({"x-api-key": f"rk-{name}"} for name in ("blue", "red"))
    assert (await raw.get("/admin/plans/mine", headers=blue)).status_code == 404
    assert (await raw.get("/admin/plans/mine", headers=red)).status_code == 200
    assert (await stub.Abort(abort, metadata=key("red"))).found
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        async for _ in running:
            pass
    assert ended.value.code() is grpc.StatusCode.CANCELLED


async def test_equal_prompts_of_two_tenants_share_nothing(
    router: InProcessRouter, stub: ripresa_pb2_grpc.InferenceAsyncStub
) -> None:
    for name, salt in (("red", ""), ("red", "s"), ("red", "t"), ("gone", "s")):
        call = stub.Generate(generate(cache_salt=salt), metadata=key(name))
        if name == "gone":
            with pytest.raises(grpc.aio.AioRpcError):
                await anext(aiter(call))
        else:
            assert [r async for r in call]
    blue = stub.Generate(generate(cache_salt="s"), metadata=key("blue"))
    assert [r async for r in blue]
    salts = [prompt.tenant_salt for prompt in router.seen]
    assert len(set(salts)) == 4
    # Memory is charged to the tenant, however often he narrows.
    assert [tenant_digest(salt) == tenant_digest(salts[0]) for salt in salts] == [
        *[True] * 3,
        False,
    ]
    prompts = {prompt.token_ids for prompt in router.seen}
    assert len(prompts) == 1


async def test_what_a_tenant_computed_is_cached_for_nobody_else(tmp_path: Path) -> None:
    """Not even for the same session id, beside him, or under a salt that is called as his."""
    path = tmp_path / "keys.yaml"
    owners = (f'{name}: {{keys: ["{key_digest(f"rk-{name}")}"]}}' for name in ("red", "blue"))
    path.write_text(f"tenants: {{{', '.join(owners)}}}")
    text = "a secret that both of them happen to send " * 60
    async with resumable_gateways({}, num_decoders=1) as gateways:
        gateway = gateways.another(KeyFile(path))
        server = GrpcServer(gateway.service, host="127.0.0.1", port=0, drain_notice_s=0)
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            stub = ripresa_pb2_grpc.InferenceStub(channel)

            async def cached(name: str, session: str = "", salt: str = "") -> int:
                """Tokens of the prompt that the tenant finds."""
                options = pb.RequestOptions(session_id=session, cache_salt=salt)
                sampling = pb.SamplingParams(max_tokens=4, ignore_eos=True)
                request = pb.GenerateRequest(text=text, sampling=sampling, options=options)
                told = [one async for one in stub.Generate(request, metadata=key(name))]
                assert told[0].started.prompt_tokens > 400
                await gateways.cluster.told()
                return int(told[0].started.cached_tokens)

            async def held(name: str) -> int:
                asked = pb.TokenizeRequest(text=text)
                return int((await stub.Tokenize(asked, metadata=key(name))).cached_tokens)

            # Neither waits for what the other computes.
            assert await asyncio.gather(cached("red", "s"), cached("blue", "s", "x")) == [0, 0]
            assert await held("red") > 400
            assert await held("blue") == 0
            for session, salt in (("s", ""), ("", "y"), ("", "red")):
                assert await cached("blue", session, salt) == 0
            assert await cached("red", "s") > 400
            assert await cached("blue", "s") > 400
        await server.stop(0)
