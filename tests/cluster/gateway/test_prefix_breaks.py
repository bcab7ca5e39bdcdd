"""Is the reason told for which a prompt does not go on from the last one, and only then?"""

from __future__ import annotations

import copy
import json
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from chat_support import calls_block, encode_output

from ripresa.cluster.gateway.chat_encoding import ChatEncoding, Turn
from ripresa.cluster.gateway.prefix_breaks import (
    Continuation,
    Conversations,
    Outline,
    outline_of,
    turn_marks,
)
from ripresa.cluster.gateway.said_turns import SaidTurns, SplicedPrompt, splice, what_is_said
from ripresa.cluster.observability.metrics import BreakReason

EOS = 1
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("search", "read")]
ARGUMENTS = {"query": "who was it", "limit": 2}

Body = dict[str, Any]
Edit = Callable[[Body], object]


class Gateway:
    """Conversations as a gateway meets them; the model's tokens are those of an encoder.

    Args:
        keeps: whether what the model said stands in for what comes back.
    """

    def __init__(self, encoding: ChatEncoding, *, keeps: bool, max_turns: int = 1000) -> None:
        self.now = 0.0
        self.conversations = Conversations(lambda: self.now, max_turns)
        self._encoding = encoding
        self._said = SaidTurns(100_000) if keeps else None

    def outline(self, body: Body) -> tuple[SplicedPrompt, Outline]:
        encoding = self._encoding
        spliced = splice(encoding, encoding.render(copy.deepcopy(body)), self._said, b"")
        outline = outline_of(
            spliced,
            user_id=encoding.user_id,
            end_id=encoding.end_id,
            end_of_reasoning_id=encoding.end_of_reasoning_id,
        )
        return spliced, outline

    def ask(
        self,
        body: Body,
        answer: tuple[str, str, dict[str, Any] | None] | None = None,
        *,
        session: str | None = "s",
        salt: bytes = b"",
    ) -> Continuation:
        """One request; `answer` is the model's reasoning, content and the arguments of a call."""
        spliced, outline = self.outline(body)
        found = self.conversations.arrived(salt, session, outline)
        turn = spliced.open_turn
        if answer is None or turn is None:
            return found
        reasoning, content, arguments = answer
        text = f"{reasoning}</think>{content}"
        calls: tuple[tuple[str, str], ...] = ()
        if arguments is not None:
            parameters = [
                (k, "true", v) if isinstance(v, str) else (k, "false", json.dumps(v))
                for k, v in arguments.items()
            ]
            text += "\n\n" + calls_block([("search", parameters)])
            calls = (("search", json.dumps(arguments)),)
        token_ids = [*turn.opening, *encode_output(text), EOS]
        said = Turn(content, calls)
        if self._said is not None:
            self._said.keep(turn.key(said), token_ids)
        marks = turn_marks(
            outline.last or b"",
            array("I", [turn.mark, *token_ids]),
            what_is_said(said),
            bool(calls),
            self._encoding.end_of_reasoning_id,
        )
        self.conversations.answered(found.conversation, marks)
        return found


def assistant(reasoning: str, content: str, arguments: dict[str, Any] | None, call: str) -> Body:
    said: Body = {"role": "assistant", "content": content, "reasoning_content": reasoning}
    if arguments is not None:
        function = {"name": "search", "arguments": json.dumps(arguments)}
        said["tool_calls"] = [{"id": call, "type": "function", "function": function}]
    return said


def loop(gateway: Gateway, **where: Any) -> Body:
    """Two steps of a tool loop; gives the third request's body."""
    messages: list[Body] = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Who was it?"},
    ]
    body: Body = {"messages": messages, "tools": list(TOOLS)}
    for step in range(2):
        answer = (f"I need to look, {step}.", "Let me look.", {**ARGUMENTS, "limit": step})
        found = gateway.ask(body, answer, **where)
        assert found.broken is None
        call = f"call_{step}"
        messages.append(assistant(*answer, call))
        messages.append({"role": "tool", "tool_call_id": call, "content": f"It was {step}."})
    return body


