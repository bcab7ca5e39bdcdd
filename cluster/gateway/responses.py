"""Which messages does a Generate stream consist of? One request's events become responses here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from ripresa.cluster.gateway.tokenizer import Tokenizer
from ripresa.cluster.gateway.validation import ServedModel
from ripresa.cluster.routing.prompt import Placed, PromptRequest
from ripresa.cluster.version import VERSION
from ripresa.protos import ripresa_pb2 as pb
from ripresa.workers.errors import ErrorCode, RipresaError
from ripresa.workers.replay import PlanKind, Recipe, ReplayMode, TailVariant
from ripresa.workers.request import Finished, FinishReason, Tokens

TAIL: Mapping[TailVariant, pb.TailVariant.ValueType] = MappingProxyType(
    {tail: pb.TailVariant.Value(f"TAIL_VARIANT_{tail.name}") for tail in TailVariant}
)
KIND: Mapping[PlanKind, pb.PlanKind.ValueType] = MappingProxyType(
    {kind: pb.PlanKind.Value(f"PLAN_KIND_{kind.name}") for kind in PlanKind}
)
MODE: Mapping[ReplayMode, pb.ReplayMode.ValueType] = MappingProxyType(
    {mode: pb.ReplayMode.Value(f"REPLAY_MODE_{mode.name}") for mode in ReplayMode}
)
REASON: Mapping[FinishReason, pb.FinishReason.ValueType] = MappingProxyType(
    {reason: pb.FinishReason.Value(f"FINISH_REASON_{reason.name}") for reason in FinishReason}
)


@dataclass(slots=True)
class _Times:
    """Seconds on the gateway's monotonic clock; None until it happened."""

    received: float
    placed: float | None = None
    first_token: float | None = None
    last_token: float | None = None


class Responses:
    """Builds the responses of one stream, in order.

    Args:
        clock: monotonic seconds.
        received: when the request arrived, on that clock.
        return_token_ids: deltas carry ids beside the text.
    """

    def __init__(
        self,
        prompt: PromptRequest,
        model: ServedModel,
        tokenizer: Tokenizer,
        *,
        return_token_ids: bool,
        clock: Callable[[], float],
        received: float,
    ) -> None:
        self._prompt = prompt
        self._model = model
        self._tokenizer = tokenizer
        self._mode = prompt.cache.mode
        self._worker_id = ""
        self._return_token_ids = return_token_ids
        self._clock = clock
        self._times = _Times(received)
        self._text = tokenizer.stream()
        self._silent_ids = frozenset(prompt.sampling.stop_token_ids)
        if model.eos_token_id is not None and not prompt.sampling.ignore_eos:
            self._silent_ids |= {model.eos_token_id}
        self._sequence = 0
        self._next_position = len(prompt.token_ids)
        self._recipe: Recipe | None = None

    def placed(self, placed: Placed) -> None:
        """Workers hold the request's pages."""
        self._times.placed = self._clock()
        self._worker_id = placed.worker_id

    def started(self, recipe: Recipe) -> pb.GenerateResponse:
        """What is computed of the prompt is known."""
        self._recipe = recipe
        now = Timestamp()
        now.GetCurrentTime()
        started = pb.Started(
            request_id=self._prompt.request_id,
            model=self._model.name,
            prompt_tokens=len(self._prompt.token_ids),
            cached_tokens=recipe.start,
            worker_id=self._worker_id,
            start_time=now,
            cache=provenance(recipe, self._mode),
            seed=recipe.seed,
        )
        return self._numbered(pb.GenerateResponse(started=started))

    def delta(self, tokens: Tokens) -> pb.GenerateResponse | None:
        """The delta of some tokens; None if it would be empty (a character is incomplete).

        Raises:
            RipresaError: the tokens do not continue the stream where it stood.
        """
        if tokens.position != self._next_position:
            raise RipresaError(
                ErrorCode.INTERNAL,
                f"the stream continued at position {tokens.position}, not {self._next_position}",
            )
        self._next_position += len(tokens.token_ids)
        now = self._clock()
        self._times.last_token = now
        if self._times.first_token is None:
            self._times.first_token = now
        spoken = [token_id for token_id in tokens.token_ids if token_id not in self._silent_ids]
        delta = pb.TokenDelta(text=self._text.feed(spoken))
        if self._return_token_ids:
            delta.token_ids.extend(tokens.token_ids)
        if not delta.text and not delta.token_ids:
            return None
        return self._numbered(pb.GenerateResponse(delta=delta))

    def finished(self, finished: Finished) -> list[pb.GenerateResponse]:
        """The rest of the text if some was held back, then `finished`, then `completed`."""
        responses = []
        rest = self._text.finish()
        if rest:
            delta = pb.TokenDelta(text=rest)
            responses.append(self._numbered(pb.GenerateResponse(delta=delta)))
        end = pb.Finished(reason=REASON[finished.reason])
        if finished.stop_token_id is not None:
            end.stop_token_id = finished.stop_token_id
        responses.append(self._numbered(pb.GenerateResponse(finished=end)))
        recipe = self._require_recipe()
        completed = pb.Completed(
            usage=pb.Usage(
                prompt_tokens=len(self._prompt.token_ids),
                completion_tokens=finished.num_generated_tokens,
                cached_tokens=recipe.start,
            ),
            cache=provenance(recipe, self._mode),
            timings=self._timings(),
            build=build(self._model, self._tokenizer),
        )
        completed.build.seed = recipe.seed
        responses.append(self._numbered(pb.GenerateResponse(completed=completed)))
        return responses

    def _numbered(self, response: pb.GenerateResponse) -> pb.GenerateResponse:
        response.sequence = self._sequence
        self._sequence += 1
        return response

    def _require_recipe(self) -> Recipe:
        if self._recipe is None:
            raise RipresaError(ErrorCode.INTERNAL, "the router never placed the prompt")
        return self._recipe

    def _timings(self) -> pb.Timings:
        times = self._times
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
    )


def build(model: ServedModel, tokenizer: Tokenizer) -> pb.Build:
    """What produced an answer. `prompt_encoding` stays empty: no template is applied."""
    return pb.Build(
        weights_digest=model.weights_digest,
        tokenizer_digest=tokenizer.digest,
        server_version=VERSION,
    )


def _set_span(duration: Duration, start: float | None, stop: float | None) -> None:
    if start is not None and stop is not None:
        duration.FromNanoseconds(round((stop - start) * 1e9))
