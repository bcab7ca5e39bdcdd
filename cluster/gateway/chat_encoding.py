"""How do messages become token ids, and a model's tokens become an answer's parts?

The only file that knows `deepseek_recipe`, which renders DeepSeek-V4.1 prompts and parses what the
model writes. Some things are done here instead of there:

- Encoding goes piece by piece, special tokens by id and all other text as plain text, so that a
  special token's spelling in a message stays text.
- No `tool_choice` changes the head of the prompt, so that none of them costs the cached prefix.
  `none` leaves the call token to be banned; `required` or a tool's name leaves a constraint.
- An answer's format may go with tools.
- A reasoning effort may be a number.
- A Chat Completions prompt may go on with its last message, or end behind it.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import deepseek_recipe as recipe

from ripresa.cluster.gateway.call_grammar import Tool
from ripresa.cluster.gateway.conversion_refusals import declared_tools, refusal
from ripresa.cluster.gateway.output_format import OutputFormat, read_format
from ripresa.cluster.gateway.status import RequestError, shorten
from ripresa.cluster.gateway.text_cache import TextCache
from ripresa.cluster.gateway.tokenizer import Tokenizer
from ripresa.workers.errors import CheckpointError, ErrorCode, InvalidArgument, reason_of

PROMPT_ENCODING = "deepseek-v41"

END_OF_SENTENCE = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
END_OF_REASONING = "</think>"
CALL_MARK = "｜DSML｜"
CALLS_OPENING = f"\n\n<{CALL_MARK} calls>\n"

MAX_TOKENS_BOUND = 1 << 31
"""The library's own bound on `max_tokens`, put out of the way: the model's context is ours."""

_NUM_HEADER_SEGMENTS = 2
"""`<｜Assistant｜>`, and what opens or closes the reasoning."""

_EFFORT = "Reasoning Effort: 75 ("


Json = dict[str, Any]


class Protocol(StrEnum):
    """Whose request it is; each has its own stream of JSON chunks."""

    CHAT_COMPLETIONS = "chat_completions"
    RESPONSES = "responses"
    MESSAGES = "messages"


MESSAGES_IN: Mapping[Protocol, str] = MappingProxyType(
    {protocol: "messages" for protocol in Protocol} | {Protocol.RESPONSES: "input"}
)
"""The field that holds a protocol's messages."""

_REQUESTS: dict[Protocol, Any] = {
    Protocol.CHAT_COMPLETIONS: recipe.ChatCompletionRequest,
    Protocol.RESPONSES: recipe.ResponsesRequest,
    Protocol.MESSAGES: recipe.MessagesRequest,
}
_RESPONSES: dict[Protocol, Any] = {
    Protocol.CHAT_COMPLETIONS: recipe.ChatCompletionResponse,
    Protocol.RESPONSES: recipe.ResponsesResponse,
    Protocol.MESSAGES: recipe.MessagesResponse,
}


class Stage(StrEnum):
    """Where in an answer the model goes on."""

    REASONING = "reasoning"
    CONTENT = "content"
    CALLS = "calls"


class Ending(StrEnum):
    """What a prompt ends with."""

    HEADER = "header"  # of the assistant's next turn
    LAST_MESSAGE = "last message"  # left open
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a rendered prompt: one special token, or plain text."""

    text: str
    is_special: bool


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the answer calls tools.

    Attributes:
        name: the one that it must call, and once.
        is_single: at most one call is allowed.
    """

    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None
    is_single: bool = False