def of_answers(change: Callable[[Body], object], *, last_only: bool = False) -> Edit:
    def edit(body: Body) -> None:
        answers = [m for m in body["messages"] if m["role"] == "assistant"]
        for message in answers[-1:] if last_only else answers:
            change(message)

    return edit


def in_arguments(change: Callable[[dict[str, Any]], str]) -> Edit:
    def rewrite(message: Body) -> None:
        function = message["tool_calls"][0]["function"]
        function["arguments"] = change(json.loads(function["arguments"]))

    return of_answers(rewrite)


def insert(role: str, place: int | None = None) -> Edit:
    message = {"role": role, "content": "By the way."}
    return lambda body: body["messages"].insert(
        len(body["messages"]) if place is None else place, message
    )


REASONING, ARGS = BreakReason.REASONING_MISSING, BreakReason.ARGS_RERENDERED
HEAD, HISTORY = BreakReason.HEAD_CHANGED, BreakReason.HISTORY_EDITED

EDITS: dict[str, tuple[Edit, BreakReason | None, BreakReason | None]] = {
    # edit: reason where the model's own tokens stand in, and where they do not.
    "echo": (lambda body: None, None, None),
    "spaces in arguments": (in_arguments(lambda a: json.dumps(a, indent=2)), None, None),
    "call ids": (
        lambda body: body.update(
            messages=json.loads(json.dumps(body["messages"]).replace('"call_', '"other_'))
        ),
        None,
        None,
    ),
    "user text appended": (insert("user"), None, None),
    "system text appended": (insert("system"), None, None),
    "tool choice": (lambda body: body.update(tool_choice="none"), None, None),
    "last reasoning dropped": (
        of_answers(lambda m: m.pop("reasoning_content"), last_only=True),
        None,
        REASONING,
    ),
    "reasoning dropped": (of_answers(lambda m: m.pop("reasoning_content")), None, REASONING),
    "another reasoning": (of_answers(lambda m: m.update(reasoning_content="So.")), None, REASONING),
    "order of keys": (
        in_arguments(lambda a: json.dumps(dict(reversed(a.items())))),
        None,
        ARGS,
    ),
    "other arguments": (in_arguments(lambda a: json.dumps({**a, "limit": 9})), HISTORY, HISTORY),
    "an answer's text": (of_answers(lambda m: m.update(content="Hm.")), HISTORY, HISTORY),
    "a tool result shortened": (
        lambda body: body["messages"][3].update(content="(dropped)"),
        HISTORY,
        HISTORY,
    ),
    "compaction": (lambda body: body["messages"].__delitem__(slice(2, 4)), HISTORY, HISTORY),
    "a message in the middle": (insert("user", 4), HISTORY, HISTORY),
    "the last result unanswered and changed": (
        lambda body: body["messages"].__delitem__(slice(4, 6)) or insert("user")(body),
        HISTORY,
        HISTORY,
    ),
    "a tool more": (
        lambda body: body["tools"].append({"type": "function", "function": {"name": "x"}}),
        HEAD,
        HEAD,
    ),
    "tools in another order": (lambda body: body["tools"].reverse(), HEAD, HEAD),
    "no tools, and no calls": (
        lambda body: (body.pop("tools"), body["messages"].__delitem__(slice(2, None))),
        HEAD,
        HEAD,
    ),
    "system text": (lambda body: body["messages"][0].update(content="Be long."), HEAD, HEAD),
    "effort": (lambda body: body.update(reasoning_effort="low"), HEAD, HEAD),
    "thinking off": (lambda body: body.update(thinking={"type": "disabled"}), HEAD, HEAD),
}


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("keeps", [True, False], ids=["spliced", "re-rendered"])
def test_each_edit_has_its_reason(encoding: ChatEncoding, name: str, keeps: bool) -> None:
    edit, spliced, rendered = EDITS[name]
    gateway = Gateway(encoding, keeps=keeps)
    body = loop(gateway)
    edit(body)
    assert gateway.ask(body).broken is (spliced if keeps else rendered)
    # Once a prompt came so, the same prompt is no news.
    assert gateway.ask(body).broken is None


