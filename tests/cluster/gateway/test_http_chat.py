"""Do the real `openai` and `anthropic` clients get what they understand, streaming and not?"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx2 as httpx
import openai
import pytest
from chat_support import GET_WEATHER, calls_block, encode_output
from http_gateway import http_gateway
from in_process_router import InProcessRouter

from ripresa.cluster.gateway.chat_encoding import ChatEncoding
from ripresa.cluster.gateway.served_model import ServedModel
from ripresa.cluster.gateway.service import InferenceService
from ripresa.cluster.gateway.tokenizer import Tokenizer
from ripresa.cluster.gateway.validation import ConversationBounds, tenant_salt
from ripresa.cluster.observability.metrics import GatewayMetrics
from ripresa.workers.errors import ResourceExhausted, Unavailable
from ripresa.workers.replay import ReplayMode

EOS = 1
MODEL = "deepseek-demo"
OSLO = [{"role": "user", "content": "Weather in Oslo?"}]
TWO_CALLS = calls_block(
    [
        ("get_weather", [("city", "true", 'Os"lo\n'), ("days", "false", "2")]),
        ("get_weather", [("city", "true", "Rome")]),
    ]
)
SAID = f"Need it.</think>Let me look.\n\n{TWO_CALLS}"
ARGUMENTS = ['{"city": "Os\\"lo\\n", "days": 2}', '{"city": "Rome"}']


@pytest.fixture
async def chat_service(
    router: InProcessRouter, chat_model: ServedModel, demo: Tokenizer, encoding: ChatEncoding
) -> AsyncIterator[InferenceService]:
    metrics = GatewayMetrics(backends=("gloo",))
    service = InferenceService(
        router, chat_model, demo, metrics, encoding=encoding, max_message_bytes=100_000
    )
    yield service
    await asyncio.wait_for(router.all_closed.wait(), 10)
    assert service.num_running == 0
    service.close()


@pytest.fixture
async def url(chat_service: InferenceService) -> AsyncIterator[str]:
    async with http_gateway(chat_service) as url:
        yield url


@pytest.fixture
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
        yield client


@pytest.fixture
async def claude(url: str) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=url, api_key="-", max_retries=0) as client:
        yield client


@pytest.fixture
async def raw(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, timeout=20) as client:
        yield client


@pytest.fixture(params=[1, 9], ids=["by_token", "batched"])
def scripted(router: InProcessRouter, request: pytest.FixtureRequest) -> list[int]:
    ids = encode_output(SAID)
    router.script = (*ids, EOS)
    router.batch = request.param
    return ids


def ask(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": OSLO, "tools": [GET_WEATHER], "max_tokens": 400, **fields}


async def test_a_whole_answer(
    client: openai.AsyncOpenAI, router: InProcessRouter, scripted: list[int]
) -> None:
    answer = await client.chat.completions.create(**ask())
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model) == ("chat.completion", MODEL)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.role == "assistant"
    assert choice.message.content == "Let me look."
    assert choice.message.reasoning_content == "Need it."  # type: ignore[attr-defined]
    calls = choice.message.tool_calls or []
    assert [call.function.arguments for call in calls] == ARGUMENTS  # type: ignore[union-attr]
    usage = answer.usage
    assert usage is not None
    assert usage.prompt_tokens == len(router.seen[0].token_ids)
    assert usage.completion_tokens == len(scripted) + 1
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 0
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens == len(encode_output("Need it."))


async def test_a_stream_tells_the_same(
    client: openai.AsyncOpenAI, router: InProcessRouter, scripted: list[int]
) -> None:
    whole = await client.chat.completions.create(**ask())
    content = reasoning = ""
    calls: list[dict[str, Any]] = []
    reasons, usages = [], []
    stream = await client.chat.completions.create(
        **ask(stream=True, stream_options={"include_usage": True})
    )
    async for chunk in stream:
        assert chunk.object == "chat.completion.chunk"
        usages.append(chunk.usage)
        if not chunk.choices:
            continue
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or ():
            if call.id:
                calls.append({"name": call.function.name, "arguments": ""})
            calls[call.index]["arguments"] += call.function.arguments
        if choice.finish_reason:
            reasons.append(choice.finish_reason)
    message = whole.choices[0].message
    assert content == message.content
    assert reasoning == message.reasoning_content  # type: ignore[attr-defined]
    assert [call["arguments"] for call in calls] == ARGUMENTS
    assert reasons == ["tool_calls"]
    assert usages[-1] == whole.usage
    assert set(usages[:-1]) == {None}, "the usage is told once"


async def test_a_stream_without_usage_has_none(raw: httpx.AsyncClient, scripted: list[int]) -> None:
    response = await raw.post("/v1/chat/completions", json=ask(stream=True))
    assert response.headers["content-type"].startswith("text/event-stream")
    *lines, end = response.text.strip().split("\n\n")
    assert end == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert not any("usage" in chunk for chunk in chunks)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1


async def test_token_ids(
    client: openai.AsyncOpenAI, router: InProcessRouter, scripted: list[int]
) -> None:
    """In vLLM's names; the stream's pieces are the whole answer's, what is held back included."""
    asked = ask(n=2, seed=3, extra_body={"return_token_ids": True})
    whole = (await client.chat.completions.create(**asked)).model_dump()
    assert whole["prompt_token_ids"] == list(router.seen[0].token_ids)
    assert [choice["token_ids"] for choice in whole["choices"]] == [[*scripted, EOS]] * 2
    told: dict[int, list[int]] = {0: [], 1: []}
    prompts = []
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        body = chunk.model_dump()
        prompts += [body["prompt_token_ids"]] if "prompt_token_ids" in body else []
        for choice in body["choices"]:
            told[choice["index"]] += choice["token_ids"]
    assert list(told.values()) == [[*scripted, EOS]] * 2
    assert prompts == [whole["prompt_token_ids"]]


