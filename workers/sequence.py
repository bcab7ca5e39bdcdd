"""How far is one request on this worker: its tokens, its next row, its status?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum

from ripresa.workers.cache.block_table import BlockTable
from ripresa.workers.errors import ErrorCode, RipresaError
from ripresa.workers.prompt_plan import PromptPlan
from ripresa.workers.replay import Recipe
from ripresa.workers.replay_plan import EncoderPass
from ripresa.workers.request import GenerationRequest, WorkCounters
from ripresa.workers.token_history import TokenHistory


class SequenceStatus(StrEnum):
    """WAITING: holds pages, its first row depends on a transfer. DONE: no row is left here.

    PARKED: had to give up its pages in decode, and goes on when there are some again.
    """

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    PARKED = "parked"
    DONE = "done"
    REMOVED = "removed"


TRANSITIONS: Mapping[SequenceStatus, frozenset[SequenceStatus]] = {
    SequenceStatus.WAITING: frozenset({SequenceStatus.PREFILL, SequenceStatus.REMOVED}),
    SequenceStatus.PREFILL: frozenset(
        {SequenceStatus.DECODE, SequenceStatus.DONE, SequenceStatus.REMOVED}
    ),
    SequenceStatus.DECODE: frozenset(
        {SequenceStatus.DONE, SequenceStatus.PARKED, SequenceStatus.REMOVED}
    ),
    SequenceStatus.PARKED: frozenset(
        {SequenceStatus.DECODE, SequenceStatus.PREFILL, SequenceStatus.REMOVED}
    ),
    SequenceStatus.DONE: frozenset({SequenceStatus.REMOVED}),
    SequenceStatus.REMOVED: frozenset(),
}


class Sequence:
    """One request with its pages. Counts are absolute positions or rows.

    Args:
        plan: how its encoder rows are computed here; None if they come by transfer.
        window: W in tokens.
        eos_token_id: the model's end of sentence; None for none.
        arrival: ascends with every sequence of a scheduler.

    Attributes:
        request: what was asked.
        arrival: who came before whom.
        pages: blocks and slot.
        is_inbound: the encoder's rows come by transfer; only decoder rows are computed here.
        sampling: the request's, with the recipe's seed.
        history: what of its tokens decides the next one.
        token_ids: prompt and every token sampled so far.
        position: the next row: of the encoder half, or of the tail if `is_inbound`.
        committed: positions below it have been computed here, or have arrived.
        counters: rows computed so far.
    """

    __slots__ = (
        "_is_restarted",
        "_pass_number",
        "_passes",
        "_prefill_stop",
        "_recipe",
        "_status",
        "_window",
        "arrival",
        "committed",
        "counters",
        "history",
        "is_inbound",
        "pages",
        "position",
        "request",
        "sampling",
        "token_ids",
    )

    def __init__(
        self,
        request: GenerationRequest,
        pages: BlockTable,
        plan: PromptPlan | None,
        window: int,
        eos_token_id: int | None = None,
        arrival: int = 0,
    ) -> None:
        self.request = request
        self.arrival = arrival
        self.pages = pages
        self.is_inbound = plan is None
        self.sampling = request.sampling
        self.token_ids = list(request.token_ids)
        self.history = TokenHistory(
            request.sampling,
            request.token_ids,
            request.num_prompt_tokens,
            eos_token_id,
            request.given,
        )
        self.position = 0
        self.committed = 0
        self.counters = WorkCounters()
        self._recipe: Recipe | None = None
        self._passes: tuple[EncoderPass, ...] = ()
        self._pass_number = 0
        self._window = window
        self._prefill_stop = request.num_tokens
        self._is_restarted = False
        self._status = SequenceStatus.WAITING
        if plan is not None:
            self.fix(plan.recipe)
            self._follow(plan)

    @property
    def rank(self) -> tuple[int, int]:
        """Ascends with who comes later: by priority, then by arrival."""
        return self.request.priority, self.arrival

    @property
    def recipe(self) -> Recipe:
        """What is computed, read and written; raises RipresaError (INTERNAL) before `fix`."""
        if self._recipe is None:
            raise RipresaError(
                ErrorCode.INTERNAL, f"the recipe of request {self.request.request_id} is not fixed"
            )
        return self._recipe

    @property
    def is_fixed(self) -> bool:
        return self._recipe is not None

    def fix(self, recipe: Recipe) -> None:
        """Set the recipe, which holds from the first row on.

        Raises RipresaError (INTERNAL) once the sequence computes.
        """
        if self._status is not SequenceStatus.WAITING:
            raise RipresaError(
                ErrorCode.INTERNAL, f"request {self.request.request_id} changes its recipe too late"
            )
        self._recipe = recipe
        self.sampling = replace(self.request.sampling, seed=recipe.seed)
        self.position = recipe.decoder_start

    def restart(self, plan: PromptPlan) -> None:
        """Compute all tokens known by now once more, by the same recipe: the state is lost."""
        self.is_inbound = False
        self._is_restarted = True
        self._prefill_stop = self.num_tokens
        self._follow(plan)

    @property
    def is_restarted(self) -> bool:
        """Its prompt was computed before, and its owner knows."""
        return self._is_restarted

    def _follow(self, plan: PromptPlan) -> None:
        self._passes, self._pass_number = plan.passes, 0
        self.position = plan.passes[0].start
        self.committed = plan.passes[0].write_floor

    @property
    def encoder_pass(self) -> EncoderPass:
        """The rows under way. Handed-over rows are one pass that has ended."""
        if not self._passes:
            recipe, stop = self.recipe, self.prefill_stop
            return EncoderPass(recipe.start, stop, recipe.swa_floor, recipe.write_floor)
        return self._passes[self._pass_number]

    @property
    def is_last_pass(self) -> bool:
        return self._pass_number >= len(self._passes) - 1

    def num_row_layers_left(self, num_layers: int) -> int:
        """Encoder rows that this worker has yet to compute of the prefill, counted once for each
        of the `num_layers` layers that computes them."""
        later = self._passes[self._pass_number + 1 :]
        args = self._window, num_layers
        now = self.encoder_pass.num_row_layers(self.position, *args) if self._passes else 0
        return now + sum(rows.num_row_layers(rows.start, *args) for rows in later)

    def append(self, token_id: int) -> None:
        """A token was sampled."""
        self.token_ids.append(token_id)
        self.history.add(token_id)

    def advance(self, position: int) -> None:
        """Rows up to `position` are computed; a pass that ends there makes way for the next."""
        self.position = position
        self.committed = max(self.committed, position)
        interval = self.recipe.anchor_interval
        if position == self.encoder_pass.stop and not self.is_last_pass:
            self._pass_number += 1
            self.position = self.encoder_pass.start
        elif interval is not None and position >= self.prefill_stop and position % interval == 0:
            start = position - self._window
            self._passes = (EncoderPass(start, position + interval, start, position, position),)
            self._pass_number = 0
            self.position = start

    @property
    def status(self) -> SequenceStatus:
        return self._status

    @property
    def num_tokens(self) -> int:
        """Known tokens; in decode the last of them has no row yet."""
        return len(self.token_ids)

    @property
    def num_generated_tokens(self) -> int:
        """Tokens after the prompt, those of earlier executions and a stop token included."""
        return self.num_tokens - self.request.num_prompt_tokens

    @property
    def prefill_stop(self) -> int:
        """End of the prefill: the tokens the request came with, or those known at a restart."""
        return self._prefill_stop

    def move(self, status: SequenceStatus) -> None:
        """Change the status; raises RipresaError (INTERNAL) for a move `TRANSITIONS` lacks."""
        if status not in TRANSITIONS[self._status]:
            raise RipresaError(
                ErrorCode.INTERNAL,
                f"request {self.request.request_id} cannot go from {self._status} to {status}",
            )
        self._status = status
