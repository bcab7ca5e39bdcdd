"""What is true of one request's stream, whatever protocol it is told in? Numbers, times, recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from types import MappingProxyType

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from ripresa.cluster.gateway.served_model import ServedModel
from ripresa.cluster.gateway.stream_origin import public_id
from ripresa.cluster.gateway.tokenizer import Tokenizer
from ripresa.cluster.routing.prompt import Placed, PromptRequest
from ripresa.cluster.version import VERSION
from ripresa.protos import ripresa_pb2 as pb
from ripresa.workers.errors import ErrorCode, RipresaError
from ripresa.workers.prefix_sources import HitTier, PrefixOutcome
from ripresa.workers.replay import PlanKind, Recipe, ReplayMode, TailVariant
from ripresa.workers.request import Finished, FinishReason, TokenLogprobs, Tokens

TAIL: Mapping[TailVariant, pb.TailVariant.ValueType] = MappingProxyType(
    {tail: pb.TailVariant.Value(f"TAIL_VARIANT_{tail.name}") for tail in TailVariant}
)
KIND: Mapping[PlanKind, pb.PlanKind.ValueType] = MappingProxyType(
    {kind: pb.PlanKind.Value(f"PLAN_KIND_{kind.name}") for kind in PlanKind}
)
MODE: Mapping[ReplayMode, pb.ReplayMode.ValueType] = MappingProxyType(
    {mode: pb.ReplayMode.Value(f"REPLAY_MODE_{mode.name}") for mode in ReplayMode}
)
TIER: Mapping[HitTier, pb.CacheTier.ValueType] = MappingProxyType(
    {tier: pb.CacheTier.Value(f"CACHE_TIER_{tier.name}") for tier in HitTier}
)
REASON: Mapping[FinishReason, pb.FinishReason.ValueType] = MappingProxyType(
    {reason: pb.FinishReason.Value(f"FINISH_REASON_{reason.name}") for reason in FinishReason}
)


@dataclass(slots=True)
class _Times:
    """Seconds on the gateway's monotonic clock; None until it happened."""

    received: float | None
    placed: float | None = None
    first_token: float | None = None
    last_token: float | None = None


