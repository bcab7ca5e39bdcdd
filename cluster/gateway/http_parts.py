"""What may stand inside a request's fields? Anything else is refused by its place, never ignored.

One table a protocol, as deep as objects are understood. Some keys are served by passing over them:
labels and marks that clients send back with an answer, and hints for caches of another kind. A null
is the same as no key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from ripresa.cluster.gateway.chat_encoding import Json, Protocol
from ripresa.workers.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Kinds:
    """Objects with keys by their kind.

    Attributes:
        tag: the key that tells an object's kind.
        keys: of each kind that is served.
        default: of an object without a tag; None leaves it to the reader.
    """

    tag: str
    keys: Mapping[str, Keys]
    default: str | None = None


@dataclass(frozen=True, slots=True)
class Only:
    """A value that is one of these."""

    values: tuple[object, ...]


Keys: TypeAlias = Mapping[str, "Keys | Kinds | Only | None"]
"""An object's keys and what their values hold: an object, or a list of them; None for anything."""


def _keys(names: str, **inner: Keys | Kinds | Only) -> Keys:
    return {**dict.fromkeys(names.split()), **inner}


_SCHEMA = _keys("name description schema strict")
_FORMAT = Kinds(
    "type",
    {
        "text": _keys("type"),
        "json_object": _keys("type"),
        "json_schema": {**_keys("type", json_schema=_SCHEMA), **_SCHEMA},
        "regex": _keys("type regex"),
    },
    default="text",
)
_STREAM_OPTIONS = _keys("include_usage", include_obfuscation=Only((False,)))
_THINKING = _keys("type budget_tokens", display=Only(("summarized",)))

_TEXT = Kinds("type", {"text": _keys("type text cache_control prompt_cache_breakpoint")})
_TOLD = _keys("role name cache_control", content=_TEXT)
_CALL = _keys(
    "id type index provider_specific_fields", function=_keys("name arguments parsed_arguments")
)
_ASSISTANT = _keys(
    "reasoning_content prefix "
    # What clients and other servers put beside an answer; `reasoning` repeats the content above.
    "id annotations parsed reasoning reasoning_details provider_specific_fields",
    tool_calls=_CALL,
)
_CHAT: Keys = {
    "messages": Kinds(
        "role",
        {
            **dict.fromkeys(("system", "developer", "user", "latest_reminder"), _TOLD),
            "assistant": {**_TOLD, **_ASSISTANT},
            "tool": {**_TOLD, **_keys("tool_call_id")},
        },
    ),
    "tools": Kinds(
        "type",
        {
            "function": _keys(
                "type cache_control", function=_keys("name description parameters strict")
            )
        },
    ),
    "tool_choice": _keys("type", function=_keys("name")),
    "thinking": _THINKING,
    "response_format": _FORMAT,
    "stream_options": _STREAM_OPTIONS,
}

_BLOCK = _keys("type cache_control")
_CLAUDE_TEXT = {**_BLOCK, **_keys("text citations")}
_CLAUDE_TEXTS = Kinds("type", {"text": _CLAUDE_TEXT})
_CLAUDE_CONTENT = Kinds(
    "type",
    {
        "text": _CLAUDE_TEXT,
        "thinking": {**_BLOCK, **_keys("thinking signature")},
        "tool_use": {**_BLOCK, **_keys("id name input caller")},
        "tool_result": {**_BLOCK, **_keys("tool_use_id is_error", content=_CLAUDE_TEXTS)},
    },
)
_CLAUDE_MESSAGE = _keys("role", content=_CLAUDE_CONTENT)
_MESSAGES: Keys = {
    "messages": Kinds("role", dict.fromkeys(("user", "assistant", "system"), _CLAUDE_MESSAGE)),
    "system": _CLAUDE_TEXTS,
    "tools": Kinds(
        "type",
        {
            "custom": {
                **_BLOCK,
                **_keys("name description input_schema strict eager_input_streaming"),
            }
        },
        default="custom",
    ),
    "tool_choice": _keys("type name disable_parallel_tool_use"),
    "thinking": _THINKING,
}

_ITEM = _keys("type id status")
_RESPONSES_TEXT = Kinds(
    "type",
    {
        "input_text": _keys("type text prompt_cache_breakpoint"),
        "output_text": _keys("type text annotations logprobs"),
    },
)
_RESPONSES: Keys = {
    "input": Kinds(
        "type",
        {
            "message": {**_ITEM, **_keys("role phase", content=_RESPONSES_TEXT)},
            "function_call": {**_ITEM, **_keys("call_id name arguments")},
            "function_call_output": {**_ITEM, **_keys("call_id", output=_RESPONSES_TEXT)},
            "reasoning": {
                **_ITEM,
                **_keys("encrypted_content"),
                **dict.fromkeys(("summary", "content"), _keys("type text")),
            },
        },
        default="message",
    ),
    "tools": Kinds("type", {"function": _keys("type name description parameters strict")}),
    "tool_choice": _keys("type name"),
    "reasoning": _keys("effort", summary=Only(("auto",))),
    "text": {"format": _FORMAT},
    "stream_options": _STREAM_OPTIONS,
}

PARTS: Mapping[Protocol, Keys] = {
    Protocol.CHAT_COMPLETIONS: _CHAT,
    Protocol.MESSAGES: _MESSAGES,
    Protocol.RESPONSES: _RESPONSES,
}
COMPLETION_PARTS: Keys = {"response_format": _FORMAT, "stream_options": _STREAM_OPTIONS}


def check_parts(body: Json, parts: Keys) -> None:
    """Refuse what a request's fields hold and is not served.

    Args:
        body: its fields are of the types that their tables say.

    Raises:
        InvalidArgument: `field` names the first such part.
    """
    for name, inner in parts.items():
        _check(body.get(name), name, inner)


def _check(value: Any, path: str, inner: Keys | Kinds | Only | None) -> None:
    if inner is None or value is None:
        return
    if isinstance(inner, Only):
        if value not in inner.values:
            allowed = ", ".join(map(json.dumps, inner.values))
            raise InvalidArgument(path, f"only {allowed} is supported")
        return
    is_list = isinstance(value, list)
    for index, part in enumerate(value if is_list else [value]):
        if isinstance(part, dict):  # what else it may be, its reader knows
            _check_object(part, f"{path}[{index}]" if is_list else path, inner)


def _check_object(part: Json, path: str, inner: Keys | Kinds) -> None:
    if isinstance(inner, Kinds):
        kind = part.get(inner.tag) or inner.default
        if kind is None:
            return
        if not isinstance(kind, str) or kind not in inner.keys:
            kinds = ", ".join(inner.keys)
            raise InvalidArgument(f"{path}.{inner.tag}", f"only {kinds} is supported")
        inner = inner.keys[kind]
    for key, value in part.items():
        if key not in inner and value is not None:
            raise InvalidArgument(f"{path}.{key[:64]}", "is not supported")
        _check(value, f"{path}.{key[:64]}", inner.get(key))