def test_a_question_asked_again_breaks_nothing(encoding: ChatEncoding) -> None:
    gateway = Gateway(encoding, keeps=True)
    body = loop(gateway)
    del body["messages"][4:]
    assert gateway.ask(body).broken is None


def test_any_of_several_answers_may_be_gone_on_from(encoding: ChatEncoding) -> None:
    gateway = Gateway(encoding, keeps=True)
    body: Body = {"messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS}
    spliced, outline = gateway.outline(body)
    found = gateway.conversations.arrived(b"", "s", outline)
    assert spliced.open_turn is not None
    for text in ("One.", "Two."):
        token_ids = [spliced.open_turn.mark, *encode_output(f"So.</think>{text}"), EOS]
        what = what_is_said(Turn(text))
        marks = turn_marks(
            outline.last or b"", array("I", token_ids), what, False, encoding.end_of_reasoning_id
        )
        gateway.conversations.answered(found.conversation, marks)
    body["messages"] += [assistant("So.", "Two.", None, ""), {"role": "user", "content": "And?"}]
    assert gateway.ask(body).broken is None


def test_without_tools_the_encoding_itself_drops_the_reasoning(encoding: ChatEncoding) -> None:
    gateway = Gateway(encoding, keeps=True)
    body: Body = {"messages": [{"role": "user", "content": "Hi"}]}
    gateway.ask(body, ("So.", "Hello.", None))
    body["messages"] += [assistant("So.", "Hello.", None, ""), {"role": "user", "content": "And?"}]
    assert gateway.ask(body).broken is BreakReason.REASONING_MISSING


def test_conversations_are_told_apart(encoding: ChatEncoding) -> None:
    gateway = Gateway(encoding, keeps=True)
    body = loop(gateway, session="one")
    body["messages"][0]["content"] = "Be long."
    assert gateway.ask(body, session="two").broken is None
    assert gateway.ask(body, session="one", salt=b"other").broken is None
    assert gateway.ask(body, session=None).broken is None
    assert gateway.ask(body, session="one").broken is BreakReason.HEAD_CHANGED


def test_without_a_session_head_and_first_message_name_a_conversation(
    encoding: ChatEncoding,
) -> None:
    gateway = Gateway(encoding, keeps=False)
    body = loop(gateway, session=None)
    other = copy.deepcopy(body)
    other["messages"][1]["content"] = "Who else?"
    assert gateway.ask(other, session=None).broken is None
    body["messages"][3]["content"] = "(dropped)"
    assert gateway.ask(body, session=None).broken is BreakReason.HISTORY_EDITED


def test_the_time_that_tools_took_is_told_once(encoding: ChatEncoding) -> None:
    gateway = Gateway(encoding, keeps=True)
    body = loop(gateway)
    gateway.now = 12.0
    assert gateway.ask(body, ("So.", "It was me.", None)).gap_s == 12.0
    gateway.now = 20.0
    body["messages"] += [
        assistant("So.", "It was me.", None, ""),
        {"role": "user", "content": "Ah."},
    ]
    assert gateway.ask(body).gap_s is None


def test_so_many_turns_are_remembered(encoding: ChatEncoding) -> None:
    gateway = Gateway(encoding, keeps=True, max_turns=7)
    for number in range(4):
        body = loop(gateway, session=str(number))
        gateway.ask(body, session=str(number))
        assert gateway.conversations.num_turns <= 7
    body["messages"][0]["content"] = "Be long."
    assert gateway.ask(body, session="0").broken is None
    assert gateway.ask(body, session="3").broken is BreakReason.HEAD_CHANGED
