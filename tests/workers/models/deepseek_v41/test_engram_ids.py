"""Do Engram's hashes agree with the released constants and the golden cases, however cut?"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tokenizers import Tokenizer, decoders, models

from ripresa.workers.demo.build_tokenizer import TOKENIZER
from ripresa.workers.errors import ConfigError
from ripresa.workers.models.deepseek_v41.config import EngramConfig
from ripresa.workers.models.deepseek_v41.engram_ids import (
    EngramHash,
    Ids,
    check_tokenizer,
    compressed_ids,
    engram_hashes,
    ngrams_of,
    paired_ids,
)

RELEASED = EngramConfig(
    layer_ids=(1, 14),
    num_embeddings=(384006168, 384016682),
    max_ngram_size=4,
    vocab_size=16_000_000,
    num_heads=8,
    head_dim=256,
    pad_token_id=2,
    compressed_vocab_size=99092,
)
TINY = EngramConfig(
    layer_ids=(1, 3),
    num_embeddings=(384, 552),
    max_ngram_size=4,
    vocab_size=50,
    num_heads=2,
    head_dim=32,
    pad_token_id=2,
    compressed_vocab_size=96,
)
PAD = 1
"""cid(2) under the paired rule."""


def test_released_constants() -> None:
    hashes = engram_hashes(RELEASED)
    primes = np.concatenate([hashes[layer].primes.ravel() for layer in (1, 14)])
    assert len(primes) == 48
    assert (primes[0], primes[-1]) == (16000057, 16000889)
    assert (np.diff(primes) > 0).all()
    assert [hashes[layer].num_rows for layer in (1, 14)] == [384006168, 384016682]
    assert hashes[1].multipliers.tolist() == [
        76632096046245,
        4839876093313,
        35959672319349,
        73987337458391,
    ]
    assert hashes[14].multipliers.tolist() == [
        67716810739261,
        51510806800915,
        30921347202721,
        82619226485591,
    ]
    assert hashes[1].num_columns == 24


def test_products_fit_into_64_bits() -> None:
    for layer in engram_hashes(RELEASED).values():
        assert int(layer.multipliers.max()) * (RELEASED.compressed_vocab_size - 1) < 2**63


def test_a_config_with_other_tables_is_refused() -> None:
    with pytest.raises(ConfigError, match="384006168, 384016682") as caught:
        engram_hashes(replace(RELEASED, num_embeddings=(384006168, 384016681)))
    assert caught.value.field == "engram_num_embeddings"


def test_no_engram_no_hashes() -> None:
    assert engram_hashes(EngramConfig((), (), 0, 0, 0, 0, 0, 0)) == {}


# --- rows ---------------------------------------------------------------------------------------


def by_definition(hash_: EngramHash, tokens: list[int], i: int) -> list[int]:
    """The specification's text, one Python integer at a time."""
    row, offset = [], 0
    for size, primes in enumerate(hash_.primes.tolist(), start=2):
        value = 0
        for s in range(size):
            token = tokens[i - s] if i >= s else PAD
            value ^= token * int(hash_.multipliers[s])
        for prime in primes:
            row.append(offset + value % prime)
            offset += prime
    return row


def rows_in_chunks(hash_: EngramHash, tokens: Ids, cuts: list[int], lookback: int = 3) -> Ids:
    edges = [0, *sorted(cuts), len(tokens)]
    rows = [
        hash_.rows(ngrams_of(tokens[a:b], tokens[max(0, a - lookback) : a], a, 4, PAD))
        for a, b in pairwise(edges)
    ]
    return np.concatenate(rows)


@given(
    st.lists(st.integers(0, 95), max_size=30),
    st.lists(st.integers(0, 30), max_size=6),
    st.integers(3, 9),
)
@settings(max_examples=200, deadline=None)
def test_any_chunking_gives_the_rows_of_the_definition(
    tokens: list[int], cuts: list[int], lookback: int
) -> None:
    cuts = [cut for cut in cuts if cut <= len(tokens)]
    for hash_ in engram_hashes(TINY).values():
        rows = rows_in_chunks(hash_, np.array(tokens, dtype=np.int64), cuts, lookback)
        assert rows.tolist() == [by_definition(hash_, tokens, i) for i in range(len(tokens))]


