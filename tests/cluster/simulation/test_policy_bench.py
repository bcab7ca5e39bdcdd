"""Do the policies reuse what their rules let them, and does the cluster's come near one cache?"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from ripresa.cluster.simulation.arrivals import Prompt, Workload
from ripresa.cluster.simulation.leasing_caches import LeasingCaches
from ripresa.cluster.simulation.policies import DirectoryPolicy, LocalCaches
from ripresa.cluster.simulation.policy_bench import PolicyFigures, compare_policies
from ripresa.cluster.simulation.trace import Conversation, TraceRequest
from ripresa.workers.cache.session_leases import LeaseOutcome
from ripresa.workers.config import LeaseConfig
from ripresa.workers.replay_query import ReplayGeometry

GEOMETRY = ReplayGeometry(8, 2, 2, 1)
NAMES = ("w0", "w1", "w2", "w3")


def conversations(num: int, seed: int = 0) -> Iterator[Conversation]:
    """Tool loops that grow, start over, and pause."""
    rng = random.Random(seed)
    for number in range(num):
        requests, num_ids, at, next_id = [], 0, 0.0, 0
        for _ in range(rng.randint(3, 25)):
            keep = num_ids if rng.random() < 0.95 else rng.randint(0, num_ids)
            new = rng.randint(1, 12)
            num_ids = keep + new
            ids = tuple(range(next_id, next_id + new))
            requests.append(TraceRequest(at, num_ids * 8 + 5, 1, keep, ids))
            next_id += new
            at += rng.expovariate(1 / 30)
        yield Conversation(number, 8, None, (tuple(requests),))


def compare(seed: int, capacity: int) -> dict[str, PolicyFigures]:
    workload = Workload(conversations(120, seed), 8, 3000.0, seed)
    found = compare_policies(workload, 4, capacity, GEOMETRY)
    return {figures.name: figures for figures in found}


@pytest.mark.parametrize("seed", range(3))
def test_the_cluster_comes_near_one_cache_and_spreads_the_work(seed: int) -> None:
    found = compare(seed, 250 * 8)
    ours, one = found["directory"], found["one cache"]
    assert ours.hit_ratio >= 0.97 * one.hit_ratio
    assert ours.worst_to_mean <= 1.15
    assert found["round robin"].hit_ratio < 0.7 * one.hit_ratio
    assert found["sticky sessions"].worst_to_mean > ours.worst_to_mean


def test_with_room_for_all_every_policy_but_round_robin_reuses_everything() -> None:
    found = compare(1, 1_000_000)
    assert found["directory"].hit_ratio == found["one cache"].hit_ratio
    assert found["sticky sessions"].hit_ratio == found["one cache"].hit_ratio


def prompt(blocks: tuple[int, ...], at_s: float = 0.0, conversation: int = 0) -> Prompt:
    return Prompt(at_s, conversation, len(blocks) * 8 + 12, 1, blocks)


def test_sticky_sessions_stay_and_round_robin_goes_round() -> None:
    for sticky, reused in ((True, 24), (False, 0)):
        policy = LocalCaches("p", NAMES, 100, GEOMETRY, sticky=sticky)
        policy.serve(prompt((0, 1, 2)))
        policy.serve(prompt((0, 1, 2)))
        assert policy.num_reused_tokens == reused
        assert sum(policy.work.values()) == 2 * 36 - reused


def test_the_cap_of_the_hit_rule_counts() -> None:
    policy = LocalCaches("p", ("all",), 100, GEOMETRY, sticky=False)
    for _ in range(2):
        policy.serve(Prompt(0.0, 0, 24, 1, (0, 1, 2)))
    assert policy.num_reused_tokens == 8


def test_a_spared_holder_is_pulled_from_and_keeps_its_blocks() -> None:
    workload = Workload([], 8, 1.0, 0)
    chain = [workload.tree.child(None, "root")]
    while len(chain) < 40:
        chain.append(workload.tree.child(chain[-1], len(chain)))
    policy = DirectoryPolicy("p", NAMES, 100, GEOMETRY, workload.tree)
    policy.serve(prompt(tuple(chain[:30])))
    # The one worker with work is spared; the next one computes ten blocks behind thirty pulled.
    policy.serve(prompt(tuple(chain), 1.0))
    assert sorted(policy.work.values()) == [0, 0, 8 * 10 + 12, 8 * 30 + 12]
    assert policy.num_reused_tokens == 30 * 8
    policy.serve(prompt(tuple(chain), 2.0))
    assert policy.num_reused_tokens == 70 * 8


def test_a_prompt_larger_than_a_worker_is_served_and_the_rest_goes_on() -> None:
    workload = Workload(conversations(10), 8, 100.0, 0)
    for figures in compare_policies(workload, 2, 5 * 8, GEOMETRY):
        assert 0 <= figures.hit_ratio < 1


def loops_beside_long_questions() -> Iterator[Conversation]:
    """Tool loops of 16 blocks that pause for 20 s or so, and prompts of 24 that never come back."""
    rng = random.Random(0)
    for number in range(4):
        calls = [
            TraceRequest(
                25.0 * k + rng.uniform(0, 3), 16 * 8 + 8 * k, 1, 15 + k if k else 0, ids, 5.0
            )
            for k in range(8)
            for ids in (tuple(range(16)) if k == 0 else (100 + k,),)
        ]
        yield Conversation(f"loop {number}", 8, 3.0 * number, (tuple(calls),))
    for number in range(40):
        question = TraceRequest(0.0, 24 * 8, 1, 0, tuple(range(24)))
        yield Conversation(f"question {number}", 8, 5.0 * number, ((question,),))


def test_leases_keep_tool_loops_beside_prompts_that_never_come_back() -> None:
    workload = Workload(loops_beside_long_questions(), 8, 0.0, 0)
    found = {
        figures.name: figures.hit_ratio
        for figures in compare_policies(
            workload, 1, 130 * 8, GEOMETRY, leases=LeaseConfig(max_share=0.8)
        )
    }
    assert found["sticky, leases"] > 1.5 * found["sticky sessions"]
    unpinned = LeasingCaches("", ["w"], 130, GEOMETRY, workload.tree, LeaseConfig(max_share=0.0))
    pinned = LeasingCaches("", ["w"], 130, GEOMETRY, workload.tree, LeaseConfig(max_share=0.8))
    for policy in (unpinned, pinned):
        for one in workload:
            policy.serve(one)
        outcomes = policy.outcomes
        assert outcomes[LeaseOutcome.GRANTED] == 32
        # The last calls are never answered, and the slowest tenth is late.
        assert 20 <= outcomes[LeaseOutcome.REDEEMED] <= 28
    assert pinned.num_reused_tokens > unpinned.num_reused_tokens
