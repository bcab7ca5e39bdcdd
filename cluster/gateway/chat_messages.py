"""What does a gRPC conversation say, in the words of Chat Completions?

One renderer serves every protocol, so a conversation takes the shape of the commonest one first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ripresa.cluster.gateway.call_grammar import check_call_name
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


@dataclass(frozen=True, slots=True)
class Paths:
    """Where a gRPC request has the parts of its conversation.

    Attributes:
        messages: those that the request adds.
        config: what shapes the conversation's head.
        num_earlier: messages of the conversation before the request's own.
    """

    messages: str
    config: str
    num_earlier: int = 0

    def of(self, place: str) -> str:
        """The path of what `place` is in a Chat Completions body; of what is no part: itself."""
        if " or " in place:
            return " or ".join(map(self.of, place.split(" or ")))
        told = _PLACE.match(place)
        if told is None:
            return place
        name, index, rest = told.groups()
        rest = rest.replace(".function", "", 1)
        if name == "messages":
            if index is None or int(index) < self.num_earlier:
                return self.messages
            rest = rest.replace(".arguments", ".arguments_json")
            return f"{self.messages}[{int(index) - self.num_earlier}]{rest}"
        if name == "stop":
            return f"sampling.{place}"
        if name == "reasoning_effort":
            return f"{self.config}.thinking"
        rest = rest.replace(".parameters", ".parameters_json").replace(
            ".json_schema.schema", ".json_schema"
        )
        return f"{self.config}.{name}{'' if index is None else f'[{index}]'}{rest}"

    @contextmanager
    def named(self) -> Iterator[None]:
        """What is wrong with a Chat Completions body is told of the part of this request."""
        try:
            yield
        except RipresaError as error:
            if error.field is not None:
                error.field = self.of(error.field)
            raise


FULL = Paths("full.messages", "full.config")
_PLACE = re.compile(
    r"(messages|tools|response_format|thinking|reasoning_effort|stop)(?:\[(\d+)\])?((?:[.\[].*)?)$"
)


def chat_body(request: pb.ChatRequest, paths: Paths = FULL) -> Json:
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
    body = conversation_body(request.full, paths)
    if request.HasField("tool_choice"):
        body["tool_choice"] = _tool_choice(request.tool_choice)
        body["parallel_tool_calls"] = not request.tool_choice.disable_parallel
    if request.sampling.stop:
        body["stop"] = list(request.sampling.stop)
    return body


def conversation_body(conversation: pb.FullConversation, paths: Paths) -> Json:
    """Messages, tools and thinking of a conversation.

    Raises:
        InvalidArgument: no body can be made of it.
    """
    config = conversation.config
    with paths.named():
        body: Json = {
            "messages": [
                _message(message, f"messages[{index}]")
                for index, message in enumerate(conversation.messages)
            ]
        }
        if config.tools:
            body["tools"] = [
                _tool(tool, f"tools[{index}]") for index, tool in enumerate(config.tools)
            ]
        constraint = config.response_format if config.HasField("response_format") else None
        wanted = format_of(constraint, "response_format")
        if wanted is not None:
            body["response_format"] = {"type": wanted.kind, **_FORMATS[wanted.kind](wanted)}
        return body | _thinking(config.thinking)


def _thinking(thinking: pb.Thinking) -> Json:
    body: Json = {}
    if thinking.HasField("enabled"):
        body["thinking"] = {"type": "enabled" if thinking.enabled else "disabled"}
    effort = thinking.WhichOneof("effort")
    if effort is None:
        return body
    if thinking.HasField("enabled") and not thinking.enabled:
        raise InvalidArgument(
            f"thinking.{effort}", "contradicts `enabled: false`; give one of them"
        )
    if effort == "tier" and thinking.tier not in TIERS:
        raise InvalidArgument("thinking.tier", f"must be one of {', '.join(TIERS)}")
    if effort == "budget" and not 1 <= thinking.budget <= 100:
        raise InvalidArgument("thinking.budget", "must be 1 to 100")
    return {**body, "reasoning_effort": getattr(thinking, effort)}


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
        said["tool_calls"] = [
            _call(call, f"{field}.tool_calls[{index}]")
            for index, call in enumerate(message.tool_calls)
        ]
    if role == "tool":
        said["tool_call_id"] = message.tool_call_id
    return said


def _call(call: pb.ToolCall, field: str) -> Json:
    check_call_name(call.name, f"{field}.name")
    function = {"name": call.name, "arguments": call.arguments_json}
    return {"id": call.id, "type": "function", "function": function}


def _tool(tool: pb.ToolDefinition, field: str) -> Json:
    function: Json = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters_json:
        function["parameters"] = _schema(tool.parameters_json, f"{field}.parameters")
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
    is_named = choice.mode == pb.TOOL_CHOICE_MODE_NAMED
    if is_named and not choice.name:
        raise InvalidArgument("tool_choice.name", "is missing: name the tool to call")
    if choice.name and not is_named:
        raise InvalidArgument("tool_choice.name", "needs the mode TOOL_CHOICE_MODE_NAMED")
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
