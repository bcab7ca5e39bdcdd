"""Is a Chat stream what the contract promises, with reasoning, content and tool calls?"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import grpc
import pytest
from chat_support import MARK, calls_block, encode_output
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from in_process_router import InProcessRouter

from ripresa.cluster.gateway.chat_encoding import ChatEncoding
from ripresa.cluster.gateway.tokenizer import Tokenizer
from ripresa.protos import ripresa_pb2 as pb
from ripresa.workers.errors import Unavailable

EOS = 1
SCHEMA = '{"type": "object", "properties": {"city": {"type": "string"}}}'
WEATHER = pb.ToolDefinition(name="get_weather", description="Weather", parameters_json=SCHEMA)
OSLO = pb.Message(role=pb.ROLE_USER, content="Weather in Oslo?")
TWO_CALLS = calls_block(
    [
        ("get_weather", [("city", "true", 'Os"lo\n'), ("days", "false", "2")]),
        ("get_weather", [("city", "true", "Rome")]),
    ]
)


def chat(
    *messages: pb.Message,
    tools: bool = True,
    thinking: bool | None = None,
    choice: pb.ToolChoice | None = None,
    return_token_ids: bool = False,
    **sampling: Any,
) -> pb.ChatRequest:
    config = pb.ConversationConfig(tools=[WEATHER] if tools else [])
    if thinking is not None:
        config.thinking.enabled = thinking
    return pb.ChatRequest(
        full=pb.FullConversation(config=config, messages=messages or [OSLO]),
        sampling=pb.SamplingParams(**{"max_tokens": 400, **sampling}),
        tool_choice=choice,
        return_token_ids=return_token_ids,
    )


def script(router: InProcessRouter, text: str, batch: int = 1) -> list[int]:
    """Let the router answer with a text and the end of sentence."""
    ids = encode_output(text)
    router.script = (*ids, EOS)
    router.batch = batch
    return ids


async def collect(call: Any) -> list[pb.ChatResponse]:
    responses = []
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    return responses


def parts(responses: list[pb.ChatResponse], choice: int = 0) -> dict[str, Any]:
    """A choice, put together from its deltas."""
    found: dict[str, Any] = {"reasoning": "", "content": "", "calls": []}
    for response in responses:
        if not response.HasField("delta") or response.delta.choice != choice:
            continue
        delta = response.delta
        match delta.WhichOneof("part"):
            case "reasoning":
                found["reasoning"] += delta.reasoning
            case "content":
                found["content"] += delta.content
            case "tool_call":
                call = delta.tool_call
                if call.id:
                    assert call.index == len(found["calls"])
                    found["calls"].append({"name": call.name, "arguments": "", "done": 0})
                else:
                    assert not call.name
                own = found["calls"][call.index]
                assert not own["done"], "nothing follows `done`"
                own["arguments"] += call.arguments_delta
                own["done"] += call.done
    return found


@pytest.mark.parametrize("batch", [1, 7, 1000])
async def test_a_stream_with_two_calls(chat_stub: Any, router: InProcessRouter, batch: int) -> None:
    ids = script(router, f"Need it.</think>Let me look.\n\n{TWO_CALLS}", batch)
    responses = await collect(chat_stub.Chat(chat()))
    kinds = [response.WhichOneof("event") for response in responses]
    assert (kinds[0], kinds[-2:]) == ("started", ["finished", "completed"])
    assert set(kinds[1:-2]) == {"delta"}
    assert [response.sequence for response in responses] == list(range(len(responses)))
    said = parts(responses)
    assert (said["reasoning"], said["content"]) == ("Need it.", "Let me look.")
    arguments = ['{"city": "Os\\"lo\\n", "days": 2}', '{"city": "Rome"}']
    assert [call["arguments"] for call in said["calls"]] == arguments
    assert [call["done"] for call in said["calls"]] == [1, 1]
    finished, usage = responses[-2].finished, responses[-1].completed.usage
    assert finished.reason == pb.FINISH_REASON_TOOL_CALLS
    assert finished.stop_token_id == EOS
    assert finished.message.role == pb.ROLE_ASSISTANT
    assert finished.message.content == "Let me look."
    assert finished.message.reasoning_content == "Need it."
    assert [call.arguments_json for call in finished.message.tool_calls] == arguments
    assert len({call.id for call in finished.message.tool_calls}) == 2
    assert usage.completion_tokens == len(ids) + 1
    assert usage.reasoning_tokens == len(encode_output("Need it."))
    assert usage.prompt_tokens == len(router.seen[0].token_ids)
    assert responses[-1].completed.build.prompt_encoding == "deepseek-v41"


async def test_a_tool_may_start_before_the_turn_ends(
    chat_stub: Any, router: InProcessRouter
) -> None:
    script(router, f"</think>{TWO_CALLS}")
    responses = await collect(chat_stub.Chat(chat()))
    calls = [r.delta.tool_call for r in responses if r.delta.HasField("tool_call")]
    places = [place for place, call in enumerate(calls) if call.done]
    assert [calls[place].index for place in places] == [0, 1]
    # The first is done before the second begins, and the second with its closing tag: the text
    # of the block's own closing tag follows.
    assert calls[places[0] + 1].id
    done = next(r for r in responses if r.delta.tool_call.done and r.delta.tool_call.index == 1)
    assert done.sequence < responses[-2].sequence
    router.script = tuple(encode_output(f"</think>{TWO_CALLS}")[:-3])
    router.hold_prefill.set()
    cut = await collect(chat_stub.Chat(chat(max_tokens=len(router.script))))
    assert cut[-2].finished.reason != pb.FINISH_REASON_UNSPECIFIED
    assert [call["done"] for call in parts(cut)["calls"]] == [1, 1]


async def test_an_unfinished_call_is_not_done(chat_stub: Any, router: InProcessRouter) -> None:
    text = f"</think>{TWO_CALLS}"
    ids = script(router, text[: text.index("Rome") + 2])
    responses = await collect(chat_stub.Chat(chat(max_tokens=len(ids))))
    calls = parts(responses)["calls"]
    assert [call["done"] for call in calls] == [1, 0]
    assert responses[-2].finished.reason == pb.FINISH_REASON_LENGTH
    assert responses[-2].finished.message.tool_calls[1].arguments_json == '{"city": "Ro'


async def test_arguments_that_are_no_json_are_done_at_the_end(
    chat_stub: Any, router: InProcessRouter
) -> None:
    script(router, "</think>" + calls_block([("get_weather", [("city", "false", "}{")])]))
    (call,) = parts(await collect(chat_stub.Chat(chat())))["calls"]
    assert call == {"name": "get_weather", "arguments": '{"city": }{}', "done": 1}


async def test_without_thinking_there_is_content_alone(
    chat_stub: Any, router: InProcessRouter, demo: Tokenizer
) -> None:
    script(router, "It is -3 C.")
    responses = await collect(chat_stub.Chat(chat(tools=False, thinking=False)))
    assert parts(responses) == {"reasoning": "", "content": "It is -3 C.", "calls": []}
    assert responses[-2].finished.reason == pb.FINISH_REASON_STOP
    prompt = demo.decode(router.seen[0].token_ids)
    assert prompt == ("<｜begin▁of▁sentence｜><｜User｜>Weather in Oslo?<｜Assistant｜></think>")


async def test_a_whole_loop_renders_append_only(chat_stub: Any, router: InProcessRouter) -> None:
    script(router, f"Need it.</think>Let me look.\n\n{TWO_CALLS}")
    responses = await collect(chat_stub.Chat(chat()))
    answer = responses[-2].finished.message
    results = [
        pb.Message(role=pb.ROLE_TOOL, tool_call_id=call.id, content="-3")
        for call in answer.tool_calls
    ]
    script(router, "Done.</think>It is cold.")
    again = await collect(chat_stub.Chat(chat(OSLO, answer, *results)))
    assert again[-2].finished.message.content == "It is cold."
    first, second = (prompt.token_ids for prompt in router.seen)
    said = tuple(encode_output(f"Need it.</think>Let me look.\n\n{TWO_CALLS}"))
    assert second[: len(first)] == first
    assert second[len(first) : len(first) + len(said) + 1] == (*said, EOS)


async def test_choices(chat_stub: Any, router: InProcessRouter) -> None:
    script(router, "Hm.</think>Yes.")
    responses = await collect(chat_stub.Chat(chat(n=3)))
    kinds = Counter(response.WhichOneof("event") for response in responses)
    assert (kinds["started"], kinds["finished"], kinds["completed"]) == (1, 3, 1)
    for choice in range(3):
        assert parts(responses, choice)["content"] == "Yes."
    num_tokens = len(router.script)
    usage = responses[-1].completed.usage
    assert usage.completion_tokens == 3 * num_tokens
    assert usage.reasoning_tokens == 3 * len(encode_output("Hm."))


async def test_token_ids_and_log_probabilities(chat_stub: Any, router: InProcessRouter) -> None:
    ids = script(router, f"é</think>ok\n\n{TWO_CALLS}", 3)
    request = chat(return_token_ids=True, logprobs=1)
    responses = await collect(chat_stub.Chat(request))
    tokens = [r.delta.tokens for r in responses if r.delta.HasField("tokens")]
    assert [i for each in tokens for i in each.token_ids] == [*ids, EOS]
    assert [entry.token_id for each in tokens for entry in each.logprobs] == [*ids, EOS]
    assert parts(responses)["content"] == "ok"


@pytest.mark.parametrize("batch", [1, 5])
async def test_a_stop_string_in_the_content(
    chat_stub: Any, router: InProcessRouter, batch: int
) -> None:
    script(router, "STOP here</think>I STOPPED it.", batch)
    responses = await collect(chat_stub.Chat(chat(stop=["nope", "STOP"])))
    assert parts(responses)["content"] == "I "
    assert parts(responses)["reasoning"] == "STOP here"
    finished = responses[-2].finished
    assert (finished.reason, finished.stop_string) == (pb.FINISH_REASON_STOP, "STOP")
    await asyncio.wait_for(router.all_closed.wait(), 10)


async def test_no_call_bans_the_call_token(
    chat_stub: Any, router: InProcessRouter, encoding: ChatEncoding
) -> None:
    script(router, "Hm.</think>Yes.")
    await collect(chat_stub.Chat(chat()))
    await collect(chat_stub.Chat(chat(choice=pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_NONE))))
    free, banned = router.seen
    assert free.token_ids == banned.token_ids
    assert free.sampling.banned_token_ids == ()
    assert banned.sampling.banned_token_ids == (encoding.call_token_id,)


async def test_a_named_call_is_forced_behind_the_reasoning(
    chat_stub: Any, router: InProcessRouter, encoding: ChatEncoding
) -> None:
    script(router, f"Hm.</think>\n\n{TWO_CALLS}")
    named = pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_NAMED, name="get_weather")
    responses = await collect(chat_stub.Chat(chat(choice=named)))
    assert len(parts(responses)["calls"]) == 2
    constraint = router.seen[0].sampling.constraint
    assert constraint is not None
    assert constraint.after == encoding.end_of_reasoning_id
    assert constraint.forbidden_before == (encoding.call_token_id,)


async def test_a_named_call_without_thinking_begins_in_the_prompt(
    chat_stub: Any, router: InProcessRouter
) -> None:
    script(router, TWO_CALLS.removeprefix(f"<{MARK} calls>\n"))
    named = pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_NAMED, name="get_weather")
    responses = await collect(chat_stub.Chat(chat(choice=named, thinking=False)))
    assert len(parts(responses)["calls"]) == 2
    constraint = router.seen[0].sampling.constraint
    assert constraint is not None
    assert (constraint.after, constraint.forbidden_before) == (None, ())


async def test_temperature_is_as_asked(chat_stub: Any, router: InProcessRouter) -> None:
    script(router, "Hm.</think>Yes.")
    await collect(chat_stub.Chat(chat(temperature=0.0, top_p=0.25)))
    sampling = router.seen[0].sampling
    assert (sampling.temperature, sampling.top_p) == (0.0, 0.25)


async def test_a_failure_ends_the_stream_by_a_status(
    chat_stub: Any, router: InProcessRouter
) -> None:
    script(router, "Hm.</think>Yes.")
    router.failure = Unavailable("the worker is gone")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(chat_stub.Chat(chat()))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    await asyncio.wait_for(router.all_closed.wait(), 10)


async def test_a_cancel_ends_the_work(chat_stub: Any, router: InProcessRouter) -> None:
    script(router, "Hm.</think>Yes.")
    router.hold.clear()
    call = chat_stub.Chat(chat(n=2))
    await call.read()
    call.cancel()
    await asyncio.wait_for(router.all_closed.wait(), 10)


async def test_tokenize_renders_as_chat_does(chat_stub: Any, router: InProcessRouter) -> None:
    script(router, "Hm.</think>Yes.")
    request = chat()
    await collect(chat_stub.Chat(request))
    answer = await chat_stub.Tokenize(pb.TokenizeRequest(conversation=request.full))
    assert tuple(answer.token_ids) == router.seen[0].token_ids
    assert answer.prompt.endswith("Weather in Oslo?<｜Assistant｜><think>")


async def test_the_model_says_that_it_chats(chat_stub: Any) -> None:
    (model,) = (await chat_stub.ListModels(pb.ListModelsRequest())).models
    assert list(model.capabilities) == ["generate", "chat"]
    assert model.build.prompt_encoding == "deepseek-v41"


def tool(**fields: Any) -> pb.ChatRequest:
    request = chat()
    request.full.config.tools[0].MergeFrom(pb.ToolDefinition(**fields))
    return request


def config(**fields: Any) -> pb.ChatRequest:
    request = chat()
    request.full.config.MergeFrom(pb.ConversationConfig(**fields))
    return request


def called(name: str) -> pb.ChatRequest:
    """A history in which the model called a tool of this name."""
    call = pb.ToolCall(id="c", name=name, arguments_json="{}")
    return chat(OSLO, pb.Message(role=pb.ROLE_ASSISTANT, tool_calls=[call]), ORPHAN)


ORPHAN = pb.Message(role=pb.ROLE_TOOL, tool_call_id="c", content="r")
TURN = pb.ChatRequest(turn=pb.SessionTurn(messages=[OSLO]))
REFUSED = {
    "nothing": (pb.ChatRequest(), "conversation", "INVALID_REQUEST"),
    "a turn": (TURN, "turn", "INVALID_REQUEST"),
    "no messages": (pb.ChatRequest(full=pb.FullConversation()), "full.messages", "TEMPLATE_ERROR"),
    "no role": (chat(pb.Message(content="x")), "full.messages[0].role", "INVALID_REQUEST"),
    "an orphan": (chat(OSLO, ORPHAN), "full.messages[1]", "TEMPLATE_ERROR"),
    "a call of no name": (called(""), "full.messages[1].tool_calls[0].name", "INVALID_REQUEST"),
    "a call that forges markup": (
        called('f"> </'),
        "full.messages[1].tool_calls[0].name",
        "INVALID_REQUEST",
    ),
    "a tool's name": (tool(name="a b"), "full.config.tools[0].name", "TEMPLATE_ERROR"),
    "a tool's schema": (
        tool(parameters_json='{"type": "array"}'),
        "full.config.tools[0].parameters_json",
        "TEMPLATE_ERROR",
    ),
    "effort without thinking": (
        config(thinking=pb.Thinking(enabled=False, budget=5)),
        "full.config.thinking.budget",
        "INVALID_REQUEST",
    ),
    "a tier without thinking": (
        config(thinking=pb.Thinking(enabled=False, tier="low")),
        "full.config.thinking.tier",
        "INVALID_REQUEST",
    ),
    "no format": (
        config(response_format=pb.OutputConstraint()),
        "full.config.response_format",
        "INVALID_REQUEST",
    ),
    "a format that is none": (
        config(response_format=pb.OutputConstraint(json_object=False)),
        "full.config.response_format.json_object",
        "INVALID_REQUEST",
    ),
    "no constraint": (
        chat(constraint=pb.OutputConstraint()),
        "sampling.constraint",
        "INVALID_REQUEST",
    ),
    "a name for nothing": (
        chat(choice=pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_AUTO, name="get_weather")),
        "tool_choice.name",
        "INVALID_REQUEST",
    ),
    "a choice of no name": (
        chat(choice=pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_NAMED)),
        "tool_choice.name",
        "INVALID_REQUEST",
    ),
    "reasoning of a user": (
        chat(pb.Message(role=pb.ROLE_USER, reasoning_content="x")),
        "full.messages[0].reasoning_content",
        "INVALID_REQUEST",
    ),
    "no JSON": (
        tool(parameters_json="{"),
        "full.config.tools[0].parameters_json",
        "INVALID_REQUEST",
    ),
    "a list": (
        tool(parameters_json="[1]"),
        "full.config.tools[0].parameters_json",
        "INVALID_REQUEST",
    ),
    "deep JSON": (
        tool(parameters_json="[" * 100_000),
        "full.config.tools[0].parameters_json",
        "INVALID_REQUEST",
    ),
    "a tier": (
        config(thinking=pb.Thinking(tier="medium")),
        "full.config.thinking.tier",
        "INVALID_REQUEST",
    ),
    "a budget": (
        config(thinking=pb.Thinking(budget=101)),
        "full.config.thinking.budget",
        "INVALID_REQUEST",
    ),
    "a response format": (
        config(response_format=pb.OutputConstraint(json_schema="{")),
        "full.config.response_format.json_schema",
        "INVALID_REQUEST",
    ),
    "an unknown function": (
        chat(choice=pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_NAMED, name="f")),
        "tool_choice",
        "INVALID_REQUEST",
    ),
    "an unknown mode": (
        chat(choice=pb.ToolChoice(mode=77)),  # type: ignore[arg-type]
        "tool_choice.mode",
        "INVALID_REQUEST",
    ),
    "a temperature": (chat(temperature=-1.0), "sampling.temperature", "INVALID_REQUEST"),
    "too long": (
        chat(pb.Message(role=pb.ROLE_USER, content="ab " * 9000)),
        "full.messages",
        "CONTEXT_LENGTH_EXCEEDED",
    ),
    "a queue time": (
        pb.ChatRequest(
            full=chat().full, options=pb.RequestOptions(max_queue_time=Duration(seconds=-1))
        ),
        "options.max_queue_time",
        "INVALID_REQUEST",
    ),
}


@pytest.mark.parametrize(("request_", "field", "reason"), REFUSED.values(), ids=REFUSED)
async def test_refusals_name_the_field(
    chat_stub: Any, router: InProcessRouter, request_: pb.ChatRequest, field: str, reason: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(chat_stub.Chat(request_))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    status = rpc_status.from_call(caught.value)
    assert status is not None
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    for packed in status.details:
        packed.Unpack(info)
        packed.Unpack(bad)
    assert (bad.field_violations[0].field, info.reason) == (field, reason)
    assert router.seen == []


async def test_a_call_of_a_tool_that_is_not_declared_any_more_may_be_told(
    chat_stub: Any, router: InProcessRouter
) -> None:
    await collect(chat_stub.Chat(called("renamed.since")))
    assert len(router.seen) == 1


async def test_arguments_stay_as_the_model_wrote_them(
    chat_stub: Any, router: InProcessRouter
) -> None:
    """Also such as a JSON parser would write otherwise."""
    script(router, "</think>" + calls_block([("f", [("x", "false", '{"a":1,"b": 2.00}')])]))
    (call,) = parts(await collect(chat_stub.Chat(chat())))["calls"]
    assert call["arguments"] == '{"x": {"a":1,"b": 2.00}}'
    assert json.loads(call["arguments"]) == {"x": {"a": 1, "b": 2.0}}
