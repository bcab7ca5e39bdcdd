"""How do policies compare on a recorded workload? Each of them serves the same prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ripresa.cluster.simulation.arrivals import Workload
from ripresa.cluster.simulation.leasing_caches import LeasingCaches
from ripresa.cluster.simulation.policies import DirectoryPolicy, LocalCaches, Policy
from ripresa.workers.config import LeaseConfig
from ripresa.workers.replay_query import ReplayGeometry


@dataclass(frozen=True, slots=True)
class PolicyFigures:
    """What one policy made of a trace.

    Attributes:
        name: the policy.
        hit_ratio: reused tokens among all prompt tokens.
        worst_to_mean: the busiest worker's uncached tokens, among the mean worker's.
        num_uncached_tokens: of all workers.
        pulled_ratio: tokens that came from another worker, among all prompt tokens.
        moved_ratio: tokens of last copies that another worker kept, among the same.
    """

    name: str
    hit_ratio: float
    worst_to_mean: float
    num_uncached_tokens: int
    pulled_ratio: float
    moved_ratio: float


ONE_CACHE = "one cache"
OURS = "directory"
LEASING = "sticky, leases"


def compare_policies(
    workload: Workload,
    num_workers: int,
    capacity_tokens: int,
    geometry: ReplayGeometry,
    *,
    leases: LeaseConfig | None = None,
    telling: Callable[[str], Callable[[int], None]] = lambda name: lambda number: None,
) -> Iterator[PolicyFigures]:
    """Run every policy over the whole workload, one after the other.

    Args:
        capacity_tokens: of each worker; one cache has that of all together.
        geometry: of the model, as the replay rules see it.
        leases: of sticky sessions with leases; None leaves that policy out.
        telling: makes of a policy's name what hears how many prompts it has served.
    """
    workers = [f"worker-{number}" for number in range(num_workers)]
    capacity = capacity_tokens // geometry.window
    makers: list[Callable[[], Policy]] = [
        lambda: LocalCaches("round robin", workers, capacity, geometry, sticky=False),
        lambda: LocalCaches("sticky sessions", workers, capacity, geometry, sticky=True),
        lambda: LocalCaches(ONE_CACHE, ["all"], capacity * num_workers, geometry, sticky=False),
        lambda: DirectoryPolicy(OURS, workers, capacity, geometry, workload.tree),
    ]
    if leases is not None:
        makers.append(
            lambda: LeasingCaches(LEASING, workers, capacity, geometry, workload.tree, leases)
        )
    for make in makers:
        policy = make()
        num_tokens = 0
        tell = telling(policy.name)
        for number, prompt in enumerate(workload, 1):
            policy.serve(prompt)
            num_tokens += prompt.num_tokens
            tell(number)
        uncached = sum(policy.work.values())
        mean = uncached / len(policy.work)
        yield PolicyFigures(
            policy.name,
            policy.num_reused_tokens / max(1, num_tokens),
            max(policy.work.values()) / mean if mean else 1.0,
            uncached,
            policy.num_pulled_tokens / max(1, num_tokens),
            policy.num_moved_tokens / max(1, num_tokens),
        )
