"""What a worker is asked to do and what it says back: requests, sampling parameters, events."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from ripresa.workers.cache.block_store import StoreStats
from ripresa.workers.errors import RipresaError
from ripresa.workers.prefix_sources import PrefixOutcome, PrefixSources
from ripresa.workers.replay import Recipe, ReplayMode, TailVariant
from ripresa.workers.scheduling.step_rates import Rates
from ripresa.workers.shadow_counters import ShadowCounters


@dataclass(frozen=True, slots=True)
class OutputConstraint:
    """What an answer must be. What it allows next follows from it and the answer's tokens alone.

    Attributes:
        grammar: in llguidance's dialect of Lark, over the bytes of tokens; `<[7]>` is token id 7,
            and a special token is matched by its id alone. Behind a whole match only the end of
            sentence may come.
        field: the part of the client's request that asked for it, for refusals.
        after: it holds behind the first of these ids; None for the whole answer.
        forbidden_before: what must not come before `after` has; nor does the end of the answer.
    """

    grammar: str
    field: str
    after: int | None = None
    forbidden_before: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen.

    In this order: bias, repetition penalty, frequency and presence penalty, what is forbidden;
    temperature; top-k and min-p, then top-p of what they left.

    Attributes:
        max_tokens: most tokens to generate, at least 1.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; None keeps all.
        top_p: keep the smallest set whose probability reaches p, 0 < p <= 1.
        stop_token_ids: ids that end the stream; a stop id is not emitted as text.
        ignore_eos: the model's end-of-sentence id does not end the stream.
        seed: key of the counter-based randomness, together with the position.
        min_p: keep tokens at least this share as likely as the likeliest, 0 <= min_p <= 1.
        presence_penalty: subtracted from the logit of every token that was generated.
        frequency_penalty: the same, times how often it was.
        repetition_penalty: logits of tokens of the prompt or the answer are divided by it if
            positive, else multiplied; above 0, 1 changes nothing.
        logit_bias: token ids and what is added to their logits.
        banned_token_ids: ids that are never chosen.
        min_tokens: neither the end of sentence nor a stop id comes before so many tokens, unless
            the constraint allows nothing else.
        constraint: what the answer must be; None for anything.
        logprobs: how many of the likeliest tokens to report with each chosen one, by their log
            probabilities under the unchanged logits; None reports nothing.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    banned_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    constraint: OutputConstraint | None = None
    logprobs: int | None = None

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty - 1)
        return any(penalty != 0 for penalty in penalties)


@dataclass(frozen=True, slots=True)
class CacheUse:
    """What a request may take from and leave in the workers' prefix caches.

    Attributes:
        mode: which cached blocks it may reuse.
        reads: it may reuse state that is cached or parked.
        writes: others may reuse what it computes.
        resumes: it may go on from its session's parked state.
    """

    mode: ReplayMode = ReplayMode.BOUNDED
    reads: bool = True
    writes: bool = True
    resumes: bool = True


@dataclass(frozen=True, slots=True)
class StreamTicket:
    """Under what a decode worker keeps a request's events, so that another gateway can tell them.

    Attributes:
        stream_id: of the whole stream; whoever knows it may read it.
        choice: which answer of it this is.
        origin: the client's request in the gateways' own terms; workers only keep it.
        placed_on: the decode worker of the first execution.
        prefilled_on: the encoder worker that was to compute its prompt; None for none.
        prefix: what the first execution brought and held for it; None on the first one.
        earlier: what earlier executions have streamed.
    """

    stream_id: str
    choice: int
    origin: bytes
    placed_on: str = ""
    prefilled_on: str | None = None
    prefix: PrefixOutcome | None = None
    earlier: tuple[Tokens, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt for the engines, identical on every worker that takes part.

    Attributes:
        request_id: unique among running requests.
        generation: raised by one on every re-execution; messages of older ones are stale.
        token_ids: prompt, followed by tokens that an earlier execution already streamed.
        num_prompt_tokens: how many of `token_ids` are prompt.
        recipe: what the first execution computed, read and wrote, to be followed; None for the
            first execution itself: the worker that runs the encoder rows fixes it.
        sampling: how to choose tokens.
        deadline: seconds since the epoch after which the work is worthless; None for none.
        tail: which rows the decoder half of the prefill reads, if no recipe says it.
        cache: what it may reuse, and leave for others.
        tenant_salt: secret of the tenant: requests with different ones share nothing.
        session_id: the conversation whose next turn this is; None for none.
        sources: where the worker may bring cached state from that it lacks, before it plans.
        claim: under which the prompt's missing blocks are claimed in the prefix directory; the
            worker that computes them keeps it up. None for none.
        priority: lower ones are computed first and parked last.
        max_chunk_rows: most rows of one chunk of its prefill beside decoding sequences, so that
            their next tokens are not late; None for the step's whole budget.
        expect_next_within_s: the client expects to go on within so many seconds after the answer;
            None if it did not say so.
        stream: outlives its reader under this ticket; None for work that ends with its reader.
        given: the answer, if it is known and only to be scored: these tokens come, `max_tokens` of
            them, whatever `sampling` would choose, and none of them ends the stream.
        gateway: who asks, in this life; one of another gateway is another request, whatever its
            id, unless it goes on with the stream.
    """

    request_id: str
    generation: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    recipe: Recipe | None
    sampling: SamplingParams
    deadline: float | None = None
    tail: TailVariant = TailVariant.FLOORED
    cache: CacheUse = field(default_factory=CacheUse)
    tenant_salt: bytes = b""
    session_id: str | None = None
    sources: PrefixSources = field(default_factory=PrefixSources)
    claim: str | None = None
    priority: int = 0
    max_chunk_rows: int | None = None
    expect_next_within_s: float | None = None
    stream: StreamTicket | None = None
    given: tuple[int, ...] = ()
    gateway: str = ""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def max_total_tokens(self) -> int:
        """Positions that the request may ever occupy."""
        return self.num_prompt_tokens + self.sampling.max_tokens

    def replaces(self, other: GenerationRequest) -> bool:
        """Whether it is a newer execution of the same request."""
        mine, others = self.stream, other.stream
        goes_on = mine is not None and others is not None and mine.stream_id == others.stream_id
        return (goes_on or self.gateway == other.gateway) and self.generation > other.generation


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Bringing:
    """The decode worker lives and has something to do before it reserves.

    The first event of a request for which peers or a disk are asked, or whose constraint is to be
    compiled; `Reserved` comes when that has ended.
    """

    worker_id: str


