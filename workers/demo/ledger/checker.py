"""Is a model's next message right? Held against the reference's, call by call and word by word."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import Any

from ripresa.workers.demo.ledger.tool_server import read_arguments

DISTANCES = (0, 128, 256, 512, 1024, 2048)
"""Where buckets of distances begin, in tokens."""


class Verdict(StrEnum):
    """How a message compares with the reference."""

    RIGHT = "right"
    WRONG_TEXT = "wrong text"
    NO_CALL = "no call"
    UNWANTED_CALL = "unwanted call"
    WRONG_TOOL = "wrong tool"
    WRONG_ARGUMENTS = "wrong arguments"
    BROKEN_ARGUMENTS = "broken arguments"
    EXTRA_TEXT = "wrong text beside a call"

    @property
    def is_valid_call(self) -> bool:
        """A call that a tool server can read was made where one was due."""
        return self in (
            Verdict.RIGHT,
            Verdict.WRONG_TOOL,
            Verdict.WRONG_ARGUMENTS,
            Verdict.EXTRA_TEXT,
        )


def compare(reference: Mapping[str, Any], answer: Mapping[str, Any]) -> Verdict:
    """The first thing that is wrong with a Chat Completions message.

    Space around the text does not count; a call's arguments are compared as JSON values, and
    its id is not.

    Args:
        answer: anybody's; what is malformed in it is wrong.
    """
    due, made = reference.get("tool_calls") or [], answer.get("tool_calls") or []
    same_text = _text(answer) == _text(reference)
    if not due:
        if made:
            return Verdict.UNWANTED_CALL
        return Verdict.RIGHT if same_text else Verdict.WRONG_TEXT
    if not made:
        return Verdict.NO_CALL
    expected = [_function(call) for call in due]
    given = [_function(call) for call in made] if isinstance(made, Sequence) else []
    if [f.get("name") for f in expected] != [f.get("name") for f in given]:
        return Verdict.WRONG_TOOL
    for wanted, found in zip(expected, given, strict=True):
        try:
            arguments = read_arguments(found.get("arguments"))
        except ValueError:
            return Verdict.BROKEN_ARGUMENTS
        # 1 == True == 1.0 in Python, but not in JSON.
        if _canonical(arguments) != _canonical(read_arguments(wanted["arguments"])):
            return Verdict.WRONG_ARGUMENTS
    return Verdict.RIGHT if same_text else Verdict.EXTRA_TEXT


def _text(message: Mapping[str, Any]) -> object:
    content = message.get("content") or ""
    return content.strip() if isinstance(content, str) else content


def _function(call: object) -> Mapping[str, Any]:
    """What a call calls; nothing of what is no call."""
    function = call.get("function") if isinstance(call, Mapping) else None
    return function if isinstance(function, Mapping) else {}


def _canonical(arguments: object) -> str:
    return json.dumps(arguments, sort_keys=True)


def distance_bucket(distance: int) -> str:
    """The bucket of a distance in tokens between evidence and answer, as `128-256`."""
    for first, last in pairwise(DISTANCES):
        if distance < last:
            return f"{first}-{last}"
    return f"{DISTANCES[-1]}-"
