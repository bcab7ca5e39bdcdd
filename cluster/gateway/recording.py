"""What does a client keep of a stream, so that the answer can be computed again?"""

from __future__ import annotations

from ripresa.cluster.client.events import Answer
from ripresa.cluster.client.exchange import Request
from ripresa.cluster.gateway.sampling import asked_by, settled
from ripresa.protos import ripresa_pb2 as pb
from ripresa.workers.errors import ErrorCode, RipresaError
from ripresa.workers.recording import Recording
from ripresa.workers.replay import PlanKind, Recipe, ReplayMode, TailVariant
from ripresa.workers.request import FinishReason


def recording_of(request: Request, answer: Answer) -> Recording:
    """What computes an answer again.

    The prompt must have gone out as token ids, and the answer have come with token ids: a text
    could be tokenized differently another time.

    Raises:
        RipresaError: FAILED_PRECONDITION; the answer is incomplete, or its prompt unknown.
    """
    finished = answer.choices[0].finished if 0 in answer.choices else None
    completed = answer.completed
    if finished is None or completed is None:
        raise RipresaError(
            ErrorCode.FAILED_PRECONDITION, "the answer is incomplete and cannot be recorded"
        )
    if not isinstance(request, pb.GenerateRequest) or request.WhichOneof("input") != "token_ids":
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
    num_sampled = len(answer.token_ids) + (finished.stop_token_id is not None)
    return Recording(
        weights_digest=completed.build.weights_digest,
        token_ids=tuple(request.token_ids.ids),
        sampling=settled(asked, max(1, num_sampled), recipe.seed),
        mode=ReplayMode(_word(pb.ReplayMode.Name(completed.cache.replay_mode), "REPLAY_MODE_")),
        recipe=recipe,
        output_ids=answer.token_ids,
        reason=FinishReason(finished.reason),
        stop_token_id=finished.stop_token_id,
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
