"""What does a client keep of a stream, so that the answer can be computed again?"""

from __future__ import annotations

from ripresa.cluster.gateway.sampling import asked_by, settled
from ripresa.protos import ripresa_pb2 as pb
from ripresa.workers.errors import ErrorCode, RipresaError
from ripresa.workers.recording import Recording
from ripresa.workers.replay import PlanKind, Recipe, ReplayMode, TailVariant
from ripresa.workers.request import FinishReason


class Recorder:
    """Listens to one Generate call. Give it to `Client.generate`; ask it when the stream is over.

    The prompt must go out as token ids, and come back with token ids: a text could be tokenized
    differently another time.
    """

    def __init__(self) -> None:
        self._request: pb.GenerateRequest | None = None
        self._output: list[int] = []
        self._finished: pb.Finished | None = None
        self._completed: pb.Completed | None = None

    def sent(self, request: pb.GenerateRequest) -> None:
        """The request goes out."""
        self._request = request

    def received(self, response: pb.GenerateResponse) -> None:
        """The next response has come."""
        match response.WhichOneof("event"):
            case "delta":
                self._output += response.delta.token_ids
            case "finished":
                self._finished = response.finished
            case "completed":
                self._completed = response.completed

    def recording(self) -> Recording:
        """What was heard.

        Raises:
            RipresaError: FAILED_PRECONDITION; the answer is incomplete, or its prompt unknown.
        """
        request, finished, completed = self._request, self._finished, self._completed
        if request is None or finished is None or completed is None:
            raise RipresaError(
                ErrorCode.FAILED_PRECONDITION, "the answer is incomplete and cannot be recorded"
            )
        if request.WhichOneof("input") != "token_ids":
            raise RipresaError(
                ErrorCode.FAILED_PRECONDITION,
                "only an answer to token ids can be recorded; tokenize the text first",
            )
        asked = asked_by(request.sampling)
        if asked.n != 1:
            raise RipresaError(
                ErrorCode.FAILED_PRECONDITION, "one answer can be recorded at a time; ask for n = 1"
            )
        recipe = recipe_of(completed.cache, completed.build.seed)
        stops = finished.WhichOneof("matched_stop") == "stop_token_id"
        return Recording(
            weights_digest=completed.build.weights_digest,
            token_ids=tuple(request.token_ids.ids),
            sampling=settled(asked, max(1, len(self._output) + stops), recipe.seed),
            mode=ReplayMode(_word(pb.ReplayMode.Name(completed.cache.replay_mode), "REPLAY_MODE_")),
            recipe=recipe,
            output_ids=tuple(self._output),
            reason=FinishReason(_word(pb.FinishReason.Name(finished.reason), "FINISH_REASON_")),
            stop_token_id=finished.stop_token_id if stops else None,
        )


def recipe_of(cache: pb.CacheProvenance, seed: int) -> Recipe:
    """The recipe that a provenance tells; `responses.provenance` is its other direction."""
    return Recipe(
        kind=PlanKind(_word(pb.PlanKind.Name(cache.kind), "PLAN_KIND_")),
        start=cache.boundary_token,
        swa_floor=cache.swa_floor_token,
        write_floor=cache.write_floor_token,
        restarts=tuple(cache.restarts),
        decoder_start=cache.decoder_start_token,
        tail=TailVariant(_word(pb.TailVariant.Name(cache.tail), "TAIL_VARIANT_")),
        seed=seed,
        rules_version=cache.rules_version,
        anchor_interval=cache.anchor_interval or None,
        source_floor=cache.source_floor_token if cache.HasField("source_floor_token") else None,
    )


def _word(name: str, prefix: str) -> str:
    return name.removeprefix(prefix).lower()