class StreamFacts:
    """Booked while a stream runs; its first choice stands for the prompt.

    Args:
        prompts: one for each choice.
        request_id: as the client knows it.
        window: W, tokens in a block.
        encoding: how the prompt was rendered; empty for a prompt as it was given.
        clock: monotonic seconds.
        received: when the request arrived, on that clock; None for a resumed stream, of which no
            times are told.
        start_time: the same in seconds since the epoch.
    """

    def __init__(
        self,
        prompts: Sequence[PromptRequest],
        model: ServedModel,
        tokenizer: Tokenizer,
        *,
        request_id: str,
        window: int,
        encoding: str = "",
        clock: Callable[[], float],
        received: float | None,
        start_time: float,
    ) -> None:
        self._prompt = prompts[0]
        self._request_id = request_id
        self._model = model
        self._tokenizer = tokenizer
        self._encoding = encoding
        self._clock = clock
        self._times = _Times(received)
        self._start_time = start_time
        self._worker_id = ""
        self._window = window
        self._computing_id = ""
        self._recipe: Recipe | None = None
        self._prefix = PrefixOutcome()
        self._num_tokens = [0] * len(prompts)
        silent = set(self._prompt.sampling.stop_token_ids)
        if model.eos_token_id is not None and not self._prompt.sampling.ignore_eos:
            silent.add(model.eos_token_id)
        self._silent_ids = frozenset(silent)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self._prompt.token_ids)

    @property
    def num_cached_tokens(self) -> int:
        return self._require_recipe().start

    @property
    def num_completion_tokens(self) -> int:
        """Of all choices, tokens that ended one included."""
        return sum(self._num_tokens)

    def placed(self, placed: Placed) -> None:
        """Workers hold the first choice's pages."""
        self._times.placed = self._clock()
        self._worker_id = placed.worker_id
        self._computing_id = placed.encoder_id or placed.worker_id

    def planned(self, recipe: Recipe, prefix: PrefixOutcome) -> None:
        """What is computed of the prompt is known, and where the rest of it was."""
        self._recipe = recipe
        self._prefix = prefix

    def started(self) -> pb.Started:
        recipe = self._require_recipe()
        start_time = Timestamp()
        start_time.FromNanoseconds(round(self._start_time * 1e9))
        ticket = self._prompt.stream
        return pb.Started(
            request_id=self._request_id,
            model=self._model.name,
            prompt_tokens=self.num_prompt_tokens,
            cached_tokens=recipe.start,
            worker_id=self._worker_id,
            start_time=start_time,
            stream_id="" if ticket is None else public_id(ticket.stream_id, self._worker_id),
            cache=self._provenance(recipe),
            seed=recipe.seed,
        )

    def tokens(self, choice: int, tokens: Tokens) -> list[int]:
        """Book tokens; those of them that are part of the answer's text.

        Raises:
            RipresaError: they do not continue the choice where it stood.
        """
        expected = self.num_prompt_tokens + self._num_tokens[choice]
        if tokens.position != expected:
            raise RipresaError(
                ErrorCode.INTERNAL,
                f"the stream continued at position {tokens.position}, not {expected}",
            )
        self._num_tokens[choice] += len(tokens.token_ids)
        now = self._clock()
        self._times.last_token = now
        if self._times.first_token is None:
            self._times.first_token = now
        return [token_id for token_id in tokens.token_ids if token_id not in self._silent_ids]

    def num_generated(self, choice: int) -> int:
        return self._num_tokens[choice]

    def finished(self, choice: int, num_generated_tokens: int) -> None:
        """A choice is over by itself; it counts a stop token that was not streamed."""
        self._num_tokens[choice] = num_generated_tokens

    def unstreamed(self, choice: int, finished: Finished) -> list[int]:
        """The stop token that ended a choice, unless it was streamed; to be asked before `finished`
        hears of the end."""
        if finished.num_generated_tokens == self._num_tokens[choice]:
            return []
        return [] if finished.stop_token_id is None else [finished.stop_token_id]

    def completed(self, num_reasoning_tokens: int = 0) -> pb.Completed:
        recipe = self._require_recipe()
        completed = pb.Completed(
            usage=pb.Usage(
                prompt_tokens=self.num_prompt_tokens,
                completion_tokens=self.num_completion_tokens,
                cached_tokens=recipe.start,
                reasoning_tokens=num_reasoning_tokens,
            ),
            cache=self._provenance(recipe),
            timings=self._timings(),
            build=build(self._model, self._tokenizer, self._encoding),
        )
        completed.build.seed = recipe.seed
        return completed

    def call_id(self, choice: int, index: int) -> str:
        """The name of a tool call; the same wherever the stream is told."""
        ticket = self._prompt.stream
        name = self._prompt.request_id if ticket is None else ticket.stream_id
        digest = blake2b(
            f"{name} {choice} {index}".encode(), digest_size=12, person=b"ripresa.call"
        )
        return f"call_{index:02d}_{digest.hexdigest()}"

    def logprobs(self, tokens: Tokens) -> list[pb.TokenLogprob]:
        """Of each token of an event, if they were asked for."""
        pairs = zip(tokens.token_ids, tokens.logprobs, strict=False)
        return [self._logprob(token_id, entry) for token_id, entry in pairs]

    def _logprob(self, token_id: int, entry: TokenLogprobs) -> pb.TokenLogprob:
        spell = self._tokenizer.token_bytes
        return pb.TokenLogprob(
            token_id=token_id,
            token_bytes=spell([token_id]),
            logprob=entry.chosen,
            top=[
                pb.TopLogprob(token_id=i, token_bytes=spell([i]), logprob=logprob)
                for i, logprob in entry.top
            ],
        )

    def _provenance(self, recipe: Recipe) -> pb.CacheProvenance:
        cache = provenance(recipe, self._prompt.cache.mode)
        is_resumed = recipe.kind is PlanKind.RESUME
        segments = self._prefix.segments(recipe.start, self._window, is_resumed=is_resumed)
        for segment in segments:
            cache.segments.add(
                tier=TIER[segment.tier],
                source_worker_id="" if segment.tier is HitTier.PEER else self._computing_id,
                start_token=segment.first,
                num_tokens=segment.num_tokens,
            )
        return cache

    def _require_recipe(self) -> Recipe:
        if self._recipe is None:
            raise RipresaError(ErrorCode.INTERNAL, "the router never placed the prompt")
        return self._recipe

    def _timings(self) -> pb.Timings | None:
        times = self._times
        if times.received is None:
            return None
        timings = pb.Timings()
        spans = (
            (timings.queue, times.received, times.placed),
            (timings.prefill, times.placed, times.first_token),
            (timings.time_to_first_token, times.received, times.first_token),
            (timings.decode, times.first_token, times.last_token),
        )
        for duration, start, stop in spans:
            _set_span(duration, start, stop)
        return timings


def provenance(recipe: Recipe, mode: ReplayMode) -> pb.CacheProvenance:
    """A recipe as clients see it, and the mode by which it was planned."""
    replay_start = recipe.start if recipe.kind is PlanKind.BOUNDED else None
    return pb.CacheProvenance(
        boundary_token=recipe.start,
        replay_mode=MODE[mode],
        recomputed_tokens=recipe.write_floor - recipe.start,
        replay_start_token=replay_start,
        bounded_generations=len(recipe.restarts),
        restarts=recipe.restarts,
        decoder_start_token=recipe.decoder_start,
        tail=TAIL[recipe.tail],
        kind=KIND[recipe.kind],
        swa_floor_token=recipe.swa_floor,
        write_floor_token=recipe.write_floor,
        rules_version=recipe.rules_version,
        anchor_interval=recipe.anchor_interval or 0,
        source_floor_token=recipe.source_floor,
    )


def build(model: ServedModel, tokenizer: Tokenizer, encoding: str = "") -> pb.Build:
    """What produced an answer. `encoding` is empty where no template was applied."""
    return pb.Build(
        prompt_encoding=encoding,
        weights_digest=model.weights_digest,
        tokenizer_digest=tokenizer.digest,
        server_version=VERSION,
    )


def _set_span(duration: Duration, start: float | None, stop: float | None) -> None:
    if start is not None and stop is not None:
        duration.FromNanoseconds(round((stop - start) * 1e9))
