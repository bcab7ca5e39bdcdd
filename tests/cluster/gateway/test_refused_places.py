"""Is whatever is wrong inside a request refused by its place? Every part is spoilt in turn."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from chat_gateway import ChatGateway

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
COUNT = "/v1/messages/count_tokens"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "f", "description": "Tells.", "parameters": PARAMETERS, "strict": False}
USER: dict[str, Any] = {"role": "user", "content": "Hi"}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": PARAMETERS}}


def text(kind: str = "text") -> list[dict[str, Any]]:
    return [{"type": kind, "text": "Hi"}]


CLAUDE: dict[str, Any] = {
    "max_tokens": 1100,
    "system": text(),
    "messages": [
        {"role": "user", "content": text()},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "text", "text": "Look."},
                {"type": "tool_use", "id": "c", "name": "f", "input": {"city": "Oslo"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c", "content": text(), "is_error": True}
            ],
        },
    ],
    "tools": [{"name": "f", "description": "Tells.", "input_schema": PARAMETERS, "strict": False}],
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "stop_sequences": ["a"],
}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (
        CHAT,
        {
            "max_tokens": 3,
            "messages": [
                {"role": "developer", "content": "Be terse."},
                {"role": "user", "content": text()},
                {
                    "role": "assistant",
                    "content": None,
                    "reasoning_content": "Hm.",
                    "tool_calls": [
                        {
                            "id": "c",
                            "type": "function",
                            "function": {"name": "f", "arguments": "{}"},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "c", "content": text()},
            ],
            "tools": [{"type": "function", "function": FUNCTION}],
            "response_format": SCHEMA,
            "thinking": {"type": "enabled"},
            "stop": ["a"],
            "logit_bias": {"5": 1.0},
            "stream_options": {"include_usage": True},
        },
    ),
    "chat's effort": (CHAT, {"max_tokens": 3, "messages": [USER], "reasoning_effort": "low"}),
    "chat's choice": (
        CHAT,
        {
            "max_tokens": 3,
            "messages": [USER],
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
        },
    ),
    "messages": (MESSAGES, CLAUDE),
    "counting": (COUNT, CLAUDE),
    "messages' choice": (
        MESSAGES,
        {
            "max_tokens": 3,
            "messages": [USER],
            "tools": CLAUDE["tools"],
            "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        },
    ),
    "responses": (
        RESPONSES,
        {
            "max_output_tokens": 3,
            "temperature": 0.5,
            "instructions": "Be terse.",
            "input": [
                {"type": "message", "role": "user", "content": text("input_text")},
                {
                    "type": "reasoning",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": "Hm."}],
                },
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {
                    "type": "function_call_output",
                    "call_id": "c",
                    "output": text("input_text"),
                },
            ],
            "tools": [{"type": "function", **FUNCTION}],
            "reasoning": {"effort": "low", "summary": "auto"},
            "text": {"format": {"type": "json_schema", **SCHEMA["json_schema"]}},  # type: ignore[dict-item]
        },
    ),
    "responses' choice": (
        RESPONSES,
        {
            "max_output_tokens": 3,
            "input": "Hi",
            "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": {"type": "function", "name": "f"},
        },
    ),
}
SPOILT: tuple[Any, ...] = (None, -1, 'no "such', [], [{}], {})
ELSEWHERE = {"tools": "tool_choice", "max_tokens": "thinking.budget_tokens"}
"""Fields whose absence is another one's fault."""


@pytest.fixture(scope="module")
def gateway() -> Iterator[ChatGateway]:
    gateway = ChatGateway()
    yield gateway
    gateway.close()