OPEN = [*OSLO, {"role": "assistant", "content": "It is", "reasoning_content": "Cold."}]


async def test_the_last_message_goes_on(
    client: openai.AsyncOpenAI, router: InProcessRouter, demo: Tokenizer
) -> None:
    router.script = (*encode_output(" -3 C."), EOS)
    goes_on = {"continue_final_message": True, "add_generation_prompt": False}
    for extra in (goes_on, {"continue_final_message": True}):
        answer = await client.chat.completions.create(
            **ask(tools=[], messages=OPEN, extra_body=extra)
        )
        assert answer.choices[0].message.content == " -3 C."
        assert demo.decode(router.seen[-1].token_ids).endswith("Cold.</think>It is")
    thinking = [OSLO[0], {"role": "assistant", "content": "", "reasoning_content": "Hm"}]
    router.script = (*encode_output("m.</think>Cold."), EOS)
    answer = await client.chat.completions.create(
        **ask(tools=[], messages=thinking, extra_body=goes_on)
    )
    assert answer.choices[0].message.reasoning_content == "m."  # type: ignore[attr-defined]
    assert answer.choices[0].message.content == "Cold."
    assert demo.decode(router.seen[-1].token_ids).endswith("<think>Hm")


async def test_an_answer_that_goes_on_is_not_one_that_ended(
    client: openai.AsyncOpenAI, router: InProcessRouter, demo: Tokenizer
) -> None:
    """What the model said stands in for a turn that is closed, and not for one left open."""
    router.script = (*encode_output("Cold.</think>It is"), EOS)
    await client.chat.completions.create(**ask(tools=[]))
    router.script = (*encode_output(" -3 C."), EOS)
    extra = {"continue_final_message": True}
    await client.chat.completions.create(**ask(tools=[], messages=OPEN, extra_body=extra))
    assert demo.decode(router.seen[-1].token_ids).endswith("Cold.</think>It is")


