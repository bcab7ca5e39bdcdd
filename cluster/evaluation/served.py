"""How often is a served model right, mode by mode? Greedy answers through a gateway.

The messages of a conversation are asked for in order, each behind the reference's text, so that a
prompt goes on from what the one before has left in the workers' caches, as an agent's does. Every
mode has cached state of its own.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ripresa.cluster.client import Answer, Client, Completed
from ripresa.cluster.evaluation.arms import EXACT, Arm
from ripresa.cluster.evaluation.cases import Case
from ripresa.cluster.evaluation.measures import Match
from ripresa.cluster.gateway.recording import recipe_of
from ripresa.workers.errors import ErrorCode, RipresaError
from ripresa.workers.replay import ReplayMode, TailVariant

CONNECT_TIMEOUT_S = 15.0

ARMS = (
    Arm(EXACT, ReplayMode.EXACT, TailVariant.EXACT),
    Arm("decoder", ReplayMode.EXACT, TailVariant.FLOORED),
    Arm("both", ReplayMode.BOUNDED, TailVariant.FLOORED),
    Arm("both layer_exact", ReplayMode.BOUNDED, TailVariant.LAYER_EXACT),
    Arm("canonical", ReplayMode.CANONICAL, TailVariant.FLOORED),
)


@dataclass(frozen=True, slots=True)
class Hit:
    """What a gateway told of one prompt.

    Attributes:
        kind: how its prefix was obtained (`PlanKind`).
        num_tokens: of the prompt.
        num_skipped, num_recomputed: of these, without any row, and computed although cached.
        num_generations: bounded hits that lie behind one another in its prefix.
        seconds: until the first token; None if the gateway did not see one.
    """

    arm: str
    kind: str
    num_tokens: int
    num_skipped: int
    num_recomputed: int
    num_generations: int
    seconds: float | None


def check_served(client: Client, token_id: int, weights_digest: str) -> None:
    """Have one token generated, so that a gateway that cannot be asked is known beforehand.

    Args:
        token_id: the prompt.

    Raises:
        RipresaError: as `ask` does.
    """
    client.wait_until_connected(CONNECT_TIMEOUT_S)
    told = client.generate([token_id], temperature=0.0, max_tokens=1).answer()
    _require_weights(told, weights_digest)


def ask(client: Client, case: Case, weights_digest: str) -> tuple[list[Match], list[Hit]]:
    """Every message of a conversation in every mode, the modes beside one another.

    Raises:
        RipresaError: FAILED_PRECONDITION; other weights are served. Or what the call fails with.
    """
    with ThreadPoolExecutor(len(ARMS)) as pool:
        asked = [pool.submit(_ask_in, client, case, arm, weights_digest) for arm in ARMS]
        answers = [each.result() for each in asked]
    matches = [match for part, _ in answers for match in part]
    return matches, [hit for _, part in answers for hit in part]


def _ask_in(
    client: Client, case: Case, arm: Arm, weights_digest: str
) -> tuple[Sequence[Match], Sequence[Hit]]:
    salt = uuid.uuid4().hex
    matches, hits = [], []
    for answer in case.answers:
        # The end of the sentence is the last token of an answer, and is not told of a stream.
        said = case.token_ids[answer.start : answer.stop - 1]
        told = client.generate(
            case.token_ids[: answer.start],
            options={
                "replay_mode": arm.mode.value,
                "tail": arm.tail.value,
                "cache_salt": salt,
            },
            return_token_ids=True,
            temperature=0.0,
            max_tokens=len(said) + 1,
        ).answer()
        completed = _require_weights(told, weights_digest)
        is_exact = told.token_ids == said and told.reason == "stop"
        matches.append(Match(arm.name, answer.task, None, is_exact))
        recipe = recipe_of(completed.cache, completed.build.seed)
        hits.append(
            Hit(
                arm.name,
                recipe.kind.value,
                answer.start,
                recipe.start,
                completed.cache.recomputed_tokens,
                completed.cache.bounded_generations,
                completed.timings.time_to_first_token_s,
            )
        )
    return matches, hits


def _require_weights(told: Answer, weights_digest: str) -> Completed:
    completed = told.completed
    assert completed is not None
    if completed.build.weights_digest != weights_digest:
        raise RipresaError(
            ErrorCode.FAILED_PRECONDITION,
            "the gateway serves other weights than the evaluated ones; name its checkpoint "
            "with --checkpoint, or serve that one",
        )
    return completed
