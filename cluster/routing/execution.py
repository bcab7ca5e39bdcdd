"""What is known of a request over all its executions? Tokens, hashes, recipe, generations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from ripresa.cluster.routing.prompt import PromptRequest
from ripresa.workers.cache.block_hash import BlockHasher, worker_context
from ripresa.workers.errors import ErrorCode, RipresaError
from ripresa.workers.prefix_sources import PrefixOutcome, PrefixSources
from ripresa.workers.replay import Recipe
from ripresa.workers.request import Finished, GenerationRequest, Tokens, WorkCounters

E = TypeVar("E", Tokens, Finished)


class Execution:
    """One request, however often it is executed.

    Args:
        first_generation: above those that workers have seen of this id.
        claim: names the request's claim in the prefix directory.
        gateway: see `GenerationRequest`.

    Attributes:
        recipe: fixed by the worker that ran the encoder rows first; it never changes.
        next_generation: above those of every execution so far.
        hashes: of the full blocks of prompt and streamed tokens, once `hash` was called.
        is_placed, is_planned: the client has heard of its worker, and of its recipe.
        prefilled_on, prefix: what else it has heard of that.
        placed_on: that worker; the next one to be asked while nobody has heard of any.
        is_followed: what some worker had kept of it was told.
        followed_on: that worker, the last one.
    """

    def __init__(
        self, prompt: PromptRequest, first_generation: int, claim: str, gateway: str = ""
    ) -> None:
        self.prompt = prompt
        self.claim = claim
        self.gateway = gateway
        self.recipe: Recipe | None = None
        self.next_generation = first_generation
        self.hashes: tuple[bytes, ...] = ()
        self.is_placed = False
        self.is_planned = False
        self.placed_on = ""
        self.prefilled_on: str | None = None
        self.prefix: PrefixOutcome | None = None
        self.is_followed = False
        self.followed_on = ""
        self._streamed: list[int] = []
        self._events: list[Tokens] = []
        self._hasher: BlockHasher | None = None
        self._prefill_counters = WorkCounters()

    @property
    def num_tokens(self) -> int:
        """Tokens that the next execution starts with."""
        return len(self.prompt.token_ids) + len(self._streamed)

    @property
    def max_total_tokens(self) -> int:
        """Positions that the request may ever occupy."""
        return len(self.prompt.token_ids) + self.prompt.sampling.max_tokens

    @property
    def has_streamed(self) -> bool:
        """The client has got a token."""
        return bool(self._streamed)

    @property
    def is_hashed(self) -> bool:
        return self._hasher is not None

    def hash(self, layout_digest: bytes, window: int) -> None:
        """Hash the blocks that are new since the last call.

        Args:
            layout_digest: of the workers; only that of the first call counts.
            window: W, likewise.
        """
        if self._hasher is None:
            salt = self.prompt.tenant_salt
            self._hasher = BlockHasher(worker_context(layout_digest, window, salt))
            self.hashes = self._hasher.extend(self.prompt.token_ids)
        known = self._hasher.num_tokens - len(self.prompt.token_ids)
        self.hashes += self._hasher.extend(self._streamed[known:])

    def fix(self, recipe: Recipe | None) -> None:
        """Book the recipe that a worker reports; raises RipresaError (INTERNAL) for another one."""
        if self.recipe is None:
            self.recipe = recipe
        elif recipe != self.recipe:
            raise RipresaError(
                ErrorCode.INTERNAL,
                f"request {self.prompt.request_id} was executed by another recipe than its first",
            )

    def stream(self, tokens: Tokens) -> None:
        """Book tokens on their way to the client."""
        self._streamed += tokens.token_ids
        if self.prompt.stream is not None:
            self._events.append(tokens)

    def prefilled(self, counters: WorkCounters) -> None:
        """Book an encoder's work."""
        self._prefill_counters = counters

    def counted(self, event: E) -> E:
        """The decode worker's event, with the work of the encoder added."""
        own, encoder = event.counters, self._prefill_counters
        counters = replace(own, encoder_rows=own.encoder_rows + encoder.encoder_rows)
        return replace(event, counters=counters)

    def next_request(
        self,
        sources: PrefixSources | None = None,
        *,
        leads: bool = False,
        max_chunk_rows: int | None = None,
        keeps: bool = False,
    ) -> GenerationRequest:
        """The request from the prompt and what was streamed; it outdates every earlier one.

        Args:
            sources: where its worker may bring cached state from.
            leads: it holds the claim of what is missing.
            max_chunk_rows: see `GenerationRequest`.
            keeps: its worker keeps the stream; the others only know that it outlives its gateway.
        """
        generation = self.next_generation
        self.next_generation += 1
        prompt = self.prompt
        ticket = prompt.stream
        if ticket is not None:
            origin, earlier = (ticket.origin, tuple(self._events)) if keeps else (b"", ())
            ticket = replace(
                ticket,
                origin=origin,
                placed_on=self.placed_on,
                prefilled_on=self.prefilled_on,
                prefix=self.prefix,
                earlier=earlier,
            )
        return GenerationRequest(
            request_id=prompt.request_id,
            generation=generation,
            token_ids=prompt.token_ids + tuple(self._streamed),
            num_prompt_tokens=len(prompt.token_ids),
            recipe=self.recipe,
            sampling=prompt.sampling,
            deadline=prompt.deadline,
            tail=prompt.tail,
            cache=prompt.cache,
            tenant_salt=prompt.tenant_salt,
            session_id=prompt.session_id,
            sources=sources or PrefixSources(),
            claim=self.claim if leads else None,
            priority=prompt.priority,
            max_chunk_rows=max_chunk_rows,
            expect_next_within_s=prompt.expect_next_within_s,
            stream=ticket,
            gateway=self.gateway,
        )


def last_hash(hashes: Sequence[bytes], num_tokens: int, window: int) -> bytes | None:
    """Hash of the last full block below a position; None if there is none."""
    number = num_tokens // window
    return hashes[number - 1] if 0 < number <= len(hashes) else None
