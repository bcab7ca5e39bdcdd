"""Which fields does each HTTP request have, and what does it ask by them?

One table an endpoint says what is understood; it is also the OpenAPI document's. A field that is
not in it, or asks for what is not served, is refused by its name. A null is the same as no field.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from ripresa.cluster.gateway.chat_encoding import Json, Protocol
from ripresa.cluster.gateway.http_parts import EFFORTS, PARTS, check_parts
from ripresa.cluster.gateway.sampling import MAX_STOP_CHARS, AskedSampling, Name
from ripresa.cluster.gateway.validation import check_expectation, check_name, check_queue_time
from ripresa.protos import ripresa_pb2 as pb
from ripresa.workers.errors import InvalidArgument

Schema = Mapping[str, Any]

_STRING: Schema = {"type": "string"}
_NUMBER: Schema = {"type": "number"}
_INTEGER: Schema = {"type": "integer"}
_BOOLEAN: Schema = {"type": "boolean"}
_OBJECT: Schema = {"type": "object"}
_OBJECTS: Schema = {"type": "array", "items": {"type": "object"}}
_TEXTS: Schema = {"anyOf": [_STRING, {"type": "array", "items": _STRING}]}
_CHOICE: Schema = {"anyOf": [_STRING, _OBJECT]}
_FORMAT: Schema = {
    "type": "object",
    "properties": {
        "type": {"enum": ["text", "json_object", "json_schema", "regex"]},
        "json_schema": _OBJECT,
        "regex": _STRING,
    },
}

_MODES: Mapping[str, pb.ReplayMode.ValueType] = {
    "exact": pb.REPLAY_MODE_EXACT,
    "bounded": pb.REPLAY_MODE_BOUNDED,
    "canonical": pb.REPLAY_MODE_CANONICAL,
}
_CACHE_POLICY: Schema = {
    "type": "object",
    "properties": {
        "replay_mode": {"enum": list(_MODES)},
        "disable_read": _BOOLEAN,
        "disable_write": _BOOLEAN,
        "disable_resume": _BOOLEAN,
    },
    "additionalProperties": False,
}
_CACHE: dict[str, Schema] = {
    "cache_policy": _CACHE_POLICY,
    "cache_salt": _STRING,
    "session_id": _STRING,
    "prompt_cache_key": _STRING,
    "priority": _INTEGER,
    "max_queue_time": _NUMBER,
    "expect_next_within": _NUMBER,
}
_SAMPLING: dict[str, Schema] = {
    "temperature": _NUMBER,
    "top_p": _NUMBER,
    "top_k": _INTEGER,
    "min_p": _NUMBER,
    "presence_penalty": _NUMBER,
    "frequency_penalty": _NUMBER,
    "repetition_penalty": _NUMBER,
    "logit_bias": {"type": "object", "additionalProperties": _NUMBER},
    "max_tokens": _INTEGER,
    "min_tokens": _INTEGER,
    "stop": _TEXTS,
    "stop_token_ids": {"type": "array", "items": _INTEGER},
    "ignore_eos": _BOOLEAN,
    "seed": _INTEGER,
    "n": _INTEGER,
    "return_token_ids": _BOOLEAN,
}
_NO_EFFECT: dict[str, Schema] = {
    "user": _STRING,
    "metadata": _OBJECT,
    "safety_identifier": _STRING,
    "service_tier": {"enum": ["auto", "default"]},
    "store": {"enum": [False]},
}

CHAT_FIELDS: Mapping[str, Schema] = {
    "model": _STRING,
    "messages": _OBJECTS,
    "add_generation_prompt": _BOOLEAN,
    "continue_final_message": _BOOLEAN,
    "tools": _OBJECTS,
    "tool_choice": _CHOICE,
    "thinking": _OBJECT,
    "reasoning_effort": {"anyOf": [{"type": "string", "enum": list(EFFORTS)}, _INTEGER]},
    "response_format": _FORMAT,
    "parallel_tool_calls": _BOOLEAN,
    "modalities": {"type": "array", "items": {"enum": ["text"]}},
    "stream": _BOOLEAN,
    "stream_options": _OBJECT,
    "max_completion_tokens": _INTEGER,
    "logprobs": _BOOLEAN,
    "top_logprobs": _INTEGER,
    **_SAMPLING,
    **_CACHE,
    **_NO_EFFECT,
}
COMPLETION_FIELDS: Mapping[str, Schema] = {
    "model": _STRING,
    "prompt": {"anyOf": [_STRING, {"type": "array"}]},
    "stream": _BOOLEAN,
    "stream_options": _OBJECT,
    "logprobs": _INTEGER,
    "echo": {"enum": [False]},
    "best_of": _INTEGER,
    "response_format": _FORMAT,
    **_SAMPLING,
    **_CACHE,
    **_NO_EFFECT,
}
MESSAGES_FIELDS: Mapping[str, Schema] = {
    "model": _STRING,
    "messages": _OBJECTS,
    "system": {"anyOf": [_STRING, _OBJECTS]},
    "tools": _OBJECTS,
    "tool_choice": _OBJECT,
    "thinking": _OBJECT,
    "max_tokens": _INTEGER,
    "stop_sequences": {"type": "array", "items": _STRING},
    "stream": _BOOLEAN,
    "temperature": _NUMBER,
    "top_p": _NUMBER,
    "top_k": _INTEGER,
    "metadata": _OBJECT,
    "service_tier": {"enum": ["auto", "standard_only"]},
    **_CACHE,
}
RESPONSES_FIELDS: Mapping[str, Schema] = {
    "model": _STRING,
    "input": {"anyOf": [_STRING, _OBJECTS]},
    "instructions": _STRING,
    "tools": _OBJECTS,
    "tool_choice": _CHOICE,
    "reasoning": _OBJECT,
    "text": {"type": "object", "properties": {"format": _FORMAT}},
    "parallel_tool_calls": _BOOLEAN,
    "include": {"type": "array", "maxItems": 0},
    "truncation": {"enum": ["disabled"]},
    "background": {"enum": [False]},
    "max_output_tokens": _INTEGER,
    "stream": _BOOLEAN,
    "stream_options": _OBJECT,
    "temperature": _NUMBER,
    "top_p": _NUMBER,
    **_CACHE,
    **_NO_EFFECT,
}
FIELDS: Mapping[Protocol, Mapping[str, Schema]] = {
    Protocol.CHAT_COMPLETIONS: CHAT_FIELDS,
    Protocol.MESSAGES: MESSAGES_FIELDS,
    Protocol.RESPONSES: RESPONSES_FIELDS,
}

_CONVERSATION: Mapping[Protocol, tuple[str, ...]] = {
    Protocol.CHAT_COMPLETIONS: (
        *("messages", "tools", "tool_choice", "thinking", "reasoning_effort"),
        *("response_format", "parallel_tool_calls", "stop", "logprobs", "top_logprobs"),
        *("add_generation_prompt", "continue_final_message"),
    ),
    Protocol.MESSAGES: (
        *("messages", "system", "tools", "tool_choice", "thinking"),
        *("stop_sequences", "max_tokens"),
    ),
    Protocol.RESPONSES: (
        *("input", "instructions", "tools", "tool_choice", "reasoning", "text"),
        *("parallel_tool_calls", "max_output_tokens", "temperature", "top_p"),
    ),
}

_OWN_NAMES: Mapping[str, tuple[str, ...]] = {
    "max_tokens": ("max_completion_tokens", "max_output_tokens"),
    "stop": ("stop_sequences",),
    "logprobs": ("top_logprobs",),
}
"""What some protocols call a sampling parameter."""


def read_body(raw: bytes, fields: Mapping[str, Schema]) -> Json:
    """A request's JSON object without its nulls.

    Raises InvalidArgument, naming the field, for one that is unknown or of another type.
    """
    twice: list[_Twice] = []
    try:
        body = json.loads(raw, object_pairs_hook=partial(_object, twice))
    except (ValueError, RecursionError) as error:
        raise InvalidArgument("body", f"is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidArgument("body", "must be a JSON object")
    _check_text(body)
    for name, path in _places_of(twice, body):
        raise InvalidArgument(path, f"has {name[:64]!r} twice")
    body = {name: value for name, value in body.items() if value is not None}
    for name, value in body.items():
        if name not in fields:
            raise InvalidArgument(name[:64], "is not supported")
        _check_type(name, value, fields[name])
    return body


def conversation_of(body: Json, protocol: Protocol) -> Json:
    """The part of a body that is the conversation; Anthropic's do not think unless they are asked.

    Raises InvalidArgument, naming the part, for what is not served inside of its fields.
    """
    check_parts(body, PARTS[protocol])
    if protocol is Protocol.MESSAGES:
        _check_budget(body)
        body = {"thinking": {"type": "disabled"}, **body}
    return {name: body[name] for name in _CONVERSATION[protocol] if name in body}


def require(body: Json, names: tuple[str, ...]) -> None:
    """Refuse a body that lacks one of these fields."""
    for name in names:
        if name not in body:
            raise InvalidArgument(name, "is missing")


def sampling_of(body: Json) -> AskedSampling:
    """The sampling parameters of a body of any protocol; their types have been checked.

    Raises InvalidArgument, naming the field.
    """
    stop: Any = body.get("stop", body.get("stop_sequences", []))
    if stop == "":
        raise InvalidArgument("stop", f"must have 1 to {MAX_STOP_CHARS} characters")
    seed = body.get("seed")
    return AskedSampling(
        max_tokens=_max_tokens(body),
        min_tokens=body.get("min_tokens", 0),
        temperature=body.get("temperature"),
        top_p=body.get("top_p"),
        top_k=body.get("top_k"),
        min_p=body.get("min_p", 0.0),
        presence_penalty=body.get("presence_penalty", 0.0),
        frequency_penalty=body.get("frequency_penalty", 0.0),
        repetition_penalty=body.get("repetition_penalty", 1.0),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(body.get("stop_token_ids", ())),
        seed=None if seed is None else seed % (1 << 64),
        n=body.get("n", 1),
        ignore_eos=body.get("ignore_eos", False),
        logit_bias=_logit_bias(body),
        logprobs=_logprobs(body),
    )


def options_of(body: Json, session_header: str | None) -> pb.RequestOptions:
    """The options of a body: what of the cache it uses, its session, when it runs and goes on.

    Raises InvalidArgument for one that a gRPC message could not hold.
    """
    names = ("session_id", "prompt_cache_key", "cache_salt")
    given = {name: body.get(name, "") for name in names} | {"x-session-id": session_header or ""}
    for name, value in given.items():
        check_name(value, name)
    session = given["session_id"] or given["prompt_cache_key"] or given["x-session-id"]
    options = pb.RequestOptions(cache_salt=given["cache_salt"], session_id=session)
    if not -(2**31) <= (priority := body.get("priority", 0)) < 2**31:
        raise InvalidArgument("priority", "must fit 32 bits")
    options.priority = priority
    options.cache_policy.CopyFrom(_cache_policy(body.get("cache_policy", {})))
    if (seconds := body.get("max_queue_time")) is not None:
        check_queue_time(seconds, "max_queue_time")
        options.max_queue_time.FromNanoseconds(round(seconds * 1e9))
    if (seconds := body.get("expect_next_within")) is not None:
        check_expectation(seconds, "expect_next_within")
        options.expect_next_within.FromNanoseconds(round(seconds * 1e9))
    return options


def tells_usage(body: Json) -> bool:
    """Whether a stream is to end with the usage; raises InvalidArgument if it is no yes or no."""
    options = body.get("stream_options", {})
    asked = options.get("include_usage", False)
    if not isinstance(asked, bool):
        raise InvalidArgument("stream_options.include_usage", "must be true or false")
    return asked


def name_in(body: Json) -> Name:
    """How a body calls a sampling parameter."""

    def name(parameter: str) -> str:
        return next((own for own in _OWN_NAMES.get(parameter, ()) if own in body), parameter)

    return name


def object_schema(fields: Mapping[str, Schema], required: tuple[str, ...]) -> Json:
    """The OpenAPI schema of a request body; null is as good as leaving a field out."""
    return {
        "type": "object",
        "properties": {
            name: dict(schema) if name in required else {"anyOf": [dict(schema), {"type": "null"}]}
            for name, schema in fields.items()
        },
        "required": list(required),
        "additionalProperties": False,
    }


class _Twice(dict[str, Any]):
    """An object that names something twice.

    Attributes:
        name: what.
    """

    name = ""


def _object(twice: list[_Twice], pairs: list[tuple[str, Any]]) -> Json:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    counts = Counter(name for name, _ in pairs)
    odd = _Twice(found)
    odd.name = next(name for name, count in counts.items() if count > 1)
    twice.append(odd)
    return odd


def _places_of(twice: list[_Twice], body: Json) -> Iterator[tuple[str, str]]:
    """The names that objects have twice, and where those objects are."""
    waiting: list[tuple[str, Any]] = [("", body)] if twice else []
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, _Twice):
            yield value.name, path or "body"
        if isinstance(value, dict):
            waiting += [
                (f"{path}.{key[:64]}" if path else key[:64], part) for key, part in value.items()
            ]
        elif isinstance(value, list):
            waiting += [(f"{path}[{index}]", part) for index, part in enumerate(value)]


def _check_text(body: Json) -> None:
    """Refuse escaped surrogates without their other half: no UTF-8 can hold them."""
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        text = f"is no Unicode text: {error.object[error.start]!r} stands alone"
        raise InvalidArgument("body", text) from error
    except RecursionError as error:
        raise InvalidArgument("body", "is nested too deeply") from error


def _is_small_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 64


_TYPES: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "string": (lambda value: isinstance(value, str), "a string"),
    "boolean": (lambda value: isinstance(value, bool), "true or false"),
    "object": (lambda value: isinstance(value, dict), "an object"),
    "array": (lambda value: isinstance(value, list), "an array"),
    "integer": (
        lambda value: _is_small_integer(value),
        "an integer of 64 bits",
    ),
    "number": (
        lambda value: isinstance(value, float) or _is_small_integer(value),
        "a number",
    ),
}


def _check_type(path: str, value: object, schema: Schema) -> None:
    """Refuse a value that is not of the schema's type; only what the tables above use."""
    if "enum" in schema:
        if value not in schema["enum"] or isinstance(value, bool) is not isinstance(
            schema["enum"][0], bool
        ):
            allowed = ", ".join(json.dumps(each) for each in schema["enum"])
            raise InvalidArgument(path, f"only {allowed} is supported")
    elif "anyOf" in schema:
        _check_one_of(path, value, schema["anyOf"])
    else:
        is_fine, words = _TYPES[schema["type"]]
        if not is_fine(value):
            raise InvalidArgument(path, f"must be {words}")
        if isinstance(value, list):
            if len(value) > schema.get("maxItems", len(value)):
                raise InvalidArgument(path, "is not supported")
            for index, item in enumerate(value):
                if "items" in schema:
                    _check_type(f"{path}[{index}]", item, schema["items"])
        if isinstance(value, dict) and "additionalProperties" in schema:
            _check_properties(path, value, schema)


