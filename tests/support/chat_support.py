"""What do chat tests say and hear? Requests, call markup and a parsed answer's parts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import deepseek_recipe as recipe

from ripresa.cluster.gateway.chat_encoding import ChatEncoding, Chunk, Prompt
from ripresa.workers.demo.checkpoint import DEMO_MODEL

MARK = "｜DSML｜"
GET_WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}

Parameter = tuple[str, str, str]
"""Name, `string=` and the text between the tags."""


def chat_body(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": list(messages), **fields}


def weather_loop(
    *, city: str = "Oslo", result: str = '{"t": -3}', call_id: str = "c1"
) -> list[dict[str, Any]]:
    """An assistant's call and its result."""
    function = {"name": "get_weather", "arguments": json.dumps({"city": city, "days": 2})}
    return [
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Need the tool.",
            "tool_calls": [{"id": call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call_id, "content": result},
    ]


def calls_block(calls: Iterable[tuple[str, Sequence[Parameter]]]) -> str:
    """What a model writes to call tools."""
    text = f"<{MARK} calls>\n"
    for name, parameters in calls:
        text += f'<{MARK} invoke name="{name}">\n'
        for key, is_string, value in parameters:
            text += f'<{MARK} parameter name="{key}" string="{is_string}">{value}'
            text += f"</{MARK} parameter>\n"
        text += f"</{MARK} invoke>\n"
    return text + f"</{MARK} calls>"


@dataclass
class Parsed:
    """An answer, put together from its chunks.

    Attributes:
        deltas: every chunk's delta, in order.
        tool_calls: name and arguments of each.
    """

    deltas: list[dict[str, Any]] = field(default_factory=list)
    reasoning: str = ""
    content: str = ""
    tool_calls: list[tuple[str, str]] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)

    def add(self, chunks: Iterable[Chunk]) -> None:
        for chunk in chunks:
            body = json.loads(chunk.json())
            (choice,) = body["choices"]
            delta = choice["delta"]
            self.deltas.append(delta)
            self.reasoning += delta.get("reasoning_content") or ""
            self.content += delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                if "id" in call:
                    assert call["index"] == len(self.tool_calls)
                    self.tool_calls.append((call["function"]["name"], ""))
                name, arguments = self.tool_calls[call["index"]]
                self.tool_calls[call["index"]] = (name, arguments + call["function"]["arguments"])
            self.finish_reason = choice["finish_reason"] or self.finish_reason
            self.usage = body["usage"] or self.usage


def asked(
    encoding: ChatEncoding,
    prompt: Prompt,
    output: str | Sequence[Sequence[int]],
    *,
    is_cut: bool = False,
) -> Parsed:
    """Parse an answer: text token by token, or token ids in the given pieces."""
    if isinstance(output, str):
        pieces: Sequence[Sequence[int]] = [[t] for t in encode_output(output)]
    else:
        pieces = output
    parser = encoding.parser(prompt, "chatcmpl-1")
    parsed = Parsed()
    parsed.add(parser.begin(10, 4))
    for piece in pieces:
        parsed.add(parser.feed(piece))
    parsed.add(parser.finish(is_cut=is_cut))
    return parsed


def encode_output(text: str) -> list[int]:
    """The demo tokens of a model's text; special tokens' spellings are special tokens here."""
    ids: list[int] = _LIBRARY.encode(text)
    return ids


_LIBRARY = recipe.Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
