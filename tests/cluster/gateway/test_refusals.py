"""Does each bad request get its own clear status, and does none of them reach the router?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from ripresa.protos import ripresa_pb2 as pb

INVALID = grpc.StatusCode.INVALID_ARGUMENT


def text(sampling: pb.SamplingParams | None = None, **options: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="hi", sampling=sampling, options=pb.RequestOptions(**options))


def sampling(**values: Any) -> pb.GenerateRequest:
    return text(pb.SamplingParams(**values))


def tokens(*ids: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids))


def policy(**values: Any) -> pb.GenerateRequest:
    return text(cache_policy=pb.CachePolicy(**values))


REFUSED = {
    "no input": (pb.GenerateRequest(), "input", "`text` or as `token_ids`"),
    "long session": (text(session_id="s" * 1025), "options.session_id", "at most 1024"),
    "long salt": (text(cache_salt="s" * 1025), "options.cache_salt", "at most 1024"),
    "empty text": (pb.GenerateRequest(text=""), "text", "empty"),
    "empty ids": (tokens(), "token_ids.ids", "empty"),
    "long text": (pb.GenerateRequest(text="~" * 64), "text", "allows 63"),
    "hopeless text": (pb.GenerateRequest(text="~" * 9999), "text", "has at least"),
    "long ids": (tokens(*[40] * 64), "token_ids.ids", "has 64 tokens"),
    "id out of range": (tokens(40, 41, 99999), "token_ids.ids[2]", "99999"),
    "max_tokens 0": (sampling(max_tokens=0), "sampling.max_tokens", "at least 1"),
    "max_tokens too large": (sampling(max_tokens=64), "sampling.max_tokens", "leaves 62"),
    "negative temperature": (sampling(temperature=-0.5), "sampling.temperature", "-0.5"),
    "NaN temperature": (sampling(temperature=float("nan")), "sampling.temperature", "nan"),
    "infinite temperature": (sampling(temperature=float("inf")), "sampling.temperature", "inf"),
    "top_p 0": (sampling(top_p=0.0), "sampling.top_p", "above 0"),
    "top_p above 1": (sampling(top_p=1.5), "sampling.top_p", "1.5"),
    "NaN top_p": (sampling(top_p=float("nan")), "sampling.top_p", "nan"),
    "negative top_k": (sampling(top_k=-2), "sampling.top_k", "0 or -1 to keep all"),
    "stop id out of range": (
        sampling(stop_token_ids=[40, 99999]),
        "sampling.stop_token_ids[1]",
        "99999",
    ),
    "min_p": (sampling(min_p=1.5), "sampling.min_p", "0 to 1"),
    "NaN min_p": (sampling(min_p=float("nan")), "sampling.min_p", "nan"),
    "presence": (sampling(presence_penalty=3), "sampling.presence_penalty", "-2.0 to 2.0"),
    "frequency": (sampling(frequency_penalty=-2.5), "sampling.frequency_penalty", "-2.5"),
    "repetition": (sampling(repetition_penalty=0), "sampling.repetition_penalty", "0.01 to 10"),
    "denormal repetition": (
        sampling(repetition_penalty=1e-45),
        "sampling.repetition_penalty",
        "0.01 to 10",
    ),
    "min_tokens": (sampling(min_tokens=3, max_tokens=2), "sampling.min_tokens", "0 to max_tokens"),
    "empty stop": (sampling(stop=["x", ""]), "sampling.stop[1]", "1 to 256"),
    "many stops": (sampling(stop=["x"] * 17), "sampling.stop", "at most 16"),
    "n 0": (sampling(n=0), "sampling.n", "1 to 8"),
    "n 9": (sampling(n=9), "sampling.n", "1 to 8"),
    "biased id": (sampling(logit_bias={99999: 1.0}), "sampling.logit_bias[99999]", "vocabulary"),
    "bias": (sampling(logit_bias={4: -101.0}), "sampling.logit_bias[4]", "-100.0 to 100.0"),
    "NaN bias": (sampling(logit_bias={4: float("nan")}), "sampling.logit_bias[4]", "nan"),
    "logprobs": (sampling(logprobs=21), "sampling.logprobs", "0 to 20"),
    "long regex": (
        sampling(constraint=pb.OutputConstraint(regex="a" * 5000)),
        "sampling.constraint.regex",
        "4096 are allowed",
    ),
    "far counting regex": (
        sampling(constraint=pb.OutputConstraint(regex="a{1,1000000000}")),
        "sampling.constraint.regex",
        "at most 1000",
    ),
    "constraint to nothing": (
        sampling(constraint=pb.OutputConstraint()),
        "sampling.constraint",
        "json_schema",
    ),
    "constraint that is none": (
        sampling(constraint=pb.OutputConstraint(json_object=False)),
        "sampling.constraint.json_object",
        "leave `sampling.constraint` out",
    ),
    "schema of no JSON": (
        sampling(constraint=pb.OutputConstraint(json_schema="{")),
        "sampling.constraint.json_schema",
        "is no JSON",
    ),
    "deep schema": (
        sampling(constraint=pb.OutputConstraint(json_schema='{"items":' * 99 + "{}" + "}" * 99)),
        "sampling.constraint.json_schema",
        "deeper than 64",
    ),
    "far counting schema": (
        sampling(constraint=pb.OutputConstraint(json_schema='{"multipleOf": 999983}')),
        "sampling.constraint.json_schema",
        "multipleOf",
    ),
    "endless constraint": (
        sampling(constraint=pb.OutputConstraint(regex="a"), ignore_eos=True),
        "sampling.ignore_eos",
        "nothing may follow",
    ),
    "queue time": (
        text(max_queue_time=Duration(seconds=3601)),
        "options.max_queue_time",
        "0 to 3600 s",
    ),
    "queue time of two signs": (
        text(max_queue_time=Duration(seconds=1, nanos=-5)),
        "options.max_queue_time",
        "sign",
    ),
    "queue time of many nanos": (
        text(max_queue_time=Duration(nanos=10**9)),
        "options.max_queue_time",
        "under a second",
    ),
    "expectation of two signs": (
        text(expect_next_within=Duration(seconds=1, nanos=-5)),
        "options.expect_next_within",
        "sign",
    ),
    "request id": (text(request_id="a\nb"), "options.request_id", "visible ASCII"),
    "request id in Greek": (text(request_id="λ"), "options.request_id", "visible ASCII"),
    "request id with a newline behind": (text(request_id="a\n"), "options.request_id", "visible"),
    "long request id": (text(request_id="r" * 129), "options.request_id", "at most 128"),
    "huge request id": (text(request_id="r" * 9000), "options.request_id", "at most 128"),
    "huge request id of an unknown model": (
        text(request_id="r" * 9000, model="gpt"),
        "options.request_id",
        "at most 128",
    ),
    "huge request id without input": (
        pb.GenerateRequest(options=pb.RequestOptions(request_id="r" * 9000)),
        "options.request_id",
        "at most 128",
    ),
    "exact tail": (
        policy(tail=pb.TAIL_VARIANT_EXACT),
        "options.cache_policy.tail",
        "only in mode 'exact'",
    ),
    "future tail": (policy(tail=77), "options.cache_policy.tail", "no known"),
    "future mode": (policy(replay_mode=77), "options.cache_policy.replay_mode", "no known"),
}


async def collect(call: Any) -> list[pb.GenerateResponse]:
    """The rest of a stream."""
    responses = []
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    return responses


async def refusal(call: Any) -> tuple[grpc.aio.AioRpcError, dict[str, Any]]:
    """The error of a call and its details by type name."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call)
    return caught.value, details(caught.value)


