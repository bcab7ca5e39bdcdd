"""Do answers keep to schemas, expressions and tools, though the model behind them knows nothing?

Noise in place of a model, or a model whose weights are random: whatever is valid here, its
constraint has made so.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import anthropic
import jsonschema
import openai
import pytest
from engine_gateway import engine_gateway, noise_runner
from http_gateway import http_gateway
from llguidance import LLParserLimits
from noise_router import NoiseRouter

from ripresa.cluster.gateway.chat_encoding import ChatEncoding
from ripresa.cluster.gateway.served_model import ServedModel
from ripresa.cluster.gateway.service import InferenceService
from ripresa.cluster.gateway.tokenizer import Tokenizer
from ripresa.cluster.observability.metrics import GatewayMetrics
from ripresa.workers import grammar
from ripresa.workers.demo.checkpoint import DEMO_MODEL
from ripresa.workers.models.vocabulary import read_vocabulary

MODEL = "deepseek-demo"
QUESTION = [{"role": "user", "content": "Find it."}]
OFF = {"thinking": {"type": "disabled"}}
NESTED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "where": {"type": "string", "enum": ["here", "there</"]},
        "note": {"type": "string", "maxLength": 12},
        "filter": {"$ref": "#/$defs/filter"},
        "pages": {"type": "array", "items": {"$ref": "#/$defs/page"}, "maxItems": 2},
        "maybe": {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}]},
        "code": {"type": "string", "pattern": "^[a-f]{1,4}$"},
    },
    "required": ["where", "note", "filter", "pages", "maybe", "code"],
    "additionalProperties": False,
    "$defs": {
        "filter": {
            "type": "object",
            "properties": {
                "op": {"type": "string", "enum": ["=", "<"]},
                "page": {"$ref": "#/$defs/page"},
            },
            "required": ["op", "page"],
            "additionalProperties": False,
        },
        "page": {"type": "integer", "minimum": 0, "maximum": 99},
    },
}
SMALL: dict[str, Any] = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "n": {"type": "integer", "maximum": 9}},
    "required": ["on", "n"],
    "additionalProperties": False,
}
NOTHING: dict[str, Any] = {"type": "object", "additionalProperties": False}


def tool(name: str, schema: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, **fields}}


LOOSE: dict[str, Any] = {**SMALL, "required": [], "not": {"required": ["x"]}}
STRICT_TOOLS = [tool("search", NESTED, strict=True), tool("switch", SMALL, strict=True)]
TOOLS = [tool("search", NESTED), tool("switch", LOOSE), tool("stop", NOTHING)]
SCHEMAS: dict[str, Any] = {"search": NESTED, "switch": LOOSE, "stop": NOTHING}


@pytest.fixture(autouse=True)
def drawn_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Always the same ones: now and then an answer of noise is longer than its request allows."""
    seeds = itertools.count(1)
    drawing = SimpleNamespace(randbits=lambda num_bits: next(seeds))
    monkeypatch.setattr("ripresa.cluster.gateway.sampling.secrets", drawing)


@pytest.fixture(scope="module")
def noise() -> NoiseRouter:
    return NoiseRouter(read_vocabulary(DEMO_MODEL, 4096, 1))


@pytest.fixture
async def url(
    noise: NoiseRouter, demo: Tokenizer, encoding: ChatEncoding, chat_model: ServedModel
) -> AsyncIterator[str]:
    service = InferenceService(noise, chat_model, demo, GatewayMetrics(), encoding=encoding)
    async with http_gateway(service) as url:
        yield url
    service.close()


@pytest.fixture
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
        yield client


@pytest.fixture
async def claude(url: str) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=url, api_key="-", max_retries=0) as client:
        yield client


def ask(encoding: ChatEncoding, *, thinking: bool = False, **fields: Any) -> dict[str, Any]:
    """Thinking ends after some tokens by a bias: a random model would not stop."""
    asked: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 400, **fields}
    if thinking:
        asked["logit_bias"] = {str(encoding.end_of_reasoning_id): 5.0}
        return asked
    return {**asked, "extra_body": OFF}


def check_call(name: str, arguments: str) -> None:
    jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("named", [False, True])
