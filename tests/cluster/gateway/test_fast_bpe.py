"""Does the fast library encode exactly what `tokenizers` does, and is all else left to that?"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as TokenizerModel
from tokenizers import decoders, models, pre_tokenizers, trainers

from ripresa.cluster.gateway.fast_bpe import DEEPSEEK_SPLITS, fast_encoder
from ripresa.cluster.gateway.tokenizer import Tokenizer
from ripresa.workers.demo.checkpoint import DEMO_MODEL

Json = dict[str, Any]

DEMO: Json = json.loads((DEMO_MODEL / "tokenizer.json").read_text(encoding="utf-8"))


def split(pattern: str, behavior: str = "Isolated") -> Json:
    pieces = {"Regex": pattern}
    return {"type": "Split", "pattern": pieces, "behavior": behavior, "invert": False}


def by_bytes(*, words: bool, space: bool = False) -> Json:
    return {
        "type": "ByteLevel",
        "add_prefix_space": space,
        "trim_offsets": True,
        "use_regex": words,
    }


def digits(*, apart: bool) -> Json:
    return {"type": "Digits", "individual_digits": apart}


def sequence(*steps: Json) -> Json:
    return {"type": "Sequence", "pretokenizers": [*steps]}


SPLITS = {
    "gpt2": by_bytes(words=True),
    "demo": sequence(digits(apart=True), by_bytes(words=True)),
    "digit runs": sequence(digits(apart=False), by_bytes(words=True)),
    "deepseek": sequence(*map(split, DEEPSEEK_SPLITS), by_bytes(words=False)),
}
"""Every way of splitting text that the fast library is trusted with."""

of_every_kind = pytest.mark.parametrize("kind", SPLITS)


def spec_of(pre_tokenizer: Json, **model: object) -> Json:
    """The bundled merges behind another way of splitting text."""
    plain = {"added_tokens": [], "post_processor": None, "pre_tokenizer": pre_tokenizer}
    return {**DEMO, **plain, "model": {**DEMO["model"], **model}}


def reference(spec: Json) -> Callable[[str], list[int]]:
    model = TokenizerModel.from_str(json.dumps(spec))
    return lambda text: model.encode_batch_fast([text], add_special_tokens=False)[0].ids


BOTH = {
    kind: (fast_encoder(spec_of(splits)), reference(spec_of(splits)))
    for kind, splits in SPLITS.items()
}

PIECES = (
    *("<｜User｜>", "<｜end▁of▁sentence｜>", "｜DSML｜", "<think>", "\0", "\0000"),
    *("'s", "'LL", "don't", "\r\n", "\n\n", "   ", "\t", " \u00a0", "\u3000", "\u180e", "\u200d"),
    *(
        "1234567",
        "٣٤٥",
        "Ⅷ½²",
        "٪",
        "e\u0301",
        "👩‍👩‍👧",
        "한국어",
        "中文",
        "かな",
        "ヿ",
        "𝒳",
        "\U0002ebf0",
    ),
    *('{"path": "a/b.py"}', "def f(x):\n    return x\n", "0x1F", "https://a.b/?c=d", "ﬁ", "ǅ"),
)
TEXTS = st.lists(st.text(max_size=20) | st.sampled_from(PIECES), max_size=30).map("".join)


@of_every_kind
@settings(deadline=None, max_examples=100)
@given(text=TEXTS)
def test_any_text(kind: str, text: str) -> None:
    fast, slow = BOTH[kind]
    assert fast(text) == slow(text)


@of_every_kind
def test_long_texts(kind: str) -> None:
    """The fast library cuts those in pieces and encodes them side by side."""
    fast, slow = BOTH[kind]
    rng = random.Random(kind)
    words = (*PIECES, *"aAzé中 \n.,!-_1239", "the", " build", " was", " not", " found")
    mixed = "".join(rng.choices(words, k=25_000))
    prose = " ".join(rng.choices(("a", "file", "of", "it's", "42", "naïve", "見る"), k=25_000))
    for text in (mixed, prose, "a" * 100_000, " " * 100_000, "\n " * 50_000):
        assert fast(text) == slow(text)


@of_every_kind
def test_in_many_threads(kind: str) -> None:
    fast, slow = BOTH[kind]
    rng = random.Random(kind)
    texts = ["".join(rng.choices(PIECES, k=200)) for _ in range(50)]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(fast, texts)) == [slow(text) for text in texts]


@pytest.mark.slow
@of_every_kind
def test_every_character(kind: str) -> None:
    """Whether each stays with a letter, a digit, a mark and a space before and a letter behind it.

    A merge of each of these with the first byte of any character shows it.
    """
    fast, slow = (make(_spec_that_shows_pieces(kind)) for make in (fast_encoder, reference))
    characters = [chr(c) for part in PLANES for c in part]
    for start in range(0, len(characters), 4096):
        some = characters[start : start + 4096]
        for lead in LEADS:
            text = "".join(f"\n{lead}{character}b" for character in some)
            if fast(text) != slow(text):
                cases = [f"\n{lead}{character}b\n" for character in some]
                assert [case for case in cases if fast(case) != slow(case)] == []


LEADS = "a1! "
PLANES = (
    *(range(0xD800), range(0xE000, 0x34000), range(0xE0000, 0xE0200)),
    # No character has been given a place here yet, or it is private.
    *(range(0x34000, 0xE0000, 0x101), range(0xE0200, 0x110000, 0x101)),
)


def _spec_that_shows_pieces(kind: str) -> Json:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    leads = ["Ġ" if lead == " " else lead for lead in LEADS]
    merges = [(lead, letter) for lead in leads for letter in letters]
    tokens = [*letters, *map("".join, merges)]
    vocab = {token: number for number, token in enumerate(tokens)}
    return spec_of(SPLITS[kind], vocab=vocab, merges=[*map(list, merges)])


@settings(deadline=None, max_examples=10)
@given(corpus=st.lists(TEXTS, min_size=1, max_size=20), text=TEXTS, kind=st.sampled_from([*SPLITS]))
def test_any_merges(corpus: list[str], text: str, kind: str) -> None:
    model = TokenizerModel(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, show_progress=False, min_frequency=1
    )
    model.train_from_iterator(corpus, trainer)
    trained = json.loads(model.to_str())["model"]
    spec = spec_of(SPLITS[kind], vocab=trained["vocab"], merges=trained["merges"])
    for sample in (text, *corpus):
        assert fast_encoder(spec)(sample) == reference(spec)(sample)


def test_merges_as_they_were_written_once() -> None:
    merges = [" ".join(pair) for pair in DEMO["model"]["merges"]]
    spec = spec_of(SPLITS["deepseek"], merges=merges)
    text = "".join(PIECES)
    assert fast_encoder(spec)(text) == BOTH["deepseek"][1](text)


def test_special_tokens_are_not_forged_by_any_text() -> None:
    demo = Tokenizer(DEMO_MODEL / "tokenizer.json")
    for spelling, token_id in demo.special_ids.items():
        for typed in (spelling, f"\0{token_id}", f" {spelling}{spelling}"):
            ids = demo.encode(typed)
            assert demo.decode(ids) == typed
            assert not set(ids) & set(demo.special_ids.values())


UNKNOWN: dict[str, tuple[Json, str]] = {
    "pattern": ({"pre_tokenizer": sequence(split(r"\p{N}{1,2}"), by_bytes(words=False))}, "splits"),
    "order": (
        {"pre_tokenizer": sequence(*map(split, DEEPSEEK_SPLITS[::-1]), by_bytes(words=False))},
        "splits",
    ),
    "some of the splits": (
        {"pre_tokenizer": sequence(split(DEEPSEEK_SPLITS[2]), by_bytes(words=False))},
        "splits",
    ),
    "behaviour": (
        {
            "pre_tokenizer": sequence(
                *(split(p, "MergedWithNext") for p in DEEPSEEK_SPLITS), by_bytes(words=False)
            )
        },
        "splits",
    ),
    "no words": ({"pre_tokenizer": by_bytes(words=False)}, "splits"),
    "a space": ({"pre_tokenizer": by_bytes(words=True, space=True)}, "plain ByteLevel"),
    "normalizer": ({"normalizer": {"type": "NFC"}}, "normalizer"),
    "ignored merges": ({"model": {**DEMO["model"], "ignore_merges": True}}, "ignore_merges"),
    "bytes": ({"model": {**DEMO["model"], "byte_fallback": True}}, "byte_fallback"),
    "prefix": (
        {"model": {**DEMO["model"], "continuing_subword_prefix": "Ġ", "merges": []}},
        "continuing_subword_prefix",
    ),
    "a missing byte": (
        {
            "model": {
                **DEMO["model"],
                "vocab": {k: v for k, v in DEMO["model"]["vocab"].items() if k != "ÿ"},
            }
        },
        "lacks 1 of the 256",
    ),
    "a gap": ({"model": {**DEMO["model"], "vocab": {**DEMO["model"]["vocab"], "zzz": 9000}}}, ""),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_is_left_to_the_other_library(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changes, reason = UNKNOWN[name]
    spec = {**DEMO, **changes}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(spec), encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        tokenizer = Tokenizer(path)
    assert "slower library" in caplog.text
    assert reason in caplog.text
    text = "read the file, don't guess: 日本 12345 é\n\n  ok"
    assert tokenizer.encode(text) == reference({**spec, "added_tokens": []})(text)


def test_the_bundled_tokenizer_is_encoded_fast(caplog: pytest.LogCaptureFixture) -> None:
    Tokenizer(DEMO_MODEL / "tokenizer.json")
    assert "slower" not in caplog.text
