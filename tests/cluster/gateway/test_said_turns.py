"""Does a conversation keep its prefix, whatever its client makes of the model's answers?"""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import httpx2 as httpx
import pytest
from chat_support import calls_block, encode_output
from http_gateway import http_gateway
from in_process_router import InProcessRouter

from ripresa.cluster.gateway.chat_encoding import ChatEncoding, Turn
from ripresa.cluster.gateway.grpc_server import GrpcServer
from ripresa.cluster.gateway.said_turns import OpenTurn, SaidTurns
from ripresa.cluster.gateway.served_model import ServedModel
from ripresa.cluster.gateway.service import InferenceService
from ripresa.cluster.gateway.tokenizer import Tokenizer
from ripresa.cluster.observability.metrics import GatewayMetrics
from ripresa.protos import ripresa_pb2 as pb
from ripresa.protos import ripresa_pb2_grpc

EOS = 1
MODEL = "deepseek-demo"
TEXT = "the model reads a file then thinks about what it may hold and goes on"
WORDS = TEXT.split()
SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Finds text",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
    },
}


def test_the_least_recently_used_go_first() -> None:
    said = SaidTurns(10)
    said.keep(b"a", [1, 2, 3, 4])
    said.keep(b"b", [5, 6, 7, 8])
    assert list(said.find(b"a") or ()) == [1, 2, 3, 4]
    said.keep(b"c", [9, 10, 11])
    assert said.find(b"b") is None
    assert said.num_tokens == 7
    said.keep(b"c", [9])
    assert said.num_tokens == 5
    said.keep(b"d", range(11))
    assert said.find(b"d") is None
    assert SaidTurns(0).find(b"a") is None


def test_a_turn_is_found_however_its_arguments_are_written() -> None:
    turn = OpenTurn(b"place", 0, ())
    key = turn.key(Turn("Hi ", (("f", '{"a": 1, "b": [2, 3]}'),)))
    assert key == turn.key(Turn("Hi", (("f", '{"b":[2,3],"a":1}'),)))
    for other in (
        Turn("Ho", (("f", '{"a": 1, "b": [2, 3]}'),)),
        Turn("Hi", (("g", '{"a": 1, "b": [2, 3]}'),)),
        Turn("Hi", (("f", '{"a": 1, "b": [3, 2]}'),)),
        Turn("Hi", ()),
    ):
        assert turn.key(other) != key
    assert OpenTurn(b"other", 0, ()).key(Turn("Hi", ())) != turn.key(Turn("Hi", ()))
    broken = Turn("", (("f", "{"),))
    assert turn.key(broken) == turn.key(copy.copy(broken))