@dataclass(frozen=True, slots=True)
class Turn:
    """What an assistant's message says, its reasoning apart. `calls`: names and arguments."""

    content: str
    calls: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered request.

    Attributes:
        segments: the prompt, piece by piece.
        turns: of the assistant, in the order of their headers; the prompt may open one more.
        protocol: whose request it was.
        begins_in: where the answer starts.
        continues: the answer goes on with the last of `turns`.
        tool_choice: what is left to be enforced; `auto` where no tool is declared.
        tools: what is declared.
        format: what the text of the answer must be; None for any.
        stop: strings that end the answer's content.
        request: what the library made of it; for `ChatEncoding.parser` alone.
        echo: settings that a Responses answer repeats; None for other protocols.
    """

    segments: tuple[Segment, ...]
    turns: tuple[Turn, ...]
    protocol: Protocol
    begins_in: Stage
    continues: bool
    tool_choice: ToolChoice
    tools: tuple[Tool, ...]
    format: OutputFormat | None
    stop: tuple[str, ...]
    request: Any
    echo: Any = None

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments)


class ChatEncoding:
    """Renders requests and parses answers, for one tokenizer and one model name.

    Attributes:
        call_token_id: without it the model cannot open a tool call.
        end_of_reasoning_id: closes the reasoning.
        user_id, end_id: open a message of the user's, and close an answer.

    Raises:
        CheckpointError: the tokenizer lacks a special token of the encoding.
    """

    def __init__(self, tokenizer: Tokenizer, tokenizer_file: Path, model: str) -> None:
        self._tokenizer = tokenizer
        self._model = model
        try:
            self._decoder = recipe.Tokenizer.from_file(str(tokenizer_file))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(
                f"{tokenizer_file} is no usable tokenizer: {reason_of(error)}"
            ) from error
        self._options = (
            recipe.ConversionOptions(messages_web_search=recipe.WebSearchBehavior.Reject)
            .with_responses_web_search(recipe.WebSearchBehavior.Reject)
            .with_model_versions_by_name({model: recipe.ModelVersion.DeepseekV41Flash})
            .with_thinking_max_tokens_upper_bound(MAX_TOKENS_BOUND)
            .with_non_thinking_max_tokens_upper_bound(MAX_TOKENS_BOUND)
        )
        self._renderer = recipe.DeepseekV41Encoding()
        self._texts = TextCache()
        self.call_token_id = self._special_id(CALL_MARK)
        self.end_of_reasoning_id = self._special_id(END_OF_REASONING)
        self.user_id = self._special_id(USER)
        self.end_id = self._special_id(END_OF_SENTENCE)

    def render(self, body: Json, protocol: Protocol = Protocol.CHAT_COMPLETIONS) -> Prompt:
        """The prompt of a request body; fields that are no part of the conversation are ignored.

        Raises:
            RipresaError: the body is no such request (INVALID_REQUEST), or no conversation
                (TEMPLATE_ERROR); `field` names the part where it is known.
        """
        body = {**body, "model": self._model}
        choice = _take_tool_choice(body, protocol)
        effort = body.get("reasoning_effort")
        _check_thinking(body)
        if isinstance(effort, int) and not isinstance(effort, bool):
            if not 1 <= effort <= 100:
                raise InvalidArgument("reasoning_effort", f"must be 1 to 100, is {effort}")
            body["reasoning_effort"] = "high"
        else:
            effort = None
        ending = _take_ending(body)
        if protocol is Protocol.CHAT_COMPLETIONS and isinstance(body.get("messages"), list):
            body["messages"] = [_as_known_role(message) for message in body["messages"]]
            ending = _marked(body["messages"], ending)
        if protocol is Protocol.MESSAGES and isinstance(body.get("tools"), list):
            body["tools"] = [_as_own_tool(tool) for tool in body["tools"]]
        try:
            echo = None
            if protocol is Protocol.RESPONSES:
                echo = recipe.ResponsesRequest(json.dumps(body)).echo()
            wanted = _take_format(body, protocol)
            converted = _REQUESTS[protocol](json.dumps(body)).convert(self._options)
            conversation = _with_format(converted.conversation, wanted)
            rendered = self._renderer.render_conversation(conversation)
        except recipe.ConversionError as error:
            message = str(json.loads(error.body)["error"]["message"])
            raise refusal(message, body, MESSAGES_IN[protocol]) from error
        except (ValueError, RuntimeError, RecursionError) as error:
            text = shorten(str(error)).removeprefix("invalid request body: ")
            raise RequestError(
                ErrorCode.INVALID_ARGUMENT, "INVALID_REQUEST", text, field="body"
            ) from error
        if rendered.image_sources:
            raise InvalidArgument(
                MESSAGES_IN[protocol], "images are not accepted: the model reads text only"
            )
        options = converted.parsing_options
        if choice.mode == "none":
            options.parse_tool_calls = False
        segments = _segments(rendered.prompt, rendered.special_ranges)
        if effort is not None:
            segments = _with_effort(segments, effort)
        tools = _tools(body, converted.conversation)
        if choice.mode == "required":
            _check_choice(choice, {tool.name for tool in tools})
        if ending is Ending.NOTHING:
            segments = segments[:-_NUM_HEADER_SEGMENTS]
            options.thinking_initial_stage = None
        stage = options.thinking_initial_stage
        begins_in = Stage.CONTENT
        if stage is not None and stage.starts_in_reasoning():
            begins_in = Stage.REASONING
        elif choice.mode == "required" and stage is None and ending is not Ending.NOTHING:
            # Nothing precedes the calls: the prompt opens them, and the parser starts inside.
            segments = (*segments, *_split_marks(CALLS_OPENING))
            options.starts_in_tool_calls = True
            begins_in = Stage.CALLS
        return Prompt(
            segments=segments,
            turns=_turns(converted.conversation),
            protocol=protocol,
            begins_in=begins_in,
            continues=ending is Ending.LAST_MESSAGE,
            tool_choice=choice if tools else ToolChoice(),
            tools=tools,
            format=wanted,
            stop=tuple(options.stop_sequences),
            request=(converted, options),
            echo=echo,
        )

    def encode(self, segments: Iterable[Segment]) -> list[int]:
        """The token ids of a prompt's pieces."""
        return self.encoder().encode(segments).tolist()

    def encoder(self, salt: bytes = b"") -> PromptEncoder:
        """Encodes one prompt; `salt` is the tenant's."""
        encode = self._tokenizer.encode
        return PromptEncoder(self._special_id, lambda text: self._texts.encoded(text, salt, encode))

    def parser(
        self, prompt: Prompt, response_id: str, protocol: Protocol | None = None
    ) -> AnswerParser:
        """A parser for one answer to a prompt, in the prompt's protocol if none is named."""
        converted, options = prompt.request
        protocol = protocol or prompt.protocol
        generator = _REQUESTS[protocol].chunk_generator(converted, response_id, self._model)
        if prompt.echo is not None and protocol is Protocol.RESPONSES:
            generator = generator.with_echo(prompt.echo)
        processor = recipe.StreamProcessor(generator, options, self._decoder)
        return AnswerParser(processor, self.end_id, protocol)

    def whole(self, protocol: Protocol, response_id: str, created: int) -> WholeAnswer:
        """Gathers the chunks of an answer into one response body."""
        return WholeAnswer(_RESPONSES[protocol](response_id, self._model, created, 0, 0))

    def _special_id(self, spelling: str) -> int:
        token_id = self._tokenizer.special_ids.get(spelling)
        if token_id is None:
            raise CheckpointError(
                f"the tokenizer has no special token {spelling}; chat needs a DeepSeek-V4.1 "
                "tokenizer.json"
            )
        return token_id


