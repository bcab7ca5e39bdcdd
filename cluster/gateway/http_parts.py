"""What may stand inside a request's fields? Anything else is refused by its place, never ignored.

One table a protocol, as deep as objects are understood. Some keys are served by passing over them:
labels and marks that clients send back with an answer, and hints for caches of another kind. A null
is the same as no key.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from ripresa.cluster.gateway.call_grammar import check_call_name
from ripresa.cluster.gateway.chat_encoding import Json, Protocol
from ripresa.workers.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Keys:
    """An object.

    Attributes:
        needed: keys that it has, and what their values are.
        others: keys that it may have.
    """

    needed: Mapping[str, Value]
    others: Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Kinds:
    """Objects with keys by their kind.

    Attributes:
        tag: the key that tells an object's kind.
        keys: of each kind that is served.
        default: of an object without a tag; None refuses it.
    """

    tag: str
    keys: Mapping[str, Keys]
    default: str | None = None


@dataclass(frozen=True, slots=True)
class Only:
    """A value that is one of these."""

    values: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Each:
    """A list.

    Attributes:
        least: how many items it has at least.
    """

    of: Value
    least: int = 0


@dataclass(frozen=True, slots=True)
class TextOr:
    """A string, or another value."""

    other: Value


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value without parts.

    Attributes:
        words: what it must be.
    """

    is_fine: Callable[[Any], bool]
    words: str


@dataclass(frozen=True, slots=True)
class Checked:
    """A string that has a check of its own, which takes it and its place."""

    check: Callable[[str, str], None]


Value: TypeAlias = Keys | Kinds | Only | Each | TextOr | Leaf | Checked | None
"""What a value is; None for anything."""

_TEXT = Leaf(lambda value: isinstance(value, str), "a string")
_FLAG = Leaf(lambda value: isinstance(value, bool), "true or false")
_OBJECT = Leaf(lambda value: isinstance(value, dict), "an object")
_COUNT = Leaf(lambda value: type(value) is int and 1 <= value < 1 << 63, "an integer of at least 1")
_CALL_NAME = Checked(check_call_name)


def _keys(needed: Mapping[str, Value] | None = None, ignored: str = "", **others: Value) -> Keys:
    """An object's table.

    Args:
        ignored: names of keys that are passed over.
        others: further keys that it may have.
    """
    return Keys(needed or {}, {**dict.fromkeys(ignored.split()), **others})


EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max")

_TYPE: Mapping[str, Value] = {"type": None}  # its holder's tag, which has been looked at
_SCHEMA_KEYS = "name description schema strict"
_FORMAT = Kinds(
    "type",
    {
        "text": _keys(_TYPE),
        "json_object": _keys(_TYPE),
        "json_schema": _keys(_TYPE, _SCHEMA_KEYS, json_schema=_keys(None, _SCHEMA_KEYS)),
        "regex": _keys({**_TYPE, "regex": _TEXT}),
    },
)
_STREAM_OPTIONS = _keys(include_usage=None, include_obfuscation=Only((False,)))
_THINKING = Kinds(
    "type",
    {
        "disabled": _keys(_TYPE),
        "enabled": _keys(_TYPE, budget_tokens=_COUNT, display=Only(("summarized",))),
        "adaptive": _keys(_TYPE, display=Only(("summarized",))),
    },
)

