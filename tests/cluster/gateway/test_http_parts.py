"""Is what stands inside a field served, passed over because it says nothing, or refused by name?"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from chat_gateway import ChatGateway
from chat_support import GET_WEATHER

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
USER: dict[str, Any] = {"role": "user", "content": "Hi"}
WEATHER = GET_WEATHER["function"]
CLAUDE_TOOL = {"name": "get_weather", "input_schema": WEATHER["parameters"]}
RESPONSES_TOOL = {"type": "function", **WEATHER}
WEATHER_CALL = {"name": "get_weather", "arguments": "{}"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.fixture(scope="module")
def gateway() -> Iterator[ChatGateway]:
    gateway = ChatGateway()
    yield gateway
    gateway.close()


def ask(gateway: ChatGateway, path: str, fields: dict[str, Any]) -> tuple[int, Any]:
    body = {"max_tokens": 3, **fields}
    if path == RESPONSES:
        body["max_output_tokens"] = body.pop("max_tokens")
    elif path != "/v1/completions":
        body = {"messages": [USER], **body}
    answer = gateway.post(path, json.dumps(body).encode())
    return answer.status_code, answer.json()


def answered(**extra: Any) -> dict[str, Any]:
    """A history whose last answer calls a tool, and has some more keys."""
    call = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    said = {"role": "assistant", "content": "Look.", "tool_calls": [call], **extra}
    result = {"role": "tool", "tool_call_id": "c", "content": "-3"}
    return {"messages": [USER, said, result], "tools": [GET_WEATHER]}


def block(**extra: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", **extra}]}]}


def claude_call(call: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    called = {"type": "tool_use", "id": "c", "name": "get_weather", "input": {}, **call}
    told = {"type": "tool_result", "tool_use_id": "c", "content": "-3", **result}
    messages = [
        USER,
        {"role": "assistant", "content": [called]},
        {"role": "user", "content": [told]},
    ]
    return {"messages": messages, "tools": [CLAUDE_TOOL]}


def item(kind: str, **extra: Any) -> dict[str, Any]:
    call = {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": "{}"}
    items: dict[str, dict[str, Any]] = {
        "message": {"type": "message", **USER},
        "function_call": call,
        "function_call_output": {"type": "function_call_output", "call_id": "c", "output": "-3"},
        "reasoning": {
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
        },
    }
    items[kind] = items[kind] | extra
    order = ("message", "reasoning", "function_call", "function_call_output")
    return {"input": [items[name] for name in order], "tools": [RESPONSES_TOOL]}


CACHE = {"cache_control": {"type": "ephemeral"}}
EMPTY = {"refusal": None, "annotations": [], "audio": None, "function_call": None}
LITELLM = {"provider_specific_fields": {"refusal": None}}
PASSED: dict[str, tuple[str, dict[str, Any]]] = {
    "openai's message": (CHAT, answered(**EMPTY)),
    "its parsed message": (CHAT, answered(parsed=None, annotations=[{"type": "url_citation"}])),
    "a participant's name": (CHAT, answered(name="agent")),
    "reasoning by both names": (CHAT, answered(reasoning="Hm.", reasoning_content="Hm.")),
    "litellm's message": (CHAT, answered(**LITELLM)),
    "an unknown null": (CHAT, answered(tomato=None)),
    "cached text": (CHAT, block(**CACHE)),
    "a cached tool": (CHAT, {"tools": [{**GET_WEATHER, **CACHE}]}),
    "a choice": (CHAT, answered() | {"tool_choice": "none"}),
    "no padding": (CHAT, {"stream_options": {"include_obfuscation": False}}),
    "a described format": (
        CHAT,
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "description": "b", "strict": True, "schema": SCHEMA},
            }
        },
    ),
    "anthropic's text": (MESSAGES, block(citations=None, **CACHE)),
    "anthropic's call": (MESSAGES, claude_call({"caller": {"type": "direct"}, **CACHE}, CACHE)),
    "a failed call": (MESSAGES, claude_call({}, {"is_error": True})),
    "a budget": (
        MESSAGES,
        {"max_tokens": 1100, "thinking": {"type": "enabled", "budget_tokens": 1024}},
    ),
    "nulls for nothing": (RESPONSES, {"input": "Hi", "text": {"format": None}}),
    "a cached system": (
        MESSAGES,
        {"system": [{"type": "text", "text": "Be terse.", **CACHE}]},
    ),
    "a cached custom tool": (MESSAGES, {"tools": [{"type": "custom", **CLAUDE_TOOL, **CACHE}]}),
    "an item's id and status": (RESPONSES, item("function_call", id="fc", status="completed")),
    "a phase": (RESPONSES, item("message", phase="commentary", id="m")),
    "encrypted reasoning": (RESPONSES, item("reasoning", id="r", encrypted_content="x")),
    "what summary there is": (
        RESPONSES,
        {"input": "Hi", "reasoning": {"effort": "low", "summary": "auto"}},
    ),
    "a regex": (
        "/v1/completions",
        {"prompt": "Hi", "response_format": {"type": "regex", "regex": "[0-9]+"}},
    ),
}


@pytest.mark.parametrize(("path", "fields"), PASSED.values(), ids=PASSED)
def test_what_clients_send_back_with_an_answer_is_accepted(
    gateway: ChatGateway, path: str, fields: dict[str, Any]
) -> None:
    status, body = ask(gateway, path, fields)
    assert status == 200, body


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a message's key": (CHAT, answered(tomato=1), "messages[1].tomato"),
    "an old call": (CHAT, answered(function_call={"name": "f"}), "messages[1].function_call"),
    "a voice": (CHAT, answered(audio={"id": "a"}), "messages[1].audio"),
    "a refusal's words": (CHAT, answered(refusal="No."), "messages[1].refusal"),
    "another role's key": (
        CHAT,
        {"messages": [{**USER, "tool_calls": []}]},
        "messages[0].tool_calls",
    ),
    "a role": (CHAT, {"messages": [{**USER, "role": "judge"}]}, "messages[0].role"),
    "a call's key": (
        CHAT,
        answered(
            tool_calls=[{"id": "c", "type": "function", "function": WEATHER_CALL, "tomato": 1}]
        ),
        "messages[1].tool_calls[0].tomato",
    ),
    "a part's key": (CHAT, block(tomato=1), "messages[0].content[0].tomato"),
    "a tool's key": (CHAT, {"tools": [{**GET_WEATHER, "tomato": 1}]}, "tools[0].tomato"),
    "a function's key": (
        CHAT,
        {"tools": [{"type": "function", "function": {**WEATHER, "tomato": 1}}]},
        "tools[0].function.tomato",
    ),
    "a choice's key": (
        CHAT,
        answered() | {"tool_choice": {"type": "function", "function": {"name": "f", "tomato": 1}}},
        "tool_choice.function.tomato",
    ),
    "a format's key": (
        CHAT,
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        "response_format.schema",
    ),
    "a schema's sibling": (
        CHAT,
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": SCHEMA, "tomato": 1},
            }
        },
        "response_format.json_schema.tomato",
    ),
    "an option's key": (CHAT, {"stream_options": {"tomato": 1}}, "stream_options.tomato"),
    "padding": (
        CHAT,
        {"stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
    ),
    "thinking's key": (
        CHAT,
        {"thinking": {"type": "enabled", "tomato": 1}},
        "thinking.tomato",
    ),
    "no effort for thinking": (
        CHAT,
        {"thinking": {"type": "enabled"}, "reasoning_effort": "none"},
        "reasoning_effort",
    ),
    "an effort for no thinking": (
        CHAT,
        {"thinking": {"type": "disabled"}, "reasoning_effort": "low"},
        "reasoning_effort",
    ),
    "anthropic's message": (MESSAGES, {"messages": [{**USER, "tomato": 1}]}, "messages[0].tomato"),
    "anthropic's block": (MESSAGES, block(tomato=1), "messages[0].content[0].tomato"),
    "anthropic's result": (
        MESSAGES,
        claude_call({}, {"content": [{"type": "text", "text": "x", "tomato": 1}]}),
        "messages[2].content[0].content[0].tomato",
    ),
    "anthropic's tool": (
        MESSAGES,
        {"tools": [{**CLAUDE_TOOL, "input_examples": [{}]}]},
        "tools[0].input_examples",
    ),
    "hidden thinking": (
        MESSAGES,
        {"thinking": {"type": "adaptive", "display": "omitted"}},
        "thinking.display",
    ),
    "an item's key": (RESPONSES, item("function_call", namespace="n"), "input[2].namespace"),
    "reasoning's key": (
        RESPONSES,
        {"input": "Hi", "reasoning": {"effort": "low", "tomato": 1}},
        "reasoning.tomato",
    ),
    "a long summary": (
        RESPONSES,
        {"input": "Hi", "reasoning": {"summary": "detailed"}},
        "reasoning.summary",
    ),
    "a text format's key": (
        RESPONSES,
        {"input": "Hi", "text": {"format": {"type": "json_object", "tomato": 1}}},
        "text.format.tomato",
    ),
    "a completion's format": (
        "/v1/completions",
        {"prompt": "Hi", "response_format": {"type": "text", "tomato": 1}},
        "response_format.tomato",
    ),
}


@pytest.mark.parametrize(("path", "fields", "field"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_served_is_refused_by_its_place(
    gateway: ChatGateway, path: str, fields: dict[str, Any], field: str
) -> None:
    status, body = ask(gateway, path, fields)
    assert status == 400, body
    assert body["error"]["message"].startswith(f"{field}: ")
    if path != MESSAGES:
        assert body["error"]["param"] == field