def details(error: grpc.aio.AioRpcError) -> dict[str, Any]:
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    assert status is not None
    found = {}
    for packed in status.details:
        name = packed.TypeName().removeprefix("google.rpc.")
        message = getattr(error_details_pb2, name)()
        assert packed.Unpack(message)
        found[name] = message
    return found


@pytest.mark.parametrize(("request_", "field", "words"), REFUSED.values(), ids=REFUSED.keys())
async def test_refused(
    stub: Any, router: Any, service: Any, request_: pb.GenerateRequest, field: str, words: str
) -> None:
    error, found = await refusal(stub.Generate(request_))
    assert error.code() is INVALID
    (violation,) = found["BadRequest"].field_violations
    assert violation.field == field
    assert words in violation.description
    assert error.details() == f"{field}: {violation.description}"
    assert found["ErrorInfo"].domain == "ripresa"
    assert 0 < len(found["RequestInfo"].request_id) <= 128
    assert found["RequestInfo"].request_id != request_.options.request_id
    assert router.seen == []
    assert service.num_running == 0


ACCEPTED = {
    "values that ask for nothing": sampling(
        max_tokens=1, n=1, min_p=0.0, presence_penalty=0.0, frequency_penalty=0.0, min_tokens=0
    ),
    "top_k 0, as vLLM's": sampling(max_tokens=1, top_k=0),
    "top_k -1, as vLLM's": sampling(max_tokens=1, top_k=-1),
    "every parameter": sampling(
        max_tokens=3,
        min_tokens=3,
        min_p=1.0,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        repetition_penalty=10.0,
        logit_bias={4: 100.0},
        logprobs=20,
        stop=["x"] * 16,
        seed=2**64 - 1,
    ),
    "as little as a float32 says": sampling(
        max_tokens=1, repetition_penalty=0.01, temperature=1e-45, top_p=1e-45, min_p=1e-45
    ),
    "all that fits": sampling(max_tokens=62),
    "longest prompt": tokens(*[40] * 63),
    "hints": text(pb.SamplingParams(max_tokens=1), session_id="s", cache_salt="x"),
    "priority and queue time": text(
        pb.SamplingParams(max_tokens=1), priority=-(2**31), max_queue_time=Duration(seconds=3600)
    ),
    "longest request id": text(pb.SamplingParams(max_tokens=1), request_id="~" * 128),
    "the model's name": text(pb.SamplingParams(max_tokens=1), model="tiny"),
    "exact mode": policy(replay_mode=pb.REPLAY_MODE_EXACT, tail=pb.TAIL_VARIANT_FULL),
    "exact tail": policy(replay_mode=pb.REPLAY_MODE_EXACT, tail=pb.TAIL_VARIANT_EXACT),
    "canonical mode": policy(replay_mode=pb.REPLAY_MODE_CANONICAL),
}