_TEXT_PART = _keys({**_TYPE, "text": _TEXT}, "cache_control prompt_cache_breakpoint")
_CONTENT = TextOr(Each(Kinds("type", {"text": _TEXT_PART})))
_ROLE: Mapping[str, Value] = {"role": None}
_TOLD = _keys({**_ROLE, "content": _CONTENT}, "name cache_control")
_CALL = _keys(
    {
        "id": _TEXT,
        "type": Only(("function",)),
        "function": _keys({"name": _CALL_NAME, "arguments": _TEXT}, "parsed_arguments"),
    },
    "index provider_specific_fields",
)
_ASSISTANT = _keys(
    _ROLE,
    # What clients and other servers put beside an answer; `reasoning` repeats the content above.
    "name cache_control id annotations parsed reasoning reasoning_details provider_specific_fields",
    content=_CONTENT,
    reasoning_content=_TEXT,
    prefix=_FLAG,
    tool_calls=Each(_CALL),
)
_CHAT: Mapping[str, Value] = {
    "messages": Each(
        Kinds(
            "role",
            {
                **dict.fromkeys(("system", "developer", "user", "latest_reminder"), _TOLD),
                "assistant": _ASSISTANT,
                "tool": _keys(
                    {**_ROLE, "content": _CONTENT, "tool_call_id": _TEXT}, "name cache_control"
                ),
            },
        )
    ),
    "tools": Each(
        Kinds(
            "type",
            {
                "function": _keys(
                    {
                        **_TYPE,
                        "function": _keys(
                            {"name": _TEXT}, description=_TEXT, parameters=_OBJECT, strict=_FLAG
                        ),
                    },
                    "cache_control",
                )
            },
        )
    ),
    "tool_choice": TextOr(
        Kinds("type", {"function": _keys({**_TYPE, "function": _keys({"name": _TEXT})})})
    ),
    "thinking": _THINKING,
    "response_format": _FORMAT,
    "stream_options": _STREAM_OPTIONS,
}

_CLAUDE_TEXT = _keys({**_TYPE, "text": _TEXT}, "cache_control citations")
_CLAUDE_TEXTS = TextOr(Each(Kinds("type", {"text": _CLAUDE_TEXT})))
_CLAUDE_CONTENT = Kinds(
    "type",
    {
        "text": _CLAUDE_TEXT,
        "thinking": _keys({**_TYPE, "thinking": _TEXT}, "cache_control", signature=_TEXT),
        "tool_use": _keys(
            {**_TYPE, "id": _TEXT, "name": _CALL_NAME, "input": None}, "cache_control caller"
        ),
        "tool_result": _keys(
            {**_TYPE, "tool_use_id": _TEXT}, "cache_control", content=_CLAUDE_TEXTS, is_error=_FLAG
        ),
    },
)
_CLAUDE_MESSAGE = _keys({**_ROLE, "content": TextOr(Each(_CLAUDE_CONTENT))})
_MESSAGES: Mapping[str, Value] = {
    "messages": Each(
        Kinds("role", dict.fromkeys(("user", "assistant", "system"), _CLAUDE_MESSAGE))
    ),
    "system": _CLAUDE_TEXTS,
    "tools": Each(
        Kinds(
            "type",
            {
                "custom": _keys(
                    {"name": _TEXT, "input_schema": _OBJECT},
                    "type cache_control eager_input_streaming",
                    description=_TEXT,
                    strict=_FLAG,
                )
            },
            default="custom",
        )
    ),
    "tool_choice": Kinds(
        "type",
        {
            "auto": _keys(_TYPE, disable_parallel_tool_use=_FLAG),
            "any": _keys(_TYPE, disable_parallel_tool_use=_FLAG),
            "tool": _keys({**_TYPE, "name": _TEXT}, disable_parallel_tool_use=_FLAG),
            "none": _keys(_TYPE),
        },
    ),
    "thinking": _THINKING,
}

