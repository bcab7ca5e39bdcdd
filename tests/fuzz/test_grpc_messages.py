"""Does any message or any bytes, sent to any method, get an answer that is no failure of ours?"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from in_process_router import InProcessRouter

from ripresa.cluster.gateway.chat_encoding import ChatEncoding
from ripresa.cluster.gateway.grpc_server import GrpcServer
from ripresa.cluster.gateway.served_model import ServedModel
from ripresa.cluster.gateway.service import InferenceService
from ripresa.cluster.gateway.tokenizer import Tokenizer
from ripresa.cluster.observability.metrics import GatewayMetrics
from ripresa.protos import ripresa_pb2 as pb
from ripresa.workers.demo.checkpoint import DEMO_MODEL

NUM_EXAMPLES = int(os.environ.get("RIPRESA_FUZZ_EXAMPLES", "60"))
MAX_DEPTH = 4
MODEL = "deepseek-demo"
OURS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
METHODS = {
    method.full_name: method
    for service in pb.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
LIKELY_TEXTS = (
    "", MODEL, "hi", "{}", '{"type": "object"}', '{"city": "Oslo"}', "f", "c", "low", "[a-z]+", "(",
    "<think>", "\x00", "é" * 40, "日本",
)  # fmt: skip
LIKELY_NUMBERS = (0, 1, 2, 3, 5, 40, 100, 4095, 4096, 2**31 - 1)

texts = st.sampled_from(LIKELY_TEXTS) | st.text(max_size=8)


def numbers(low: int, high: int) -> st.SearchStrategy[int]:
    return st.sampled_from([n for n in LIKELY_NUMBERS if low <= n <= high]) | st.integers(low, high)


SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.CPPTYPE_INT32: numbers(-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: numbers(-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: numbers(0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: numbers(0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats(),
    FieldDescriptor.CPPTYPE_FLOAT: st.sampled_from([0.0, 0.5, 1.0, 2.0]) | st.floats(width=32),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_ENUM: st.integers(0, 9),
    FieldDescriptor.CPPTYPE_STRING: texts,
}


@st.composite
def messages(draw: st.DrawFn, descriptor: Descriptor, depth: int = 0) -> Message:
    """A message with some of its fields, most of them with likely values."""
    message: Any = message_factory.GetMessageClass(descriptor)()
    fields = [f for f in descriptor.fields if f.message_type is None or depth < MAX_DEPTH]
    if not fields:
        return message  # type: ignore[no-any-return]
    # The first fields of a request are its essential ones.
    wanted = draw(st.lists(st.sampled_from(fields), max_size=4, unique_by=lambda f: f.number))
    for field in (*fields[: draw(st.integers(0, 4))], *wanted):
        fill(draw, message, field, depth)
    return message  # type: ignore[no-any-return]


GOOD: dict[str, Message] = {
    "ripresa.v1.Inference.Chat": pb.ChatRequest(
        full=pb.FullConversation(messages=[pb.Message(role=pb.ROLE_USER, content="hi")]),
        sampling=pb.SamplingParams(max_tokens=20),
    ),
    "ripresa.v1.Inference.Generate": pb.GenerateRequest(
        text="hi", sampling=pb.SamplingParams(max_tokens=20)
    ),
}


@st.composite
def requests(draw: st.DrawFn, method: MethodDescriptor) -> Message:
    """A method's request: any message, or a good one with something changed."""
    drawn: Message = draw(messages(method.input_type))
    if method.full_name not in GOOD or draw(st.booleans()):
        return drawn
    request = type(drawn)()
    request.CopyFrom(GOOD[method.full_name])
    # One of the drawn fields at most, so that many of these are accepted.
    field = draw(st.sampled_from([None, *(field for field, _ in drawn.ListFields())]))
    if field is not None:
        for other, _ in drawn.ListFields():
            if other.number != field.number:
                drawn.ClearField(other.name)
        request.MergeFrom(drawn)
    return request


