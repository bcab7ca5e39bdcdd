"""What holds an answer to its tool choice, its tools' schemas and its format?

| | the answer, behind its reasoning |
|---|---|
| `none` | no call; text in the format |
| `required`, a name | calls alone, without text |
| `auto` | text in the format, or calls |

Calls follow their tools' schemas where they are demanded, where a tool is strict or a format or a
single call is asked for; else `auto` leaves the answer free.
"""

from __future__ import annotations

from ripresa.cluster.gateway.call_grammar import calls_rules
from ripresa.cluster.gateway.chat_encoding import ChatEncoding, Prompt, Stage
from ripresa.cluster.gateway.output_format import OutputFormat
from ripresa.workers.errors import InvalidArgument
from ripresa.workers.request import OutputConstraint

_OPENING = '"\\n\\n<" mark " calls>\\n"'
_FREE_TEXT = """
before: BEFORE
text: TEXT
BEFORE: /(.|\\n)*</
TEXT: /(.|\\n)*/
"""


def constraint_of(
    prompt: Prompt, wanted: OutputFormat | None, encoding: ChatEncoding
) -> OutputConstraint | None:
    """The constraint of a chat's answer; None for none.

    Args:
        wanted: the text's format, if it was asked for beside the conversation.

    Raises:
        InvalidArgument: what was asked for cannot be kept to; `field` names it.
    """
    if wanted is not None and prompt.format is not None:
        raise InvalidArgument(wanted.field, "contradicts the response format; give one of them")
    asked = _grammar(prompt, prompt.format or wanted, encoding)
    if asked is None:
        return None
    grammar, field = asked
    reasons = prompt.begins_in is Stage.REASONING
    return OutputConstraint(
        grammar,
        field,
        after=encoding.end_of_reasoning_id if reasons else None,
        forbidden_before=(encoding.call_token_id,) if reasons else (),
    )


def _grammar(
    prompt: Prompt, wanted: OutputFormat | None, encoding: ChatEncoding
) -> tuple[str, str] | None:
    """The grammar, and the part of the request to name where it is refused; None for neither."""
    choice, tools = prompt.tool_choice, prompt.tools
    is_bound = choice.mode == "required" or wanted is not None or choice.is_single
    if not tools or choice.mode == "none":
        return None if wanted is None else (f"start: {wanted.rule()}\n", wanted.field)
    if not is_bound and not any(tool.is_strict for tool in tools):
        return None
    if choice.name is not None:
        tools = tuple(tool for tool in tools if tool.name == choice.name)
    is_single = choice.is_single or choice.name is not None
    rules = calls_rules(tools, encoding.call_token_id, is_single=is_single)
    if prompt.begins_in is Stage.CALLS:
        return f"start: calls\n{rules}", "tools"
    if choice.mode == "required":
        return f"start: {_OPENING} calls\n{rules}", "tools"
    if wanted is None:
        return f'start: text | before mark " calls>\\n" calls{_FREE_TEXT}{rules}', "tools"
    field = f"{wanted.field} or tools"
    return f"start: text | {_OPENING} calls\ntext: {wanted.rule()}\n{rules}", field