@pytest.mark.parametrize("request_", ACCEPTED.values(), ids=ACCEPTED.keys())
async def test_accepted(stub: Any, router: Any, request_: pb.GenerateRequest) -> None:
    responses = await collect(stub.Generate(request_))
    assert responses[-1].HasField("completed")
    assert len(router.seen) == 1


async def test_context_length_comes_with_numbers(stub: Any) -> None:
    _, found = await refusal(stub.Generate(tokens(*[40] * 70)))
    assert found["ErrorInfo"].reason == "CONTEXT_LENGTH_EXCEEDED"
    assert dict(found["ErrorInfo"].metadata) == {"max_model_len": "64", "prompt_tokens": "70"}


async def test_unknown_model(stub: Any, router: Any) -> None:
    error, found = await refusal(stub.Generate(text(model="gpt-" + "9" * 5000)))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert found["ErrorInfo"].reason == "MODEL_NOT_FOUND"
    assert "'tiny' is" in (error.details() or "")
    assert "BadRequest" not in found
    assert found["ResourceInfo"].resource_type == "model"
    assert found["ResourceInfo"].resource_name.startswith("gpt-9")
    assert router.seen == []


async def test_a_running_request_id_is_taken(stub: Any, router: Any) -> None:
    router.hold.clear()
    running = stub.Generate(text(pb.SamplingParams(max_tokens=2), request_id="twin"))
    assert (await running.read()).HasField("started")
    error, found = await refusal(stub.Generate(text(request_id="twin")))
    assert error.code() is grpc.StatusCode.ALREADY_EXISTS
    assert found["ErrorInfo"].reason == "REQUEST_ID_IN_USE"
    assert found["RequestInfo"].request_id == "twin"
    assert [each.field for each in found["BadRequest"].field_violations] == ["options.request_id"]
    router.hold.set()
    assert (await collect(running))[-1].HasField("completed")
    # The router keeps no streams, so the same request runs again.
    again = stub.Generate(text(pb.SamplingParams(max_tokens=2), request_id="twin"))
    assert (await collect(again))[-1].HasField("completed")
    other = stub.Generate(text(pb.SamplingParams(max_tokens=1), request_id="twin"))
    error, found = await refusal(other)
    assert error.code() is grpc.StatusCode.ALREADY_EXISTS
    assert found["ErrorInfo"].reason == "REQUEST_ID_IN_USE"


async def test_more_choices_than_may_ever_run_are_named_by_their_field(
    stub: Any, router: Any
) -> None:
    error, found = await refusal(stub.Generate(text(pb.SamplingParams(n=4))))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert [each.field for each in found["BadRequest"].field_violations] == ["sampling.n"]
    assert "gateway.max_running" in (error.details() or "")
    assert router.seen == []


async def test_one_too_many_is_refused_with_a_hint(stub: Any, router: Any) -> None:
    router.hold.clear()
    running = [stub.Generate(text(pb.SamplingParams(max_tokens=2))) for _ in range(3)]
    for call in running:
        assert (await call.read()).HasField("started")
    error, found = await refusal(stub.Generate(text()))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert found["ErrorInfo"].reason == "QUEUE_FULL"
    assert found["RetryInfo"].retry_delay.seconds == 1
    assert "gateway.max_running" in (error.details() or "")
    router.hold.set()
    for call in running:
        assert (await collect(call))[-1].HasField("completed")