class PromptEncoder:
    """Encodes the pieces of one prompt: of those that it repeats, each once.

    Most are markup: of the seven of a call with one argument, five are the same in every call.

    Args:
        special, plain: encode a special token, and plain text.
    """

    def __init__(
        self, special: Callable[[str], int], plain: Callable[[str], Sequence[int]]
    ) -> None:
        self._special = special
        self._plain = plain
        self._special_ids: dict[str, Sequence[int]] = {}
        self._plain_ids: dict[str, Sequence[int]] = {}

    def encode(self, segments: Iterable[Segment]) -> array[int]:
        """The token ids of the prompt's next pieces."""
        token_ids = array("I")
        for segment in segments:
            token_ids.extend(self._ids(segment))
        return token_ids

    def _ids(self, segment: Segment) -> Sequence[int]:
        known = self._special_ids if segment.is_special else self._plain_ids
        found = known.get(segment.text)
        if found is None:
            text = segment.text
            found = [self._special(text)] if segment.is_special else self._plain(text)
            known[text] = found
        return found


Logprobs = Sequence[tuple[float, Sequence[tuple[int, float]]]]
"""Of each token: its own log probability, and alternatives with theirs."""


class AnswerParser:
    """Turns one answer's tokens into its protocol's chunks; any cutting gives the same answer.

    Attributes:
        is_over: a stop string ended the answer; no more tokens may follow.
    """

    def __init__(self, processor: Any, end_id: int, protocol: Protocol) -> None:
        self._processor = processor
        self._end_id = end_id
        self._protocol = protocol
        self.is_over = False

    def begin(self, num_prompt_tokens: int, num_cached_tokens: int) -> list[Chunk]:
        """What precedes the first token."""
        usage = recipe.PromptUsage(
            prompt_tokens=num_prompt_tokens, prompt_cache_hit_tokens=num_cached_tokens
        )
        return self._push(recipe.InferenceChunk.ready(prompt_usage=usage))

    def feed(self, token_ids: Sequence[int], logprobs: Logprobs | None = None) -> list[Chunk]:
        """The chunks that are certain after some more tokens; end-of-sentence ids are skipped."""
        if self._end_id in token_ids:
            kept = [place for place, t in enumerate(token_ids) if t != self._end_id]
            token_ids = [token_ids[place] for place in kept]
            logprobs = None if logprobs is None else [logprobs[place] for place in kept]
        if not token_ids:
            return []
        return self._push(recipe.InferenceChunk.tokens(token_ids, logprobs))

    def finish(self, *, is_cut: bool) -> list[Chunk]:
        """The rest of the answer. `is_cut`: it ended by its length, in the middle of something."""
        if self.is_over:
            return []
        reasons = recipe.InferenceFinishReason
        reason = reasons.Length if is_cut else reasons.Stop
        chunks = self._push(recipe.InferenceChunk.finish(reason))
        return [*chunks, *(Chunk(c, self._protocol) for c in self._processor.finish())]

    def close(self) -> None:
        """Give up; nothing may follow."""
        self._processor.close()

    def _push(self, chunk: Any) -> list[Chunk]:
        if self.is_over:
            return []
        chunks = [Chunk(c, self._protocol) for c in self._processor.push(chunk)]
        self.is_over = self._processor.finished
        return chunks