async def test_a_prompt_without_a_header(
    client: openai.AsyncOpenAI, raw: httpx.AsyncClient, router: InProcessRouter, demo: Tokenizer
) -> None:
    router.script = (*encode_output("Oslo, in Norway"), EOS)
    extra = {"add_generation_prompt": False}
    answer = await client.chat.completions.create(**ask(extra_body=extra))
    assert answer.choices[0].message.content == "Oslo, in Norway"
    assert demo.decode(router.seen[-1].token_ids).endswith("<｜User｜>Weather in Oslo?")
    body = {"messages": OSLO, "tools": [GET_WEATHER], **extra}
    rendered = (await raw.post("/tokenize", json=body)).json()["tokens"]
    assert rendered == list(router.seen[-1].token_ids)
    body = {"messages": OPEN, "continue_final_message": True}
    rendered = (await raw.post("/tokenize", json=body)).json()["tokens"]
    assert demo.decode(rendered).endswith("</think>It is")


async def test_choices_interleave(client: openai.AsyncOpenAI, router: InProcessRouter) -> None:
    router.script = (*encode_output("Hm.</think>Yes."), EOS)
    answer = await client.chat.completions.create(**ask(n=3))
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.message.content for choice in answer.choices} == {"Yes."}
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3 * len(router.script)
    texts = ["", "", ""]
    async for chunk in await client.chat.completions.create(**ask(n=3, stream=True)):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == ["Yes."] * 3


async def test_parameters_arrive(client: openai.AsyncOpenAI, router: InProcessRouter) -> None:
    router.script = (*encode_output("Hm.</think>Yes."), EOS)
    await client.chat.completions.create(
        **ask(
            max_tokens=None,
            max_completion_tokens=50,
            temperature=0.0,
            top_p=0.25,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias={"9": -100},
            seed=-1,
            stop="zz",
            user="u",
            extra_body={"top_k": 3, "min_p": 0.5, "session_id": "s"},
        )
    )
    (prompt,) = router.seen
    sampling = prompt.sampling
    assert sampling.max_tokens == 50
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.0, 0.25, 3)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert (sampling.min_p, sampling.logit_bias) == (0.5, ((9, -100.0),))
    assert sampling.seed == 2**64 - 1
    assert prompt.session_id == "s"


async def test_log_probabilities(client: openai.AsyncOpenAI, router: InProcessRouter) -> None:
    router.script = (*encode_output("Hm.</think>Yes."), EOS)
    answer = await client.chat.completions.create(**ask(logprobs=True, top_logprobs=2))
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert "".join(entry.token for entry in logprobs.content or ()) == "Yes."
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs.content or ())


async def test_a_stop_string(client: openai.AsyncOpenAI, router: InProcessRouter) -> None:
    router.script = (*encode_output("Hm.</think>I STOP."), EOS)
    answer = await client.chat.completions.create(**ask(stop=["STOP"]))
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("I ", "stop")


async def test_the_messages_api(
    claude: anthropic.AsyncAnthropic, router: InProcessRouter, scripted: list[int]
) -> None:
    function = GET_WEATHER["function"]
    tools: Any = [{"name": function["name"], "input_schema": function["parameters"]}]
    asked: Any = {"model": MODEL, "messages": OSLO, "tools": tools}
    asked["thinking"] = {"type": "adaptive"}
    question = {**asked, "max_tokens": 400}
    whole = await claude.messages.create(**question)
    assert whole.stop_reason == "tool_use"
    kinds = [block.type for block in whole.content]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    assert whole.content[2].input == json.loads(ARGUMENTS[0])  # type: ignore[union-attr]
    assert whole.usage.input_tokens == len(router.seen[0].token_ids)
    async with claude.messages.stream(**question) as stream:
        streamed = await stream.get_final_message()
    assert [block.type for block in streamed.content] == kinds
    assert streamed.content[3].input == {"city": "Rome"}  # type: ignore[union-attr]
    assert streamed.stop_reason == "tool_use"
    counted = await claude.messages.count_tokens(**asked)
    assert counted.input_tokens == whole.usage.input_tokens


