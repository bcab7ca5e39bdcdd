"""What stands between the facts? Paragraphs of the bundled prose and code, split once for all."""

from __future__ import annotations

from functools import cache

from ripresa.workers.demo.build_tokenizer import corpus
from ripresa.workers.demo.ledger.draws import Split, split_of

MIN_CHARACTERS, MAX_CHARACTERS = 80, 600


@cache
def paragraphs(split: Split) -> tuple[str, ...]:
    """Paragraphs of moderate length, in the corpus's order; none is in both splits."""
    pieces = (piece.strip() for piece in corpus().split("\n\n"))
    return tuple(
        piece
        for piece in pieces
        if MIN_CHARACTERS <= len(piece) <= MAX_CHARACTERS and split_of(piece) is split
    )
