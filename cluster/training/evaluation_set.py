"""How is the evaluation set written anew? `python -m ripresa.cluster.training.evaluation_set`.

What was measured before can then be compared by those conversations alone whose messages stayed.
"""

from __future__ import annotations

import lzma
from pathlib import Path

from ripresa.cluster.training.rendering import Renderer
from ripresa.workers.demo.build_tokenizer import TOKENIZER
from ripresa.workers.demo.ledger.evaluation import (
    FILE,
    NUM_CONVERSATIONS,
    draw_evaluation,
    to_lines,
)


def write_evaluation(path: Path = FILE) -> None:
    """Draw every conversation and write them all."""
    drawn = draw_evaluation(Renderer(TOKENIZER), range(NUM_CONVERSATIONS))
    path.write_bytes(lzma.compress(to_lines(drawn).encode()))


if __name__ == "__main__":
    write_evaluation()
