"""Which tokenizer belongs to the tiny model? A word an id, in pairs that differ in case."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel


def write_tiny_tokenizer(folder: Path, vocab_size: int = 96) -> None:
    """Write a `tokenizer.json` that gives the compressed ids of `paired_ids`."""
    words = {f"{'wW'[number % 2]}{number // 2}": number for number in range(vocab_size)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
