"""How far is one request on this worker: its tokens, its next row, its status?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum

from ripresa.workers.cache.block_table import BlockTable
from ripresa.workers.errors import ErrorCode, RipresaError
from ripresa.workers.request import GenerationRequest, WorkCounters


class SequenceStatus(StrEnum):
    """WAITING: holds pages, its first row depends on a transfer. DONE: no row is left here."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    DONE = "done"
    REMOVED = "removed"


TRANSITIONS: Mapping[SequenceStatus, frozenset[SequenceStatus]] = {
    SequenceStatus.WAITING: frozenset({SequenceStatus.PREFILL, SequenceStatus.REMOVED}),
    SequenceStatus.PREFILL: frozenset(
        {SequenceStatus.DECODE, SequenceStatus.DONE, SequenceStatus.REMOVED}
    ),
    SequenceStatus.DECODE: frozenset({SequenceStatus.DONE, SequenceStatus.REMOVED}),
    SequenceStatus.DONE: frozenset({SequenceStatus.REMOVED}),
    SequenceStatus.REMOVED: frozenset(),
}


class Sequence:
    """One request with its pages. Counts are absolute positions or rows.

    Attributes:
        request: what was asked; its recipe holds for life.
        pages: blocks and slot.
        is_inbound: the encoder's rows come by transfer; only decoder rows are computed here.
        sampling: the request's, with the recipe's seed.
        token_ids: prompt and every token sampled so far.
        position: the next row: of the encoder half, or of the tail if `is_inbound`.
        counters: rows computed so far.
    """

    __slots__ = (
        "_status",
        "counters",
        "is_inbound",
        "pages",
        "position",
        "request",
        "sampling",
        "token_ids",
    )

    def __init__(self, request: GenerationRequest, pages: BlockTable, *, is_inbound: bool) -> None:
        self.request = request
        self.pages = pages
        self.is_inbound = is_inbound
        self.sampling = replace(request.sampling, seed=request.recipe.seed)
        self.token_ids = list(request.token_ids)
        self.position = request.recipe.decoder_start if is_inbound else request.recipe.start
        self.counters = WorkCounters()
        self._status = SequenceStatus.WAITING

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
        """End of the prefill: the tokens the request came with."""
        return self.request.num_tokens

    def move(self, status: SequenceStatus) -> None:
        """Change the status; raises RipresaError (INTERNAL) for a move `TRANSITIONS` lacks."""
        if status not in TRANSITIONS[self._status]:
            raise RipresaError(
                ErrorCode.INTERNAL,
                f"request {self.request.request_id} cannot go from {self._status} to {status}",
            )
        self._status = status
