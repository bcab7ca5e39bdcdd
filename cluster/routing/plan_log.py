"""Why did a request run where it ran, and was its plan right? The newest plans of a gateway."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from ripresa.cluster.routing.route_plan import Candidate, RoutePlan
from ripresa.workers.prefix_sources import PrefixOutcome
from ripresa.workers.replay import Recipe


@dataclass(slots=True)
class PlannedExecution:
    """One execution of a request.

    Attributes:
        plan: what was decided.
        hints: why the directory gave none; empty if it did.
        follows: claim of the leader that it waited for; None for nobody.
        encoders: encoder workers that took over, in order.
        outcome: what the computing worker brought and held; None until it said so.
        error: how the execution ended, if it failed.
    """

    plan: RoutePlan
    hints: str
    follows: str | None = None
    encoders: list[str] = field(default_factory=list)
    outcome: PrefixOutcome | None = None
    error: str = ""


@dataclass(slots=True)
class PlannedRequest:
    """All executions of one request, and what is the same for them.

    Attributes:
        num_prompt_tokens: length of the prompt.
        recipe: what was computed, once it is fixed.
    """

    request_id: str
    num_prompt_tokens: int
    executions: list[PlannedExecution] = field(default_factory=list)
    recipe: Recipe | None = None


class PlanLog:
    """The newest requests of one gateway, by id.

    Args:
        capacity: most requests; the oldest is forgotten first.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._requests: OrderedDict[str, PlannedRequest] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def begin(self, request_id: str, num_prompt_tokens: int) -> PlannedRequest:
        """A request arrived; one with the same id is forgotten."""
        entry = PlannedRequest(request_id, num_prompt_tokens)
        self._requests.pop(request_id, None)
        self._requests[request_id] = entry
        while len(self._requests) > self._capacity:
            self._requests.popitem(last=False)
        return entry

    def find(self, request_id: str) -> PlannedRequest | None:
        return self._requests.get(request_id)


def explanation(request: PlannedRequest, window: int) -> list[str]:
    """Lines for a reader; they name no token and no text."""
    lines = [f"request {request.request_id}, {request.num_prompt_tokens} prompt tokens"]
    for number, execution in enumerate(request.executions, 1):
        lines += _execution_lines(number, execution, request.recipe, window)
    if request.recipe is None:
        return [*lines, "recipe: not fixed"]
    recipe = request.recipe
    restarts = ", ".join(map(str, recipe.restarts)) or "none"
    return [
        *lines,
        f"recipe: {recipe.kind}, rows from {recipe.start}, window floor {recipe.swa_floor}, "
        f"write floor {recipe.write_floor}, decoder rows from {recipe.decoder_start}, "
        f"tail {recipe.tail}, restarts {restarts}",
    ]


def _execution_lines(
    number: int, execution: PlannedExecution, recipe: Recipe | None, window: int
) -> list[str]:
    plan, chosen = execution.plan, execution.plan.chosen
    lines = [
        f"execution {number}: {chosen.name}",
        f"  reason: {plan.reason}",
        f"  directory: {execution.hints or 'answered'}",
        f"  planned hit: {_hit(chosen, window)}",
        *(f"  brings {line}" for line in _sources(chosen, window)),
    ]
    if execution.follows is not None:
        lines.append(f"  follows another request's claim {execution.follows}")
    lines += [f"  taken over by encoder {name}" for name in execution.encoders]
    outcome = execution.outcome
    if outcome is None or recipe is None:
        lines.append("  real hit: not told")
    else:
        lines.append(
            f"  real hit: {recipe.kind}, rows from {recipe.start}; {recipe.write_floor} tokens "
            f"reused, {outcome.num_from_peers * window} brought from peers and "
            f"{outcome.num_from_disk * window} from disk"
            f"{'; the state was brought' if outcome.has_image else ''}"
        )
    if execution.error:
        lines.append(f"  failed: {execution.error}")
    lines += [
        f"  instead: {other.name}: {other.cost}{'; ' + other.note if other.note else ''}"
        for other in plan.alternatives
    ]
    lines += [f"  left out: {worker}" for worker in plan.left_out]
    return lines


def _hit(candidate: Candidate, window: int) -> str:
    hit = candidate.hit
    return (
        f"{hit.kind}, rows from {hit.start}; {hit.num_blocks * window} tokens reused, "
        f"{hit.num_local * window} of them held by {candidate.computing}"
    )


def _sources(candidate: Candidate, window: int) -> list[str]:
    sources = candidate.sources
    lines = [
        f"tokens {part.first * window} to {part.stop * window} from {part.holder.worker_id}"
        for part in sources.blocks
    ]
    lines += [
        f"the window at {part.boundary} from {part.holder.worker_id}" for part in sources.windows
    ]
    if sources.image is not None:
        lines.insert(0, f"the session's parked state from {sources.image.holder.worker_id}")
    if sources.leader is not None:
        leader = sources.leader
        lines.append(
            f"tokens {leader.first * window} to {leader.stop * window} from "
            f"{leader.holder.worker_id} as they are computed"
        )
    return lines