async def test_the_messages_api_does_not_think_unless_asked(
    claude: anthropic.AsyncAnthropic, router: InProcessRouter
) -> None:
    asked: Any = {"model": MODEL, "messages": OSLO}
    told = []
    for thinking in ({}, {"thinking": {"type": "disabled"}}):
        router.answers = [(*encode_output("It is cold."), EOS)]
        answer = await claude.messages.create(max_tokens=400, **asked, **thinking)
        counted = await claude.messages.count_tokens(**asked, **thinking)
        assert counted.input_tokens == answer.usage.input_tokens
        told.append([block.model_dump(exclude_none=True) for block in answer.content])
    assert told == [[{"type": "text", "text": "It is cold."}]] * 2
    silent, disabled = (prompt.token_ids for prompt in router.seen)
    assert silent == disabled


async def test_the_responses_api(
    client: openai.AsyncOpenAI, router: InProcessRouter, scripted: list[int]
) -> None:
    function = GET_WEATHER["function"]
    question: Any = {
        "model": MODEL,
        "input": "Weather in Oslo?",
        "tools": [{"type": "function", **function}],
        "max_output_tokens": 400,
        "temperature": 0.0,
    }
    whole = await client.responses.create(**question)
    kinds = [item.type for item in whole.output]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    assert whole.output_text == "Let me look."
    assert router.seen[0].sampling.temperature == 0.0
    final = None
    async for event in await client.responses.create(stream=True, **question):
        if event.type == "response.completed":
            final = event.response
    assert final is not None
    assert [item.type for item in final.output] == kinds
    arguments = [item.arguments for item in final.output if item.type == "function_call"]
    assert arguments == ARGUMENTS


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no messages": ({"messages": []}, "messages", "template_error"),
    "messages of text": ({"messages": "hi"}, "messages", "invalid_request"),
    "an unknown field": ({"extra_body": {"tomato": 1}}, "tomato", "invalid_request"),
    "functions": ({"functions": [{"name": "f"}]}, "functions", "invalid_request"),
    "audio": ({"modalities": ["text", "audio"]}, "modalities[1]", "invalid_request"),
    "store": ({"store": True}, "store", "invalid_request"),
    "a format": (
        {"response_format": {"type": "yaml"}},
        "response_format.type",
        "invalid_request",
    ),
    "a schema's integer": (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"type": "integer", "const": 10**30}},
            }
        },
        "response_format.json_schema.schema",
        "invalid_request",
    ),
    "one call at a time": (
        {"parallel_tool_calls": "no"},
        "parallel_tool_calls",
        "invalid_request",
    ),
    "a type": ({"temperature": "hot"}, "temperature", "invalid_request"),
    "a truth": ({"temperature": True}, "temperature", "invalid_request"),
    "a range": ({"temperature": -1}, "temperature", "invalid_request"),
    "a denormal": (
        {"extra_body": {"repetition_penalty": 1e-320}},
        "repetition_penalty",
        "invalid_request",
    ),
    "top_logprobs alone": ({"top_logprobs": 2}, "top_logprobs", "invalid_request"),
    "a bias": ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_request"),
    "nine choices": ({"n": 9}, "n", "invalid_request"),
    "two lengths": ({"max_completion_tokens": 3}, "max_completion_tokens", "invalid_request"),
    "an empty stop": ({"stop": ["a", ""]}, "stop[1]", "invalid_request"),
    "no stop": ({"stop": ""}, "stop", "invalid_request"),
    "a choice": ({"tool_choice": "never"}, "tool_choice", "invalid_request"),
    "too many tokens": ({"max_tokens": 100_000}, "max_tokens", "context_length_exceeded"),
    "a long text": (
        {"messages": [{"role": "user", "content": "ab " * 9000}]},
        "messages",
        "context_length_exceeded",
    ),
    "an image": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
                    ],
                }
            ]
        },
        "messages[0].content[0].type",
        "invalid_request",
    ),
    "both endings": (
        {"extra_body": {"continue_final_message": True, "add_generation_prompt": True}},
        "continue_final_message",
        "invalid_request",
    ),
    "a question that goes on": (
        {"extra_body": {"continue_final_message": True}},
        "continue_final_message",
        "invalid_request",
    ),
    "session": ({"extra_body": {"session_id": "s" * 1025}}, "session_id", "invalid"),
    "cache key": ({"prompt_cache_key": "s" * 1025}, "prompt_cache_key", "invalid"),
    "salt": ({"extra_body": {"cache_salt": "s" * 1025}}, "cache_salt", "invalid"),
    "usage": ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", "invalid"),
}


