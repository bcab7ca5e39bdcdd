"""Do routing and placement choose the workers that their rules name?"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ripresa.cluster.placement import AGE_TOLERANCE, MAX_LEAD, computing_worker, keeping_worker

WORKERS = ("a", "b", "c")
works = st.fixed_dictionaries({worker: st.floats(0, 1e12) for worker in WORKERS})


@pytest.mark.parametrize(
    ("held", "work", "chosen"),
    [
        ({"b": 5}, {"a": 0.0, "b": 0.0, "c": 0.0}, "b"),
        ({"b": 5}, {"a": 100.0, "b": 105.0, "c": 100.0}, "b"),
        ({"b": 5}, {"a": 100.0, "b": 200.0, "c": 100.0}, "a"),
        ({"b": 5, "c": 1}, {"a": 100.0, "b": 200.0, "c": 100.0}, "c"),
        ({}, {"a": 3.0, "b": 2.0, "c": 3.0}, "b"),
        ({"a": 4, "c": 4}, {"a": 101.0, "b": 100.0, "c": 100.0}, "c"),
    ],
)
def test_the_holder_computes_unless_it_leads(
    held: Mapping[str, int], work: Mapping[str, float], chosen: str
) -> None:
    assert computing_worker(held, work) == chosen


@given(st.dictionaries(st.sampled_from(WORKERS), st.integers(0, 10)), works)
def test_nobody_far_above_the_mean_computes(held: dict[str, int], work: dict[str, float]) -> None:
    chosen = computing_worker(held, work)
    mean = sum(work.values()) / len(work)
    assert work[chosen] <= (1 + MAX_LEAD) * mean * (1 + 1e-9)
    better = [w for w in WORKERS if held.get(w, 0) > held.get(chosen, 0)]
    assert all(work[w] > mean for w in better)


@pytest.mark.parametrize(
    ("ages", "keeper"),
    [
        ({"a": 10.0, "b": 10.0, "c": 10.0}, "b"),
        ({"a": 10.0, "b": 9.0, "c": 8.0}, "b"),
        ({"a": 10.0, "b": 2.0, "c": 8.0}, "a"),
        ({"a": 10.0, "b": 2.0, "c": 12.0}, "c"),
        ({"a": float("inf"), "b": 2.0, "c": 12.0}, "a"),
        ({"a": float("inf"), "b": float("inf"), "c": 12.0}, "b"),
    ],
)
def test_a_block_goes_unless_another_worker_has_much_older_ones(
    ages: Mapping[str, float], keeper: str
) -> None:
    assert keeping_worker("b", ages) == keeper


@given(st.fixed_dictionaries({worker: st.floats(0, 1e9) for worker in WORKERS}))
def test_no_block_goes_where_it_would_displace_a_much_younger_one(ages: dict[str, float]) -> None:
    keeper = keeping_worker("b", ages)
    assert ages[keeper] >= (1 - AGE_TOLERANCE) * max(ages.values())
