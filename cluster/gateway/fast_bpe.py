"""Which tokenizer.json does the fast library encode exactly? All others are left to the slow one.

`tokenizers` says what a tokenizer.json means, and spends a microsecond on each token. `fastokens`
is about ten times as fast, with regular expressions of another engine and without every option. So
only what has been compared with `tokenizers` is given to it: byte-level BPE without options, behind
the splits of DeepSeek's models, or those of GPT-2 with or without digits apart.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from fastokens import Tokenizer as FastModel

from ripresa.workers.models.vocabulary import byte_alphabet

Json = dict[str, Any]
Encode = Callable[[str], list[int]]

DEEPSEEK_SPLITS = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+"
    "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*"
    "|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
"""By what DeepSeek-V3 and later split text, one step after the other."""

# Spelled out, since to this engine U+180E is space too.
_SPACES = r"\t-\r \x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"
_WORDS = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+"
    rf"| ?[^{_SPACES}\p{{L}}\p{{N}}]+|[{_SPACES}]+(?![^{_SPACES}])|[{_SPACES}]+"
)
"""What a ByteLevel step with `use_regex` splits by, in the words of the fast library's engine."""

_NO_NORMALIZER = (None, {"type": "Sequence", "normalizers": []})
_MODEL_OPTIONS = {
    "dropout": (None, 0.0),
    "unk_token": (None,),
    "continuing_subword_prefix": (None, ""),
    "end_of_word_suffix": (None, ""),
    "byte_fallback": (None, False),
    "ignore_merges": (None, False),
}
"""Of the options that change what text becomes, the values that stand for "not used"."""


class NotKnown(Exception):
    """The tokenizer has something that has not been compared; the message names it."""


def fast_encoder(spec: Json) -> Encode:
    """The fast library's encoding of plain text by a tokenizer.json, thread-safe.

    Args:
        spec: of byte-level BPE, without added tokens, post-processing, cuts and padding.

    Raises:
        NotKnown: it may differ from that of `tokenizers`.
    """
    _check_model(spec["model"])
    if spec.get("normalizer") not in _NO_NORMALIZER:
        raise NotKnown("it has a normalizer")
    steps = _known_steps(spec.get("pre_tokenizer"))
    splits = {"type": "Sequence", "pretokenizers": steps}
    known = {**spec, "normalizer": None, "pre_tokenizer": splits}
    try:
        model = FastModel.from_json_str(json.dumps(known))
    except ValueError as error:
        raise NotKnown(str(error)) from error
    return lambda text: model.encode(text).ids


def _check_model(model: Json) -> None:
    for name, unused in _MODEL_OPTIONS.items():
        if model.get(name) not in unused:
            raise NotKnown(f"its model has `{name}`")
    if missing := byte_alphabet().keys() - model["vocab"].keys():
        raise NotKnown(f"its vocabulary lacks {len(missing)} of the 256 bytes")


def _known_steps(pre_tokenizer: Json | None) -> list[Json]:
    """The steps before the merges, so that the fast library is fast and does the same."""
    if pre_tokenizer is None:
        raise NotKnown("it does not split text")
    is_sequence = pre_tokenizer["type"] == "Sequence"
    steps: list[Json] = pre_tokenizer["pretokenizers"] if is_sequence else [pre_tokenizer]
    *splits, last = steps
    if last["type"] != "ByteLevel" or last.get("add_prefix_space", True):
        raise NotKnown("its pre-tokenizer does not end in a plain ByteLevel")
    by_bytes = {**last, "use_regex": False}
    if not last.get("use_regex", True):
        if splits == [_split(pattern) for pattern in DEEPSEEK_SPLITS]:
            return [*splits, by_bytes]
    elif not splits or [step["type"] for step in splits] == ["Digits"]:
        return [*splits, _split(_WORDS), by_bytes]
    raise NotKnown("it splits text in a way that is not known here")


def _split(pattern: str) -> Json:
    """A step that makes each match a piece of its own."""
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