@pytest.mark.parametrize(("fields", "param", "code"), REFUSED.values(), ids=REFUSED)
async def test_refusals_name_the_field(
    client: openai.AsyncOpenAI,
    router: InProcessRouter,
    fields: dict[str, Any],
    param: str,
    code: str,
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(**ask(**fields))
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert (caught.value.code or "").startswith(code)
    assert caught.value.request_id
    assert router.seen == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}),
        ("/v1/responses", {"input": "hi"}),
    ],
)
async def test_every_endpoint_takes_a_replay_mode(
    raw: httpx.AsyncClient, router: InProcessRouter, path: str, body: dict[str, Any]
) -> None:
    asked = {"model": MODEL, "cache_policy": {"replay_mode": "exact"}, **body}
    assert (await raw.post(path, json=asked)).status_code == 200
    assert router.seen[0].cache.mode is ReplayMode.EXACT


@pytest.mark.parametrize(
    ("path", "field", "tool", "limits"),
    [
        ("/v1/chat/completions", "messages", GET_WEATHER, {}),
        ("/v1/messages", "messages", {"name": "f", "input_schema": {}}, {"max_tokens": 1}),
        ("/v1/messages/count_tokens", "messages", {"name": "f", "input_schema": {}}, {}),
        ("/v1/responses", "input", {"type": "function", "name": "f"}, {}),
        ("/tokenize", "messages", GET_WEATHER, {}),
    ],
)
async def test_conversations_of_too_many_parts_are_refused_before_they_are_rendered(
    raw: httpx.AsyncClient,
    chat_service: InferenceService,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    field: str,
    tool: dict[str, Any],
    limits: dict[str, int],
) -> None:
    monkeypatch.setattr(chat_service, "_bounds", ConversationBounds(max_messages=2, max_tools=1))
    monkeypatch.delattr(ChatEncoding, "render")
    message = {"role": "user", "content": "hi"}
    for name, parts in ((field, 3), ("tools", 2)):
        body: dict[str, Any] = {field: [message], **limits}
        body[name] = [message if name == field else tool] * parts
        response = await raw.post(path, json=body)
        assert response.status_code == 400
        setting = "gateway.max_messages" if name == field else "gateway.max_tools"
        assert f"{name}: has {parts} parts" in response.text
        assert setting in response.text


RESPONSES_REFUSED = {
    "previous_response_id": "resp_1",
    "background": True,
    "truncation": "auto",
    "store": True,
    "tools": [{"type": "web_search"}],
    "text": {"format": {"type": "yaml"}},
    "conversation": "c",
}


@pytest.mark.parametrize(("field", "value"), RESPONSES_REFUSED.items(), ids=RESPONSES_REFUSED)
async def test_responses_refuses_what_needs_a_store(
    client: openai.AsyncOpenAI, router: InProcessRouter, field: str, value: Any
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model=MODEL, input="hi", extra_body={field: value})
    assert field in str(caught.value)
    assert router.seen == []


HOSTED_TOOLS = (
    *("file_search", "computer_use_preview", "code_interpreter", "image_generation"),
    *("local_shell", "mcp", "web_search", "web_search_preview", "custom", "tomato"),
)
ITEMS = ("item_reference", "computer_call", "mcp_call", "compaction", "tomato")
DATA = {"type": "base64", "media_type": "image/png", "data": "AA=="}
KINDS: list[tuple[str, str, Any]] = [
    *(("tools[0].type", "tools", [{"type": kind, "name": "f"}]) for kind in HOSTED_TOOLS),
    *(("input[1].type", "input", [OSLO[0], {"type": kind, "id": "x"}]) for kind in ITEMS),
    *(
        ("input[0].content[0].type", "input", [{"role": "user", "content": [{"type": kind}]}])
        for kind in ("input_file", "input_image", "tomato")
    ),
    (
        "input[0].output[0].type",
        "input",
        [{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]}],
    ),
    ("text.verbosity", "text", {"verbosity": "low"}),
]


