"""Does the window pool keep whole windows within its budget, the newest used ones?"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.cache.cache_events import Origin
from ripresa.workers.cache.window_pool import WindowPool
from ripresa.workers.errors import ErrorCode, RipresaError

ORIGIN = Origin("tenant", b"\x00", None)


def name(number: int) -> BlockIdentity:
    return BlockIdentity(bytes([number]), ())


def payload(number: int, size: int = 10) -> torch.Tensor:
    return torch.full((size,), number, dtype=torch.uint8)


@given(st.lists(st.tuples(st.sampled_from(["put", "take"]), st.integers(0, 9), st.integers(1, 12))))
def test_any_history_keeps_the_most_recently_used(actions: list[tuple[str, int, int]]) -> None:
    pool = WindowPool(30)
    model: dict[int, int] = {}
    for action, number, size in actions:
        if action == "put":
            pool.put(name(number), payload(number, size), ORIGIN)
            kept = model.pop(number, size)
            model[number] = kept
            while sum(model.values()) > 30:
                del model[next(iter(model))]
        elif number in model:
            assert pool.take(name(number)).tolist() == [number] * model[number]
            model[number] = model.pop(number)
        else:
            with pytest.raises(RipresaError) as caught:
                pool.take(name(number))
            assert caught.value.code is ErrorCode.NOT_FOUND
        pool.check_integrity()
        assert pool.num_bytes == sum(model.values())
        assert all((name(n) in pool) is (n in model) for n in range(10))


def test_a_window_larger_than_the_pool_evicts_nothing() -> None:
    pool = WindowPool(30)
    pool.put(name(0), payload(0), ORIGIN)
    pool.put(name(1), payload(1, 31), ORIGIN)
    assert (name(0) in pool, name(1) in pool, len(pool)) == (True, False, 1)


def test_a_miss_is_remembered_until_the_window_comes() -> None:
    pool = WindowPool(30)
    assert not pool.was_missed(name(0))
    pool.miss(name(0))
    assert pool.was_missed(name(0))
    assert pool.num_misses == 1
    pool.put(name(0), payload(0), ORIGIN)
    assert not pool.was_missed(name(0))
    pool.take(name(0))
    assert pool.num_hits == 1


def test_lineages_are_different_windows() -> None:
    pool = WindowPool(30)
    pool.put(BlockIdentity(b"x", ()), payload(0), ORIGIN)
    assert BlockIdentity(b"x", (128,)) not in pool


def test_an_empty_budget_keeps_nothing() -> None:
    pool = WindowPool(0)
    pool.put(name(0), payload(0), ORIGIN)
    assert len(pool) == 0
    with pytest.raises(ValueError, match="-1"):
        WindowPool(-1)
