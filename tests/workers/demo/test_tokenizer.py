"""Is the committed tokenizer what its builder makes, loss-less, and blind to cuts?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from ripresa.workers.demo import build_tokenizer
from ripresa.workers.demo.build_tokenizer import (
    CONTROL_TOKENS,
    TEMPLATE_TOKENS,
    TOKENIZER,
    VOCAB_SIZE,
    build,
)
from ripresa.workers.demo.checkpoint import DEMO_MODEL

TEXTS = [
    "Plain text, 1234567890 digits and 3.14.",
    "é ø 日本語 Ω ﬁ 👩‍👩‍👧‍👦 🏳️‍🌈 \U0001f600",
    "\r\n\t  tabs \u00a0\u200b and   runs\n\n\nof space ",
    "\x00\x1f\ufffd\ufeff\uffff",
    'def f(x):\n    return {"a": [1, 2.50, -3e10]}  # ok\n',
    '<｜User｜>Hi<｜Assistant｜></think>\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">',
    "<｜User <think >｜DSML <|User|> ▁ ｜",
    "",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TOKENIZER))


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def test_the_committed_file_is_what_the_builder_makes() -> None:
    assert TOKENIZER.read_text(encoding="utf-8") == build()


def test_main_writes_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "tokenizer.json"
    monkeypatch.setattr("sys.argv", ["build_tokenizer", "--output", str(output)])
    build_tokenizer.main()
    assert output.read_bytes() == TOKENIZER.read_bytes()


def test_size_fits_the_config(tokenizer: Tokenizer) -> None:
    config = json.loads((DEMO_MODEL / "config.json").read_text())["text_config"]
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    assert sorted(vocabulary.values()) == list(range(VOCAB_SIZE))
    assert config["vocab_size"] == VOCAB_SIZE


def test_template_tokens_have_one_id_each(tokenizer: Tokenizer) -> None:
    spellings = [*CONTROL_TOKENS, *TEMPLATE_TOKENS]
    assert [ids(tokenizer, text) for text in spellings] == [[i] for i in range(len(spellings))]


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(ids(tokenizer, text), skip_special_tokens=False) == text


@given(st.text())
@settings(max_examples=300, deadline=None)
def test_round_trip_of_any_text(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    assert tokenizer.decode(ids(tokenizer, text), skip_special_tokens=False) == text


def test_every_digit_is_its_own_token(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("year 20261130, 0x1f, v2.60").tokens
    assert not [t for t in tokens if len(t) > 1 and any(c.isdigit() for c in t)]


def test_decoding_skips_control_tokens_and_keeps_template_tokens(tokenizer: Tokenizer) -> None:
    text = "".join([*CONTROL_TOKENS, *TEMPLATE_TOKENS])
    assert tokenizer.decode(ids(tokenizer, text), skip_special_tokens=True) == "".join(
        TEMPLATE_TOKENS
    )


@pytest.mark.parametrize("special", [*CONTROL_TOKENS, *TEMPLATE_TOKENS])
def test_cutting_at_a_special_token_changes_no_id(tokenizer: Tokenizer, special: str) -> None:
    """A prompt may be encoded turn by turn: no merge reaches over a special token."""
    for left in TEXTS:
        right = "  then 12 more"
        whole = ids(tokenizer, left + special + right)
        assert whole == ids(tokenizer, left) + ids(tokenizer, special) + ids(tokenizer, right)


def test_bytes_of_tokens_concatenate_to_the_text(tokenizer: Tokenizer) -> None:
    """Wherever a stream of ids is cut, the bytes so far are a prefix of the text's."""
    byte_of = {char: byte for byte, char in byte_alphabet().items()}
    for text in TEXTS:
        encoded = b""
        for token in tokenizer.encode(text, add_special_tokens=False).tokens:
            special = token in CONTROL_TOKENS + TEMPLATE_TOKENS
            encoded += token.encode() if special else bytes(byte_of[c] for c in token)
            assert text.encode().startswith(encoded)
        assert encoded == text.encode()


def byte_alphabet() -> dict[int, str]:
    """The printable stand-in of every byte, as byte-level BPE defines it."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in kept]
    return {b: chr(b) for b in kept} | {b: chr(256 + n) for n, b in enumerate(moved)}