def test_released_geometry_follows_the_definition() -> None:
    tokens = np.random.default_rng(5).integers(0, RELEASED.compressed_vocab_size, 50)
    tokens[10:14] = RELEASED.compressed_vocab_size - 1
    for hash_ in engram_hashes(RELEASED).values():
        rows = rows_in_chunks(hash_, tokens, [7, 8, 9])
        assert rows.tolist() == [by_definition(hash_, tokens.tolist(), i) for i in range(50)]
        assert rows.min() >= 0
        assert rows.max() < hash_.num_rows


def test_rows_of_different_sequences_share_a_call() -> None:
    hash_ = engram_hashes(TINY)[1]
    a = ngrams_of(np.array([5, 6]), np.array([], dtype=np.int64), 0, 4, PAD)
    b = ngrams_of(np.array([7]), np.array([1, 2, 3]), 50, 4, PAD)
    both = hash_.rows(np.concatenate([a, b]))
    assert both.tolist() == hash_.rows(a).tolist() + hash_.rows(b).tolist()


@pytest.mark.parametrize(("start", "given_"), [(3, 2), (1, 0), (100, 0), (100, 2), (0, 1), (2, 3)])
def test_a_wrong_look_back_is_refused(start: int, given_: int) -> None:
    with pytest.raises(ValueError, match=f"position {start} needs"):
        ngrams_of(np.array([1]), np.arange(given_), start, 4, PAD)


# --- golden cases -------------------------------------------------------------------------------


@pytest.fixture(params=["case_b_grids_engram_replay", "case_c_quantised_dspark"])
def case(shared: Path, request: pytest.FixtureRequest) -> Path:
    return shared / "golden" / str(request.param)


def golden(case: Path) -> tuple[EngramConfig, int, Ids, Ids]:
    """Config, vocabulary, token ids [S] and expected rows [S, layers, columns] of a case."""
    text = json.loads((case / "checkpoint" / "config.json").read_text())["text_config"]
    config = EngramConfig(
        layer_ids=tuple(text["engram_layer_ids"]),
        num_embeddings=tuple(text["engram_num_embeddings"]),
        max_ngram_size=text["engram_max_ngram_size"],
        vocab_size=text["engram_vocab_size"],
        num_heads=text["engram_n_heads"],
        head_dim=text["engram_head_dim"],
        pad_token_id=text["engram_pad_token_id"],
        compressed_vocab_size=text["engram_compressed_vocab_size"],
    )
    tensors = load_file(case / "golden.safetensors")
    tokens = tensors["token_ids"].astype(np.int64)
    return config, text["vocab_size"], tokens, tensors["official.engram_rows"].astype(np.int64)


def test_golden_rows(case: Path) -> None:
    config, vocab_size, tokens, expected = golden(case)
    ids = paired_ids(vocab_size)
    assert ids.max() + 1 == config.compressed_vocab_size
    assert ids[config.pad_token_id] == PAD
    for cuts in ([], [1, 2, 3], [5, 17, 18], list(range(len(tokens)))):
        rows = [rows_in_chunks(h, ids[tokens], cuts) for h in engram_hashes(config).values()]
        np.testing.assert_array_equal(np.stack(rows, axis=1), expected)


Mutant = Callable[[EngramConfig, Ids, Ids], Ids]


def hashed(hash_: EngramHash, tokens: Ids, pad: int = PAD) -> Ids:
    return hash_.rows(ngrams_of(tokens, tokens[:0], 0, 4, pad))


def first(config: EngramConfig) -> EngramHash:
    return engram_hashes(config)[config.layer_ids[0]]


def second(config: EngramConfig) -> EngramHash:
    return engram_hashes(config)[config.layer_ids[1]]


def without_lookback(config: EngramConfig, tokens: Ids, ids: Ids) -> Ids:
    h = first(config)
    return np.concatenate([hashed(h, ids[tokens][:9]), hashed(h, ids[tokens][9:])])


def reversed_ngrams(config: EngramConfig, tokens: Ids, ids: Ids) -> Ids:
    return first(config).rows(ngrams_of(ids[tokens], ids[:0], 0, 4, PAD)[:, ::-1])


def without_offsets(config: EngramConfig, tokens: Ids, ids: Ids) -> Ids:
    h = first(config)
    ends = np.cumsum(h.primes.ravel())
    return hashed(h, ids[tokens]) - (ends - h.primes.ravel())


def heads_outer(config: EngramConfig, tokens: Ids, ids: Ids) -> Ids:
    h = first(config)
    rows = hashed(h, ids[tokens]).reshape(len(tokens), *h.primes.shape)
    return rows.transpose(0, 2, 1).reshape(len(tokens), -1)


