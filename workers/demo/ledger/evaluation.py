"""Which 500 conversations is a model measured on? Drawn once and kept as messages.

They share no coined name and no seed with the training's, and no whole paragraph; the prose repeats
itself, so that 18 of the evaluation's 464 paragraphs have over half of their runs of eight words in
common with training ones. `python -m ripresa.cluster.training.evaluation_set` writes them anew.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

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
    """The committed set, or another file of the same form."""
    lines = lzma.decompress(path.read_bytes()).decode().splitlines()
    return [_from_json(json.loads(line)) for line in lines]


def _from_json(fields: dict[str, object]) -> Conversation:
    document = dict(fields)
    messages, expected = document.pop("messages"), document.pop("expected")
    assert isinstance(messages, list)
    assert isinstance(expected, list)
    return Conversation(
        tuple(messages),
        tuple(Expected(e["message"], Task(e["task"]), e["evidence"]) for e in expected),
        **document,  # type: ignore[arg-type]
    )