async def test_demanded_calls_have_valid_arguments(
    client: openai.AsyncOpenAI, encoding: ChatEncoding, thinking: bool, named: bool
) -> None:
    by_name = {"type": "function", "function": {"name": "search"}}
    choice: Any = by_name if named else "required"
    tools = STRICT_TOOLS if thinking else TOOLS
    fields = {"tools": tools, "tool_choice": choice, "n": 5, "seed": 3, "max_tokens": 1500}
    answer = await client.chat.completions.create(**ask(encoding, thinking=thinking, **fields))
    ended = [c for c in answer.choices if c.finish_reason == "tool_calls"]
    assert len(ended) >= 2
    for choice in ended:
        calls = choice.message.tool_calls
        assert calls
        assert not choice.message.content
        assert not named or [call.function.name for call in calls] == ["search"]
        for call in calls:
            check_call(call.function.name, call.function.arguments)


async def test_streamed_calls_are_the_same_as_whole_ones(
    client: openai.AsyncOpenAI, encoding: ChatEncoding
) -> None:
    asked = ask(encoding, tools=TOOLS, tool_choice="required", seed=8, parallel_tool_calls=False)
    whole = (await client.chat.completions.create(**asked)).choices[0]
    assert whole.finish_reason == "tool_calls"
    (expected,) = whole.message.tool_calls or ()
    name = arguments = ""
    async for chunk in await client.chat.completions.create(stream=True, **asked):
        for part in chunk.choices[0].delta.tool_calls or ():
            assert part.index == 0
            assert part.function is not None
            name += part.function.name or ""
            arguments += part.function.arguments or ""
    assert (name, arguments) == (expected.function.name, expected.function.arguments)
    check_call(name, arguments)


async def test_a_call_that_is_cut_ends_by_its_length(
    client: openai.AsyncOpenAI, encoding: ChatEncoding
) -> None:
    asked = ask(encoding, tools=TOOLS, tool_choice="required", max_tokens=12)
    answer = await client.chat.completions.create(**asked)
    assert answer.choices[0].finish_reason == "length"


async def test_strict_tools_bind_the_calls_that_an_answer_begins(
    client: openai.AsyncOpenAI, encoding: ChatEncoding, demo: Tokenizer
) -> None:
    (bracket,) = demo.encode("<")
    bias = {str(encoding.call_token_id): 6.0, str(bracket): 6.0}
    fields = {"tools": STRICT_TOOLS, "n": 4, "seed": 5, "logit_bias": bias, "max_tokens": 900}
    fields["parallel_tool_calls"] = False
    answer = await client.chat.completions.create(**ask(encoding, **fields))
    called = [c for c in answer.choices if c.finish_reason == "tool_calls"]
    assert called
    for choice in called:
        for call in choice.message.tool_calls or ():
            check_call(call.function.name, call.function.arguments)
    assert not any("｜DSML｜" in (c.message.content or "") for c in answer.choices)


FORMATS: dict[str, tuple[dict[str, Any], Any]] = {
    "strict": ({"name": "a", "schema": NESTED, "strict": True}, NESTED),
    "loose": (
        {"name": "a", "schema": {**SMALL, "not": {"required": ["x"]}}},
        SMALL,
    ),
}


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize(("given", "schema"), FORMATS.values(), ids=FORMATS)
async def test_an_answer_keeps_to_a_schema(
    client: openai.AsyncOpenAI,
    encoding: ChatEncoding,
    thinking: bool,
    given: dict[str, Any],
    schema: Any,
) -> None:
    fields = {"response_format": {"type": "json_schema", "json_schema": given}, "seed": 2}
    asked = ask(encoding, thinking=thinking, **fields)
    answer = await client.chat.completions.create(**asked)
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content or ""), schema)


