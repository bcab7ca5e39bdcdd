"""What the gateway asks of a router, and what the router says back: the seam between the two.

Plain values and one protocol: no ray, grpc or torch. The gateway validates a request completely
before a `PromptRequest` exists; the router places it, drives the workers and streams events.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from ripresa.workers.replay import Recipe, TailVariant
from ripresa.workers.request import Finished, SamplingParams, Tokens


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """One valid prompt on its way to the workers.

    Attributes:
        request_id: unique among the running requests of the gateway that made it.
        token_ids: the prompt, not empty, every id below the model's vocabulary size.
        sampling: complete, the seed included.
        tail: which rows the decoder half of the prefill may read.
        deadline: seconds since the epoch after which the work is worthless; None for none.
    """

    request_id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    tail: TailVariant
    deadline: float | None = None


@dataclass(frozen=True, slots=True)
class Placed:
    """The prompt has its workers and its recipe. Sent once, before any token.

    Attributes:
        worker_id: the decode worker that streams the answer.
        encoder_id: the encoder worker that prefills; None when the decode worker does it itself.
        recipe: fixed at admission; every re-execution follows it.
        reason: why these workers, in words for a log line.
    """

    worker_id: str
    encoder_id: str | None
    recipe: Recipe
    reason: str


RouterEvent = Placed | Tokens | Finished


class Router(Protocol):
    """Runs prompts on workers. One instance serves many requests on one event loop."""

    def generate(self, prompt: PromptRequest) -> AsyncGenerator[RouterEvent]:
        """Stream one request's events: `Placed`, any number of `Tokens`, `Finished`, in this order.

        `Tokens.position` continues without gap from the prompt's length, whatever worker or
        re-execution produced them. Closing the generator stops the work everywhere.

        Raises:
            RipresaError: the request failed; nothing follows. CANCELLED after `abort`.
        """

    async def abort(self, request_id: str) -> bool:
        """End a running request, by whichever gateway it came. False: no such request runs."""

    async def ready(self) -> bool:
        """Whether a request could be placed now."""
