"""Do Tokenize and Detokenize stay small, off the event loop, and out of other calls' way?"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from ripresa.cluster.gateway.call import Call
from ripresa.cluster.gateway.served_model import ServedModel
from ripresa.cluster.gateway.service import InferenceService
from ripresa.cluster.gateway.tokenizer import Tokenizer
from ripresa.cluster.observability.metrics import GatewayMetrics
from ripresa.protos import ripresa_pb2 as pb
from ripresa.workers.errors import ErrorCode, RipresaError


class Gate:
    """An `encode` that waits until it is opened.

    Attributes:
        entered: released once for each text that a thread began to encode.
        texts: these texts, in order.
    """

    def __init__(self, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.entered = threading.Semaphore(0)
        self.texts: list[str] = []
        encode = tokenizer.encode

        def wait(text: str) -> list[int]:
            self.texts.append(text)
            self.entered.release()
            assert self.opened.wait(30)
            return encode(text)

        monkeypatch.setattr(tokenizer, "encode", wait)


@pytest.fixture
def gate(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(tokenizer, monkeypatch)
    yield gate
    gate.opened.set()


@pytest.fixture
async def narrow(router: Any, model: ServedModel, tokenizer: Tokenizer) -> Any:
    """A service with one thread for tokenization."""
    service = InferenceService(router, model, tokenizer, GatewayMetrics(), tokenizer_threads=1)
    yield service
    service.close()


async def refused_field(call: Any) -> tuple[grpc.StatusCode, str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    status = rpc_status.from_call(caught.value)  # type: ignore[arg-type]
    assert status is not None
    bad = error_details_pb2.BadRequest()
    assert any(detail.Unpack(bad) for detail in status.details)
    (violation,) = bad.field_violations
    return caught.value.code(), violation.field, violation.description


async def test_too_many_ids_are_refused(stub: Any) -> None:
    assert (await stub.Detokenize(pb.DetokenizeRequest(token_ids=[40] * 64))).text
    call = stub.Detokenize(pb.DetokenizeRequest(token_ids=[40] * 65))
    code, field, words = await refused_field(call)
    assert (code, field) == (grpc.StatusCode.INVALID_ARGUMENT, "token_ids")
    assert "at most 64" in words


async def test_a_text_that_cannot_fit_is_not_tokenized(stub: Any, gate: Gate) -> None:
    code, field, words = await refused_field(stub.Tokenize(pb.TokenizeRequest(text="~" * 9999)))
    assert (code, field) == (grpc.StatusCode.INVALID_ARGUMENT, "text")
    assert "at least" in words
    assert gate.texts == []


async def test_decoding_leaves_the_loop_free(
    stub: Any, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, threads = tokenizer.decode, []

    def watched(token_ids: Any) -> str:
        threads.append(threading.current_thread())
        return decode(token_ids)

    monkeypatch.setattr(tokenizer, "decode", watched)
    await stub.Detokenize(pb.DetokenizeRequest(token_ids=[40]))
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()


async def test_a_full_default_pool_holds_up_no_call(stub: Any) -> None:
    opened = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        asyncio.get_running_loop().set_default_executor(pool)
        blocking = asyncio.create_task(asyncio.to_thread(opened.wait, 30))
        try:
            assert (await stub.Tokenize(pb.TokenizeRequest(text="a"), timeout=20)).token_ids
            sampling = pb.SamplingParams(max_tokens=1)
            stream = stub.Generate(pb.GenerateRequest(text="hi", sampling=sampling), timeout=20)
            assert (await stream.read()).HasField("started")
        finally:
            opened.set()
        assert await blocking


async def test_waiting_texts_leave_the_default_pool_free(narrow: Any, gate: Gate) -> None:
    with ThreadPoolExecutor(1) as pool:
        asyncio.get_running_loop().set_default_executor(pool)
        request = pb.TokenizeRequest(text="a")
        calls = [asyncio.create_task(narrow.tokenize(request, Call(str(n)))) for n in range(3)]
        assert await asyncio.to_thread(gate.entered.acquire, timeout=30)
        gate.opened.set()
        assert [len(answer.token_ids) for answer in await asyncio.gather(*calls)] == [1, 1, 1]


async def test_a_queued_call_ends_with_its_deadline_or_its_client(narrow: Any, gate: Gate) -> None:
    def ask(text: str, deadline: float | None = None) -> asyncio.Task[Any]:
        request = pb.TokenizeRequest(text=text)
        return asyncio.create_task(narrow.tokenize(request, Call(text, deadline)))

    first = ask("first")
    assert await asyncio.to_thread(gate.entered.acquire, timeout=30)
    with pytest.raises(RipresaError) as caught:
        await ask("late", deadline=0.0)
    assert caught.value.code is ErrorCode.DEADLINE_EXCEEDED
    with pytest.raises(RipresaError) as caught:
        await anext(narrow.generate(pb.GenerateRequest(text="late"), Call("g", 0.0)))
    assert caught.value.code is ErrorCode.DEADLINE_EXCEEDED
    cancelled = ask("cancelled")
    last = ask("last")
    await asyncio.wait({cancelled, last}, timeout=0)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    gate.opened.set()
    await asyncio.gather(first, last)
    assert gate.texts == ["first", "last"]


async def test_a_queued_calls_deadline_is_met_over_the_wire(
    stub: Any, service: InferenceService, gate: Gate
) -> None:
    blocking = [stub.Tokenize(pb.TokenizeRequest(text="a")) for _ in range(2)]
    for _ in blocking:
        assert await asyncio.to_thread(gate.entered.acquire, timeout=30)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Tokenize(pb.TokenizeRequest(text="late"), timeout=0.2)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    gate.opened.set()
    for call in blocking:
        assert (await call).token_ids
    assert gate.texts == ["a", "a"]


async def test_closing_ends_the_threads(narrow: Any) -> None:
    await narrow.tokenize(pb.TokenizeRequest(text="a"), Call("a"))
    threads = [t for t in threading.enumerate() if t in narrow._reading._threads._threads]
    assert len(threads) == 1
    narrow.close()
    await asyncio.to_thread(threads[0].join, 30)
    assert not threads[0].is_alive()
