"""What of a sequence's own tokens decides its next one? Counts and bans, as values.

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
        given: the token that comes, whatever the model says; None lets it choose.
    """

    prompt_ids: tuple[int, ...] = ()
    said: tuple[tuple[int, int], ...] = ()
    forbidden: tuple[int, ...] = ()
    given: int | None = None


class TokenHistory:
    """One sequence's tokens, as far as its parameters look back at them.

    Args:
        token_ids: the prompt, and tokens that an earlier execution generated.
        num_prompt_tokens: how many of them are prompt.
        eos_token_id: the model's end of sentence; None for none.
        given: the whole answer, if it is known; empty for one that is chosen.

    Attributes:
        constrained_from: how many generated tokens come before the first one that the constraint
            decides; None without a constraint, or while it has yet to begin.
    """

    __slots__ = (
        "_endings",
        "_given",
        "_num_generated",
        "_params",
        "_prompt_ids",
        "_said",
        "constrained_from",
    )

    def __init__(
        self,
        params: SamplingParams,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
        eos_token_id: int | None,
        given: tuple[int, ...] = (),
    ) -> None:
        self._params = params
        self._given = given
        own = () if eos_token_id is None or params.ignore_eos else (eos_token_id,)
        self._endings = own + params.stop_token_ids
        self._num_generated = 0
        self._said: Counter[int] | None = Counter() if params.has_penalties else None
        self._prompt_ids: tuple[int, ...] = ()
        if params.repetition_penalty != 1:
            self._prompt_ids = tuple(sorted(set(token_ids[:num_prompt_tokens])))
        constraint = params.constraint
        self.constrained_from: int | None = None
        if constraint is not None and constraint.after is None:
            self.constrained_from = 0
        for token_id in token_ids[num_prompt_tokens:]:
            self.add(token_id)

    def add(self, token_id: int) -> None:
        """A token was generated."""
        self._num_generated += 1
        if self._said is not None:
            self._said[token_id] += 1
        constraint = self._params.constraint
        has_begun = self.constrained_from is not None
        if constraint is not None and not has_begun and token_id == constraint.after:
            self.constrained_from = self._num_generated

    def rules(self) -> TokenRules | None:
        """What holds for the next token; None if nothing does."""
        params = self._params
        if self._given:
            return TokenRules(given=self._given[self._num_generated])
        forbidden: tuple[int, ...] = ()
        if self._num_generated < params.min_tokens:
            forbidden = self._endings
        constraint = params.constraint
        if constraint is not None and self.constrained_from is None:
            forbidden = (*self._endings, *constraint.forbidden_before)
        if self._said is None and not forbidden:
            return None
        said = () if self._said is None else tuple(self._said.items())
        return TokenRules(self._prompt_ids, said, forbidden)
