"""How text becomes token ids and token ids become text, whole or while they stream.

Byte-level BPE only, from a `tokenizer.json` by path. Every token id then stands for fixed bytes,
so decoding needs no look-back and text streams are exact: their pieces concatenate to the decoded
whole, whatever way the tokens were batched. `fast_bpe.py` encodes what it is known to encode
exactly; what it refuses is encoded by `tokenizers`, and the log says why.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as TokenizerModel

from ripresa.cluster.gateway.fast_bpe import Encode, NotKnown, fast_encoder
from ripresa.workers.errors import CheckpointError, InvalidArgument, reason_of
from ripresa.workers.models.checkpoint_tokenizer import read_tokenizer_file, usable_tokenizer
from ripresa.workers.models.vocabulary import token_bytes

log = logging.getLogger(__name__)


class Tokenizer:
    """One `tokenizer.json`.

    `encode` reads plain text: the spelling of a special token in it stays text, so that user text
    cannot forge a turn. Nothing is added in front or behind.

    Attributes:
        digest: of the file, in hexadecimal.
        special_ids: spelling -> id of the added tokens.

    Raises:
        CheckpointError: the file is missing, is no tokenizer, or is not byte-level.
    """

    def __init__(self, path: Path) -> None:
        raw = read_tokenizer_file(path)
        self.digest = hashlib.sha256(raw).hexdigest()
        try:
            spec: dict[str, Any] = json.loads(raw)
            self._bytes_of = token_bytes(spec)
            self._max_token_bytes = max(map(len, self._bytes_of.values()))
            self.special_ids = _special_ids(spec)
            self._encode = _encoder(path, _without_added_tokens(spec))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(
                f"{path} is no usable tokenizer.json: {reason_of(error)}"
            ) from error

    @property
    def num_ids(self) -> int:
        """One more than the highest id that has a spelling."""
        return max(self._bytes_of) + 1

    def least_tokens(self, text: str) -> int:
        """A lower bound of `len(encode(text))` that costs almost nothing."""
        return -(-len(text.encode()) // self._max_token_bytes)

    def encode(self, text: str) -> list[int]:
        with usable_tokenizer():
            return self._encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of some ids, special tokens as their spelling, broken UTF-8 as U+FFFD.

        Raises:
            InvalidArgument: an id has no spelling; `field` is its place in `token_ids`.
        """
        for index, token_id in enumerate(token_ids):
            if token_id not in self._bytes_of:
                raise InvalidArgument(f"token_ids[{index}]", f"token id {token_id} has no spelling")
        return self.token_bytes(token_ids).decode("utf-8", errors="replace")

    def token_bytes(self, token_ids: Iterable[int]) -> bytes:
        """The bytes of some ids; an id without a spelling (vocabulary padding) has none."""
        return b"".join(self._bytes_of.get(token_id, b"") for token_id in token_ids)

    def stream(self) -> TextStream:
        return TextStream(self)


class TextStream:
    """Decodes one stream of tokens; an incomplete character waits for its remaining bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_ids: Iterable[int]) -> str:
        """The text that is certain after these tokens."""
        return self._decoder.decode(self._tokenizer.token_bytes(token_ids))

    def finish(self) -> str:
        """What was held back, as U+FFFD, since nothing follows."""
        return self._decoder.decode(b"", final=True)


def _special_ids(spec: dict[str, Any]) -> dict[str, int]:
    """Spelling -> id of every added token."""
    return {token["content"]: token["id"] for token in spec["added_tokens"]}


def _without_added_tokens(spec: dict[str, Any]) -> dict[str, Any]:
    """The same BPE that knows no special spelling and adds, cuts and pads nothing.

    The ids of added tokens keep entries that no text can spell: some libraries refuse gaps.
    """
    added = {token["id"] for token in spec["added_tokens"]}
    model = spec["model"]
    vocab = {
        f"\0{token_id}" if token_id in added else token: token_id
        for token, token_id in model["vocab"].items()
    }
    unwanted: dict[str, Any] = {
        "added_tokens": [],
        "post_processor": None,
        "truncation": None,
        "padding": None,
    }
    return {**spec, **unwanted, "model": {**model, "vocab": vocab}}


def _encoder(path: Path, spec: dict[str, Any]) -> Encode:
    """The fastest exact encoding of plain text by a tokenizer.json."""
    # Whether it is one at all is for this library to say.
    model = TokenizerModel.from_str(json.dumps(spec))
    try:
        return fast_encoder(spec)
    except NotKnown as reason:
        log.warning("%s is encoded by the slower library: %s", path, reason)
    # Unlike `encode`, it computes no offsets, which nobody asks for.
    return lambda text: model.encode_batch_fast([text], add_special_tokens=False)[0].ids
