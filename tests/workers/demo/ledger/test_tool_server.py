"""Does the tool server execute what it can, and refuse the rest in words that say what to do?"""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ripresa.workers.demo.ledger.tool_server import TOOLS, ToolServer
from ripresa.workers.demo.ledger.world import Field, World


@pytest.fixture
def server() -> ToolServer:
    return small_server()


def small_server() -> ToolServer:
    record = {Field.CODE: 412, Field.OWNER: "rizat", Field.PLACE: "mobak", Field.COLOR: "red"}
    return ToolServer(World({"nubok": record}, {}, ["one", "two"]))


@pytest.mark.parametrize(
    ("tool", "arguments", "result"),
    [
        ("read", {"page": 2}, "two"),
        ("calc", {"expression": "412+30"}, "412+30=442"),
        ("calc", {"expression": "12-30"}, "12-30=-18"),
        ("set", {"key": "nubok", "field": "code", "value": 500}, 'code of "nubok" is 500'),
        (
            "get",
            {"key": "nubok"},
            'code of "nubok" is 412\nowner of "nubok" is "rizat"\n'
            'place of "nubok" is "mobak"\ncolor of "nubok" is red',
        ),
        ("get", {"key": "zuvit"}, 'error: no "zuvit" in the ledger'),
        ("get", {"key": "<b>"}, "error: no such key in the ledger"),
        ("get", {}, "error: get needs key"),
        ("get", {"name": "nubok"}, "error: get takes no 'name'; it takes key"),
        ("get", {"key": 3}, "error: key must be of type string"),
        ("read", {"page": True}, "error: page must be of type integer"),
        ("read", {"page": 3}, "error: no page 3; there are 2 pages, from 1"),
        ("set", {"key": "nubok", "field": "owner", "value": 500},
         "error: only the field code can be set"),
        ("set", {"key": "nubok", "field": "code", "value": 5}, "error: a code has three digits"),
        ("calc", {"expression": "١٢+٣"},
         "error: write two whole numbers with + or - between them, as 12+30"),
        ("calc", {"expression": "__import__('os')"},
         "error: write two whole numbers with + or - between them, as 12+30"),
        ("grep", {}, "error: no tool 'grep'; the tools are get, set, read, calc"),
    ],
)  # fmt: skip
def test_calls_and_refusals(
    server: ToolServer, tool: str, arguments: dict[str, object], result: str
) -> None:
    assert server.call(tool, json.dumps(arguments)) == result


def test_what_was_set_is_read_afterwards(server: ToolServer) -> None:
    server.call("set", '{"key": "nubok", "field": "code", "value": 500}')
    assert server.call("get", '{"key": "nubok"}').startswith('code of "nubok" is 500\n')


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
names = st.sampled_from(["key", "field", "value", "page", "expression"])


@given(
    st.sampled_from([t["function"]["name"] for t in TOOLS]) | st.text(),
    st.text() | st.dictionaries(names, json_values, max_size=3).map(json.dumps),
)
def test_no_call_brings_the_server_down(tool: str, arguments: str) -> None:
    assert small_server().call(tool, arguments)


def test_arguments_that_name_something_twice_are_refused(server: ToolServer) -> None:
    twice = '{"key": "zuvit", "key": "nubok"}'
    assert server.call("get", twice) == "error: the arguments name something twice"


@pytest.mark.parametrize("arguments", ["", "nubok", "[1]", "3", "[" * 100_000])
def test_arguments_that_are_no_object_are_refused(server: ToolServer, arguments: str) -> None:
    assert server.call("get", arguments).startswith("error: the arguments are no JSON")