def added_not_xored(config: EngramConfig, tokens: Ids, ids: Ids) -> Ids:
    h = first(config)
    sums = np.cumsum(ngrams_of(ids[tokens], ids[:0], 0, 4, PAD) * h.multipliers, axis=1)[:, 1:]
    ends = np.cumsum(h.primes).reshape(h.primes.shape)
    return (sums[:, :, None] % h.primes + ends - h.primes).reshape(len(tokens), -1)


MISTAKES: dict[str, tuple[int, Mutant]] = {
    "raw token ids": (0, lambda c, t, i: hashed(first(c), t)),
    "raw pad id": (0, lambda c, t, i: hashed(first(c), i[t], pad=c.pad_token_id)),
    "zero pad": (0, lambda c, t, i: hashed(first(c), i[t], pad=0)),
    "no look-back over a chunk": (0, without_lookback),
    "oldest token first": (0, reversed_ngrams),
    "no offsets": (0, without_offsets),
    "heads outer": (0, heads_outer),
    "added, not xored": (0, added_not_xored),
    "even multipliers": (
        0,
        lambda c, t, i: hashed(replace(first(c), multipliers=first(c).multipliers - 1), i[t]),
    ),
    "layer's number in the list as seed": (
        1,
        lambda c, t, i: hashed(
            replace(
                second(c),
                multipliers=engram_hashes(replace(c, layer_ids=(7, c.layer_ids[1] + 1)))[
                    c.layer_ids[1] + 1
                ].multipliers,
            ),
            i[t],
        ),
    ),
    "one seed for all layers": (
        1,
        lambda c, t, i: hashed(replace(second(c), multipliers=first(c).multipliers), i[t]),
    ),
    "primes start over in each layer": (
        1,
        lambda c, t, i: hashed(replace(second(c), primes=first(c).primes), i[t]),
    ),
    "multipliers of another vocabulary": (
        0,
        lambda c, t, i: hashed(first(replace(c, compressed_vocab_size=192)), i[t]),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_golden_rows_catch_mistakes(case: Path, mistake: str) -> None:
    config, vocab_size, tokens, expected = golden(case)
    layer, mutant = MISTAKES[mistake]
    assert not np.array_equal(mutant(config, tokens, paired_ids(vocab_size)), expected[:, layer])


# --- compressed ids -----------------------------------------------------------------------------


def word_tokenizer(*words: str) -> Tokenizer:
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=words[0]))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["The", "the", "THE", " the", "the\n"], [0, 0, 0, 0, 0]),
        (["é", "e", "É", "e\u0301", "Ⅷ", "viii", "ﬁ", "fi"], [0, 0, 0, 0, 1, 1, 2, 2]),
        ([" ", "\n", "\t\r\n ", "", "\u00a0"], [0, 0, 0, 1, 0]),
        (["a  b", "a b", "a\n\tb", "ab"], [0, 0, 0, 1]),
        (["\u0301", "\u0300", "x"], [0, 1, 2]),
        (["<｜User｜>", "<｜user｜>", "User"], [0, 0, 1]),
        (["b", "a", "B", "A", "c"], [0, 1, 0, 1, 2]),
    ],
    ids=["case", "accents", "space", "runs", "empty_result", "special", "first_appearance"],
)
def test_texts_that_count_as_one(words: list[str], expected: list[int]) -> None:
    assert compressed_ids(word_tokenizer(*words)).tolist() == expected


def test_pieces_of_characters_stay_apart() -> None:
    tokenizer = Tokenizer(models.BPE({"Ã": 0, "æ": 1, "ð": 2, "a": 3, "A": 4}, []))
    tokenizer.decoder = decoders.ByteLevel()
    assert compressed_ids(tokenizer).tolist() == [0, 1, 2, 3, 3]


def test_demo_tokenizer() -> None:
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    ids = compressed_ids(tokenizer)
    assert ids.shape == (4096,)
    assert sorted(set(ids.tolist())) == list(range(2964))
    of = {text: ids[tokenizer.encode(text).ids[0]] for text in ("the", " the", " The", "\n", " ")}
    assert of["the"] == of[" the"] == of[" The"]
    assert of["\n"] == of[" "]
    check_tokenizer(ids, 2964)
    with pytest.raises(ConfigError, match="2964 distinct texts"):
        check_tokenizer(ids, 99092)