@pytest.mark.parametrize(("param", "field", "value"), KINDS)
async def test_responses_names_the_kind_it_does_not_serve(
    raw: httpx.AsyncClient, router: InProcessRouter, param: str, field: str, value: Any
) -> None:
    response = await raw.post("/v1/responses", json={"input": "hi", field: value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert router.seen == []


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize("kind", ["document", "image", "server_tool_use", "search_result"])
async def test_messages_names_the_content_it_does_not_serve(
    raw: httpx.AsyncClient, router: InProcessRouter, path: str, kind: str
) -> None:
    block = {"type": kind, "source": DATA}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [block]}
    for content, place in (([block], "content[0]"), ([result], "content[0].content[0]")):
        body = {"max_tokens": 3, "messages": [{"role": "user", "content": content}]}
        response = await raw.post(path, json=body)
        assert response.status_code == 400
        assert f"messages[0].{place}.type: only text" in response.text
    assert router.seen == []


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/chat/completions", {"max_completion_tokens": 0}, "max_completion_tokens"),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("/v1/messages", {"max_tokens": 0}, "max_tokens"),
        ("/v1/messages", {"max_tokens": 5, "stop_sequences": [""]}, "stop_sequences[0]"),
        ("/v1/messages/count_tokens", {"max_tokens": 0}, "max_tokens"),
        ("/v1/messages/count_tokens", {"stop_sequences": ["a"] * 17}, "stop_sequences"),
        ("/v1/responses", {"max_output_tokens": 0}, "max_output_tokens"),
        ("/v1/responses", {"temperature": 9}, "temperature"),
        ("/v1/responses", {"top_p": 0}, "top_p"),
        ("/v1/responses", {"input": []}, "input"),
        ("/v1/responses", {"input": "ab " * 9000}, "input"),
        ("/v1/responses", {"max_output_tokens": 100_000}, "max_output_tokens"),
    ],
)
async def test_refusals_use_the_protocol_s_names(
    raw: httpx.AsyncClient, path: str, fields: dict[str, Any], param: str
) -> None:
    said = {"input": "hi"} if path == "/v1/responses" else {"messages": OSLO}
    response = await raw.post(path, json={**said, **fields})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(f"{param}: ")


async def test_messages_need_a_length(raw: httpx.AsyncClient, router: InProcessRouter) -> None:
    for fields in ({}, {"max_tokens": None}):
        response = await raw.post("/v1/messages", json={"messages": OSLO, **fields})
        assert response.status_code == 400
        assert response.json()["error"]["message"] == "max_tokens: is missing"
    counted = await raw.post("/v1/messages/count_tokens", json={"messages": OSLO})
    assert counted.status_code == 200
    assert router.seen == []


async def test_other_refusals(
    client: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic, router: InProcessRouter
) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.chat.completions.create(**ask(model="gpt-4"))
    assert unknown.value.code == "model_not_found"
    router.refusals.append(ResourceExhausted("full", retry_after_s=7))
    with pytest.raises(openai.RateLimitError) as full:
        await client.chat.completions.create(**ask())
    assert full.value.response.headers["retry-after"] == "7"
    router.refusals.append(Unavailable("nobody there"))
    with pytest.raises(openai.InternalServerError) as nobody:
        await client.chat.completions.create(**ask(stream=True))
    assert nobody.value.status_code == 503
    router.refusals.append(Unavailable("nobody there"))
    with pytest.raises(anthropic.APIStatusError) as overloaded:
        await claude.messages.create(model=MODEL, max_tokens=5, messages=OSLO)  # type: ignore[arg-type]
    assert overloaded.value.status_code == 503
    assert overloaded.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError, match="tomato"):
        await claude.messages.create(
            model=MODEL,
            max_tokens=5,
            messages=OSLO,  # type: ignore[arg-type]
            extra_body={"tomato": 1},
        )