class Chunk:
    """One piece of an answer in its protocol's JSON."""

    __slots__ = ("_chunk", "_protocol")

    def __init__(self, chunk: Any, protocol: Protocol) -> None:
        self._chunk = chunk
        self._protocol = protocol

    def json(self) -> str:
        return _with_true_usage(self._chunk.to_json())

    @property
    def event(self) -> str | None:
        """The name of its server-sent event; None for none."""
        name: str | None = _RESPONSES[self._protocol].sse_event_name(self._chunk)
        return name

    def release(self) -> Any:
        """The library's own object, for `WholeAnswer` alone."""
        return self._chunk


class WholeAnswer:
    """An answer's chunks, gathered."""

    def __init__(self, response: Any) -> None:
        self._response = response

    def add(self, chunk: Chunk) -> None:
        """Take a chunk, which is used up by it."""
        self._response.accumulate(chunk.release())

    def json(self) -> str:
        return _with_true_usage(self._response.to_json())


def _with_true_usage(text: str) -> str:
    """An answer's JSON, whose reasoning has at most as many tokens as the whole.

    The library counts them by encoding the text anew, which can need more than the model did.
    """
    if '"reasoning_tokens"' not in text:
        return text
    body = json.loads(text)
    usage = body.get("usage") or (body.get("response") or {}).get("usage") or {}
    for total, details in (
        ("completion_tokens", "completion_tokens_details"),
        ("output_tokens", "output_tokens_details"),
    ):
        counted = usage.get(details) or {}
        if "reasoning_tokens" in counted:
            counted["reasoning_tokens"] = min(counted["reasoning_tokens"], usage[total])
    return json.dumps(body, ensure_ascii=False)


