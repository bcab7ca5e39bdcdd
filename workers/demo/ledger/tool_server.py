"""What happens when a model calls a tool? The call is executed on a world, or refused in words.

A refusal is a result like any other: it begins with `error:` and says what to do instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from ripresa.workers.demo.ledger.world import RECORDED, Field, World

Json = dict[str, Any]

_SUM = re.compile(r"([0-9]{1,6})([+-])([0-9]{1,6})")
_COINED = re.compile(r"[a-z]{1,32}")


def _schema(name: str, description: str, properties: Mapping[str, str]) -> Json:
    kinds = {key: {"type": kind} for key, kind in properties.items()}
    parameters = {"type": "object", "properties": kinds, "required": list(properties)}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS: tuple[Json, ...] = (
    _schema("get", "Everything recorded of an entity.", {"key": "string"}),
    _schema("set", "Change a field.", {"key": "string", "field": "string", "value": "integer"}),
    _schema("read", "The text of a page.", {"page": "integer"}),
    _schema("calc", "A sum or difference.", {"expression": "string"}),
)
"""As Chat Completions requests declare them."""

_TYPES: dict[str, type] = {"string": str, "integer": int}


class ToolServer:
    """Executes calls on one world; `set` changes it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._tools: dict[str, Callable[..., str]] = {
            "get": self._get,
            "set": self._set,
            "read": self._read,
            "calc": self._calc,
        }

    def call(self, tool: str, arguments: str) -> str:
        """The result of a call, which is a refusal if the call is wrong.

        Args:
            arguments: JSON, as an assistant's message has them.
        """
        if tool not in self._tools:
            return f"error: no tool {tool!r}; the tools are {', '.join(self._tools)}"
        try:
            given = read_arguments(arguments)
        except ValueError as error:
            return f"error: {error}"
        wrong = _wrong_arguments(tool, given)
        return f"error: {wrong}" if wrong else self._tools[tool](**given)

    def _get(self, key: str) -> str:
        if key not in self._world.records:
            return self._unknown(key)
        return "\n".join(self._world.fact(key, asked) for asked in RECORDED)

    def _set(self, key: str, field: str, value: int) -> str:
        if key not in self._world.records:
            return self._unknown(key)
        if field != Field.CODE:
            return "error: only the field code can be set"
        if not 100 <= value <= 999:
            return "error: a code has three digits"
        self._world.records[key][Field.CODE] = value
        return self._world.fact(key, Field.CODE)

    def _read(self, page: int) -> str:
        pages = self._world.pages
        if not 1 <= page <= len(pages):
            return f"error: no page {page}; there are {len(pages)} pages, from 1"
        return pages[page - 1]

    def _calc(self, expression: str) -> str:
        parts = _SUM.fullmatch(expression)
        if parts is None:
            return "error: write two whole numbers with + or - between them, as 12+30"
        left, right = int(parts[1]), int(parts[3])
        return f"{expression}={left + right if parts[2] == '+' else left - right}"

    def _unknown(self, key: str) -> str:
        shown = f'"{key}"' if _COINED.fullmatch(key) else "such key"
        return f"error: no {shown} in the ledger"


def read_arguments(arguments: object) -> Json:
    """A call's arguments.

    Raises:
        ValueError: they are no JSON object, or name something twice.
    """
    if not isinstance(arguments, str):
        raise ValueError("the arguments are no JSON")
    try:
        given = json.loads(arguments, object_pairs_hook=_each_once)
    except _NamedTwice:
        raise
    except (ValueError, RecursionError) as error:
        raise ValueError("the arguments are no JSON") from error
    if not isinstance(given, dict):
        raise ValueError("the arguments are no JSON object")
    return given


class _NamedTwice(ValueError):
    """A JSON object has two values of one name, of which readers take different ones."""


def _each_once(pairs: list[tuple[str, Any]]) -> Json:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _NamedTwice("the arguments name something twice")
    return found


def _wrong_arguments(tool: str, given: Mapping[str, object]) -> str | None:
    """What is wrong with a call's arguments, held against the tool's schema."""
    (schema,) = (t["function"] for t in TOOLS if t["function"]["name"] == tool)
    properties = schema["parameters"]["properties"]
    for name in given:
        if name not in properties:
            return f"{tool} takes no {name[:32]!r}; it takes {', '.join(properties)}"
    for name, kind in properties.items():
        if name not in given:
            return f"{tool} needs {name}"
        value = given[name]
        if not isinstance(value, _TYPES[kind["type"]]) or isinstance(value, bool):
            return f"{name} must be of type {kind['type']}"
    return None
