"""What does a stream say? Its messages as typed events, and the answer that they add up to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from google.protobuf.duration_pb2 import Duration

from ripresa.cluster.client.errors import ServerError
from ripresa.protos import ripresa_pb2 as pb


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt is placed. `cached_tokens` of its `prompt_tokens` are not computed again."""

    request_id: str
    model: str
    worker_id: str
    stream_id: str
    prompt_tokens: int
    cached_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """The ids behind the next text; only where they, or log probabilities, were asked for."""

    choice: int
    token_ids: tuple[int, ...]
    logprobs: tuple[pb.TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Text:
    """The next part of an answer to `generate`."""

    choice: int
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The next part of what the model thinks."""

    choice: int
    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """The next part of what the model says."""

    choice: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallPart:
    """The next part of a tool call's arguments; its first one comes as soon as the name is known.

    Attributes:
        index: which call of this choice, from 0.
    """

    choice: int
    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A whole tool call.

    Attributes:
        arguments_json: as the model wrote them; incomplete if the answer was cut.
    """

    id: str
    name: str
    arguments_json: str

    def arguments(self) -> dict[str, Any]:
        """The arguments by name.

        Raises:
            ValueError: they are no JSON object; the answer was cut, or the model erred.
        """
        arguments = json.loads(self.arguments_json)
        if not isinstance(arguments, dict):
            raise ValueError(f"the arguments of {self.name} are no object: {self.arguments_json}")
        return arguments


@dataclass(frozen=True, slots=True)
class ToolCallReady:
    """A call's arguments are complete: its tool may start while the model goes on."""

    choice: int
    index: int
    call: ToolCall


@dataclass(frozen=True, slots=True)
class Finished:
    """A choice is over.

    Attributes:
        reason: `stop`, `length` or `tool_calls`.
        message: the whole message of a chat, to be sent back as it is.
        turn_id: of a session; a later turn may name it as its parent.
        turn_error: why the session could not take the turn, such as SESSION_NOT_FOUND; no later
            turn can go on from it.
    """

    choice: int
    reason: str
    message: pb.Message
    turn_id: str
    turn_error: str
    stop_string: str | None
    stop_token_id: int | None


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of tokens.

    Attributes:
        cached_tokens: of the prompt, not computed again.
        computed_tokens: of the prompt, computed in this request.
        reasoning_tokens: of the completion.
    """

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    completion_tokens: int
    reasoning_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds as the gateway sees them; None where nothing of the kind happened.

    Attributes:
        queue_s: from the request to its placement.
        prefill_s: from there to the first token.
        decode_s: from there to the last one.
    """

    queue_s: float | None
    prefill_s: float | None
    time_to_first_token_s: float | None
    decode_s: float | None


@dataclass(frozen=True, slots=True)
class Completed:
    """The stream's last event.

    Attributes:
        cache, build: together they compute the answer again.
    """

    usage: Usage
    timings: Timings
    cache: pb.CacheProvenance
    build: pb.Build


Event = (
    Started
    | Tokens
    | Text
    | Reasoning
    | Content
    | ToolCallPart
    | ToolCallReady
    | Finished
    | Completed
)


@dataclass(slots=True)
class Choice:
    """One choice, whole.

    Attributes:
        text: of `generate`; a chat's is `message.content`.
        tool_calls: also those that were cut.
        token_ids, logprobs: where they were asked for.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[pb.TokenLogprob] = field(default_factory=list)
    tool_calls: list[ToolCall] = field(default_factory=list)
    finished: Finished | None = None


@dataclass(slots=True)
class Answer:
    """Everything that a stream said. The properties speak of the first choice."""

    started: Started | None = None
    choices: dict[int, Choice] = field(default_factory=dict)
    completed: Completed | None = None

    @property
    def message(self) -> pb.Message:
        """The assistant's message, to be sent back as it is."""
        return self._end.message

    @property
    def content(self) -> str:
        return self._end.message.content

    @property
    def reasoning(self) -> str:
        return self._end.message.reasoning_content

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(self.choices[0].token_ids)

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return tuple(self.choices[0].tool_calls)

    @property
    def reason(self) -> str:
        """`stop`, `length` or `tool_calls`."""
        return self._end.reason

    @property
    def turn_id(self) -> str:
        return self._end.turn_id

    @property
    def usage(self) -> Usage:
        if self.completed is None:
            raise ValueError("the answer is not complete")
        return self.completed.usage

    @property
    def _end(self) -> Finished:
        finished = self.choices[0].finished
        if finished is None:
            raise ValueError("the answer is not complete")
        return finished


TimingName = Literal["queue", "prefill", "time_to_first_token", "decode"]


class StreamReader:
    """Turns the messages of one stream, resumed or not, into events, and keeps the answer.

    Attributes:
        answer: what was said so far.
        next_sequence: of the message to come.
    """

    def __init__(self) -> None:
        self.answer = Answer()
        self.next_sequence = 0

    @property
    def is_complete(self) -> bool:
        return self.answer.completed is not None

    @property
    def stream_id(self) -> str:
        """By which the stream can be resumed; empty before it started."""
        return "" if self.answer.started is None else self.answer.started.stream_id

    def read(
        self, response: pb.GenerateResponse | pb.ChatResponse | pb.ResumeResponse
    ) -> Iterator[Event]:
        """The events of the next message; none if it was read before.

        Raises:
            ServerError: messages before this one are missing.
        """
        message = _unwrapped(response)
        if message.sequence < self.next_sequence:
            return
        if message.sequence > self.next_sequence:
            raise ServerError(
                f"message {message.sequence} came where {self.next_sequence} was due; "
                "send the request again",
                reason="STREAM_GAP",
            )
        self.next_sequence += 1
        yield from self._events(message)

    def _events(self, message: pb.GenerateResponse | pb.ChatResponse) -> Iterator[Event]:
        answer = self.answer
        match message.WhichOneof("event"):
            case "started":
                answer.started = _started(message.started)
                yield answer.started
            case "delta":
                yield from self._delta(message.delta)
            case "finished":
                finished = _finished(message.finished)
                self._choice(finished.choice).finished = finished
                yield finished
            case "completed":
                answer.completed = _completed(message.completed)
                yield answer.completed

    def _delta(self, delta: pb.TokenDelta | pb.ChatDelta) -> Iterator[Event]:
        if isinstance(delta, pb.TokenDelta):
            yield from self._tokens(delta)
            if delta.text:
                self._choice(delta.choice).text += delta.text
                yield Text(delta.choice, delta.text)
            return
        if delta.HasField("tokens"):
            yield from self._tokens(delta.tokens)
        match delta.WhichOneof("part"):
            case "reasoning":
                yield Reasoning(delta.choice, delta.reasoning)
            case "content":
                yield Content(delta.choice, delta.content)
            case "tool_call":
                yield from self._call_delta(delta.choice, delta.tool_call)

    def _call_delta(self, choice: int, delta: pb.ToolCallDelta) -> Iterator[Event]:
        calls = self._choice(choice).tool_calls
        if delta.index == len(calls):
            calls.append(ToolCall(delta.id, delta.name, ""))
        call = calls[delta.index]
        call = ToolCall(call.id, call.name, call.arguments_json + delta.arguments_delta)
        calls[delta.index] = call
        yield ToolCallPart(choice, delta.index, call.id, call.name, delta.arguments_delta)
        if delta.done:
            yield ToolCallReady(choice, delta.index, call)

    def _tokens(self, delta: pb.TokenDelta) -> Iterator[Event]:
        if delta.token_ids or delta.logprobs:
            choice = self._choice(delta.choice)
            choice.token_ids += delta.token_ids
            choice.logprobs += delta.logprobs
            yield Tokens(delta.choice, tuple(delta.token_ids), tuple(delta.logprobs))

    def _choice(self, number: int) -> Choice:
        return self.answer.choices.setdefault(number, Choice())


def _unwrapped(
    response: pb.GenerateResponse | pb.ChatResponse | pb.ResumeResponse,
) -> pb.GenerateResponse | pb.ChatResponse:
    if not isinstance(response, pb.ResumeResponse):
        return response
    return response.chat if response.WhichOneof("event") == "chat" else response.generate


def _started(started: pb.Started) -> Started:
    return Started(
        request_id=started.request_id,
        model=started.model,
        worker_id=started.worker_id,
        stream_id=started.stream_id,
        prompt_tokens=started.prompt_tokens,
        cached_tokens=started.cached_tokens,
        seed=started.seed,
    )


def _finished(finished: pb.Finished) -> Finished:
    matched = finished.WhichOneof("matched_stop")
    return Finished(
        choice=finished.choice,
        reason=pb.FinishReason.Name(finished.reason).removeprefix("FINISH_REASON_").lower(),
        message=finished.message,
        turn_id=finished.turn_id,
        turn_error=finished.turn_error,
        stop_string=finished.stop_string if matched == "stop_string" else None,
        stop_token_id=finished.stop_token_id if matched == "stop_token_id" else None,
    )


def _completed(completed: pb.Completed) -> Completed:
    usage = completed.usage
    return Completed(
        Usage(
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            computed_tokens=usage.prompt_tokens - usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            reasoning_tokens=usage.reasoning_tokens,
        ),
        Timings(
            queue_s=_seconds(completed.timings, "queue"),
            prefill_s=_seconds(completed.timings, "prefill"),
            time_to_first_token_s=_seconds(completed.timings, "time_to_first_token"),
            decode_s=_seconds(completed.timings, "decode"),
        ),
        completed.cache,
        completed.build,
    )


def _seconds(timings: pb.Timings, name: TimingName) -> float | None:
    if not timings.HasField(name):
        return None
    span: Duration = getattr(timings, name)
    return span.ToTimedelta().total_seconds()
