"""Which rows of its n-gram tables does a token look up? Engram hashing (model specification, 10).

Integers only. A row depends on the token and the three true tokens before it, so whoever computes
a chunk, a replayed row or a decode step passes the look-back; nothing is kept between calls.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, normalizers

from ripresa.workers.errors import ConfigError
from ripresa.workers.models.deepseek_v41.config import EngramConfig

Ids = NDArray[np.int64]

SMALLEST_NGRAM = 2
_LONE_SPACE = "\ue000"  # stands in for a text that is one space, which stripping would empty
_NORMALIZER = normalizers.Sequence(
    [
        normalizers.NFKC(),
        normalizers.NFD(),
        normalizers.StripAccents(),
        normalizers.Lowercase(),
        normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
        normalizers.Replace(Regex(r"^ $"), _LONE_SPACE),
        normalizers.Strip(),
        normalizers.Replace(_LONE_SPACE, " "),
    ]
)


def compressed_ids(tokenizer: Tokenizer) -> Ids:
    """The compressed id of every token id of a tokenizer: [tokenizer size] int64.

    Tokens whose texts differ only in case, accents or white space share one. Ids count the
    distinct texts in the order of their first token.
    """
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    return _number_by_first_appearance(_key(tokenizer, token) for token in range(size))


def paired_ids(vocab_size: int) -> Ids:
    """The rule of models without a tokenizer: ids 2k and 2k + 1 share the compressed id k."""
    return np.arange(vocab_size, dtype=np.int64) // 2


def _key(tokenizer: Tokenizer, token: int) -> str:
    text: str = tokenizer.decode([token], skip_special_tokens=False)
    if "\ufffd" in text:  # a piece of a character: no text of its own
        return str(tokenizer.id_to_token(token))
    return str(_NORMALIZER.normalize_str(text)) or text


def _number_by_first_appearance(keys: Iterable[str]) -> Ids:
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)


@dataclass(frozen=True, slots=True)
class EngramHash:
    """The hash constants of one Engram layer.

    Attributes:
        primes: [n-gram sizes, heads] int64, the number of table rows of each size and head.
        multipliers: [largest n-gram] int64, odd, one for each distance back.
    """

    primes: Ids
    multipliers: Ids

    @property
    def num_rows(self) -> int:
        """Rows of the layer's table; a checkpoint with another number is not this model's."""
        return int(self.primes.sum())

    @property
    def num_columns(self) -> int:
        """Table rows that one token looks up."""
        return self.primes.size

    def rows(self, ngrams: Ids) -> Ids:
        """Table rows of tokens: [tokens, n-gram sizes * heads] int64, sizes outer.

        Args:
            ngrams: [tokens, largest n-gram] int64 from `ngrams_of`; rows of any sequences.
        """
        products = ngrams * self.multipliers
        hashes = np.bitwise_xor.accumulate(products, axis=1)[:, SMALLEST_NGRAM - 1 :]
        in_table = hashes[:, :, None] % self.primes
        ends = np.cumsum(self.primes).reshape(self.primes.shape)
        return (in_table + (ends - self.primes)).reshape(len(ngrams), self.num_columns)


def ngrams_of(tokens: Ids, lookback: Ids, start: int, size: int, pad: int) -> Ids:
    """Each token of a run with its predecessors: [tokens, size] int64, column s is s back.

    Args:
        tokens: [tokens] int64 compressed ids of positions start, start + 1, ...
        lookback: compressed ids of the positions right before `start`, in order; at least
            min(start, size - 1) of them, replayed or not, cached or not.
        start: position of the first token; predecessors of position 0 are `pad`.
        size: the largest n-gram.
        pad: compressed id of the pad token.

    Raises:
        ValueError: the look-back is shorter than the positions before `start` allow, or longer.
    """
    if not min(start, size - 1) <= len(lookback) <= start:
        raise ValueError(
            f"a run at position {start} needs the {min(start, size - 1)} ids before it, "
            f"got {len(lookback)}"
        )
    padding = np.full(size - 1, pad, dtype=np.int64)
    before = np.concatenate([padding, lookback])[-(size - 1) :]
    run = np.concatenate([before, tokens])
    newest = np.arange(len(tokens)) + size - 1
    ngrams: Ids = run[newest[:, None] - np.arange(size)]
    return ngrams


def engram_hashes(config: EngramConfig) -> dict[int, EngramHash]:
    """Hash constants by Engram layer.

    Each (layer, n-gram size, head), in this order, takes the next prime at or above
    `config.vocab_size`.

    Raises:
        ConfigError: `engram_num_embeddings` disagrees with the tables that the other fields give.
    """
    sizes = config.max_ngram_size - SMALLEST_NGRAM + 1
    primes = _primes_from(config.vocab_size)
    hashes = {}
    for layer in config.layer_ids:
        drawn = [next(primes) for _ in range(sizes * config.num_heads)]
        hashes[layer] = EngramHash(
            primes=np.array(drawn, dtype=np.int64).reshape(sizes, config.num_heads),
            multipliers=_multipliers(layer, config.max_ngram_size, config.compressed_vocab_size),
        )
    num_rows = tuple(layer.num_rows for layer in hashes.values())
    if num_rows != config.num_embeddings:
        raise ConfigError(
            "engram_num_embeddings",
            f"is {list(config.num_embeddings)}, but the other engram fields give tables of "
            f"{list(num_rows)} rows; the config does not belong to a V4.1-class checkpoint",
        )
    return hashes


def pad_ids(ids: Ids, vocab_size: int, pad_token_id: int) -> Ids:
    """Compressed ids of a whole vocabulary, which may be padded beyond the tokenizer's.

    No text has the ids behind the tokenizer's; they count as the pad token.

    Raises:
        ConfigError: the pad token is none of the tokenizer's.
    """
    if pad_token_id >= len(ids):
        raise ConfigError(
            "engram_pad_token_id",
            f"is {pad_token_id}, but the tokenizer has ids below {len(ids)}; use the "
            "tokenizer.json that belongs to the checkpoint",
        )
    padding = max(vocab_size - len(ids), 0)
    return np.pad(ids, (0, padding), constant_values=ids[pad_token_id])


def check_tokenizer(ids: Ids, compressed_vocab_size: int) -> None:
    """Refuse a tokenizer that the hash constants of a checkpoint were not made for.

    Raises:
        ConfigError: `ids` count another number of distinct texts than the config says.
    """
    distinct = int(ids.max()) + 1
    if distinct != compressed_vocab_size:
        raise ConfigError(
            "engram_compressed_vocab_size",
            f"is {compressed_vocab_size}, but the tokenizer has {distinct} distinct texts; "
            "use the tokenizer.json that belongs to the checkpoint",
        )


def _multipliers(layer: int, count: int, compressed_vocab_size: int) -> Ids:
    """Odd numbers so small that id * multiplier stays below 2^63."""
    bound = (2**63 - 1) // compressed_vocab_size // 2
    drawn: Ids = np.random.default_rng(10007 * layer).integers(0, bound, count, np.int64)
    return drawn * 2 + 1


def _primes_from(least: int) -> Iterator[int]:
    candidate = max(least, 2)
    while True:
        if all(candidate % divisor for divisor in range(2, math.isqrt(candidate) + 1)):
            yield candidate
        candidate += 1
