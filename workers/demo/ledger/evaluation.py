"""Which 500 conversations is a model measured on? Drawn once and kept as messages.

They share no coined name and no seed with the training's, and no whole paragraph; the prose repeats
itself, so that 18 of the evaluation's 464 paragraphs have over half of their runs of eight words in
common with training ones. `python -m ripresa.cluster.training.evaluation_set` writes them anew.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import asdict
from pathlib import Path
from types import NoneType
from typing import Any

from ripresa.workers.demo.ledger.conversation import Conversation, Expected, Task
from ripresa.workers.demo.ledger.draws import Draws, Split
from ripresa.workers.demo.ledger.filler import paragraphs
from ripresa.workers.demo.ledger.scripts import (
    FULL,
    Placement,
    Ruler,
    draw_conversation,
    draw_straddle,
)

FILE = Path(__file__).parent / "evaluation.jsonl.xz"
NUM_CONVERSATIONS = 500
_NUM_STRADDLES = 25
"""Of each placement."""
_CHARACTERS = (600, 1200, 2000, 3200)
_SHARE_WITH_TOOLS = 0.2


def draw_evaluation(ruler: Ruler, indices: Iterable[int]) -> Iterator[Conversation]:
    """Conversations of the evaluation set.

    Args:
        indices: which ones, below `NUM_CONVERSATIONS`.
    """
    filler = paragraphs(Split.EVALUATION)
    placements = [place for place in Placement for _ in range(_NUM_STRADDLES)]
    for index in indices:
        draws = Draws(Split.EVALUATION, index)
        if index < len(placements):
            yield draw_straddle(draws, filler, placements[index], ruler)
        else:
            size = draws.pick(_CHARACTERS)
            yield draw_conversation(draws, FULL, filler, size, _SHARE_WITH_TOOLS)


def to_lines(conversations: Iterable[Conversation]) -> str:
    """JSON, a conversation a line."""
    lines = (json.dumps(asdict(c), ensure_ascii=False) for c in conversations)
    return "".join(f"{line}\n" for line in lines)


def load_evaluation(path: Path = FILE) -> list[Conversation]:
    """The committed set, or another file of the same form.

    Raises:
        OSError, lzma.LZMAError: it cannot be read, or unpacked.
        ValueError: a line, which is named, is no such conversation.
    """
    lines = lzma.decompress(path.read_bytes()).decode().split("\n")
    found = []
    for number, line in enumerate(lines[:-1] if lines[-1] == "" else lines, 1):
        try:
            found.append(_from_json(json.loads(line)))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
    return found


def _from_json(document: object) -> Conversation:
    fields = _object(document, "a conversation", {"messages", "expected"}, _OPTIONAL)
    messages, expected = fields.pop("messages"), fields.pop("expected")
    if not isinstance(messages, list) or not isinstance(expected, list):
        raise ValueError("`messages` and `expected` must be lists")
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            raise ValueError(f"messages[{number}] must be an object")
    answers = [n for n, message in enumerate(messages) if message.get("role") == "assistant"]
    if not answers or answers[-1] != len(messages) - 1:
        raise ValueError("`messages` must end with the assistant's")
    told = tuple(_expected(each, f"expected[{n}]", answers) for n, each in enumerate(expected))
    named = [each.message for each in told]
    if named != answers:
        raise ValueError(
            f"`expected` must name every message of the assistant, in order: {answers}, not {named}"
        )
    for name, types in _OPTIONAL.items():
        if name in fields and type(fields[name]) not in types:
            raise ValueError(f"`{name}` must not be {fields[name]!r}")
    return Conversation(tuple(messages), told, **fields)


_OPTIONAL = {"declares_tools": (bool,), "boundary": (int, NoneType), "placement": (str, NoneType)}


def _expected(document: object, name: str, answers: Sequence[int]) -> Expected:
    fields = _object(document, name, {"message", "task", "evidence"})
    message, evidence = fields["message"], fields["evidence"]
    if type(message) is not int or message not in answers:
        raise ValueError(f"{name}.message is {message!r}: no index of an assistant's message")
    if evidence is not None and (type(evidence) is not int or not 0 <= evidence < message):
        raise ValueError(f"{name}.evidence is {evidence!r}: no index of a message before it")
    return Expected(message, Task(fields["task"]), evidence)


def _object(
    document: object, name: str, required: Set[str], optional: Iterable[str] = ()
) -> dict[str, Any]:
    if not isinstance(document, dict):
        raise ValueError(f"{name} must be an object")
    missing, unknown = required - document.keys(), document.keys() - required - set(optional)
    if missing or unknown:
        raise ValueError(
            f"{name} lacks {sorted(missing)}"
            if missing
            else f"{name} has unknown {sorted(unknown)}"
        )
    return dict(document)
