"""What does an engine keep of one admitted request, and who hears of its progress?"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from ripresa.workers.errors import RipresaError
from ripresa.workers.grammar import Matcher
from ripresa.workers.models.base import EncoderOutput
from ripresa.workers.prefix_cache import RequestPrefix
from ripresa.workers.prefix_sources import PrefixOutcome
from ripresa.workers.request import GenerationRequest
from ripresa.workers.scheduling.scheduler import Progress
from ripresa.workers.sequence import Sequence, SequenceStatus

OnLogits = Callable[[int, torch.Tensor], None]
"""Hears the logits of a request's decoder rows, as steps compute them: the first row's position,
and [rows, vocab] float32. Row p foretells token p + 1. Called on the event loop; must not raise.
What a preemption lost comes again."""


class Listener(Protocol):
    """A request's owner. Called on the event loop, between steps; must not raise."""

    def on_progress(
        self,
        progress: Progress,
        encoder_output: EncoderOutput | None,
        windows: Mapping[int, torch.Tensor],
    ) -> None:
        """A step computed rows of the request.

        Args:
            encoder_output: what was to leave it.
            windows: encoder windows that it cut, by boundary.
        """

    def on_failed(self, error: RipresaError) -> None:
        """The request is over; called at most once, and never after its last progress."""

    def inbound_rows(self, start: int, stop: int) -> EncoderOutput:
        """Handed-over encoder output of rows [start, stop)."""


class Job:
    """One admitted request inside an engine.

    Attributes:
        sequence: its rows and pages.
        prefix: its blocks by name.
        listener: who hears of it.
        outcome: what was brought for it before it was admitted.
        released: set once its pages are free.
        error: why it failed, if it did.
        matcher: follows the answer through its constraint; None without one.
        on_logits: hears what each decoder row foretells; None if nobody asked.
        tail_bytes: set aside for its encoder output.
        is_prefilled: its prompt's state is complete on the worker that decodes.
        patience_until: engine clock in seconds until which a WAITING request may wait; None for
            as long as its deadline allows.
    """

    __slots__ = (
        "_moved",
        "error",
        "is_prefilled",
        "listener",
        "matcher",
        "on_logits",
        "outcome",
        "patience_until",
        "prefix",
        "released",
        "sequence",
        "tail_bytes",
    )

    def __init__(
        self,
        sequence: Sequence,
        prefix: RequestPrefix,
        listener: Listener,
        outcome: PrefixOutcome,
        tail_bytes: int = 0,
        matcher: Matcher | None = None,
        on_logits: OnLogits | None = None,
    ) -> None:
        self.sequence = sequence
        self.prefix = prefix
        self.listener = listener
        self.released = asyncio.Event()
        self.error: RipresaError | None = None
        self.patience_until: float | None = None
        self.outcome = outcome
        self.tail_bytes = tail_bytes
        self.is_prefilled = False
        self.matcher = matcher
        self.on_logits = on_logits
        self._moved = asyncio.Event()

    def notify(self) -> None:
        """Rows were committed, the recipe was fixed, or the request is over."""
        self._moved.set()
        self._moved = asyncio.Event()

    async def moved(self) -> None:
        """Wait for the next `notify`."""
        await self._moved.wait()

    @property
    def request(self) -> GenerationRequest:
        return self.sequence.request

    @property
    def is_over(self) -> bool:
        return self.sequence.status is SequenceStatus.REMOVED

    @property
    def due(self) -> float | None:
        """The earliest moment at which the request must be failed."""
        if self.sequence.status is not SequenceStatus.WAITING or self.patience_until is None:
            return self.request.deadline
        if self.request.deadline is None:
            return self.patience_until
        return min(self.request.deadline, self.patience_until)
