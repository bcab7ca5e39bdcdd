"""Which bytes does each token id stand for? Byte-level BPE only."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

from ripresa.workers.errors import CheckpointError
from ripresa.workers.models.checkpoint_tokenizer import TOKENIZER_FILE, read_tokenizer_file


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A model's tokens.

    Attributes:
        bytes_of: by token id; empty for an id without a spelling (vocabulary padding).
        special_ids: tokens that no text spells.
        eos_token_id: the model's end of sentence.
    """

    bytes_of: tuple[bytes, ...]
    special_ids: frozenset[int]
    eos_token_id: int


def read_vocabulary(folder: Path, vocab_size: int, eos_token_id: int) -> Vocabulary:
    """The vocabulary of a checkpoint, from its tokenizer.json.

    Args:
        vocab_size: logits of a row; ids beyond the file's have no spelling.

    Raises:
        CheckpointError: the file is missing, is no byte-level tokenizer, or has more ids.
    """
    path = folder / TOKENIZER_FILE
    raw = read_tokenizer_file(path)
    try:
        spec: dict[str, Any] = json.loads(raw)
        known = token_bytes(spec)
        special = frozenset(token["id"] for token in spec["added_tokens"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is no usable tokenizer.json: {error}") from error
    if max(known, default=0) >= vocab_size:
        raise CheckpointError(f"{path} has token id {max(known)}, the model {vocab_size} logits")
    bytes_of = tuple(known.get(token_id, b"") for token_id in range(vocab_size))
    return Vocabulary(bytes_of, special, eos_token_id)


def token_bytes(spec: dict[str, Any]) -> dict[int, bytes]:
    """Token id -> bytes, added tokens as the UTF-8 of their spelling.

    Args:
        spec: a tokenizer.json.

    Raises:
        ValueError, KeyError, TypeError: it is none, or not byte-level.
    """
    model, decoder = spec["model"], spec["decoder"]
    steps = decoder["decoders"] if decoder and decoder["type"] == "Sequence" else [decoder]
    if model["type"] != "BPE" or [step and step["type"] for step in steps] != ["ByteLevel"]:
        raise ValueError("only byte-level BPE (model BPE, decoder ByteLevel) is supported")
    byte_of = byte_alphabet()
    added = {token["id"]: token["content"].encode() for token in spec["added_tokens"]}
    known: dict[int, bytes] = {}
    for token, token_id in model["vocab"].items():
        if token_id not in added:
            known[token_id] = bytes(byte_of[character] for character in token)
    return known | added


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: printable Latin-1 stands for itself, the rest follow U+0100.

    Compared with the library's own alphabet when built.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet |= {chr(0x100 + place): byte for place, byte in enumerate(others)}
    if set(alphabet) != set(ByteLevel.alphabet()):
        raise ValueError("the tokenizers library uses another byte alphabet")
    return alphabet
