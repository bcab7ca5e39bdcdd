"""What a worker is asked to do and what it says back: requests, sampling parameters, events."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from ripresa.workers.errors import RipresaError
from ripresa.workers.replay import Recipe


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen.

    Attributes:
        max_tokens: most tokens to generate, at least 1.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; None keeps all.
        top_p: keep the smallest set whose probability reaches p, 0 < p <= 1.
        stop_token_ids: ids that end the stream; a stop id is not emitted as text.
        ignore_eos: the model's end-of-sentence id does not end the stream.
        seed: key of the counter-based randomness, together with the position.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt for the engines, identical on every worker that takes part.

    Attributes:
        request_id: unique among running requests.
        generation: raised by one on every re-execution; messages of older ones are stale.
        token_ids: prompt, followed by tokens that an earlier execution already streamed.
        num_prompt_tokens: how many of `token_ids` are prompt.
        recipe: what to compute, read and write.
        sampling: how to choose tokens.
        deadline: seconds since the epoch after which the work is worthless; None for none.
    """

    request_id: str
    generation: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    recipe: Recipe
    sampling: SamplingParams
    deadline: float | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def max_total_tokens(self) -> int:
        """Positions that the request may ever occupy."""
        return self.num_prompt_tokens + self.sampling.max_tokens


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Reserved:
    """The decode worker holds every page the request can need; a prefill may be spent on it.

    Attributes:
        worker_id: the decode worker that holds them.
        local: the decode worker prefills by itself; no encoder is needed.
    """

    worker_id: str
    local: bool


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """The prompt's state is complete on the decode worker."""

    recipe: Recipe


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens that one step produced, in order; `position` is the first one's."""

    position: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WorkCounters:
    """Rows really computed for one request, summed over layers of each half."""

    encoder_rows: int = 0
    decoder_prefill_rows: int = 0
    decoder_rows: int = 0
    transfer_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """The stream is over; exactly one is sent, last, unless the request failed."""

    reason: FinishReason
    stop_token_id: int | None
    num_generated_tokens: int
    counters: WorkCounters = field(default_factory=WorkCounters)


@dataclass(frozen=True, slots=True)
class Failed:
    """The stream is over by an error; nothing follows."""

    error: RipresaError


EngineEvent = Reserved | PrefillDone | Tokens | Finished | Failed


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A worker's load and work so far.

    Attributes:
        num_running: requests in prefill or decode.
        num_waiting: requests that hold pages and wait for a transfer.
        num_blocks, num_free_blocks: KV blocks.
        num_steps: steps run.
        counters: rows of all requests by kind, as planned, and bytes sent or received.
        num_encoder_rows, num_decoder_rows: rows that each half of the model really computed.
    """

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_steps: int
    counters: WorkCounters
    num_encoder_rows: int
    num_decoder_rows: int