def fill(draw: st.DrawFn, message: Any, field: FieldDescriptor, depth: int) -> None:
    kind = field.message_type
    held = getattr(message, field.name)
    if kind is not None and kind.GetOptions().map_entry:
        key, value = kind.fields_by_name["key"], kind.fields_by_name["value"]
        held[draw(scalar(key))] = draw(scalar(value))
    elif kind is not None and field.is_repeated:
        held.extend(draw(st.lists(messages(kind, depth + 1), max_size=3)))
    elif kind is not None:
        held.CopyFrom(draw(messages(kind, depth + 1)))
    elif field.is_repeated:
        held.extend(draw(st.lists(scalar(field), max_size=4)))
    else:
        setattr(message, field.name, draw(scalar(field)))


def scalar(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=8)
    return SCALARS[field.cpp_type]


class Gateway:
    """A served gateway and a raw channel to it, on a loop of their own."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.runner.run(self._start())

    async def _start(self) -> None:
        tokenizer = Tokenizer(DEMO_MODEL / "tokenizer.json")
        encoding = ChatEncoding(tokenizer, DEMO_MODEL / "tokenizer.json", MODEL)
        model = ServedModel(MODEL, 2048, tokenizer.num_ids, 1, "ab12")
        self.router = InProcessRouter(batch=40)
        self.service = InferenceService(
            self.router, model, tokenizer, GatewayMetrics(), encoding=encoding, max_running=8
        )
        self.server = GrpcServer(self.service, host="127.0.0.1", port=0, drain_notice_s=0)
        await self.server.start()
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.server.port}")

    def send(self, method: MethodDescriptor, raw: bytes) -> grpc.StatusCode:
        """The status that a call with these bytes ends with; its stream is read to the end."""
        return self.runner.run(self._send(method, raw))

    async def _send(self, method: MethodDescriptor, raw: bytes) -> grpc.StatusCode:
        path = f"/{method.containing_service.full_name}/{method.name}"
        answer = message_factory.GetMessageClass(method.output_type)
        kind = self.channel.unary_stream if method.server_streaming else self.channel.unary_unary
        call: Any = kind(path, response_deserializer=answer.FromString)(raw, timeout=60)
        with contextlib.suppress(grpc.aio.AioRpcError):
            if method.server_streaming:
                while await call.read() is not grpc.aio.EOF:
                    pass
            else:
                await call
        code: grpc.StatusCode = await call.code()
        assert code is grpc.StatusCode.OK or await call.details(), "an error says what to do"
        return code

    async def _stop(self) -> None:
        await self.channel.close()
        await self.server.stop(0)

    def close(self) -> None:
        self.runner.run(self._stop())
        self.service.close()
        self.runner.close()


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    gateway = Gateway()
    yield gateway
    gateway.close()


def check(gateway: Gateway, method: MethodDescriptor, raw: bytes) -> None:
    assert gateway.send(method, raw) not in OURS
    assert gateway.service.num_running == 0
    assert not gateway.router.open
    gateway.router.seen.clear()


@pytest.mark.parametrize("name", METHODS)
def test_no_message_is_a_failure_of_ours(gateway: Gateway, name: str) -> None:
    method = METHODS[name]

    @settings(max_examples=NUM_EXAMPLES, suppress_health_check=[HealthCheck.too_slow])
    @given(requests(method))
    def send(message: Message) -> None:
        check(gateway, method, message.SerializeToString())

    send()


@given(content=st.binary(max_size=40))
@settings(max_examples=NUM_EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_bytes_are_a_failure_of_ours(gateway: Gateway, content: bytes) -> None:
    for method in METHODS.values():
        check(gateway, method, content)


@given(data=st.data())
@settings(max_examples=NUM_EXAMPLES, suppress_health_check=list(HealthCheck))
def test_no_broken_message_is_a_failure_of_ours(gateway: Gateway, data: st.DataObject) -> None:
    """A good message with a few of its bytes changed, cut off or doubled."""
    method = METHODS[data.draw(st.sampled_from(sorted(METHODS)))]
    raw = bytearray(data.draw(requests(method)).SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(raw)))
        match data.draw(st.integers(0, 2)):
            case 0 if place < len(raw):
                raw[place] = data.draw(st.integers(0, 255))
            case 1:
                del raw[place:]
            case _:
                raw += raw[place:]
    check(gateway, method, bytes(raw))
