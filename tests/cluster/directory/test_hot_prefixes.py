"""Does the directory know which prefixes are asked for most, within bounds?"""

from __future__ import annotations

from directory_sides import SETTINGS, Worker, chain
from hypothesis import given
from hypothesis import strategies as st

from ripresa.cluster.directory.hot_prefixes import HotPrefixes
from ripresa.cluster.directory.index import PrefixIndex

HITS = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 4)), max_size=60)


@given(HITS, st.integers(0, 8))
def test_the_most_used_come_first(hits: list[tuple[int, int]], count: int) -> None:
    hot, expected = HotPrefixes(), dict[bytes, int]()
    for now, (number, length) in enumerate(hits):
        name = bytes([number, length])
        hot.hit(name, f"tenant {number % 2}", length, now)
        expected[name] = expected.get(name, 0) + 1
    top = hot.top(count)
    assert len(top) == min(count, len(expected))
    assert [use.num_hits for _, use in top] == sorted(expected.values(), reverse=True)[:count]
    assert all(expected[name] == use.num_hits for name, use in top)
    own = hot.top(100, "tenant 1")
    assert {name for name, _ in own} == {name for name in expected if name[0] % 2}


def test_what_is_not_asked_for_makes_room() -> None:
    hot = HotPrefixes(capacity=3)
    for number in (0, 1, 2, 0, 3, 4):
        hot.hit(bytes([number]), "t", 1, float(number))
    assert len(hot) == 3
    assert {name for name, _ in hot.top(9)} == {bytes([n]) for n in (0, 3, 4)}


def test_lookups_count_where_they_end_and_where_prompts_part() -> None:
    index = PrefixIndex(SETTINGS, "d1")
    one, two = chain("a", 6, shared=3), chain("b", 5, shared=3)
    worker = Worker(index, "w")
    worker.hold(one)
    Worker(index, "v").hold(two)
    for now in (0.1, 0.2):
        index.lookup(one, now)
    index.lookup((*two, b"new"), 0.5)
    index.lookup((b"unknown",), 0.5)
    head, longer, shorter = index.top(9, None, now=1.0)
    assert (head.last_hash, head.num_blocks, head.num_hits, head.age_s) == (one[2], 3, 3, 0.5)
    assert (longer.last_hash, longer.num_blocks, longer.num_hits) == (one[5], 6, 2)
    assert (shorter.last_hash, shorter.num_blocks, shorter.num_hits) == (two[4], 5, 1)
    assert (head.workers, longer.workers, shorter.workers) == (("v", "w"), ("w",), ("v",))
    assert index.top(1, None, now=1.0) == [head]
    assert index.top(9, "another", now=1.0) == []
    worker.drop(one)
    assert index.top(2, None, now=1.0)[1].workers == ()
    assert index.counters.num_lookup_blocks == 6 + 6 + 6 + 1
    assert index.counters.num_found_blocks == 6 + 6 + 5