async def test_a_format_beside_tools_leaves_the_choice_to_the_model(
    client: openai.AsyncOpenAI, encoding: ChatEncoding
) -> None:
    given = {"type": "json_schema", "json_schema": {"name": "a", "schema": SMALL, "strict": True}}
    answer = await client.chat.completions.create(
        **ask(encoding, tools=TOOLS, response_format=given, n=8, seed=1, max_tokens=1500)
    )
    kinds = set()
    for choice in answer.choices:
        if choice.finish_reason == "stop":
            jsonschema.validate(json.loads(choice.message.content or ""), SMALL)
        for call in choice.message.tool_calls or ():
            if choice.finish_reason == "tool_calls":
                check_call(call.function.name, call.function.arguments)
        kinds.add(choice.finish_reason)
    assert kinds >= {"stop", "tool_calls"}
    silent = await client.chat.completions.create(
        **ask(encoding, tools=TOOLS, response_format=given, tool_choice="none", n=4)
    )
    for choice in silent.choices:
        jsonschema.validate(json.loads(choice.message.content or ""), SMALL)


async def test_responses_and_completions_take_formats_too(client: openai.AsyncOpenAI) -> None:
    wanted = {"type": "json_schema", "name": "a", "schema": SMALL, "strict": True}
    answer = await client.responses.create(
        model=MODEL,
        input="hi",
        reasoning={"effort": "none"},
        max_output_tokens=200,
        text={"format": wanted},  # type: ignore[typeddict-item]
    )
    jsonschema.validate(json.loads(answer.output_text), SMALL)
    told = answer.to_dict()["text"]
    assert told["format"]["schema"] == SMALL  # type: ignore[index]
    regex = r"(Ja|Nein), [0-9]{2}/[0-9]{2}"
    text = await client.completions.create(
        model=MODEL,
        prompt="Kommst du?",
        max_tokens=50,
        n=3,
        extra_body={"response_format": {"type": "regex", "regex": regex}},
    )
    for choice in text.choices:
        assert re.fullmatch(regex, choice.text)
        assert choice.finish_reason == "stop"


async def test_messages_call_tools_when_told_to(claude: anthropic.AsyncAnthropic) -> None:
    tools = [{"name": "search", "input_schema": NESTED}, {"name": "switch", "input_schema": SMALL}]
    asked: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 500,
        "messages": QUESTION,
        "tools": tools,
        "thinking": {"type": "disabled"},
    }
    for choice in ({"type": "any"}, {"type": "tool", "name": "search"}):
        choice = {**choice, "disable_parallel_tool_use": True}
        answer = await claude.messages.create(tool_choice=choice, **asked)
        assert answer.stop_reason == "tool_use"
        (block,) = answer.content
        assert block.type == "tool_use"
        jsonschema.validate(block.input, SCHEMAS[block.name])
        async with claude.messages.stream(tool_choice=choice, **asked) as stream:
            final = await stream.get_final_message()
        (block,) = final.content
        assert block.type == "tool_use"
        jsonschema.validate(block.input, SCHEMAS[block.name])


async def test_parameters_hold_beside_a_constraint(
    client: openai.AsyncOpenAI, encoding: ChatEncoding
) -> None:
    given = {"type": "json_schema", "json_schema": {"name": "a", "schema": NESTED, "strict": True}}
    asked = ask(
        encoding,
        response_format=given,
        seed=11,
        n=3,
        presence_penalty=1.0,
        frequency_penalty=0.5,
        top_p=0.9,
    )
    asked["extra_body"] = {**OFF, "min_tokens": 300, "top_k": 50, "repetition_penalty": 1.2}
    answer = await client.chat.completions.create(**asked)
    for index, choice in enumerate(answer.choices):
        jsonschema.validate(json.loads(choice.message.content or ""), NESTED)
        alone = {**asked, "n": 1, "seed": 11 + index}
        again = await client.chat.completions.create(**alone)
        assert again.choices[0].message.content == choice.message.content


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "an unknown keyword": (
        {"type": "json_schema", "json_schema": {"schema": {"not": {}}, "strict": True}},
        "response_format.json_schema.schema",
        "not",
    ),
    "a keyword of nobody": (
        {
            "type": "json_schema",
            "json_schema": {
                "schema": {
                    "type": "object",
                    "properties": {"a/b": {"anyOf": [{"type": "null"}, {"nullable": True}]}},
                },
                "strict": True,
            },
        },
        "response_format.json_schema.schema",
        "'nullable' at #/properties/a~1b/anyOf/1",
    ),
    "an unknown type": (
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "tomato"}}},
        "response_format.json_schema.schema",
        "tomato",
    ),
    "a circle": (
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#"}}},
        "response_format.json_schema.schema",
        "nothing satisfies it",
    ),
    "an open group": ({"type": "regex", "regex": "(a"}, "response_format.regex", "unclosed"),
    "a look-ahead": ({"type": "regex", "regex": "(?=a)b"}, "response_format.regex", "look"),
}


