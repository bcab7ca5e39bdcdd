"""Does a stream go on, message by message, whichever gateway or worker dies?"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import pytest
from chat_support import calls_block, encode_output
from resumable_gateways import Request, Response, TestGateway, resumable_gateways
from suspensions import Cancelling, for_every_wait

from ripresa.cluster.gateway.admission import Admitted
from ripresa.cluster.gateway.api_keys import KeyFile, key_digest
from ripresa.cluster.gateway.grpc_server import GrpcServer
from ripresa.cluster.gateway.status import RequestError
from ripresa.cluster.observability.metrics import (
    TENANT_RUNNING,
    TENANT_TOKENS,
    BilledTokens,
    Kind,
    Series,
)
from ripresa.protos import ripresa_pb2 as pb
from ripresa.protos.ripresa_pb2_grpc import InferenceStub
from ripresa.workers.errors import ErrorCode, RipresaError

EOS = 1
SCHEMA = '{"type": "object", "properties": {"city": {"type": "string"}}}'
WEATHER = pb.ToolDefinition(name="get_weather", description="Weather", parameters_json=SCHEMA)
CALLS = calls_block(
    [
        ("get_weather", [("city", "true", 'Os"lo\n'), ("days", "false", "2")]),
        ("get_weather", [("city", "true", "Rome")]),
    ]
)
SEED = 7


def written(*texts: str) -> dict[int, list[int]]:
    """Answers to the choices of a request of seed 7."""
    return {SEED + k: [*encode_output(text), EOS] for k, text in enumerate(texts)}


def generate(n: int = 1, **sampling: object) -> pb.GenerateRequest:
    params = pb.SamplingParams(max_tokens=200, seed=SEED, n=n, **sampling)  # type: ignore[arg-type]
    return pb.GenerateRequest(text="Once upon a time", sampling=params, return_token_ids=True)


def chat(n: int = 1, **sampling: object) -> pb.ChatRequest:
    params = pb.SamplingParams(max_tokens=200, seed=SEED, n=n, **sampling)  # type: ignore[arg-type]
    return pb.ChatRequest(
        full=pb.FullConversation(
            config=pb.ConversationConfig(tools=[WEATHER]),
            messages=[pb.Message(role=pb.ROLE_USER, content="Weather in Oslo?")],
        ),
        sampling=params,
    )


CALLING = f"Need it.</think>Let me look, é.\n\n{CALLS}"
SCENARIOS: dict[str, tuple[Request, dict[int, list[int]]]] = {
    "text": (generate(), written("the quick brown fox, 日本語")),
    "text, two choices and log probabilities": (
        generate(2, logprobs=2),
        written("the quick brown fox", "jumps"),
    ),
    "text, stop strings": (
        generate(2, stop=["STOP"]),
        written("one STOP two three four", "one two STO three"),
    ),
    "chat, tool calls": (chat(), written(CALLING)),
    "chat, two choices": (chat(2), written(CALLING, "Hm.</think>It is cold.")),
    "chat, stop strings": (chat(stop=["cold"]), written("Hm.</think>It is cold. And so on.")),
}


def untimed(messages: Sequence[Response]) -> list[Response]:
    """The messages without what a resuming gateway cannot know."""
    copies = []
    for message in messages:
        copy = type(message)()
        copy.CopyFrom(message)  # type: ignore[arg-type]
        if copy.HasField("completed"):
            copy.completed.ClearField("timings")
        copies.append(copy)
    return copies


@pytest.mark.parametrize("name", SCENARIOS)
async def test_a_stream_goes_on_from_every_message(name: str) -> None:
    request, answers = SCENARIOS[name]
    async with resumable_gateways(answers) as gateways:
        first, second = gateways.another(), gateways.another()
        told = untimed(await first.ask(request))
        stream_id = told[0].started.stream_id
        assert [message.sequence for message in told] == list(range(len(told)))
        for k in range(len(told)):
            assert await second.resume(stream_id, k) == told[k:]
        for k in (len(told), len(told) + 1):
            with pytest.raises(RipresaError, match=f"{len(told) - 1} is its last") as caught:
                await second.resume(stream_id, k)
            assert (caught.value.code, caught.value.field) == (
                ErrorCode.INVALID_ARGUMENT,
                "next_sequence",
            )


def named(request: Request, request_id: str = "mine") -> Request:
    copy = type(request)()
    copy.CopyFrom(request)  # type: ignore[arg-type]
    copy.options.request_id = request_id
    return copy


@pytest.mark.parametrize("name", SCENARIOS)
async def test_a_request_that_is_sent_again_runs_once(name: str) -> None:
    request, answers = SCENARIOS[name]
    async with resumable_gateways(answers) as gateways:
        gateway = gateways.another()
        told = await gateway.ask(named(request))
        num_run = len(gateways.asked)
        assert await gateway.ask(named(request)) == untimed(told)
        assert len(gateways.asked) == num_run
        other = named(request)
        other.sampling.seed += 1
        with pytest.raises(RequestError, match="use another id") as caught:
            await gateway.ask(other)
        assert (caught.value.code, caught.value.reason, caught.value.field) == (
            ErrorCode.ALREADY_EXISTS,
            "REQUEST_ID_IN_USE",
            "options.request_id",
        )
        assert len(gateways.asked) == num_run
        await gateway.ask(named(request, "another"))
        assert len(gateways.asked) == 2 * num_run


async def test_a_request_that_was_not_answered_runs_again() -> None:
    """Cancelled before its end, or answered so long ago that no worker keeps the stream."""
    request, answers = SCENARIOS["text"]
    async with resumable_gateways(answers, num_decoders=1) as gateways:
        gateway = gateways.another()
        async with aclosing(gateway.open(named(request))) as messages:
            await anext(messages)
        told = await gateway.ask(named(request))
        assert told[-1].HasField("completed")
        assert len(gateways.asked) == 2
        (worker,) = gateways.cluster.workers_by_id.values()
        assert worker.streams is not None
        for stream in tuple(worker.streams._ended):
            worker.streams._forget(stream)
        again = await gateway.ask(named(request))
        assert len(gateways.asked) == 3
        assert again[0].started.stream_id != told[0].started.stream_id


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("num_encoders", [0, 1])
async def test_a_stream_outlives_its_gateway(name: str, num_encoders: int) -> None:
    """Wherever it is killed: what the client has read and what comes then are one stream."""
    request, answers = SCENARIOS[name]
    async with resumable_gateways(answers, num_encoders) as gateways:
        told = await gateways.another().ask(request)
        for k in range(1, len(told), max(1, len(told) // 8)):
            read = await gateways.another().read(request, k)
            stream_id = read[0].started.stream_id
            second = gateways.another()
            rest = await second.resume(stream_id, k)
            whole = await second.resume(stream_id)
            assert untimed([*read, *rest]) == whole
            assert len(whole) == len(told)


async def test_without_a_gateway_the_work_goes_on_to_its_end() -> None:
    request, answers = SCENARIOS["text"]
    async with resumable_gateways(answers, num_decoders=1) as gateways:
        read = await gateways.another().read(request, 2)
        await gateways.idle()
        (worker,) = gateways.cluster.workers_by_id.values()
        assert worker.streams is not None
        steps = worker.engine.stats().num_steps
        rest = await gateways.another().resume(read[0].started.stream_id, 2)
        assert rest[-1].HasField("completed")
        assert worker.engine.stats().num_steps == steps


NUM_LONG = 300
LONG = {SEED: [40] * NUM_LONG}


def long() -> pb.GenerateRequest:
    request = generate()
    request.sampling.max_tokens = NUM_LONG
    return request


async def test_a_cancel_at_a_living_gateway_ends_the_work() -> None:
    async with resumable_gateways(LONG, num_decoders=1) as gateways:
        gateway = gateways.another()
        stream = gateway.open(long())
        read = [await anext(stream) for _ in range(3)]
        await stream.aclose()
        await gateways.idle()
        with pytest.raises(RipresaError) as caught:
            await gateway.resume(read[0].started.stream_id, 3)
        assert caught.value.code is ErrorCode.CANCELLED


async def test_a_gateway_that_stops_too_soon_leaves_its_streams_to_others() -> None:
    async with resumable_gateways(LONG) as gateways:
        first = gateways.another()
        server = GrpcServer(first.service, host="127.0.0.1", port=0, drain_notice_s=0)
        await server.start()
        read: list[Response] = []
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            call = InferenceStub(channel).Generate(long())

            async def read_on(num_messages: int) -> None:
                while len(read) < num_messages:
                    read.append(await call.read())

            await read_on(3)
            await server.stop(0, before_cut=first.calls.detach)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read_on(NUM_LONG)
        assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        second = gateways.another()
        rest = await second.resume(read[0].started.stream_id, len(read))
        assert [*read, *rest] == await second.resume(read[0].started.stream_id)
        assert len(read) + len(rest) == NUM_LONG + 3


@pytest.mark.parametrize("name", ["text, two choices and log probabilities", "chat, tool calls"])
async def test_two_gateways_charge_what_one_would(name: str, tmp_path: Path) -> None:
    request, answers = SCENARIOS[name]
    file = tmp_path / "keys.yaml"
    file.write_text(f'tenants: {{red: {{keys: ["{key_digest("rk-red")}"], max_running: 2}}}}')
    keys = KeyFile(file)

    def charged(gateway: TestGateway) -> float:
        return sample(gateway, TENANT_TOKENS, BilledTokens.GENERATED)

    async with resumable_gateways(answers) as gateways:
        undisturbed = gateways.another(keys, "red")
        told = await undisturbed.ask(request)
        # Whatever closes an answer is not streamed.
        assert charged(undisturbed) == sum(len(answer) - 1 for answer in answers.values())
        for k in range(1, len(told), max(1, len(told) // 6)):
            first, second = gateways.another(keys, "red"), gateways.another(keys, "red")
            read = await first.read(request, k)
            stream = second.resumed(read[0].started.stream_id, k)
            await anext(stream)
            assert sample(second, TENANT_RUNNING) == len(answers)
            async for _ in stream:
                pass
            assert sample(second, TENANT_RUNNING) == 0
            assert charged(first) + charged(second) == charged(undisturbed)


def sample(gateway: TestGateway, series: Series, *labels: str) -> float:
    metrics = gateway.service.metrics
    kept = metrics.gauge if series.kind is Kind.GAUGE else metrics.counter
    value: float = kept(series).labels("red", *labels)._value.get()
    return value


async def test_two_readers_and_the_last_one_that_goes_ends_the_work() -> None:
    async with resumable_gateways(LONG, num_decoders=1) as gateways:
        first, second = gateways.another(), gateways.another()
        one = first.open(long())
        started = await anext(one)
        two = second.resumed(started.started.stream_id, 1)
        seen = [(await anext(two)).generate for _ in range(5)]
        assert seen == [await anext(one) for _ in range(5)]
        await one.aclose()
        more = [(await anext(two)).generate.sequence for _ in range(5)]
        assert more == list(range(6, 11))
        (worker,) = gateways.cluster.workers_by_id.values()
        assert worker.engine.stats().num_running == 1
        await two.aclose()
        await gateways.idle()
        assert worker.engine.stats().num_steps < NUM_LONG


async def test_a_wrong_question_ends_nothing() -> None:
    async with resumable_gateways(LONG, num_decoders=1) as gateways:
        (started,) = await gateways.another().read(long(), 1)
        second = gateways.another()
        with pytest.raises(RipresaError) as caught:
            await second.resume(started.started.stream_id, 10_000)
        assert caught.value.code is ErrorCode.INVALID_ARGUMENT
        rest = await second.resume(started.started.stream_id, 1)
        assert len(rest) == NUM_LONG + 2


@pytest.mark.parametrize("name", ["text", "text, two choices and log probabilities"])
async def test_a_stream_is_found_where_it_went_when_its_worker_died(name: str) -> None:
    request, answers = SCENARIOS[name]
    async with resumable_gateways(answers, num_decoders=3) as gateways:
        first = gateways.another()
        stream = first.open(request)
        read = [await anext(stream) for _ in range(4)]
        placed_on = read[0].started.worker_id
        await gateways.cluster.kill(placed_on)
        read.append(await anext(stream))
        # The first gateway has taken it elsewhere, and dies too.
        while len(read) < 7:
            read.append(await anext(stream))
        await first.die(stream)
        second = gateways.another()
        rest = await second.resume(read[0].started.stream_id, 7)
        whole = await second.resume(read[0].started.stream_id)
        assert untimed([*read, *rest]) == whole
        assert whole[-1].HasField("completed")


async def test_a_resumed_stream_outlives_its_worker() -> None:
    async with resumable_gateways(LONG, num_decoders=2) as gateways:
        (started,) = await gateways.another().read(long(), 1)
        second = gateways.another()
        stream = second.resumed(started.started.stream_id, 1)
        read = [await anext(stream) for _ in range(3)]
        await gateways.cluster.kill(started.started.worker_id)
        async with aclosing(stream):
            read += [message async for message in stream]
        assert [one.generate.sequence for one in read] == list(range(1, NUM_LONG + 3))
        assert sum(len(one.generate.delta.token_ids) for one in read) == NUM_LONG


async def test_gateway_and_worker_are_both_lost() -> None:
    async with resumable_gateways(LONG, num_decoders=2) as gateways:
        (started,) = await gateways.another().read(long(), 1)
        await gateways.cluster.kill(started.started.worker_id)
        with pytest.raises(RequestError, match="send the request again") as caught:
            await gateways.another().resume(started.started.stream_id, 1)
        assert (caught.value.code, caught.value.reason) == (ErrorCode.UNAVAILABLE, "WORKER_LOST")
        assert caught.value.retry_after_s == 1.0


async def test_an_encoder_route_is_taken_over_in_its_prefill() -> None:
    """The gateway that drove the hand-over is gone before the first token."""
    request, answers = SCENARIOS["text"]
    async with resumable_gateways(answers, num_encoders=1, num_decoders=1) as gateways:
        read = await gateways.another().read(request, 1)
        rest = await gateways.another().resume(read[0].started.stream_id, 1)
        assert rest[-1].HasField("completed")


@pytest.mark.parametrize("stream_id", ["", "x", "x.", ".d0", "x" * 300 + ".d0"])
async def test_no_stream_id(stream_id: str) -> None:
    async with resumable_gateways({}) as gateways:
        with pytest.raises(RipresaError) as caught:
            await gateways.another().resume(stream_id)
        assert (caught.value.code, caught.value.field) == (ErrorCode.INVALID_ARGUMENT, "stream_id")


async def test_an_unknown_stream_is_not_found() -> None:
    async with resumable_gateways({}) as gateways:
        with pytest.raises(RequestError, match="send the request again") as caught:
            await gateways.another().resume("x.d0")
        assert (caught.value.code, caught.value.reason) == (
            ErrorCode.NOT_FOUND,
            "STREAM_NOT_FOUND",
        )
        assert caught.value.resource == ("stream", "x.d0")


@pytest.mark.parametrize("is_resumed", [False, True], ids=["begun", "resumed"])
async def test_a_stream_that_nobody_reads_gives_its_place_and_goes_on_for_resume(
    is_resumed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = generate(8, logprobs=20, ignore_eos=True)
    async with resumable_gateways({}) as gateways:
        first, second = gateways.another(), gateways.another()
        # Long enough for a loaded machine to write what the client does take.
        first.service.max_unread_s = 1.0
        is_free = asyncio.Event()
        close = Admitted.close

        def noted(admitted: Admitted) -> None:
            close(admitted)
            is_free.set()

        stream_id = ""
        if is_resumed:
            stream_id = (await second.read(request, 1))[0].started.stream_id
        monkeypatch.setattr(Admitted, "close", noted)
        server = GrpcServer(first.service, host="127.0.0.1", port=0, drain_notice_s=0)
        await server.start()
        options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
        address = f"127.0.0.1:{server.port}"
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            stub = InferenceStub(channel)
            call: Any
            if is_resumed:
                call = stub.Resume(pb.ResumeRequest(stream_id=stream_id))
            else:
                call = stub.Generate(request)
            await asyncio.wait_for(is_free.wait(), 60)
            assert first.service.num_running == 0
            told: list[Any] = []

            async def read() -> None:
                async for message in call:
                    told.append(message.generate if is_resumed else message)

            with pytest.raises(grpc.aio.AioRpcError, match="go on with Resume") as caught:
                await asyncio.wait_for(read(), 60)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await server.stop(0)
        stream_id = stream_id or told[0].started.stream_id
        rest = await gateways.another().resume(stream_id, len(told))
        sequence = [message.sequence for message in (*told, *rest)]
        assert sequence == list(range(len(sequence)))
        assert rest[-1].completed.usage.completion_tokens == 8 * 200


async def test_nobody_looks_for_a_worker_that_a_client_made_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither is one waited for, nor an encoder taken for lost which keeps no streams."""
    async with resumable_gateways({}, num_encoders=1) as gateways:
        gateway, lost = gateways.another(), list[str]()
        monkeypatch.setattr(gateways.cluster, "lost", lost.append)
        for name in ("made-up", "e0"):
            with pytest.raises(RequestError, match="no such stream is kept") as caught:
                await gateway.resume(f"x.{name}")
            assert caught.value.code is ErrorCode.NOT_FOUND
        assert lost == []


async def test_a_retry_by_request_id_takes_the_place_of_an_abandoned_stream() -> None:
    request = long()
    request.options.request_id = "mine"
    async with resumable_gateways(LONG, num_decoders=1) as gateways:
        await gateways.another().read(request, 2)
        told = await gateways.another().ask(request)
        assert told[-1].completed.usage.completion_tokens == NUM_LONG


async def test_a_cancel_at_every_wait_of_a_resume_leaves_nothing() -> None:
    request, answers = generate(2), written("ab", "cd")

    async def scenario(cancelling: Cancelling[list[Response]]) -> bool:
        async with resumable_gateways(answers) as gateways:
            (started,) = await gateways.another().read(request, 1)
            second = gateways.another()
            rest = await cancelling(lambda: second.resume(started.started.stream_id, 1))
            await gateways.idle()
            return rest is not None

    assert await for_every_wait(scenario) > 5
