"""What of a sequence's own tokens decides its next one? Counts, bans and what is forced, as values.

A pure function of the parameters, the prompt and the tokens so far: a sequence that another worker
continues, from the tokens that were streamed, goes on as it would have here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ripresa.workers.request import SamplingParams


@dataclass(frozen=True, slots=True)
class TokenRules:
    """What holds for one token, beside its sampling parameters.

    Attributes:
        prompt_ids: distinct tokens of the prompt; empty without a repetition penalty.
        said: generated tokens and how often each was; empty without penalties.
        forbidden: tokens that must not come now.
        forced: the token that must; None for none.
    """

    prompt_ids: tuple[int, ...] = ()
    said: tuple[tuple[int, int], ...] = ()
    forbidden: tuple[int, ...] = ()
    forced: int | None = None


class TokenHistory:
    """One sequence's tokens, as far as its parameters look back at them.

    Args:
        token_ids: the prompt, and tokens that an earlier execution generated.
        num_prompt_tokens: how many of them are prompt.
        eos_token_id: the model's end of sentence; None for none.
    """

    __slots__ = ("_endings", "_forced_from", "_num_generated", "_params", "_prompt_ids", "_said")

    def __init__(
        self,
        params: SamplingParams,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
        eos_token_id: int | None,
    ) -> None:
        self._params = params
        own = () if eos_token_id is None or params.ignore_eos else (eos_token_id,)
        self._endings = own + params.stop_token_ids
        self._num_generated = 0
        self._said: Counter[int] | None = Counter() if params.has_penalties else None
        self._prompt_ids: tuple[int, ...] = ()
        if params.repetition_penalty != 1:
            self._prompt_ids = tuple(sorted(set(token_ids[:num_prompt_tokens])))
        forced = params.forced
        self._forced_from = 0 if forced is not None and forced.after is None else None
        for token_id in token_ids[num_prompt_tokens:]:
            self.add(token_id)

    def add(self, token_id: int) -> None:
        """A token was generated."""
        self._num_generated += 1
        if self._said is not None:
            self._said[token_id] += 1
        forced = self._params.forced
        if forced is not None and self._forced_from is None and token_id == forced.after:
            self._forced_from = self._num_generated

    def rules(self) -> TokenRules | None:
        """What holds for the next token; None if nothing does."""
        params = self._params
        forbidden: tuple[int, ...] = ()
        if self._num_generated < params.min_tokens:
            forbidden = self._endings
        token_id: int | None = None
        forced = params.forced
        if forced is not None:
            if self._forced_from is None:
                forbidden = (*self._endings, *forced.forbidden_before)
            else:
                place = self._num_generated - self._forced_from
                token_id = forced.token_ids[place] if place < len(forced.token_ids) else None
        if self._said is None and not forbidden and token_id is None:
            return None
        said = () if self._said is None else tuple(self._said.items())
        return TokenRules(self._prompt_ids, said, forbidden, token_id)