@pytest.mark.parametrize(("given", "field", "words"), REFUSED.values(), ids=REFUSED)
async def test_what_cannot_be_kept_to_is_refused_by_its_field(
    client: openai.AsyncOpenAI,
    encoding: ChatEncoding,
    given: dict[str, Any],
    field: str,
    words: str,
) -> None:
    for streams in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(
                **ask(encoding, response_format=given, stream=streams)
            )
        assert caught.value.param == field
        assert words in str(caught.value)


async def test_a_strict_tool_s_unknown_keyword_is_refused(
    client: openai.AsyncOpenAI, encoding: ChatEncoding
) -> None:
    items = {"type": "string", "tomato": 1}
    deep = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": items}},
        "required": ["a"],
        "additionalProperties": False,
    }
    for is_strict in (True, False):
        asked = ask(encoding, tools=[tool("search", deep, strict=is_strict)])
        asked |= {"tool_choice": "required", "max_tokens": 5}
        if not is_strict:
            await client.chat.completions.create(**asked)
            continue
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**asked)
        assert caught.value.param == "tools[0].function.parameters"
        assert "'tomato' at #/properties/a/items" in str(caught.value)


async def test_names_and_values_are_no_keywords(
    client: openai.AsyncOpenAI, encoding: ChatEncoding
) -> None:
    """What stands under `properties`, in `const` or among notes may be called anything."""
    schema = {
        "type": "object",
        "title": "A",
        "default": {"tomato": 1},
        "properties": {"not": {"const": {"tomato": 1}}, "tomato": {"$ref": "#/$defs/if"}},
        "required": ["not"],
        "additionalProperties": False,
        "$defs": {"if": {"type": "integer", "description": "any"}},
    }
    given = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    answer = await client.chat.completions.create(**ask(encoding, response_format=given, seed=3))
    jsonschema.validate(json.loads(answer.choices[0].message.content or ""), schema)


async def test_a_real_model_keeps_to_a_demanded_call(
    demo: Tokenizer, encoding: ChatEncoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_name = {"type": "function", "function": {"name": "switch"}}
    asked = ask(encoding, tools=TOOLS, tool_choice=by_name, seed=2, max_tokens=150)
    hostile = {"type": "regex", "regex": "((a|b){20,30}){20,30}"}
    async with (
        engine_gateway(noise_runner(), demo, encoding) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client,
        anthropic.AsyncAnthropic(base_url=url, api_key="-", max_retries=0) as claude,
    ):
        whole = (await client.chat.completions.create(**asked)).choices[0]
        (call,) = whole.message.tool_calls or ()
        assert whole.finish_reason == "tool_calls"
        check_call("switch", call.function.arguments)
        streamed = ""
        async for chunk in await client.chat.completions.create(stream=True, **asked):
            for part in chunk.choices[0].delta.tool_calls or ():
                streamed += (part.function and part.function.arguments) or ""
        assert streamed == call.function.arguments
        message = await claude.messages.create(
            model=MODEL,
            max_tokens=150,
            messages=[{"role": "user", "content": "Find it."}],
            tools=[{"name": "switch", "input_schema": LOOSE}],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
            thinking={"type": "disabled"},
        )
        (block,) = message.content
        assert block.type == "tool_use"
        jsonschema.validate(block.input, LOOSE)
        # A grammar that becomes too complex ends its own request alone.
        monkeypatch.setattr(grammar, "_LIMITS", LLParserLimits(max_lexer_states=40))
        beside = asyncio.create_task(client.chat.completions.create(**asked))
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**ask(encoding, response_format=hostile))
        assert caught.value.param == "response_format.regex"
        assert "ask for a simpler one" in str(caught.value)
        (again,) = (await beside).choices[0].message.tool_calls or ()
        assert again.function.arguments == call.function.arguments
