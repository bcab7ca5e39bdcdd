"""What has one choice of a chat said so far, and what of it is new? Deltas of any parsed answer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ripresa.cluster.gateway.chat_encoding import CALL_MARK, AnswerParser, Chunk, Logprobs
from ripresa.cluster.gateway.tokenizer import TextStream

_INVOKE_END = f"</{CALL_MARK} invoke>"


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the reasoning or of the content."""

    part: Literal["reasoning", "content"]
    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """More of a tool call.

    Attributes:
        index: which of the answer's calls.
        id, name: of the call; empty but in its first delta.
        arguments: the next piece of its JSON text.
        done: no piece follows: the tool may start.
    """

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""
    done: bool = False


Delta = TextDelta | CallDelta


@dataclass(slots=True)
class Call:
    """A tool call, whole or under way."""

    id: str
    name: str
    arguments: str = ""
    done: bool = False


@dataclass(slots=True)
class ChatAnswer:
    """One choice's answer, as its parser tells it in Chat Completions chunks.

    Attributes:
        reasoning, content, calls: so far.
        finish_reason: `stop`, `length` or `tool_calls`; None while it goes on.
        num_reasoning_tokens: known once it is finished.
        matched_stop: the stop string that ended it; None for none.
    """

    parser: AnswerParser
    raw: TextStream
    stop: Sequence[str]
    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)
    finish_reason: str | None = None
    num_reasoning_tokens: int = 0
    matched_stop: str | None = None
    _text: str = ""
    _num_ended: int = 0
    _num_checked_chars: int = 0

    def begin(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """The prompt is placed."""
        self._take(self.parser.begin(num_prompt_tokens, num_cached_tokens))

    def feed(self, token_ids: Sequence[int], logprobs: Logprobs | None = None) -> list[Delta]:
        """What some more tokens add."""
        self._look_for_ends(self.raw.feed(token_ids))
        deltas = self._take(self.parser.feed(token_ids, logprobs))
        if self.parser.is_over:
            self.matched_stop = self._stop_behind_content()
        return deltas

    def finish(self, *, is_cut: bool) -> list[Delta]:
        """The rest."""
        return self._take(self.parser.finish(is_cut=is_cut))

    def _take(self, chunks: Iterable[Chunk]) -> list[Delta]:
        deltas: list[Delta] = []
        for chunk in chunks:
            body = json.loads(chunk.json())
            (choice,) = body["choices"]
            self._add(choice["delta"], deltas)
            if choice["finish_reason"] is not None:
                self.finish_reason = choice["finish_reason"]
                # Without thinking the usage has no such details.
                details = body["usage"].get("completion_tokens_details", {})
                self.num_reasoning_tokens = details.get("reasoning_tokens", 0)
        self._close_calls(deltas)
        return deltas

    def _add(self, delta: dict[str, object], deltas: list[Delta]) -> None:
        reasoning, content = delta.get("reasoning_content"), delta.get("content")
        if isinstance(reasoning, str) and reasoning:
            self.reasoning += reasoning
            _append_text(deltas, "reasoning", reasoning)
        if isinstance(content, str) and content:
            self.content += content
            _append_text(deltas, "content", content)
        calls = delta.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            index, function = call["index"], call["function"]
            if "id" in call:
                if self.calls:
                    self._close(len(self.calls) - 1, deltas)
                self.calls.append(Call(call["id"], function["name"]))
                self._num_checked_chars = 0
                deltas.append(CallDelta(index, call["id"], function["name"]))
            if function["arguments"]:
                self.calls[index].arguments += function["arguments"]
                _append_call(deltas, CallDelta(index, arguments=function["arguments"]))

    def _close_calls(self, deltas: list[Delta]) -> None:
        """Say that the last call is complete, once that is certain."""
        if not self.calls:
            return
        last = len(self.calls) - 1
        call = self.calls[last]
        if self.finish_reason == "tool_calls":
            self._close(last, deltas)
        elif self._num_ended > last and len(call.arguments) != self._num_checked_chars:
            self._num_checked_chars = len(call.arguments)
            if _is_object(call.arguments):
                self._close(last, deltas)

    def _close(self, index: int, deltas: list[Delta]) -> None:
        if not self.calls[index].done:
            self.calls[index].done = True
            _append_call(deltas, CallDelta(index, done=True))

    def _look_for_ends(self, text: str) -> None:
        """Count the closing tags of calls; such a tag ends a call wherever it stands."""
        kept = self._text[-(len(_INVOKE_END) - 1) :]
        self._num_ended += (kept + text).count(_INVOKE_END)
        self._text = self._text + text if self.stop else (kept + text)

    def _stop_behind_content(self) -> str | None:
        """Which stop string it was: the text goes on with it where the content ends."""
        behind = [stop for stop in self.stop if self.content + stop in self._text]
        return max(behind, key=len, default=None)


def _append_text(deltas: list[Delta], part: Literal["reasoning", "content"], text: str) -> None:
    last = deltas[-1] if deltas else None
    if isinstance(last, TextDelta) and last.part == part:
        deltas[-1] = TextDelta(part, last.text + text)
    else:
        deltas.append(TextDelta(part, text))


def _append_call(deltas: list[Delta], more: CallDelta) -> None:
    last = deltas[-1] if deltas else None
    if isinstance(last, CallDelta) and last.index == more.index and not last.done:
        deltas[-1] = CallDelta(
            last.index, last.id, last.name, last.arguments + more.arguments, more.done
        )
    else:
        deltas.append(more)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