async def test_a_body_that_is_too_large(
    client: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic, router: InProcessRouter
) -> None:
    messages: Any = [{"role": "user", "content": "a" * 100_000}]
    with pytest.raises(openai.APIStatusError) as large:
        await client.chat.completions.create(**ask(messages=messages))
    assert (large.value.status_code, large.value.code) == (413, "message_too_large")
    assert "gateway.max_message_bytes" in large.value.message
    with pytest.raises(anthropic.APIStatusError) as refused:
        await claude.messages.create(model=MODEL, max_tokens=5, messages=messages)
    assert refused.value.status_code == 413
    assert refused.value.body["error"]["type"] == "request_too_large"  # type: ignore[index]
    assert router.seen == []


async def test_a_stream_that_fails_says_so_and_ends_without_done(
    client: openai.AsyncOpenAI, raw: httpx.AsyncClient, router: InProcessRouter, scripted: list[int]
) -> None:
    router.failure = Unavailable("the worker is gone")
    with pytest.raises(openai.APIError, match="the worker is gone"):
        async for _ in await client.chat.completions.create(**ask(stream=True)):
            pass
    response = await raw.post("/v1/chat/completions", json=ask(stream=True))
    assert response.status_code == 200
    assert "[DONE]" not in response.text
    assert "overloaded_error" in response.text.strip().split("\n\n")[-1]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_ends_the_work(
    raw: httpx.AsyncClient, router: InProcessRouter, scripted: list[int], stream: bool
) -> None:
    router.hold.clear()
    if stream:
        async with raw.stream("POST", "/v1/chat/completions", json=ask(stream=True)) as response:
            await anext(response.aiter_bytes())
            assert router.open
    else:
        post = asyncio.create_task(raw.post("/v1/chat/completions", json=ask()))
        await asyncio.wait_for(router.opened.wait(), 10)
        post.cancel()
        await asyncio.gather(post, return_exceptions=True)
    await asyncio.wait_for(router.all_closed.wait(), 10)
    router.hold.set()


async def test_an_id_in_use_is_named_by_its_header(
    raw: httpx.AsyncClient, router: InProcessRouter, scripted: list[int]
) -> None:
    router.hold.clear()
    named: Any = {"json": ask(), "headers": {"x-request-id": "mine"}}
    first = asyncio.create_task(raw.post("/v1/chat/completions", **named))
    await asyncio.wait_for(router.opened.wait(), 10)
    second = await raw.post("/v1/chat/completions", **named)
    router.hold.set()
    assert second.status_code == 409
    assert second.json()["error"]["param"] == "x-request-id"
    assert (await first).status_code == 200


async def test_the_client_knows_each_answer_by_its_id(
    client: openai.AsyncOpenAI, router: InProcessRouter, scripted: list[int]
) -> None:
    answer = await client.chat.completions.create(**ask())
    assert answer._request_id == router.seen[0].request_id
    response = await client.responses.create(model=MODEL, input="Hi")
    assert response._request_id == router.seen[1].request_id
    raw_stream = await client.chat.completions.with_raw_response.create(**ask(stream=True))
    assert raw_stream.request_id == router.seen[2].request_id
    stream = raw_stream.parse()
    assert stream.response.headers["x-request-id"] == raw_stream.request_id
    async for chunk in stream:
        assert chunk.id == f"chatcmpl-{raw_stream.request_id}"
    mine = {"x-request-id": "mine"}
    named = await client.chat.completions.create(**ask(extra_headers=mine))
    assert named._request_id == "mine"


async def test_request_ids(raw: httpx.AsyncClient, router: InProcessRouter) -> None:
    router.script = (*encode_output("Hm.</think>Yes."), EOS)
    mine = await raw.post("/v1/chat/completions", json=ask(), headers={"x-request-id": "mine"})
    assert mine.headers["x-request-id"] == "mine"
    assert router.seen[0].request_id == "mine"
    other = await raw.get("/health")
    assert len(other.headers["x-request-id"]) == 32
    bad = await raw.get("/health", headers={"x-request-id": "a b"})
    assert bad.status_code == 400
    assert bad.json()["error"]["param"] == "x-request-id"


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1]", b"\xff", b"[" * 90_000, b'{"messages": ["\\ud800"]}'],
    ids=["empty", "cut", "list", "not_utf8", "deep", "surrogate"],
)
@pytest.mark.parametrize(
    "path",
    ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions", "/tokenize"],
)
async def test_bodies_that_are_none(raw: httpx.AsyncClient, path: str, content: bytes) -> None:
    response = await raw.post(path, content=content)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/completions", "/tokenize"])