def words(seed: int, count: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def odd_tokens(text: str, tokenizer: Tokenizer) -> list[int]:
    """Tokens that spell a text as a model may sample them: not those of an encoder."""
    ids = []
    for token_id in encode_output(text):
        raw = tokenizer.token_bytes([token_id]).decode(errors="replace")
        if token_id > 100 and raw.isascii() and len(raw) > 3 and token_id % 3 == 0:
            ids += [*encode_output(raw[:2]), *encode_output(raw[2:])]
        else:
            ids.append(token_id)
    return ids


def steps(tokenizer: Tokenizer) -> list[list[int]]:
    """What the model says in three steps of a loop: odd tokens, compact JSON, odd newlines."""
    said = []
    for step in range(3):
        arguments = json.dumps({"query": words(step, 5), "limit": step}, separators=(",", ":"))
        block = calls_block([("search", [("query", "false", arguments)])])
        text = f"{words(10 + step, 120)}</think>{words(20 + step, 8)}\n\n\n{block}"
        said.append(odd_tokens(text, tokenizer))
    return said


@pytest.fixture
async def chats(
    router: InProcessRouter, demo: Tokenizer, encoding: ChatEncoding
) -> AsyncIterator[InferenceService]:
    model = ServedModel(MODEL, 16384, demo.num_ids, EOS, "ab12")
    service = InferenceService(router, model, demo, GatewayMetrics(), encoding=encoding)
    yield service
    await asyncio.wait_for(router.all_closed.wait(), 10)
    service.close()


Post = Callable[..., Any]


@pytest.fixture
async def post(chats: InferenceService, router: InProcessRouter) -> AsyncIterator[Post]:
    async with http_gateway(chats) as url, httpx.AsyncClient(base_url=url, timeout=30) as client:

        async def post(messages: list[Any], said: list[int], **fields: Any) -> dict[str, Any]:
            """One turn in which the model says the tokens; gives the assistant's message."""
            router.script = (*said, EOS)
            router.batch = 50
            body = {"model": MODEL, "messages": messages, "tools": [SEARCH], **fields}
            response = await client.post("/v1/chat/completions", json=body)
            assert response.status_code == 200, response.text
            message: dict[str, Any] = response.json()["choices"][0]["message"]
            return message

        yield post


async def run_loop(post: Post, tokenizer: Tokenizer, **fields: Any) -> list[Any]:
    """Three steps of a tool loop; gives the messages of the fourth request."""
    messages: list[Any] = [
        {"role": "system", "content": words(1, 200)},
        {"role": "user", "content": words(2, 30)},
    ]
    for step, said in enumerate(steps(tokenizer)):
        answer = await post(messages, said, **fields)
        assert len(answer["tool_calls"]) == 1
        call_id = answer["tool_calls"][0]["id"]
        result = {"role": "tool", "tool_call_id": call_id, "content": words(30 + step, 150)}
        messages += [answer, result]
    return messages


def kept(old: tuple[int, ...], new: tuple[int, ...]) -> float:
    """Which share of the old prompt the new one still starts with."""
    same = 0
    for a, b in zip(old, new, strict=False):
        if a != b:
            break
        same += 1
    return same / len(old)


def without_reasoning(messages: list[Any]) -> None:
    for message in messages:
        message.pop("reasoning_content", None)


def without_last_reasoning(messages: list[Any]) -> None:
    messages[-2].pop("reasoning_content")


def wrong_reasoning(messages: list[Any]) -> None:
    for message in messages:
        if "reasoning_content" in message:
            message["reasoning_content"] = "I made this up."


def rewrite_arguments(messages: list[Any], **how: Any) -> None:
    for message in messages:
        for call in message.get("tool_calls") or ():
            arguments = json.loads(call["function"]["arguments"])
            if how.pop("reverse", False):
                arguments = dict(reversed(arguments.items()))
            call["function"]["arguments"] = json.dumps(arguments, **how)


def rename_ids(messages: list[Any]) -> None:
    for message in messages:
        if "tool_call_id" in message:
            message["tool_call_id"] += "x"
        for call in message.get("tool_calls") or ():
            call["id"] += "x"


def openai_client(messages: list[Any]) -> None:
    """What a plain client keeps: no reasoning, its own JSON, content without outer spaces."""
    without_reasoning(messages)
    rewrite_arguments(messages, indent=1)
    for message in messages:
        if message["role"] == "assistant":
            message["content"] = message["content"].strip() or None


EDITS: dict[str, Callable[[list[Any]], None]] = {
    "echo": lambda messages: None,
    "no reasoning in the last step": without_last_reasoning,
    "no reasoning": without_reasoning,
    "another reasoning": wrong_reasoning,
    "spaces in arguments": lambda messages: rewrite_arguments(messages, indent=2),
    "order of keys": lambda messages: rewrite_arguments(messages, reverse=True),
    "ids": rename_ids,
    "all that a plain client does": openai_client,
    "a reminder": lambda messages: messages.append({"role": "system", "content": "It is noon."}),
    "more of the user": lambda messages: messages.append({"role": "user", "content": "And?"}),
}


async def fourth_prompt(
    post: Post, router: InProcessRouter, demo: Tokenizer, edit: Callable[[list[Any]], None]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens whose state is cached after three steps, and the fourth prompt."""
    messages = copy.deepcopy(await run_loop(post, demo))
    held = (*router.seen[-1].token_ids, *steps(demo)[-1], EOS)
    edit(messages)
    await post(messages, encode_output("Done.</think>Yes."))
    return held, router.seen[-1].token_ids


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
async def test_the_prefix_stays(
    post: Post, router: InProcessRouter, demo: Tokenizer, edit: Callable[[list[Any]], None]
) -> None:
    held, new = await fourth_prompt(post, router, demo, edit)
    assert len(held) > 1000
    assert kept(held, new) == 1.0


@pytest.mark.parametrize(
    "fields",
    [{"tool_choice": "none"}, {"tool_choice": "required"}, {"temperature": 0.5}],
    ids=["none", "required", "temperature"],
)
async def test_a_tool_choice_costs_no_prefix(
    post: Post, router: InProcessRouter, demo: Tokenizer, fields: dict[str, Any]
) -> None:
    messages = await run_loop(post, demo)
    held = (*router.seen[-1].token_ids, *steps(demo)[-1], EOS)
    await post(messages, encode_output("Done.</think>Yes."), **fields)
    assert kept(held, router.seen[-1].token_ids) == 1.0


async def test_an_edited_result_keeps_what_is_before_it(
    post: Post, router: InProcessRouter, demo: Tokenizer
) -> None:
    def shorten(messages: list[Any]) -> None:
        messages[-1]["content"] = "(dropped)"
        without_reasoning(messages)

    held, new = await fourth_prompt(post, router, demo, shorten)
    assert kept(held, new) == 1.0, "the last result is behind all that is held"

    def shorten_first(messages: list[Any]) -> None:
        messages[3]["content"] = "(dropped)"

    held, new = await fourth_prompt(post, router, demo, shorten_first)
    first_answer = len(router.seen[4].token_ids) + len(steps(demo)[0])
    assert kept(held, new) == pytest.approx(first_answer / len(held), abs=0.02)


async def test_re_rendered_answers_break_the_prefix(
    router: InProcessRouter, demo: Tokenizer, encoding: ChatEncoding
) -> None:
    """What the splice is there for: without it, little is left."""
    model = ServedModel(MODEL, 16384, demo.num_ids, EOS, "ab12")
    metrics = GatewayMetrics()
    service = InferenceService(router, model, demo, metrics, encoding=encoding, max_said_tokens=0)
    async with http_gateway(service) as url, httpx.AsyncClient(base_url=url, timeout=30) as client:

        async def post(messages: list[Any], said: list[int], **fields: Any) -> Any:
            router.script, router.batch = (*said, EOS), 50
            body = {"model": MODEL, "messages": messages, "tools": [SEARCH], **fields}
            return (await client.post("/v1/chat/completions", json=body)).json()["choices"][0][
                "message"
            ]

        held, new = await fourth_prompt(post, router, demo, without_reasoning)
        assert kept(held, new) < 0.5
    service.close()
    # Once a request: the model's tokens are no encoder's, so each step came back in others.
    told = metrics.render().decode()
    assert 'ripresa_prefix_break_total{reason="reasoning_missing"} 3.0' in told
    assert 'ripresa_prefix_break_total{reason="history_edited"} 0.0' in told


async def test_workers_hear_which_tools_an_answer_calls_and_when_its_client_goes_on(
    post: Post, router: InProcessRouter, demo: Tokenizer, chats: InferenceService
) -> None:
    messages = await run_loop(post, demo)
    assert list(router.calls.values()) == [("search",)] * 3
    assert [prompt.request_id for prompt in router.seen] == list(router.calls)
    await post(messages, encode_output("Done.</think>Yes."), expect_next_within=2.5)
    assert len(router.calls) == 3
    assert [prompt.expect_next_within_s for prompt in router.seen] == [None, None, None, 2.5]
    told = chats.metrics.render().decode()
    assert "ripresa_tool_gap_seconds_count 3.0" in told
    assert 'ripresa_prefix_break_total{reason="reasoning_missing"} 0.0' in told


async def test_a_salt_keeps_answers_apart(
    post: Post, router: InProcessRouter, demo: Tokenizer
) -> None:
    messages = await run_loop(post, demo, cache_salt="mine")
    held = (*router.seen[-1].token_ids, *steps(demo)[-1], EOS)
    without_reasoning(messages)
    last = encode_output("Done.</think>Yes.")
    await post(messages, last, cache_salt="mine")
    assert kept(held, router.seen[-1].token_ids) == 1.0
    for other in ("yours", ""):
        await post(messages, last, cache_salt=other)
        assert kept(held, router.seen[-1].token_ids) < 1.0


async def test_an_answer_that_was_cut_is_not_kept(
    post: Post, router: InProcessRouter, demo: Tokenizer, chats: InferenceService
) -> None:
    messages: list[Any] = [{"role": "user", "content": "Hi"}]
    answer = await post(messages, encode_output("Hm.</think>Yes, and more."), max_tokens=6)
    messages += [answer, {"role": "user", "content": "Go on"}]
    await post(messages, encode_output("Hm.</think>Yes."))
    said = demo.decode(router.seen[-1].token_ids)
    assert answer["content"] + "<｜end▁of▁sentence｜>" in said


async def test_grpc_keeps_and_finds_the_same_answers(
    chats: InferenceService, router: InProcessRouter, demo: Tokenizer
) -> None:
    server = GrpcServer(chats, host="127.0.0.1", port=0, drain_notice_s=0)
    await server.start()
    function = SEARCH["function"]
    config = pb.ConversationConfig(tools=[pb.ToolDefinition(name=function["name"])])  # type: ignore[index]
    messages = [pb.Message(role=pb.ROLE_USER, content="Hi")]
    said = steps(demo)[0]
    options = pb.RequestOptions()

    async def ask(stub: Any) -> pb.Message:
        router.script, router.batch = (*said, EOS), 50
        full = pb.FullConversation(config=config, messages=messages)
        call = stub.Chat(pb.ChatRequest(options=options, full=full))
        message = pb.Message()
        while (response := await call.read()) is not grpc.aio.EOF:
            if response.HasField("finished"):
                message = response.finished.message
        return message

    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub = ripresa_pb2_grpc.InferenceStub(channel)
        answer = await ask(stub)
        held = (*router.seen[-1].token_ids, *said, EOS)
        answer.ClearField("reasoning_content")
        result = pb.Message(
            role=pb.ROLE_TOOL, tool_call_id=answer.tool_calls[0].id, content="found"
        )
        messages += [answer, result]
        await ask(stub)
        assert kept(held, router.seen[-1].token_ids) == 1.0
        options.cache_policy.disable_read = True
        options.expect_next_within.FromMilliseconds(1500)
        await ask(stub)
        assert router.seen[-1].expect_next_within_s == 1.5
        assert kept(held, router.seen[-1].token_ids) < 1.0
    await server.stop(0)
