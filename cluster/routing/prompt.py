"""What the gateway asks of a router, and what the router says back: the seam between the two.

Plain values and one protocol: no ray, grpc or torch. The gateway validates a request completely
before a `PromptRequest` exists; the router places it, drives the workers and streams events.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from ripresa.workers.errors import Unavailable
from ripresa.workers.kept_streams import KeptPrompt
from ripresa.workers.prefix_sources import PrefixOutcome
from ripresa.workers.replay import Recipe, TailVariant
from ripresa.workers.request import CacheUse, Finished, SamplingParams, StreamTicket, Tokens


@dataclass(slots=True)
class Hold:
    """What the end of reading means to a stream that others may go on with.

    Attributes:
        ends_work: closing is a client's cancel, and ends the work if nobody else reads; otherwise
            the stream goes on.
    """

    ends_work: bool = True


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """One valid prompt on its way to the workers.

    Attributes:
        request_id: unique among the running requests of the gateway that made it.
        token_ids: the prompt, not empty, every id below the model's vocabulary size.
        sampling: complete, the seed included.
        tail: which rows the decoder half of the prefill may read.
        deadline: seconds since the epoch after which the work is worthless; None for none.
        cache: what it may reuse, and leave for others.
        tenant_salt: requests with different ones share no cached state.
        session_id: the conversation that it goes on with; None for none.
        priority: lower ones come first, in every queue.
        max_queue_s: longest wait while every worker is full or none is ready; 0 for none.
        expect_next_within_s: the client expects to go on within so many seconds after the answer;
            None if it did not say so.
        stream: under what others may go on with the answer; None ends it with its reader.
        hold: what that end means.
    """

    request_id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    tail: TailVariant
    deadline: float | None = None
    cache: CacheUse = field(default_factory=CacheUse)
    tenant_salt: bytes = b""
    session_id: str | None = None
    priority: int = 0
    max_queue_s: float = 0.0
    expect_next_within_s: float | None = None
    stream: StreamTicket | None = None
    hold: Hold = field(default_factory=Hold, compare=False)


class Waste(StrEnum):
    """Why computed rows led to no answer.

    CANCELLED: the client went before the first token. RETRIED: the request was executed again.
    FAILED: it failed for good.
    """

    CANCELLED = "cancelled"
    RETRIED = "retried"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Placed:
    """The prompt has its workers. Sent once, first.

    Attributes:
        worker_id: the decode worker that streams the answer.
        encoder_id: the encoder worker that prefills; None when the decode worker does it itself.
        recipe: what of the prompt is computed; None while the encoder worker has yet to fix it.
        reason: why these workers, in words for a log line.
        prefix: what the worker that computes the prompt brought and held, if the recipe is known.
        hit_error_tokens: by how many tokens the planned hit exceeded the real one; negative if
            more was there; None if nothing was planned with.
    """

    worker_id: str
    encoder_id: str | None
    recipe: Recipe | None
    reason: str
    prefix: PrefixOutcome = field(default_factory=PrefixOutcome)
    hit_error_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Planned:
    """The recipe is fixed; every re-execution follows it. Sent once, unless `Placed` had it.

    Attributes:
        prefix, hit_error_tokens: see `Placed`.
    """

    recipe: Recipe
    prefix: PrefixOutcome = field(default_factory=PrefixOutcome)
    hit_error_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """What was known of a resumed stream has been told. Sent once, by `Router.resume` alone.

    Attributes:
        is_lost: nothing was known; the answer is computed anew.
    """

    is_lost: bool = False


RouterEvent = Placed | Planned | CaughtUp | Tokens | Finished


class Router(Protocol):
    """Runs prompts on workers. One instance serves many requests on one event loop."""

    def generate(self, prompt: PromptRequest) -> AsyncGenerator[RouterEvent]:
        """Stream one request's events, in this order: `Placed`, `Planned` if the placement lacked
        the recipe, any number of `Tokens`, `Finished`.

        `Tokens.position` continues without gap from the prompt's length, whatever worker or
        re-execution produced them. Closing the generator stops the work everywhere, unless the
        prompt's `hold` says otherwise.

        Raises:
            RipresaError: the request failed; nothing follows. CANCELLED after `abort`.
        """

    async def find_stream(self, stream_id: str, worker_id: str) -> KeptPrompt | None:
        """What a stream goes on from; None if no worker keeps it.

        Args:
            worker_id: where it was placed first.

        Raises:
            RipresaError: UNAVAILABLE; the worker that kept it is lost.
        """

    def resume(self, prompt: PromptRequest) -> AsyncGenerator[RouterEvent]:
        """The events of a stream that `generate` has begun, in whatever process, from its first one
        on; `CaughtUp` follows those that were known. What no worker has is computed anew.

        Raises:
            RipresaError: as `generate`.
        """

    async def abort(self, request_id: str) -> bool:
        """End a running request, by whichever gateway it came. False: no such request runs."""

    def called(self, request_id: str, tools: Sequence[str]) -> None:
        """The answer of a finished request called these tools: its session will come back.

        What it left is kept for that. Nothing if the request is not remembered.
        """

    async def end_session(self, tenant_salt: bytes, session_id: str) -> None:
        """The session is closed: nothing of it needs to be kept. Idempotent."""

    async def num_held_tokens(self, token_ids: Sequence[int], tenant_salt: bytes) -> int:
        """Leading tokens of a prompt whose state the cluster holds now, whole blocks; 0 also where
        that is not known."""

    def explain(self, request_id: str) -> list[str]:
        """How a request was placed, in lines for a reader.

        Raises:
            RipresaError: NOT_FOUND; it is not remembered.
        """

    async def why_not_ready(self) -> Unavailable | None:
        """Why no request could be placed now; None if one could."""