def _turns(conversation: recipe.Conversation) -> tuple[Turn, ...]:
    """The assistant's messages, as the library understood them."""
    return tuple(
        Turn(
            message.content,
            tuple((call.name, call.arguments) for call in message.tool_calls or ()),
        )
        for message in conversation.messages
        if message.role == "assistant"
    )


def _tools(body: Json, conversation: recipe.Conversation) -> tuple[Tool, ...]:
    """The declared tools with their schemas as they were sent.

    Of a strict tool's schema the library leaves out what its prompt does not show.
    """
    sent = {declared.name: declared for declared in declared_tools(body)}
    return tuple(
        Tool(tool.name, sent[tool.name].parameters, tool.strict is True, sent[tool.name].place)
        for tool in conversation.tools
    )


def _take_format(body: Json, protocol: Protocol) -> OutputFormat | None:
    """Remove the answer's format from a request, and say what it was.

    The library takes no format beside tools.
    """
    match protocol:
        case Protocol.CHAT_COMPLETIONS:
            return read_format(body.pop("response_format", {}), "response_format")
        case Protocol.RESPONSES:
            return read_format(body.pop("text", {}).get("format", {}), "text.format")
    return None


def _with_format(
    conversation: recipe.Conversation, wanted: OutputFormat | None
) -> recipe.Conversation:
    """The conversation whose prompt tells the format of the answer.

    Raises InvalidArgument for a schema that holds what the library cannot.
    """
    if wanted is None:
        return conversation
    told: dict[str, Any] = {"response_format": "json_object"}
    if wanted.kind == "regex":
        told = {"response_regex": wanted.text}
    elif wanted.kind == "json_schema":
        told = {"response_schema": wanted.schema}
    try:
        return recipe.Conversation(
            conversation.messages,
            thinking_mode=conversation.thinking_mode,
            tools=conversation.tools,
            tool_choice=conversation.tool_choice,
            reasoning_effort=conversation.reasoning_effort,
            **told,
        )
    except OverflowError as error:
        raise InvalidArgument(wanted.field, "has an integer of more than 64 bits") from error


def _take_tool_choice(body: Json, protocol: Protocol) -> ToolChoice:
    """Remove the choice from a request, and say what it was."""
    choice = body.pop("tool_choice", None)
    is_single = body.pop("parallel_tool_calls", True) is False
    if isinstance(choice, dict) and "disable_parallel_tool_use" in choice:
        choice = dict(choice)
        flag = choice.pop("disable_parallel_tool_use")
        if not isinstance(flag, bool):
            raise InvalidArgument("tool_choice.disable_parallel_tool_use", "must be true or false")
        is_single = is_single or flag
    return replace(_choice_of(choice, protocol), is_single=is_single)


def _choice_of(asked: Any, protocol: Protocol) -> ToolChoice:
    if asked is None or asked in ("auto", {"type": "auto"}):
        return ToolChoice()
    if asked in ("none", {"type": "none"}):
        return ToolChoice("none")
    if asked in ("required", {"type": "any"}):
        return ToolChoice("required")
    if isinstance(asked, dict) and asked.get("type") in ("function", "tool"):
        holder = asked.get("function") if protocol is Protocol.CHAT_COMPLETIONS else asked
        name = holder.get("name") if isinstance(holder, dict) else None
        if isinstance(name, str):
            return ToolChoice("required", name)
    if protocol is Protocol.MESSAGES:
        raise InvalidArgument("tool_choice", "must be of type auto, any, none, or tool with a name")
    raise InvalidArgument("tool_choice", "must be auto, none, required, or name one function")


