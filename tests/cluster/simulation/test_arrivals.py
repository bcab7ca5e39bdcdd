"""Do prompts come in order of time, with equal numbers for equal prefixes only?"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ripresa.cluster.simulation.arrivals import Workload
from ripresa.cluster.simulation.trace import Conversation, TraceRequest
from ripresa.workers.errors import InvalidArgument


def listed(ids: Sequence[Sequence[int]], granularity: int, extra: int = 0) -> list[TraceRequest]:
    """Requests of these whole prompts, told as differences."""
    requests, before = [], list[int]()
    for number, now in enumerate(ids):
        keep = 0
        while keep < min(len(before), len(now)) and before[keep] == now[keep]:
            keep += 1
        length = max(1, len(now) * granularity + extra)
        requests.append(TraceRequest(float(number), length, 1, keep, tuple(now[keep:])))
        before = list(now)
    return requests


prompts = st.lists(st.lists(st.integers(0, 2), max_size=9), min_size=1, max_size=8)


@given(prompts, st.sampled_from([2, 4, 8, 16]), st.integers(-3, 0))
def test_blocks_are_equal_exactly_when_their_prefixes_are(
    ids: list[list[int]], granularity: int, extra: int
) -> None:
    window = 8
    one = Conversation("x", granularity, None, (tuple(listed(ids, granularity, extra)),))
    served = list(Workload([one], window, 10.0, 0))
    names: dict[int, Hashable] = {}
    for whole, prompt in zip(ids, served, strict=True):
        tokens = [(one, place) for one in whole for place in range(granularity)]
        assert len(prompt.blocks) == min(prompt.num_tokens, len(tokens)) // window
        for number, block in enumerate(prompt.blocks):
            prefix = tuple(tokens[: (number + 1) * window])
            assert names.setdefault(block, prefix) == prefix
    assert len(set(names.values())) == len(names)


def test_scopes_keep_equal_ids_apart_and_shared_scopes_do_not() -> None:
    def blocks(first: str, second: str) -> list[tuple[int, ...]]:
        both = [Conversation(s, 8, 0.0, (tuple(listed([[1, 2]], 8)),)) for s in (first, second)]
        return [prompt.blocks for prompt in Workload(both, 8, 10.0, 0)]

    assert len(set(blocks("a", "b"))) == 2
    assert len(set(blocks("a", "a"))) == 1


def test_starts_follow_the_seed_and_times_rise() -> None:
    many = [Conversation(n, 8, None, (tuple(listed([[1], [1, 2]], 8)),)) for n in range(20)]
    first, again, other = (
        [(p.at_s, p.conversation) for p in Workload(many, 8, 100.0, seed)] for seed in (1, 1, 2)
    )
    assert first == again != other
    assert [at for at, _ in first] == sorted(at for at, _ in first)
    assert all(0 <= at <= 101 for at, _ in first)


def test_a_window_that_does_not_fit_the_ids_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="--window"):
        Workload([Conversation("a", 24, None, ())], 16, 1.0, 0)
