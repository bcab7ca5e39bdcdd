"""Which kinds of tools, messages and content are served? Any other is refused by its place.

What reads the conversation later passes over some kinds that it has no use for.
"""

from __future__ import annotations

from collections.abc import Mapping

from ripresa.cluster.gateway.chat_encoding import Json, Protocol
from ripresa.workers.errors import InvalidArgument

_TOOLS: Mapping[Protocol, tuple[str, ...]] = {
    Protocol.CHAT_COMPLETIONS: ("function",),
    Protocol.MESSAGES: ("custom",),
    Protocol.RESPONSES: ("function",),
}
_ITEMS = ("message", "function_call", "function_call_output", "reasoning")
_CONTENT: Mapping[Protocol, tuple[str, ...]] = {
    Protocol.CHAT_COMPLETIONS: ("text",),
    Protocol.MESSAGES: ("text", "thinking", "tool_use", "tool_result"),
    Protocol.RESPONSES: ("input_text", "output_text"),
}


def check_kinds(body: Json, protocol: Protocol) -> None:
    """Refuse the tools, messages and content of a request that are of no kind served.

    Args:
        body: its fields are of the types that their tables say.

    Raises:
        InvalidArgument: `field` names the first of them.
    """
    _check(body.get("tools"), "tools", _TOOLS[protocol])
    if protocol is Protocol.RESPONSES:
        _check(body.get("input"), "input", _ITEMS)
        for name, value in body.get("text", {}).items():
            if name != "format" and value is not None:
                raise InvalidArgument(f"text.{name[:64]}", "is not supported")
    _check(body.get("system"), "system", ("text",))
    kinds = _CONTENT[protocol]
    for holder in ("messages", "input"):
        messages = body.get(holder)
        for index, message in enumerate(messages if isinstance(messages, list) else ()):
            path = f"{holder}[{index}]"
            _check(message.get("output"), f"{path}.output", kinds)
            content = message.get("content")
            if message.get("type") == "reasoning" or not isinstance(content, list):
                continue
            _check(content, f"{path}.content", kinds)
            for place, block in enumerate(content):
                if isinstance(block, dict) and block.get("type") == "tool_result":
                    _check(block.get("content"), f"{path}.content[{place}].content", ("text",))


def _check(parts: object, path: str, kinds: tuple[str, ...]) -> None:
    for index, part in enumerate(parts if isinstance(parts, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind is not None and kind not in kinds:
            raise InvalidArgument(f"{path}[{index}].type", f"only {', '.join(kinds)} is supported")
