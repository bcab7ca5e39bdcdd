"""Does any JSON, sent to any endpoint, get an answer that is no failure of ours?"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
from chat_gateway import ChatGateway
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ripresa.cluster.gateway.http_fields import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    MESSAGES_FIELDS,
    RESPONSES_FIELDS,
)
from ripresa.cluster.gateway.http_tokens import DETOKENIZE_FIELDS, TOKENIZE_FIELDS

NUM_EXAMPLES = int(os.environ.get("RIPRESA_FUZZ_EXAMPLES", "60"))
ENDPOINTS = {
    "/v1/chat/completions": CHAT_FIELDS,
    "/v1/completions": COMPLETION_FIELDS,
    "/v1/messages": MESSAGES_FIELDS,
    "/v1/messages/count_tokens": MESSAGES_FIELDS,
    "/v1/responses": RESPONSES_FIELDS,
    "/tokenize": TOKENIZE_FIELDS,
    "/detokenize": DETOKENIZE_FIELDS,
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
GOOD: dict[str, list[Any]] = {
    "model": ["deepseek-demo"],
    "messages": [
        [{"role": "user", "content": "hi"}],
        [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "r"},
        ],
    ],
    "prompt": ["hi", [5, 6]],
    "input": ["hi", [{"role": "user", "content": "hi"}]],
    "tokens": [[5, 6]],
    "tools": [[TOOL], [TOOL["function"]]],
    "tool_choice": ["none", "required", {"type": "any"}],
    "max_tokens": [3],
    "max_output_tokens": [3],
    "stream": [True, False],
    "n": [2],
    "stop": ["a", ["b"]],
    "reasoning_effort": ["low", "none", 3],
    "thinking": [{"type": "disabled"}],
}
numbers = st.integers() | st.floats() | st.sampled_from([10**400, -(2**63), 2**64, 0, -1])
texts = st.text(max_size=6) | st.sampled_from(["\ud800", "a\udfff"])
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "role", "content", "name"]) | texts, inner)
    ),
    max_leaves=6,
)


@st.composite
def bodies(draw: st.DrawFn, fields: Any) -> dict[str, Any]:
    """A request that may be right: some of its fields, most of them with fitting values."""
    body: dict[str, Any] = {}
    for name in ("model", "messages", "prompt", "input", "tokens", "max_tokens"):
        if name in fields and draw(st.integers(0, 9)):
            body[name] = draw(st.sampled_from(GOOD[name]))
    for name in draw(st.lists(st.sampled_from(sorted(fields)), max_size=4)):
        good = st.sampled_from(GOOD[name]) if name in GOOD else values
        body[name] = draw(good | values)
    return body


@pytest.fixture(scope="module")
def gateway() -> Iterator[ChatGateway]:
    gateway = ChatGateway()
    yield gateway
    gateway.close()


def check(gateway: ChatGateway, path: str, content: bytes) -> None:
    response = gateway.post(path, content)
    assert response.status_code in (200, 400, 404, 409), (response.status_code, response.text)
    assert response.headers["x-request-id"]
    if response.status_code != 200:
        error = response.json()["error"]
        assert error["message"]
        assert error["type"]
    assert '"server_error"' not in response.text
    assert gateway.service.num_running == 0
    assert not gateway.router.open


@pytest.mark.parametrize("path", ENDPOINTS)
def test_no_request_is_a_failure_of_ours(gateway: ChatGateway, path: str) -> None:
    @settings(max_examples=NUM_EXAMPLES, suppress_health_check=[HealthCheck.too_slow])
    @given(bodies(ENDPOINTS[path]))
    def send(body: dict[str, Any]) -> None:
        check(gateway, path, json.dumps(body).encode())

    send()


@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_lone_surrogate_is_the_body_s_fault(gateway: ChatGateway, path: str) -> None:
    for field in ("model", "prompt", "messages", "input", "cache_salt", "\ud800"):
        for text in ("\ud800", "a\udfff", "\ude00\ud83d"):
            for value in (text, [{"role": "user", "content": text}], {text: 1}):
                response = gateway.post(path, json.dumps({field: value}).encode())
                assert response.status_code == 400
                message = response.json()["error"]["message"]
                assert message.startswith("body: is no Unicode text")


@given(content=st.binary(max_size=60))
@settings(max_examples=NUM_EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_bytes_are_a_failure_of_ours(gateway: ChatGateway, content: bytes) -> None:
    for path in ENDPOINTS:
        check(gateway, path, content)
