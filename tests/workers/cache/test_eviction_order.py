"""Do blocks go in the order of their last use, wherever they come in, and who finds room?"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ripresa.workers.cache.eviction_order import EvictionOrder

Entry = tuple[int, float, bool]
entries = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 20).map(float), st.booleans()))


def order_of(put: Sequence[Entry]) -> EvictionOrder:
    order = EvictionOrder()
    for block, used_at, is_demoted in put:
        order.put(block, used_at, is_demoted=is_demoted)
    return order


@given(entries, st.sets(st.integers(0, 12)))
def test_demoted_ones_go_first_then_the_longest_unused(put: list[Entry], gone: set[int]) -> None:
    order = order_of(put)
    for block in gone:
        order.discard(block)
    newest = {block: (used_at, is_demoted) for block, used_at, is_demoted in put}
    left = {block: entry for block, entry in newest.items() if block not in gone}
    assert len(order) == len(left)
    assert order.first(3) == list(order)[:3]
    ages = [used_at for used_at, is_demoted in left.values() if not is_demoted]
    assert order.oldest == min(ages, default=None)
    popped = [order.pop() for _ in left]
    assert set(popped) == set(left)
    assert [left[block][1] for block in popped] == sorted(
        (demoted for _, demoted in left.values()), reverse=True
    )
    assert [left[block][0] for block in popped if not left[block][1]] == sorted(ages)
    with pytest.raises(KeyError):
        order.pop()


@given(entries, st.lists(st.integers(0, 20).map(float)).map(sorted), st.integers(0, 3))
def test_only_what_is_younger_displaces(
    put: list[Entry], offered: list[float], num_free: int
) -> None:
    order = order_of(put)
    used_at = {block: at for block, at, _ in put}
    num_ready = num_free + order.num_demoted
    taken = order.room_for(offered, num_free)
    gone = [used_at[order.pop()] for _ in range(max(0, taken - num_free))]
    displaced = gone[num_ready - num_free :]
    came = offered[len(offered) - taken :]
    assert taken <= len(offered)
    assert all(old < new for old in displaced for new in came)
    assert taken >= min(num_ready, len(offered))
    # The next one would have displaced something as young.
    if taken < len(offered) and len(order) and not order.num_demoted:
        oldest = order.oldest
        assert oldest is not None
        assert oldest >= offered[-taken - 1]