def _check_choice(choice: ToolChoice, tools: Set[str]) -> None:
    if not tools:
        raise InvalidArgument("tool_choice", "asks for a call, but `tools` declares no function")
    if choice.name is not None and choice.name not in tools:
        raise InvalidArgument("tool_choice", f"`tools` declares no function {choice.name[:64]!r}")


def _split_marks(text: str) -> Iterator[Segment]:
    """Our own call markup as segments."""
    for place, part in enumerate(text.split(CALL_MARK)):
        if place:
            yield Segment(CALL_MARK, True)
        if part:
            yield Segment(part, False)


def _check_thinking(body: Json) -> None:
    """Refuse an effort for thinking that is disabled, and none for thinking that is asked for.

    Otherwise `thinking` says whether the model thinks, and the effort how much: clients of
    DeepSeek's API send both.
    """
    effort, thinking = body.get("reasoning_effort"), body.get("thinking")
    if effort is None or not isinstance(thinking, dict):
        return
    kind = thinking.get("type")
    is_off = kind == "disabled" and effort not in ("none", "minimal")
    is_on = kind in ("enabled", "adaptive") and effort == "none"
    if is_off or is_on:
        raise InvalidArgument(
            "reasoning_effort",
            f"{effort!r} contradicts `thinking` of type {kind!r}; give one of them",
        )


def _as_known_role(message: Any) -> Any:
    """`developer` is the newer name of `system`."""
    if isinstance(message, dict) and message.get("role") == "developer":
        return {**message, "role": "system"}
    return message


def _take_ending(body: Json) -> Ending:
    """Remove from a request what its prompt is to end with, and say it; as vLLM's."""
    adds_header = body.pop("add_generation_prompt", None)
    if not body.pop("continue_final_message", False):
        return Ending.NOTHING if adds_header is False else Ending.HEADER
    if adds_header:
        raise InvalidArgument(
            "continue_final_message", "contradicts add_generation_prompt; give one of them"
        )
    return Ending.LAST_MESSAGE


def _marked(messages: list[Any], ending: Ending) -> Ending:
    """Leave the last message open where that is asked for, here or by its own `prefix`."""
    last: Any = messages[-1] if messages else None
    is_answer = isinstance(last, dict) and last.get("role") == "assistant"
    if ending is Ending.LAST_MESSAGE:
        if not is_answer:
            raise InvalidArgument(
                "continue_final_message", "only a message of role assistant can go on"
            )
        messages[-1] = {**last, "prefix": True}
    elif is_answer and last.get("prefix") is True:
        return Ending.LAST_MESSAGE
    return ending


def _as_own_tool(tool: Any) -> Any:
    """Messages' tools of type `custom` are those without a type."""
    if isinstance(tool, dict) and tool.get("type") == "custom":
        return {name: value for name, value in tool.items() if name != "type"}
    return tool


def _segments(prompt: str, special_ranges: Sequence[tuple[int, int]]) -> tuple[Segment, ...]:
    segments = []
    end = 0
    for start, stop in special_ranges:
        if end < start:
            segments.append(Segment(prompt[end:start], False))
        segments.append(Segment(prompt[start:stop], True))
        end = stop
    if end < len(prompt):
        segments.append(Segment(prompt[end:], False))
    return tuple(segments)


def _with_effort(segments: tuple[Segment, ...], effort: int) -> tuple[Segment, ...]:
    """The same prompt with another number in its effort line, if it has one."""
    for place, segment in enumerate(segments[:3]):
        if not segment.is_special and segment.text.startswith(_EFFORT):
            line = f"Reasoning Effort: {effort} (" + segment.text.removeprefix(_EFFORT)
            return (*segments[:place], Segment(line, False), *segments[place + 1 :])
    return segments
