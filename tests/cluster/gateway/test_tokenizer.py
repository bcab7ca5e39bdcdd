"""Does text survive the way to token ids and back, whole and streamed, and stay plain text?"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as TokenizerModel

import ripresa.workers.demo
from ripresa.cluster.gateway.tokenizer import Tokenizer
from ripresa.workers.errors import CheckpointError, InvalidArgument

DEMO = Path(ripresa.workers.demo.__file__).parent / "tokenizer.json"

SPELLINGS = ["<think>", "<｜User｜>", "<｜end▁of▁sentence｜>", " ", "日本", "é", "🦊", "\n"]
TEXTS = st.lists(st.text() | st.sampled_from(SPELLINGS)).map("".join)


@settings(deadline=None)
@given(text=TEXTS)
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(deadline=None)
@given(text=TEXTS)
def test_typed_special_tokens_stay_text(tokenizer: Tokenizer, text: str) -> None:
    assert not set(tokenizer.encode(text)) & {0, 1, 2, 3}


def test_special_ids_decode_to_their_spelling(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([2, 3]) == "<｜User｜><think>"


@settings(deadline=None)
@given(ids=st.lists(st.integers(4, 319)))
def test_decode_agrees_with_the_library(
    tokenizer: Tokenizer, tokenizer_path: Path, ids: list[int]
) -> None:
    ids = [token_id for token_id in ids if token_id < tokenizer.num_ids]
    library = TokenizerModel.from_file(str(tokenizer_path))
    assert tokenizer.decode(ids) == library.decode(ids, skip_special_tokens=False)


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 255 + 4)), cuts=st.lists(st.integers(0, 40)))
def test_streamed_pieces_concatenate_to_the_whole(
    tokenizer: Tokenizer, ids: list[int], cuts: list[int]
) -> None:
    stream = tokenizer.stream()
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    pieces = [stream.feed(ids[a:b]) for a, b in pairwise(bounds)]
    assert "".join(pieces) + stream.finish() == tokenizer.decode(ids)


def test_an_incomplete_character_is_held_back(tokenizer: Tokenizer) -> None:
    fox = tokenizer.encode("🦊")
    assert len(fox) == 4  # no merge covers it: one token a byte
    stream = tokenizer.stream()
    assert [stream.feed([token_id]) for token_id in fox] == ["", "", "", "🦊"]
    assert stream.feed(fox[:2]) == ""
    assert stream.finish() == "\ufffd"


def test_unknown_id_is_named(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidArgument) as caught:
        tokenizer.decode([40, tokenizer.num_ids])
    assert caught.value.field == "token_ids[1]"


def test_digest_follows_the_file(tokenizer_path: Path, tmp_path: Path) -> None:
    other = tmp_path / "tokenizer.json"
    other.write_bytes(tokenizer_path.read_bytes() + b"\n")
    assert len(Tokenizer(other).digest) == 64
    assert Tokenizer(other).digest != Tokenizer(tokenizer_path).digest


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda spec: spec.update(decoder={"type": "WordPiece"}), id="decoder"),
        pytest.param(lambda spec: spec["model"].update(type="WordLevel"), id="model"),
        pytest.param(lambda spec: spec.pop("model"), id="no model"),
    ],
)
def test_an_unusable_file_is_refused(tokenizer_path: Path, tmp_path: Path, spoil: object) -> None:
    spec = json.loads(tokenizer_path.read_text())
    spoil(spec)  # type: ignore[operator]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(spec))
    with pytest.raises(CheckpointError, match=r"no usable tokenizer\.json"):
        Tokenizer(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot read the tokenizer .*gone"):
        Tokenizer(tmp_path / "gone")


@settings(deadline=None)
@given(text=TEXTS)
def test_the_lower_bound_holds(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text))


def test_the_bundled_tokenizer() -> None:
    demo, library = Tokenizer(DEMO), TokenizerModel.from_file(str(DEMO))
    typed = "<｜User｜>read the file<｜Assistant｜></think> 日本 🦊\n\n  12"
    assert demo.decode(demo.encode(typed)) == typed
    special = library.token_to_id("<｜User｜>")
    assert special in library.encode(typed, add_special_tokens=False).ids
    assert special not in demo.encode(typed)
    everything = list(range(demo.num_ids))
    assert demo.decode(everything) == library.decode(everything, skip_special_tokens=False)
    plain = "Plain text, as it stands: café, 3 + 4 = 7."
    assert demo.encode(plain) == library.encode(plain, add_special_tokens=False).ids
