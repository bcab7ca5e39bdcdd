"""Are short requests read on the loop, one a round, and all others beside it?"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from ripresa.cluster.gateway.reading import MAX_SHORT_BYTES, MAX_SHORT_PARTS, Reading, is_short
from ripresa.cluster.gateway.tokenizer import Tokenizer
from ripresa.protos import ripresa_pb2 as pb
from ripresa.workers.errors import ErrorCode, RipresaError

HELLO = pb.Message(role=pb.ROLE_USER, content="Hello")
TOOL = pb.ToolDefinition(name="look", parameters_json="{}")
CALL = pb.ToolCall(id="1", name="look", arguments_json="{}")


def chat(*messages: pb.Message, config: pb.ConversationConfig | None = None) -> pb.ChatRequest:
    return pb.ChatRequest(full=pb.FullConversation(messages=messages, config=config))


def chat_with(change: Callable[[pb.ChatRequest], object]) -> pb.ChatRequest:
    request = chat(HELLO, config=pb.ConversationConfig(tools=[TOOL]))
    change(request)
    return request


@pytest.fixture
async def reading() -> AsyncIterator[Reading]:
    reading = Reading(1)
    yield reading
    reading.close()


@pytest.mark.parametrize(
    "request_",
    [
        pb.GenerateRequest(text="a" * (MAX_SHORT_BYTES - 100)),
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(100))),
        chat(*[HELLO] * MAX_SHORT_PARTS),
        chat(HELLO, pb.Message(role=pb.ROLE_ASSISTANT, tool_calls=[CALL] * 9)),
        chat_with(lambda request: None),
    ],
    ids=["text", "ids", "messages", "calls", "tools"],
)
def test_what_is_short(request_: pb.GenerateRequest | pb.ChatRequest) -> None:
    assert is_short(request_)


@pytest.mark.parametrize(
    "request_",
    [
        pb.GenerateRequest(text="a" * (MAX_SHORT_BYTES + 1)),
        pb.GenerateRequest(
            text="a", sampling=pb.SamplingParams(constraint=pb.OutputConstraint(regex="a"))
        ),
        chat(pb.Message(content="a" * (MAX_SHORT_BYTES + 1))),
        chat(*[HELLO] * (MAX_SHORT_PARTS + 1)),
        chat(pb.Message(role=pb.ROLE_ASSISTANT, tool_calls=[CALL] * MAX_SHORT_PARTS)),
        chat(HELLO, config=pb.ConversationConfig(tools=[TOOL] * MAX_SHORT_PARTS)),
        chat_with(lambda request: request.tool_choice.SetInParent()),
        chat_with(lambda request: request.full.config.response_format.SetInParent()),
        chat_with(lambda request: setattr(request.full.config.tools[0], "strict", True)),
    ],
    ids=["text", "regex", "content", "messages", "calls", "tools", "choice", "format", "strict"],
)
def test_what_may_take_longer(request_: pb.GenerateRequest | pb.ChatRequest) -> None:
    assert not is_short(request_)


async def test_where_each_is_read(reading: Reading) -> None:
    here = threading.current_thread()
    assert await reading.run(threading.current_thread, None, is_short=True) is here
    assert await reading.run(threading.current_thread, None) is not here


async def test_a_short_prompt_of_a_client_is_read_on_the_loop(
    stub: Any, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, threads = tokenizer.encode, []

    def watched(text: str) -> list[int]:
        threads.append(threading.current_thread())
        return encode(text)

    monkeypatch.setattr(tokenizer, "encode", watched)
    sampling = pb.SamplingParams(max_tokens=1)
    stream = stub.Generate(pb.GenerateRequest(text="hi", sampling=sampling))
    assert (await stream.read()).HasField("started")
    assert threads == [threading.current_thread()]


async def test_the_loop_goes_round_between_two_short_ones(reading: Reading) -> None:
    num_rounds = 0
    loop = asyncio.get_running_loop()

    def count() -> None:
        nonlocal num_rounds
        num_rounds += 1
        loop.call_soon(count)

    count()
    work = [reading.run(lambda: num_rounds, None, is_short=True) for _ in range(10)]
    rounds = await asyncio.gather(*work)
    assert len(set(rounds)) == 10
    assert rounds == sorted(rounds)


async def test_whoever_is_refused_or_leaves_gives_its_round_to_the_next(reading: Reading) -> None:
    read: list[str] = []

    def refuse() -> None:
        raise RipresaError(ErrorCode.INVALID_ARGUMENT, "no")

    refused = asyncio.create_task(reading.run(refuse, None, is_short=True))
    leaving, last = (
        asyncio.create_task(reading.run(lambda name=name: read.append(name), None, is_short=True))
        for name in ("leaving", "last")
    )
    await asyncio.wait({leaving, last}, timeout=0)
    leaving.cancel()
    await last
    assert leaving.cancelled()
    assert isinstance(refused.exception(), RipresaError)
    assert read == ["last"]


@pytest.mark.parametrize("is_short", [True, False])
async def test_nothing_is_read_behind_its_deadline(reading: Reading, is_short: bool) -> None:
    read: list[str] = []
    with pytest.raises(RipresaError) as caught:
        await reading.run(lambda: read.append("late"), 0.0, is_short=is_short)
    assert caught.value.code is ErrorCode.DEADLINE_EXCEEDED
    assert read == []