def _check_properties(path: str, value: Json, schema: Schema) -> None:
    """Of an object whose properties are listed, or all of one type."""
    others = schema["additionalProperties"]
    for key, item in value.items():
        if others is not False:
            _check_type(f"{path}[{key[:32]}]", item, others)
        elif key not in schema["properties"]:
            raise InvalidArgument(f"{path}.{key[:32]}", "is not supported")
        else:
            _check_type(f"{path}.{key}", item, schema["properties"][key])


def _check_one_of(path: str, value: object, schemas: list[Schema]) -> None:
    for schema in schemas:
        is_fine, _ = _TYPES[schema["type"]]
        if is_fine(value):
            _check_type(path, value, schema)
            return
    words = " or ".join(_TYPES[schema["type"]][1] for schema in schemas)
    raise InvalidArgument(path, f"must be {words}")


def _check_budget(body: Json) -> None:
    """Refuse thinking that would leave no room for an answer, as Anthropic does."""
    budget, most = body.get("thinking", {}).get("budget_tokens"), body.get("max_tokens")
    if budget is not None and most is not None and budget >= most:
        raise InvalidArgument("thinking.budget_tokens", f"must be below max_tokens, {most}")


def _cache_policy(asked: Json) -> pb.CachePolicy:
    replay_mode = _MODES[asked["replay_mode"]] if "replay_mode" in asked else None
    return pb.CachePolicy(**{**asked, "replay_mode": replay_mode})


def _max_tokens(body: Json) -> int | None:
    names = ("max_tokens", *_OWN_NAMES["max_tokens"])
    given = {body[name] for name in names if name in body}
    if len(given) > 1:
        raise InvalidArgument("max_completion_tokens", "contradicts max_tokens; give one of them")
    return next(iter(given), None)


def _logit_bias(body: Json) -> tuple[tuple[int, float], ...]:
    biases: dict[int, float] = {}
    for key, bias in body.get("logit_bias", {}).items():
        if not key.isascii() or not key.isdigit() or len(key) > 9:
            raise InvalidArgument("logit_bias", f"{key[:32]!r} is no token id")
        if int(key) in biases:
            raise InvalidArgument(f"logit_bias[{key}]", f"token {int(key)} has a bias already")
        biases[int(key)] = float(bias)
    return tuple(biases.items())


def _logprobs(body: Json) -> int | None:
    asked = body.get("logprobs")
    if "top_logprobs" in body and asked is not True:
        raise InvalidArgument("top_logprobs", "needs logprobs: true")
    if isinstance(asked, bool):
        return int(body.get("top_logprobs", 0)) if asked else None
    return None if asked is None else int(asked)
