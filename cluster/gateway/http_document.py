"""What does `/openapi.json` say of an endpoint? Its fields, its answers, its errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ripresa.cluster.gateway.http_fields import Schema, object_schema
from ripresa.cluster.gateway.status import ANTHROPIC_TYPES, HTTP_STATUSES, STATUS

_TEXT: Schema = {"type": "string"}
_OPENAI_ERROR: Schema = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": _TEXT,
                "type": {"enum": sorted({wire.http_type for wire in STATUS.values()})},
                "param": {"type": ["string", "null"]},
                "code": _TEXT,
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
_ANTHROPIC_ERROR: Schema = {
    "type": "object",
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "properties": {
                "type": {"enum": sorted({*ANTHROPIC_TYPES.values(), "api_error"})},
                "message": _TEXT,
            },
            "required": ["type", "message"],
        },
        "request_id": _TEXT,
    },
    "required": ["type", "error", "request_id"],
}
_EVENT: Schema = {
    "type": "object",
    "properties": {"event": _TEXT, "data": _TEXT},
    "required": ["data"],
}


def errors(*, anthropic: bool = False) -> dict[int | str, dict[str, Any]]:
    """What any endpoint may answer instead, by HTTP status."""
    schema = _ANTHROPIC_ERROR if anthropic else _OPENAI_ERROR
    content = {"application/json": {"schema": schema}}
    return {
        status: {"description": "an error", "content": content} for status in sorted(HTTP_STATUSES)
    }


def documented(
    fields: Mapping[str, Schema],
    required: tuple[str, ...],
    answer: tuple[str, ...],
    *,
    streams: bool = False,
    anthropic: bool = False,
) -> dict[str, Any]:
    """The OpenAPI entry of an endpoint with a JSON body.

    Args:
        fields, required: of the request.
        answer: what a whole answer always has.
        streams: `stream: true` gives server-sent events instead, of this shape each.
        anthropic: errors have Anthropic's shape.
    """
    body = {"application/json": {"schema": object_schema(fields, required)}}
    content: dict[str, Any] = {
        "application/json": {"schema": {"type": "object", "required": list(answer)}}
    }
    if streams:
        content["text/event-stream"] = {"schema": _EVENT}
    answers = {200: {"description": "the answer", "content": content}}
    return {
        "openapi_extra": {"requestBody": {"required": True, "content": body}},
        "responses": {**errors(anthropic=anthropic), **answers},
    }
