"""What does a client say? Messages, tools, sampling and options, put into requests."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypedDict

from google.protobuf.duration_pb2 import Duration

from ripresa.protos import ripresa_pb2 as pb
from ripresa.workers.errors import InvalidArgument


class Sampling(TypedDict, total=False):
    """How tokens are chosen; what is absent gets the server's default."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    max_tokens: int
    min_tokens: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    seed: int
    n: int
    ignore_eos: bool
    logit_bias: Mapping[int, float]
    logprobs: int


class Options(TypedDict, total=False):
    """Facts about a call that are not about its text.

    Attributes:
        request_id: names the call; made here if absent.
        model: refuse another one than this.
        session_id: the conversation, so that it returns to its worker.
        cache_salt: shares no cached state with other salts.
        priority: lower runs earlier; 0 if absent.
        max_queue_time_s: longest wait for a worker before the request is refused.
        expect_next_within_s: the conversation goes on within this time; keep its state.
        disable_cache_read, disable_cache_write: of this request's state.
        replay_mode: `exact`, `bounded` or `canonical`.
        tail: `floored`, `layer_exact`, `full` or `exact`.
    """

    request_id: str
    model: str
    session_id: str
    cache_salt: str
    priority: int
    max_queue_time_s: float
    expect_next_within_s: float
    disable_cache_read: bool
    disable_cache_write: bool
    replay_mode: str
    tail: str


Message: TypeAlias = pb.Message
ToolDefinition: TypeAlias = pb.ToolDefinition

Effort = Literal["none", "low", "high", "max"] | int
"""How much the model thinks; a number is 1 to 100, and `none` turns thinking off."""


def system(content: str) -> pb.Message:
    """What the model is told to be or do; a later one may say what has changed."""
    return pb.Message(role=pb.ROLE_SYSTEM, content=content)


def user(content: str) -> pb.Message:
    return pb.Message(role=pb.ROLE_USER, content=content)


def tool_result(call_id: str, content: str, *, is_error: bool = False) -> pb.Message:
    """What a tool returned for the call of this id."""
    return pb.Message(role=pb.ROLE_TOOL, tool_call_id=call_id, content=content, is_error=is_error)


def tool(name: str, description: str, parameters: Mapping[str, Any]) -> pb.ToolDefinition:
    """A tool that the model may call.

    Args:
        parameters: a JSON Schema of an object; the order of its keys is part of the prompt.
    """
    return pb.ToolDefinition(
        name=name,
        description=description,
        parameters_json=json.dumps(parameters, ensure_ascii=False),
    )


def generate_request(
    prompt: str | Sequence[int], sampling: Sampling, options: Options, return_token_ids: bool
) -> pb.GenerateRequest:
    """Raises InvalidArgument for what the wire cannot hold."""
    request = pb.GenerateRequest(
        options=_options(options), sampling=_sampling(sampling), return_token_ids=return_token_ids
    )
    try:
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids.extend(prompt)
            request.token_ids.SetInParent()
    except (ValueError, TypeError) as error:
        raise InvalidArgument("prompt", f"cannot be sent: {error}") from error
    return request


def chat_request(
    conversation: pb.FullConversation | pb.SessionTurn,
    tool_choice: str | None,
    sampling: Sampling,
    options: Options,
    return_token_ids: bool,
) -> pb.ChatRequest:
    """Raises InvalidArgument for what the wire cannot hold.

    Args:
        tool_choice: `auto`, `none`, `required`, or the name of the tool to call.
    """
    request = pb.ChatRequest(
        options=_options(options), sampling=_sampling(sampling), return_token_ids=return_token_ids
    )
    if isinstance(conversation, pb.SessionTurn):
        request.turn.CopyFrom(conversation)
    else:
        request.full.CopyFrom(conversation)
    if tool_choice is not None:
        modes = {
            "auto": pb.TOOL_CHOICE_MODE_AUTO,
            "none": pb.TOOL_CHOICE_MODE_NONE,
            "required": pb.TOOL_CHOICE_MODE_REQUIRED,
        }
        request.tool_choice.mode = modes.get(tool_choice, pb.TOOL_CHOICE_MODE_NAMED)
        if tool_choice not in modes:
            request.tool_choice.name = tool_choice
    return request


