"""Is a model's next message right? Held against the reference's, call by call and word by word."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from itertools import pairwise
from typing import Any

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

    @property
    def is_valid_call(self) -> bool:
        """A call that a tool server can read was made where one was due."""
        return self in (Verdict.RIGHT, Verdict.WRONG_TOOL, Verdict.WRONG_ARGUMENTS)


def compare(reference: Mapping[str, Any], answer: Mapping[str, Any]) -> Verdict:
    """The first thing that is wrong with a Chat Completions message.

    Space around the text does not count; a call's arguments are compared as JSON values, and
    its id is not.
    """
    due, made = reference.get("tool_calls") or [], answer.get("tool_calls") or []
    if not due:
        if made:
            return Verdict.UNWANTED_CALL
        same = (answer.get("content") or "").strip() == (reference.get("content") or "").strip()
        return Verdict.RIGHT if same else Verdict.WRONG_TEXT
    if not made:
        return Verdict.NO_CALL
    if [c["function"]["name"] for c in due] != [c["function"]["name"] for c in made]:
        return Verdict.WRONG_TOOL
    for expected, given in zip(due, made, strict=True):
        try:
            arguments = json.loads(given["function"]["arguments"])
        except (ValueError, RecursionError):
            return Verdict.BROKEN_ARGUMENTS
        if not isinstance(arguments, dict):
            return Verdict.BROKEN_ARGUMENTS
        # 1 == True == 1.0 in Python, but not in JSON.
        if _canonical(arguments) != _canonical(json.loads(expected["function"]["arguments"])):
            return Verdict.WRONG_ARGUMENTS
    return Verdict.RIGHT


def _canonical(arguments: object) -> str:
    return json.dumps(arguments, sort_keys=True)


def distance_bucket(distance: int) -> str:
    """The bucket of a distance in tokens between evidence and answer, as `128-256`."""
    for first, last in pairwise(DISTANCES):
        if distance < last:
            return f"{first}-{last}"
    return f"{DISTANCES[-1]}-"