@dataclass(frozen=True, slots=True)
class Reserved:
    """The decode worker holds every page the request can need; a prefill may be spent on it.

    Attributes:
        worker_id: the decode worker that holds them.
        local: the decode worker prefills by itself; no encoder is needed.
        recipe: fixed; None while the encoder worker has yet to fix it.
        prefix: what the decode worker brought and held.
    """

    worker_id: str
    local: bool
    recipe: Recipe | None = None
    prefix: PrefixOutcome = field(default_factory=PrefixOutcome)


@dataclass(frozen=True, slots=True)
class RecipeFixed:
    """The encoder worker has fixed the recipe that `Reserved` lacked. Sent once.

    Attributes:
        prefix: what the encoder worker brought and held.
    """

    recipe: Recipe
    prefix: PrefixOutcome = field(default_factory=PrefixOutcome)


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """The prompt's state is complete on the decode worker."""

    recipe: Recipe


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of probabilities under the model's own logits.

    Attributes:
        chosen: the generated token's.
        top: the likeliest token ids with theirs, likeliest first.
    """

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class WorkCounters:
    """Rows really computed for one request, summed over layers of each half."""

    encoder_rows: int = 0
    decoder_prefill_rows: int = 0
    decoder_rows: int = 0
    transfer_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens that one step produced, in order; `position` is the first one's.

    `logprobs` has one entry a token if the request asked for them, and is empty otherwise.
    `counters` are of the work up to here, for a reader who wants no more.
    """

    position: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    counters: WorkCounters = field(default_factory=WorkCounters, compare=False)


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


EngineEvent = Bringing | Reserved | RecipeFixed | PrefillDone | Tokens | Finished | Failed


@dataclass(frozen=True, slots=True)
class PullCounters:
    """What a worker has exchanged with its peers' caches so far.

    Attributes:
        ends: how its own pulls ended (`PullEnd`), and how often.
        received_bytes: payload of its own pulls.
        num_served: pulls of others that it answered to their end.
        sent_bytes: payload of others' pulls.
    """

    ends: tuple[tuple[str, int], ...] = ()
    received_bytes: int = 0
    num_served: int = 0
    sent_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LeaseCounters:
    """What became of the leases of a worker's sessions.

    Attributes:
        outcomes: by name (`LeaseOutcome`), and how often.
        num_pinned_blocks: KV blocks that leases pin now.
        prefetched: KV blocks that were read back ahead, by what became of them
            (`PrefetchOutcome`).
    """

    outcomes: tuple[tuple[str, int], ...] = ()
    num_pinned_blocks: int = 0
    prefetched: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class MoveCounters:
    """What became of last copies that a worker had to evict so far, in blocks.

    Attributes:
        num_moved: another worker keeps them.
        num_refused: the worker that was to keep them had no older ones.
        num_late: they were gone, or the transfer broke, before they had reached it.
        num_taken: of other workers, that this one keeps.
        sent_bytes: payload.
    """

    num_moved: int = 0
    num_refused: int = 0
    num_late: int = 0
    num_taken: int = 0
    sent_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A worker's load and work so far.

    Attributes:
        num_running: requests in prefill or decode.
        num_waiting: requests that hold pages and wait for a transfer.
        num_blocks: KV blocks in the pool.
        num_free_blocks: those that a new request could have: free, or cached and unused.
        num_steps: steps run.
        counters: rows of all requests by kind, as planned, and bytes sent or received.
        num_encoder_rows, num_decoder_rows: rows that each half of the model really computed.
        num_row_layers: the encoder rows, counted once for each layer that they passed.
        num_cut_short_tokens: those whose encoder rows were computed of prompts that never got to
            the first token: cancelled, failed, or computed anew elsewhere.
        num_queued_rows: rows of prompts that are admitted and not computed yet, of both halves.
        num_decoding: streams that take a row of each step.
        num_parked: streams that gave up their pages and wait for others.
        num_preemptions: times that a stream had to.
        rates: how fast it computes.
        disk: what it did with the disk tier; None without one.
        pulls: what went to and came from peers' caches.
        moves: last copies that other workers keep.
        leases: what is kept for sessions whose tools run.
        num_sessions: sessions whose states are parked.
        shadow: how far served answers were from exact replay; its own rows are in no other count.
    """

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_steps: int
    counters: WorkCounters
    num_encoder_rows: int
    num_decoder_rows: int
    num_row_layers: int = 0
    num_cut_short_tokens: int = 0
    num_queued_rows: int = 0
    num_decoding: int = 0
    num_parked: int = 0
    num_preemptions: int = 0
    rates: Rates = field(default_factory=Rates)
    disk: StoreStats | None = None
    pulls: PullCounters = field(default_factory=PullCounters)
    moves: MoveCounters = field(default_factory=MoveCounters)
    leases: LeaseCounters = field(default_factory=LeaseCounters)
    num_sessions: int = 0
    shadow: ShadowCounters = field(default_factory=ShadowCounters)