def conversation_of(
    messages: Iterable[pb.Message],
    tools: Iterable[pb.ToolDefinition] = (),
    effort: Effort | None = None,
    json_schema: Mapping[str, Any] | None = None,
) -> pb.FullConversation:
    """A whole conversation.

    Args:
        json_schema: of the object that the answer's content must be.
    """
    return pb.FullConversation(config=_config(tools, effort, json_schema), messages=list(messages))


def open_session_request(
    head: pb.FullConversation,
    session_id: str,
    model: str,
    cache_salt: str,
    idle_ttl_s: float | None,
) -> pb.OpenSessionRequest:
    """Raises InvalidArgument for what the wire cannot hold.

    Args:
        head: what every turn of the session begins with.
    """
    try:
        request = pb.OpenSessionRequest(
            model=model,
            cache_salt=cache_salt,
            config=head.config,
            preamble=head.messages,
            session_id=session_id,
        )
        if idle_ttl_s is not None:
            request.idle_ttl.CopyFrom(_duration(idle_ttl_s))
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidArgument("session", f"cannot be sent: {error}") from error
    return request


def _config(
    tools: Iterable[pb.ToolDefinition],
    effort: Effort | None,
    json_schema: Mapping[str, Any] | None,
) -> pb.ConversationConfig:
    """What shapes the head of a prompt, and so stays as it is for a whole conversation."""
    config = pb.ConversationConfig(tools=list(tools))
    try:
        match effort:
            case None:
                pass
            case "none":
                config.thinking.enabled = False
            case str():
                config.thinking.tier = effort
            case _:
                config.thinking.budget = effort
    except (ValueError, TypeError) as error:
        raise InvalidArgument("effort", f"cannot be sent: {error}") from error
    if json_schema is not None:
        config.response_format.json_schema = json.dumps(json_schema, ensure_ascii=False)
    return config


def _sampling(sampling: Sampling) -> pb.SamplingParams:
    message = pb.SamplingParams()
    for name, value in sampling.items():
        try:
            message.MergeFrom(pb.SamplingParams(**{name: value}))  # type: ignore[arg-type]
        except (ValueError, TypeError) as error:
            raise InvalidArgument(f"sampling.{name}", f"cannot be sent: {error}") from error
    return message


def _options(given: Options) -> pb.RequestOptions:
    unknown = given.keys() - Options.__annotations__.keys()
    if unknown:
        raise InvalidArgument("options", f"{', '.join(sorted(unknown))}: there is no such option")
    options = pb.RequestOptions()
    for name, value in given.items():
        try:
            _set_option(options, name, value)
        except (ValueError, TypeError, OverflowError, AttributeError) as error:
            raise InvalidArgument(f"options.{name}", f"cannot be sent: {error}") from error
    options.request_id = options.request_id or uuid.uuid4().hex
    return options


def _set_option(options: pb.RequestOptions, name: str, value: Any) -> None:
    match name:
        case "max_queue_time_s" | "expect_next_within_s":
            getattr(options, name.removesuffix("_s")).CopyFrom(_duration(value))
        case "disable_cache_read":
            options.cache_policy.disable_read = value
        case "disable_cache_write":
            options.cache_policy.disable_write = value
        case "replay_mode":
            mode = f"REPLAY_MODE_{value.upper()}"
            options.cache_policy.replay_mode = pb.ReplayMode.Value(mode)
        case "tail":
            options.cache_policy.tail = pb.TailVariant.Value(f"TAIL_VARIANT_{value.upper()}")
        case _:
            setattr(options, name, value)


def _duration(seconds: float) -> Duration:
    wire = Duration()
    wire.FromNanoseconds(round(seconds * 1e9))
    return wire
