"""What does a gRPC conversation say, in the words of Chat Completions?

One renderer serves every protocol, so a conversation takes the shape of the commonest one first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from ripresa.cluster.gateway.chat_encoding import Json
from ripresa.cluster.gateway.output_format import OutputFormat, format_of
from ripresa.protos import ripresa_pb2 as pb
from ripresa.workers.errors import InvalidArgument, RipresaError

ROLES: Mapping[int, str] = MappingProxyType(
    {
        pb.ROLE_SYSTEM: "system",
        pb.ROLE_USER: "user",
        pb.ROLE_ASSISTANT: "assistant",
        pb.ROLE_TOOL: "tool",
    }
)
TIERS = ("low", "high", "max")

_FORMATS: Mapping[str, Callable[[OutputFormat], Json]] = MappingProxyType(
    {
        "json_object": lambda wanted: {},
        "json_schema": lambda wanted: {
            "json_schema": {"name": "answer", "schema": wanted.schema, "strict": True}
        },
        "regex": lambda wanted: {"regex": wanted.text},
    }
)


def chat_body(request: pb.ChatRequest) -> Json:
    """The Chat Completions body of a Chat request, its sampling apart from the stop strings.

    Raises:
        InvalidArgument: it holds something that is not supported, or of which no body can be made.
    """
    match request.WhichOneof("conversation"):
        case None:
            raise InvalidArgument("conversation", "give the messages as `full` or as a `turn`")
        case "turn":
            raise InvalidArgument(
                "turn", "no sessions are kept here; send the whole conversation as `full`"
            )
    body = conversation_body(request.full, "full")
    if request.HasField("tool_choice"):
        body["tool_choice"] = _tool_choice(request.tool_choice)
        body["parallel_tool_calls"] = not request.tool_choice.disable_parallel
    if request.sampling.stop:
        body["stop"] = list(request.sampling.stop)
    return body


def conversation_body(conversation: pb.FullConversation, field: str) -> Json:
    """Messages, tools and thinking of a conversation; `field` is its path in the request."""
    config = conversation.config
    body: Json = {
        "messages": [
            _message(message, f"{field}.messages[{index}]")
            for index, message in enumerate(conversation.messages)
        ]
    }
    if config.tools:
        body["tools"] = [
            _tool(tool, f"{field}.config.tools[{index}]") for index, tool in enumerate(config.tools)
        ]
    wanted = format_of(config.response_format, f"{field}.config.response_format")
    if wanted is not None:
        body["response_format"] = {"type": wanted.kind, **_FORMATS[wanted.kind](wanted)}
    thinking = config.thinking
    if thinking.HasField("enabled"):
        body["thinking"] = {"type": "enabled" if thinking.enabled else "disabled"}
    match thinking.WhichOneof("effort"):
        case "tier":
            if thinking.tier not in TIERS:
                raise InvalidArgument(
                    f"{field}.config.thinking.tier", f"must be one of {', '.join(TIERS)}"
                )
            body["reasoning_effort"] = thinking.tier
        case "budget":
            if not 1 <= thinking.budget <= 100:
                raise InvalidArgument(f"{field}.config.thinking.budget", "must be 1 to 100")
            body["reasoning_effort"] = thinking.budget
    return body


@contextmanager
def messages_named(name: str) -> Iterator[None]:
    """What is wrong with a body's `messages` is told of the part of the request they came from."""
    try:
        yield
    except RipresaError as error:
        if error.field == "messages":
            error.field = name
        raise


def _message(message: pb.Message, field: str) -> Json:
    role = ROLES.get(message.role)
    if role is None:
        raise InvalidArgument(f"{field}.role", "must be system, user, assistant or tool")
    said: Json = {"role": role, "content": message.content}
    only_for = {
        "reasoning_content": ("assistant", message.reasoning_content),
        "tool_calls": ("assistant", message.tool_calls),
        "tool_call_id": ("tool", message.tool_call_id),
        "is_error": ("tool", message.is_error),
    }
    for name, (owner, value) in only_for.items():
        if value and role != owner:
            raise InvalidArgument(f"{field}.{name}", f"only a message of role {owner} has it")
    if message.reasoning_content:
        said["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        said["tool_calls"] = [_call(call) for call in message.tool_calls]
    if role == "tool":
        said["tool_call_id"] = message.tool_call_id
    return said


def _call(call: pb.ToolCall) -> Json:
    function = {"name": call.name, "arguments": call.arguments_json}
    return {"id": call.id, "type": "function", "function": function}


def _tool(tool: pb.ToolDefinition, field: str) -> Json:
    function: Json = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters_json:
        function["parameters"] = _schema(tool.parameters_json, f"{field}.parameters_json")
    if tool.HasField("strict"):
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _schema(text: str, field: str) -> Any:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(field, f"is no JSON: {error}") from error
    if not isinstance(schema, dict):
        raise InvalidArgument(field, "must be a JSON object")
    return schema


def _tool_choice(choice: pb.ToolChoice) -> Any:
    match choice.mode:
        case pb.TOOL_CHOICE_MODE_UNSPECIFIED | pb.TOOL_CHOICE_MODE_AUTO:
            return "auto"
        case pb.TOOL_CHOICE_MODE_NONE:
            return "none"
        case pb.TOOL_CHOICE_MODE_REQUIRED:
            return "required"
        case pb.TOOL_CHOICE_MODE_NAMED:
            return {"type": "function", "function": {"name": choice.name}}
    raise InvalidArgument("tool_choice.mode", "is no known mode")