async def test_bodies_that_are_too_large(raw: httpx.AsyncClient, path: str) -> None:
    response = await raw.post(path, content=b"x" * 200_000)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "message_too_large"


async def test_unknown_paths_and_methods(raw: httpx.AsyncClient) -> None:
    missing = await raw.get("/v1/tomatoes")
    assert missing.status_code == 404
    assert missing.json()["error"]["type"] == "invalid_request_error"
    wrong = await raw.get("/v1/chat/completions")
    assert wrong.status_code == 405
    assert wrong.headers["allow"] == "POST"
    assert wrong.json()["error"]["code"] == "invalid_request"


async def test_an_unexpected_failure_tells_no_more_than_its_id(
    raw: httpx.AsyncClient, router: InProcessRouter, scripted: list[int]
) -> None:
    router.refusals.append(ValueError("a secret"))
    response = await raw.post("/v1/chat/completions", json=ask())
    assert response.status_code == 500
    assert "secret" not in response.text
    assert response.headers["x-request-id"] in response.text


async def test_models(client: openai.AsyncOpenAI) -> None:
    models = (await client.models.list()).data
    assert [model.id for model in models] == [MODEL]
    assert (await client.models.retrieve(MODEL)).owned_by == "ripresa"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("gpt-4")


async def test_tokenize_and_detokenize(
    raw: httpx.AsyncClient, router: InProcessRouter, demo: Tokenizer
) -> None:
    router.num_held[tenant_salt("", "mine")] = 3
    asked = {"prompt": "héllo <think>", "cache_salt": "mine"}
    answer = (await raw.post("/tokenize", json=asked)).json()
    assert answer["tokens"] == demo.encode("héllo <think>")
    assert answer["cached_tokens"] == 3
    assert answer["count"] == len(answer["tokens"])
    text = (await raw.post("/detokenize", json={"tokens": answer["tokens"]})).json()
    assert text == {"prompt": "héllo <think>"}
    router.script = (*encode_output("Hm.</think>Yes."), EOS)
    await raw.post("/v1/chat/completions", json=ask())
    conversation = {"messages": OSLO, "tools": [GET_WEATHER]}
    answer = (await raw.post("/tokenize", json=conversation)).json()
    assert tuple(answer["tokens"]) == router.seen[0].token_ids
    for path, body in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": OSLO}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": [99999]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": ["a"]}),
        ("/detokenize", {"tokens": [True]}),
        ("/detokenize", {"tokens": [1] * 5000}),
    ):
        response = await raw.post(path, json=body)
        assert response.status_code == 400, (path, body)


async def test_the_document_lists_what_is_served(raw: httpx.AsyncClient) -> None:
    paths = (await raw.get("/openapi.json")).json()["paths"]
    for path in (
        *("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"),
        *("/v1/messages/count_tokens", "/v1/models", "/tokenize", "/detokenize"),
        *("/health", "/ready", "/version", "/metrics"),
    ):
        assert path in paths, path
    body = paths["/v1/chat/completions"]["post"]["requestBody"]
    schema = body["content"]["application/json"]["schema"]
    assert {"messages", "tools", "stream", "logprobs"} <= set(schema["properties"])
    assert schema["additionalProperties"] is False


async def test_nothing_of_a_text_is_logged(
    raw: httpx.AsyncClient, router: InProcessRouter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", logger="ripresa")
    secret = [{"role": "user", "content": "pomodoro"}]
    router.script = (*encode_output("Hm.</think>Yes."), EOS)
    await raw.post("/v1/chat/completions", json=ask(messages=secret))
    await raw.post("/v1/chat/completions", json=ask(messages=secret, n=99))
    router.failure = ValueError("broken")
    await raw.post("/v1/chat/completions", json=ask(messages=secret))
    assert "pomodoro" not in caplog.text