async def test_one_too_many_hears_that_no_worker_is_ready(stub: Any, router: Any) -> None:
    """The others wait for one, and that is what it lacks too."""
    router.hold_prefill.clear()
    waiting = [stub.Generate(text(pb.SamplingParams(max_tokens=2))) for _ in range(3)]
    for call in waiting:
        assert (await call.read()).HasField("started")
    router.is_ready = False
    error, found = await refusal(stub.Generate(text()))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert found["ErrorInfo"].reason == "NO_READY_WORKER"
    assert found["RetryInfo"].retry_delay.seconds == 1
    router.hold_prefill.set()
    for call in waiting:
        assert (await collect(call))[-1].HasField("completed")


@pytest.mark.parametrize("request_id", ["r" * 9000, "a\nb", "\x7f"])
async def test_no_call_takes_a_bad_request_id(stub: Any, request_id: str) -> None:
    options = pb.RequestOptions(request_id=request_id)
    calls = {
        "options.request_id": stub.Chat(pb.ChatRequest(options=options)),
        "request_id": stub.Abort(pb.AbortRequest(request_id=request_id)),
    }
    for field, call in calls.items():
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await (call.read() if field == "options.request_id" else call)
        found = details(caught.value)
        assert caught.value.code() is INVALID
        assert [each.field for each in found["BadRequest"].field_violations] == [field]
        assert found["RequestInfo"].request_id != request_id


def raw_generate(channel: grpc.aio.Channel, payload: bytes) -> Any:
    send: Callable[[bytes], Any] = channel.unary_stream(
        "/ripresa.v1.Inference/Generate",
        request_serializer=lambda raw: raw,
        response_deserializer=pb.GenerateResponse.FromString,
    )
    return send(payload)


def length_delimited(number: int, payload: bytes) -> bytes:
    assert len(payload) < 128
    return bytes([number << 3 | 2, len(payload)]) + payload


MALFORMED = {
    "text": (length_delimited(2, b"ok \xff\xfe"), "text", "not valid UTF-8"),
    "model": (
        length_delimited(1, length_delimited(2, b"\xc3")) + length_delimited(2, b"hi"),
        "options.model",
        "not valid UTF-8",
    ),
    "second stop": (
        length_delimited(4, length_delimited(9, b"ok") + length_delimited(9, b"\xed\xa0\x80")),
        "sampling.stop[1]",
        "not valid UTF-8",
    ),
    "no message": (b"\x12\x7fshort", "request", "not a valid ripresa.v1.GenerateRequest"),
}


@pytest.mark.parametrize(("payload", "field", "words"), MALFORMED.values(), ids=MALFORMED.keys())
async def test_malformed_bytes(
    channel: grpc.aio.Channel, router: Any, payload: bytes, field: str, words: str
) -> None:
    error, found = await refusal(raw_generate(channel, payload))
    assert error.code() is INVALID
    assert found["BadRequest"].field_violations[0].field == field
    assert words in (error.details() or "")
    assert router.seen == []


async def test_two_inputs_cannot_be_told_apart_on_the_wire(
    channel: grpc.aio.Channel, router: Any
) -> None:
    both = length_delimited(2, b"hi") + length_delimited(3, length_delimited(1, bytes([40])))
    error, found = await refusal(raw_generate(channel, both))
    assert error.code() is INVALID
    assert found["BadRequest"].field_violations[0].field == "input"
    assert "not both" in (error.details() or "")
    assert router.seen == []


async def test_two_constraints_cannot_be_told_apart_on_the_wire(
    channel: grpc.aio.Channel, router: Any
) -> None:
    constraints = pb.OutputConstraint(json_schema="{}"), pb.OutputConstraint(regex="a+")
    # Bytes of two messages behind one another are those of both merged.
    asked = b"".join(sampling(constraint=one).SerializeToString() for one in constraints)
    error, found = await refusal(raw_generate(channel, asked))
    assert error.code() is INVALID
    assert found["BadRequest"].field_violations[0].field == "sampling.constraint.kind"
    assert router.seen == []


async def test_a_bad_request_id_is_refused_before_two_inputs(channel: grpc.aio.Channel) -> None:
    bad_id = length_delimited(1, length_delimited(1, b"a\n"))
    both = length_delimited(2, b"hi") + length_delimited(3, length_delimited(1, bytes([40])))
    error, found = await refusal(raw_generate(channel, bad_id + both))
    assert error.code() is INVALID
    assert found["BadRequest"].field_violations[0].field == "options.request_id"


@pytest.mark.parametrize("factor", [1, 3], ids=["our limit", "gRPC's limit"])
async def test_an_oversized_message_is_refused(stub: Any, router: Any, factor: int) -> None:
    limit = 1 << 16
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(stub.Generate(pb.GenerateRequest(text="x" * (factor * limit))))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(limit if factor == 1 else 2 * limit) in (caught.value.details() or "")
    assert router.seen == []
