"""Which part of a request does a refusal of the prompt library's mean? It tells most, not all.

Places are told in the words of the request's own protocol, from its body as it was converted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ripresa.cluster.gateway.status import RequestError
from ripresa.workers.errors import ErrorCode, InvalidArgument

MAX_STOP_STRINGS = 16

_Json = dict[str, Any]

_PARAMETER = re.compile(r"^Invalid (\w+) value, ")
_QUOTED = re.compile(r"^Invalid '([\w.\[\]]+)': ")
_LEADING = re.compile(r"^(?:unexpected `)?((?:messages|input|tools)\b[\w.\[\]]*): ?")
_NUMBER = re.compile(r"\.(\d+)\b")
_SCHEMA = re.compile(r"^Invalid schema for function '(.*?)': ", re.DOTALL)
_UNANSWERED = ("An assistant message with 'tool_calls'", "No tool output found")
_UNASKED = ("Messages with role 'tool'", "No tool call found")


def refusal(message: str, body: _Json, messages: str) -> InvalidArgument | RequestError:
    """The refusal with its place.

    Args:
        message: the library's words.
        messages: the field that holds the body's messages.
    """
    parameter = _PARAMETER.match(message)
    if parameter is not None:
        name = parameter[1]
        if name == "max_tokens" and "max_output_tokens" in body:
            name = "max_output_tokens"
        return InvalidArgument(name, message[parameter.end() :])
    if message.startswith("Stop string array"):
        name = "stop_sequences" if "stop_sequences" in body else "stop"
        return InvalidArgument(name, f"at most {MAX_STOP_STRINGS} strings are allowed")
    for pattern in (_QUOTED, _LEADING):
        told = pattern.match(message)
        if told is not None:
            return _template(_NUMBER.sub(r"[\1]", told[1]), message[told.end() :])
    schema = _SCHEMA.match(message)
    if schema is not None:
        places = (tool.place for tool in declared_tools(body) if tool.name == schema[1])
        return _template(next(places, "tools"), message[schema.end() :])
    if message.startswith("Tool names must be unique"):
        return _template(_second_name(body), message)
    return _template(_message_meant(message, body.get(messages), messages), message)


def _template(field: str, message: str) -> RequestError:
    return RequestError(ErrorCode.INVALID_ARGUMENT, "TEMPLATE_ERROR", message, field=field)


@dataclass(frozen=True, slots=True)
class DeclaredTool:
    """A tool as a body declares it.

    Attributes:
        parameters: the schema as it was sent; None if there is none.
        name_place, place: where the name and the parameters stand.
    """

    name: str
    parameters: Any
    name_place: str
    place: str


def declared_tools(body: _Json) -> Iterator[DeclaredTool]:
    """The tools of a body whose parts have been checked."""
    for index, tool in enumerate(body.get("tools") or ()):
        path, holder = f"tools[{index}]", tool
        if isinstance(tool.get("function"), dict):
            path, holder = f"{path}.function", tool["function"]
        key = "input_schema" if "input_schema" in holder else "parameters"
        yield DeclaredTool(holder.get("name"), holder.get(key), f"{path}.name", f"{path}.{key}")


def _second_name(body: _Json) -> str:
    """Where a tool's name stands for the second time."""
    seen: set[str] = set()
    for tool in declared_tools(body):
        if tool.name in seen:
            return tool.name_place
        seen.add(tool.name)
    return "tools"


def _message_meant(message: str, parts: Any, field: str) -> str:
    """The place of the message that a refusal is about; all of them where that is not known."""
    if not isinstance(parts, list):
        return field
    index: int | None = None
    if message.startswith("Invalid assistant message"):
        index = _first(parts, lambda part: part.get("role") == "assistant" and not _says(part))
    elif message.startswith("Invalid completion message"):
        index = _first(parts, lambda part: part.get("prefix") is True)
    elif message.startswith(_UNANSWERED):
        index, _ = _unpaired(parts, at_once=field == "messages")
    elif message.startswith(_UNASKED):
        _, index = _unpaired(parts, at_once=field == "messages")
    return field if index is None else f"{field}[{index}]"


def _first(parts: list[_Json], is_meant: Callable[[_Json], bool]) -> int | None:
    return next((index for index, part in enumerate(parts) if is_meant(part)), None)


def _says(part: _Json) -> bool:
    return bool(part.get("content") or part.get("tool_calls"))


def _unpaired(parts: list[_Json], *, at_once: bool) -> tuple[int | None, int | None]:
    """The first part whose calls lack a result, and the first result that no call asked for.

    Args:
        at_once: nothing may come between calls and their results.
    """
    unanswered: list[int] = []
    unasked: list[int] = []
    waiting: dict[str, int] = {}
    for index, part in enumerate(parts):
        if (result := _result_of(part)) is not None:
            if waiting.pop(result, None) is None:
                unasked.append(index)
            continue
        if at_once:
            unanswered += waiting.values()
            waiting = {}
        waiting |= dict.fromkeys(_calls_of(part), index)
    unanswered += waiting.values()
    return min(unanswered, default=None), min(unasked, default=None)


def _calls_of(part: _Json) -> list[str]:
    if part.get("type") == "function_call":
        return [part["call_id"]]
    return [call["id"] for call in part.get("tool_calls") or ()]


def _result_of(part: _Json) -> str | None:
    """The id of the call whose result a part is; None if it is none."""
    if part.get("type") == "function_call_output":
        return str(part["call_id"])
    return str(part["tool_call_id"]) if part.get("role") == "tool" else None