def places(value: Any, path: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Every part below a value: how it is told, and the keys that lead to it."""
    parts: list[tuple[Any, str]] = []
    if isinstance(value, dict):
        parts = [(key, f"{path}.{key}" if path else key) for key in value]
    elif isinstance(value, list):
        parts = [(index, f"{path}[{index}]") for index in range(len(value))]
    for key, told in parts:
        yield told, [key]
        if "parameters" not in told and "schema" not in told:
            for deeper, keys in places(value[key], told):
                yield deeper, [key, *keys]


def spoil(body: dict[str, Any], keys: list[Any], value: Any) -> dict[str, Any]:
    spoilt = copy.deepcopy(body)
    holder: Any = spoilt
    for key in keys[:-1]:
        holder = holder[key]
    holder[keys[-1]] = value
    return spoilt


def field_of(path: str, error: dict[str, Any]) -> str:
    if path.startswith(MESSAGES):
        return str(error["message"]).split(": ")[0]
    return str(error["param"])


def is_named(place: str, field: str) -> bool:
    """Whether a refusal tells a place: itself, or an item of its list that does not fit it."""
    root = re.split(r"[.\[]", place)[0]
    if field == ELSEWHERE.get(place):
        return True
    return re.split(r"[.\[]", field)[0] == root and ("[" in field or "[" not in place)


@pytest.mark.parametrize(("path", "body"), BODIES.values(), ids=BODIES)
def test_what_is_spoilt_is_named(gateway: ChatGateway, path: str, body: dict[str, Any]) -> None:
    assert gateway.post(path, json.dumps(body).encode()).status_code == 200
    num_refused = 0
    for place, keys in places(body):
        for value in SPOILT:
            answer = gateway.post(path, json.dumps(spoil(body, keys, value)).encode())
            assert answer.status_code in (200, 400), (place, value, answer.text)
            if answer.status_code == 400:
                num_refused += 1
                field = field_of(path, answer.json()["error"])
                assert is_named(place, field), (place, value, answer.text)
    assert num_refused > len(SPOILT)


TWICE = {
    "a field": (b'{"prompt": "hi", "prompt": "ho"}', "body"),
    "a bias": (b'{"prompt": "hi", "logit_bias": {"5": 1, "5": 2}}', "logit_bias"),
    "a bias of another spelling": (
        b'{"prompt": "hi", "logit_bias": {"5": 1, "05": 2}}',
        "logit_bias[05]",
    ),
    "deep inside": (
        b'{"prompt": "hi", "response_format": {"type": "json_schema", "json_schema": '
        b'{"name": "a", "schema": {"properties": {"b": {}, "b": {}}}}}}',
        "response_format.json_schema.schema.properties",
    ),
}


@pytest.mark.parametrize(("content", "field"), TWICE.values(), ids=TWICE)
def test_what_is_said_twice_is_not_half_ignored(
    gateway: ChatGateway, content: bytes, field: str
) -> None:
    answer = gateway.post("/v1/completions", content)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


CONTRADICTIONS: dict[str, tuple[str, dict[str, Any], str]] = {
    "effort without thinking": (
        CHAT,
        {"thinking": {"type": "disabled"}, "reasoning_effort": "high"},
        "reasoning_effort",
    ),
    "a number without thinking": (
        CHAT,
        {"thinking": {"type": "disabled"}, "reasoning_effort": 33},
        "reasoning_effort",
    ),
    "stop strings from a token on": (CHAT, {"stop": "a", "min_tokens": 2}, "min_tokens"),
    "a number as text": (CHAT, {"reasoning_effort": "50"}, "reasoning_effort"),
    "a budget of everything": (
        MESSAGES,
        {"thinking": {"type": "enabled", "budget_tokens": 3}},
        "thinking.budget_tokens",
    ),
    "a budget for nothing": (
        MESSAGES,
        {"thinking": {"type": "disabled", "budget_tokens": 1}},
        "thinking.budget_tokens",
    ),
    "OpenAI's word": (MESSAGES, {"tool_choice": {"type": "required"}}, "tool_choice.type"),
    "a choice without its tool": (MESSAGES, {"tool_choice": {"type": "tool"}}, "tool_choice.name"),
}


@pytest.mark.parametrize(("path", "fields", "field"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_contradictions_are_refused(
    gateway: ChatGateway, path: str, fields: dict[str, Any], field: str
) -> None:
    body = {"max_tokens": 3, "messages": [USER], **fields}
    answer = gateway.post(path, json.dumps(body).encode())
    assert answer.status_code == 400
    assert field_of(path, answer.json()["error"]) == field
