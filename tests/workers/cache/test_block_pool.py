"""Does a pool hand out every id once, and take it back once?"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ripresa.workers.cache.block_pool import BlockPool, SlotPool
from ripresa.workers.errors import ErrorCode, ResourceExhausted, RipresaError

# Positive: allocate so many; negative: free the allocation of that index, modulo what is held.
ACTIONS = st.lists(st.integers(min_value=-8, max_value=9), max_size=60)


@given(num_blocks=st.integers(1, 24), actions=ACTIONS)
def test_pool_matches_a_set(num_blocks: int, actions: list[int]) -> None:
    pool = BlockPool(num_blocks)
    free = set(range(num_blocks))
    held: list[tuple[int, ...]] = []
    for action in actions:
        if action < 0:
            if held:
                blocks = held.pop(action % len(held))
                pool.free(blocks)
                free |= set(blocks)
        elif action > len(free):
            with pytest.raises(ResourceExhausted):
                pool.allocate(action)
        else:
            blocks = pool.allocate(action)
            assert len(set(blocks)) == action
            assert set(blocks) <= free
            assert list(blocks) == sorted(blocks)
            runs = any(set(range(b, b + action)) <= free for b in free)
            assert not action or not runs or blocks[-1] - blocks[0] == action - 1
            free -= set(blocks)
            held.append(blocks)
        assert pool.num_free == len(free)
        pool.check_integrity()
    for blocks in held:
        pool.free(blocks)
    assert pool.num_free == num_blocks


def test_free_ids_are_taken_from_the_first_run_that_is_long_enough() -> None:
    pool = BlockPool(10)
    pool.allocate(10)
    pool.free((1, 4, 5, 6, 8))
    assert pool.allocate(3) == (4, 5, 6)
    assert pool.allocate(2) == (1, 8)


@pytest.mark.parametrize("blocks", [(0,), (3,), (-1,), (1, 1)], ids=str)
def test_a_wrong_free_raises_and_gives_nothing_back(blocks: tuple[int, ...]) -> None:
    pool = BlockPool(3)
    pool.allocate(3)
    pool.free((0,))
    with pytest.raises(RipresaError) as caught:
        pool.free(blocks)
    assert caught.value.code is ErrorCode.INTERNAL
    assert pool.num_free == 1
    pool.check_integrity()


def test_slots_run_out_and_come_back() -> None:
    slots = SlotPool(2)
    assert [slots.allocate(), slots.allocate()] == [0, 1]
    with pytest.raises(ResourceExhausted, match="sequence slot"):
        slots.allocate()
    slots.free(0)
    with pytest.raises(RipresaError, match="freed twice"):
        slots.free(0)
    assert slots.allocate() == 0
    slots.check_integrity()