_ITEM = "type id status"
_RESPONSES_TEXT = TextOr(
    Each(
        Kinds(
            "type",
            {
                "input_text": _keys({**_TYPE, "text": _TEXT}, "prompt_cache_breakpoint"),
                "output_text": _keys({**_TYPE, "text": _TEXT}, "annotations logprobs"),
            },
        )
    )
)
_TEXT_FORMAT = Kinds(
    "type",
    {
        **_FORMAT.keys,
        "json_schema": _keys(
            {**_TYPE, "name": _TEXT, "schema": _OBJECT}, description=_TEXT, strict=_FLAG
        ),
    },
)
_RESPONSES: Mapping[str, Value] = {
    "input": TextOr(
        Each(
            Kinds(
                "type",
                {
                    "message": _keys(
                        {
                            "role": Only(("user", "assistant", "system", "developer")),
                            "content": _RESPONSES_TEXT,
                        },
                        f"{_ITEM} phase",
                    ),
                    "function_call": _keys(
                        {"call_id": _TEXT, "name": _CALL_NAME, "arguments": _TEXT}, _ITEM
                    ),
                    "function_call_output": _keys(
                        {"call_id": _TEXT, "output": _RESPONSES_TEXT}, _ITEM
                    ),
                    "reasoning": _keys(
                        None,
                        f"{_ITEM} summary",
                        encrypted_content=_TEXT,
                        content=Each(_keys({"text": _TEXT}, "type")),
                    ),
                },
                default="message",
            )
        )
    ),
    "tools": Each(
        Kinds(
            "type",
            {
                "function": _keys(
                    {**_TYPE, "name": _TEXT}, description=_TEXT, parameters=_OBJECT, strict=_FLAG
                )
            },
        )
    ),
    "tool_choice": TextOr(Kinds("type", {"function": _keys({**_TYPE, "name": _TEXT})})),
    "reasoning": _keys(effort=Only(EFFORTS), summary=Only(("auto",))),
    "text": _keys(format=_TEXT_FORMAT),
    "stream_options": _STREAM_OPTIONS,
}

PARTS: Mapping[Protocol, Mapping[str, Value]] = {
    Protocol.CHAT_COMPLETIONS: _CHAT,
    Protocol.MESSAGES: _MESSAGES,
    Protocol.RESPONSES: _RESPONSES,
}
COMPLETION_PARTS: Mapping[str, Value] = {
    "response_format": _FORMAT,
    "stream_options": _STREAM_OPTIONS,
}


def check_parts(body: Json, parts: Mapping[str, Value]) -> None:
    """Refuse what a request's fields hold and is not served; drop the nulls of what is.

    Raises:
        InvalidArgument: `field` names the first such part.
    """
    for name, inner in parts.items():
        if body.get(name) is not None:
            _check(body[name], name, inner)


def _check(value: Any, path: str, inner: Value) -> None:
    match inner:
        case None:
            return
        case Only(values):
            # A truth is an integer to Python, and no value to a client.
            if not any(value == one and type(value) is type(one) for one in values):
                allowed = ", ".join(map(json.dumps, values))
                raise InvalidArgument(path, f"only {allowed} is supported")
        case Leaf(is_fine, words):
            if not is_fine(value):
                raise InvalidArgument(path, f"must be {words}")
        case Checked(check):
            _check(value, path, _TEXT)
            check(value, path)
        case TextOr(other):
            if not isinstance(value, str):
                _check_other(value, path, other)
        case Each(of):
            _check(value, path, _LIST)
            for index, item in enumerate(value):
                _check(item, f"{path}[{index}]", of)
        case Keys() | Kinds():
            _check(value, path, _OBJECT)
            _check_object(value, path, inner)


_LIST = Leaf(lambda value: isinstance(value, list), "a list")


def _check_other(value: Any, path: str, other: Value) -> None:
    """A value that is no string, where one would be fine."""
    kind, words = (list, "a list") if isinstance(other, Each) else (dict, "an object")
    if not isinstance(value, kind):
        raise InvalidArgument(path, f"must be a string or {words}")
    _check(value, path, other)


def _check_object(part: Json, path: str, inner: Keys | Kinds) -> None:
    for key in [key for key, value in part.items() if value is None]:
        del part[key]
    if isinstance(inner, Kinds):
        kind = part.get(inner.tag, inner.default)
        if kind is None:
            raise InvalidArgument(f"{path}.{inner.tag}", "is missing")
        if not isinstance(kind, str) or kind not in inner.keys:
            kinds = ", ".join(inner.keys)
            raise InvalidArgument(f"{path}.{inner.tag}", f"only {kinds} is supported")
        inner = inner.keys[kind]
    for key, value in part.items():
        if key not in inner.needed and key not in inner.others:
            raise InvalidArgument(f"{path}.{key[:64]}", "is not supported")
        _check(value, f"{path}.{key}", inner.needed.get(key, inner.others.get(key)))
    for key in inner.needed:
        if key not in part:
            raise InvalidArgument(f"{path}.{key}", "is missing")
