"""Are the estimates what a tool's newest answers took, whatever other tools do?"""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from ripresa.workers.cache.gap_estimates import (
    FIRST_MEDIAN_S,
    FIRST_S,
    MAX_GAPS,
    MAX_TOOLS,
    MIN_GAPS,
    GapEstimates,
)

GAPS = st.floats(0, 1e5)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xy"), GAPS), max_size=300))
def test_nine_of_ten_of_the_newest_gaps_and_half_of_them_are_within(
    seen: list[tuple[str, str, float]],
) -> None:
    estimates = GapEstimates()
    gaps: dict[tuple[str, str], list[float]] = {}
    for tenant, tool, gap_s in seen:
        estimates.observe(tenant.encode(), [tool], gap_s)
        gaps.setdefault((tenant, tool), []).append(gap_s)
    for tenant in "ab":
        for tool in "xy":
            newest = gaps.get((tenant, tool), [])[-MAX_GAPS:]
            expected = estimates.expected(tenant.encode(), [tool])
            median = estimates.median(tenant.encode(), [tool])
            if len(newest) < MIN_GAPS:
                assert (expected, median) == (FIRST_S, FIRST_MEDIAN_S)
                continue
            for share, found in ((0.9, expected), (0.5, median)):
                assert sum(gap <= found for gap in newest) >= math.ceil(share * len(newest))
                assert sum(gap < found for gap in newest) < math.ceil(share * len(newest))


def known(estimates: GapEstimates, tool: str) -> bool:
    return estimates.expected(b"", [tool]) != FIRST_S


def test_of_parallel_calls_the_slowest_counts_and_learns() -> None:
    estimates = GapEstimates()
    for _ in range(MIN_GAPS):
        estimates.observe(b"", ["fast"], 1.0)
        estimates.observe(b"", ["slow"], 100.0)
    assert estimates.expected(b"", ["fast"]) == 1.0
    assert estimates.expected(b"", ["fast", "slow"]) == 100.0
    assert estimates.expected(b"", ["fast", "unknown"]) == FIRST_S
    for _ in range(MAX_GAPS):
        estimates.observe(b"", ["fast", "slow"], 200.0)
    assert estimates.expected(b"", ["fast"]) == 1.0
    assert estimates.expected(b"", ["slow"]) == 200.0
    assert estimates.expected(b"", []) == FIRST_S
    assert estimates.median(b"", []) == FIRST_MEDIAN_S
    assert estimates.median(b"", ["fast", "slow"]) == 200.0
    estimates.observe(b"", [], 5.0)


def test_only_so_many_tools_are_remembered() -> None:
    estimates = GapEstimates()
    for number in range(MAX_TOOLS + 10):
        for _ in range(MIN_GAPS):
            estimates.observe(b"", [str(number)], 1.0)
    assert len(estimates) == MAX_TOOLS
    assert not known(estimates, "9")
    assert known(estimates, "10")
