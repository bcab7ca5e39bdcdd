"""Which tokens does a grammar allow next? The only file that knows `llguidance`.

A grammar is a client's: everything it may cost is bounded by counts and not by a clock, so that
the same one is always taken or always refused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from ripresa.workers.errors import InvalidArgument
from ripresa.workers.models.vocabulary import Vocabulary
from ripresa.workers.request import OutputConstraint
from ripresa.workers.sampler import TokenMask

MAX_GRAMMAR_BYTES = 1 << 20
MAX_KEPT = 64
MAX_KEPT_BYTES = 4 << 20
"""Of compiled grammars that wait for their next use: their number, and the length of their text."""

_LIMITS = LLParserLimits(
    max_items_in_row=500,
    initial_lexer_fuel=500_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
_MAX_MESSAGE_CHARS = 300


class Grammars:
    """Compiles grammars for one vocabulary, and keeps the last used ones. Of one thread at a time.

    Args:
        vocabulary: reads the vocabulary; called once, for the first grammar.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        self._vocabulary = vocabulary
        self._tokenizer: tuple[LLTokenizer, int] | None = None
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()
        self._kept_bytes = 0

    def matcher(self, constraint: OutputConstraint) -> Matcher:
        """What follows one answer through the constraint's grammar, from its beginning.

        Raises:
            InvalidArgument: it is no grammar, is too large, or nothing satisfies it.
            CheckpointError: the model has no usable tokenizer.
        """
        tokenizer, vocab_size = self._prepared()
        found = self._kept.get(constraint.grammar)
        if found is None:
            found = _compiled(tokenizer, vocab_size, constraint)
            self._keep(constraint.grammar, found)
        self._kept.move_to_end(constraint.grammar)
        return Matcher(found.deep_copy(), vocab_size, constraint.field)

    def _prepared(self) -> tuple[LLTokenizer, int]:
        if self._tokenizer is None:
            vocabulary = self._vocabulary()
            tokenizer = LLTokenizer(_Tokens(vocabulary))  # type: ignore[arg-type]
            self._tokenizer = tokenizer, len(vocabulary.bytes_of)
        return self._tokenizer

    def _keep(self, text: str, compiled: LLMatcher) -> None:
        self._kept[text] = compiled
        self._kept_bytes += len(text)
        while len(self._kept) > MAX_KEPT or (
            self._kept_bytes > MAX_KEPT_BYTES and len(self._kept) > 1
        ):
            old, _ = self._kept.popitem(last=False)
            self._kept_bytes -= len(old)


class Matcher:
    """One answer on its way through a grammar. Of one thread at a time.

    Attributes:
        num_followed: tokens that it has been told.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, field: str) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._field = field
        self.num_followed = 0

    def follow(self, token_ids: Sequence[int]) -> None:
        """The answer goes on with these tokens.

        Raises:
            InvalidArgument: the grammar does not allow them, or has become too complex.
        """
        self.num_followed += len(token_ids)
        for token_id in token_ids:
            if not self._matcher.consume_token(token_id):
                raise self._broken(f"token id {token_id} is not allowed")

    def mask(self) -> TokenMask:
        """The tokens that may come now; the end of sentence alone behind a whole match.

        Raises:
            InvalidArgument: nothing may, or the grammar has become too complex.
        """
        allowed = _allowed(self._matcher, self._vocab_size)
        if self._matcher.is_error() or not allowed.any():
            raise self._broken("no token is allowed")
        return allowed

    def _broken(self, reason: str) -> InvalidArgument:
        reason = _message(self._matcher) or reason
        return InvalidArgument(
            self._field,
            f"the answer could not be kept to the constraint behind {self.num_followed} tokens "
            f"({reason}); ask for a simpler one",
        )


def _compiled(tokenizer: LLTokenizer, vocab_size: int, constraint: OutputConstraint) -> LLMatcher:
    """A matcher at its beginning, which has proved that some token may come there."""
    field, text = constraint.field, constraint.grammar
    if len(text) > MAX_GRAMMAR_BYTES:
        raise InvalidArgument(
            field, f"is too large: its grammar has {len(text)} characters of {MAX_GRAMMAR_BYTES}"
        )
    try:
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=_LIMITS)
        is_possible = not matcher.is_error() and bool(_allowed(matcher, vocab_size).any())
    except BaseException as error:
        # A panic of the library is no Exception.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise InvalidArgument(field, f"cannot be kept to: {error}"[:400]) from error
        raise
    if not is_possible or matcher.is_error():
        raise InvalidArgument(
            field, f"cannot be kept to: {_message(matcher) or 'nothing satisfies it'}"
        )
    return matcher


def _allowed(matcher: LLMatcher, vocab_size: int) -> TokenMask:
    bits = allocate_token_bitmask(1, vocab_size)
    fill_next_token_bitmask(matcher, bits)
    return np.unpackbits(bits.view(np.uint8)[0], count=vocab_size, bitorder="little").view(np.bool_)


def _message(matcher: LLMatcher) -> str:
    """Why a matcher broke, without the grammar that the library quotes."""
    first = matcher.get_error().split("\n   1 |")[0].replace("\n<non-verbose/>", "").strip()
    if first == "NoExtensionBias":
        return "nothing satisfies it"
    return " ".join(first.split())[:_MAX_MESSAGE_CHARS]


class _Tokens:
    """A vocabulary as the library asks for it."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos_token_id
        self.tokens = list(vocabulary.bytes_of)
        self.special_token_ids = sorted(vocabulary.special_ids)
        self._one_byte = {
            spelling: token_id
            for token_id, spelling in enumerate(vocabulary.bytes_of)
            if len(spelling) == 1 and token_id not in vocabulary.special_ids
        }

    def __call__(self, text: Any) -> list[int]:
        """Some tokens of a text. The library asks in order to suggest tokens, which nobody uses."""
        raw = text if isinstance(text, bytes) else text.encode()
        return [self._one_byte[raw[n : n + 1]] for n in range(len(raw))]
