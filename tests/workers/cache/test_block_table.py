"""Are a sequence's pages freed exactly once, and never while something uses them?"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ripresa.workers.cache.block_cache import BlockCache
from ripresa.workers.cache.block_pool import BlockPool, SlotPool
from ripresa.workers.cache.block_table import PagePool
from ripresa.workers.errors import ResourceExhausted, RipresaError


def make_pool(num_blocks: int, num_slots: int, forgotten: list[int]) -> PagePool:
    blocks = BlockCache(BlockPool(num_blocks), 8)
    return PagePool(blocks, num_blocks, SlotPool(num_slots), 8, forgotten.append)


@given(st.lists(st.sampled_from(["hold", "drop", "retire"]), max_size=20))
def test_pages_are_freed_with_the_last_use_after_the_end(actions: list[str]) -> None:
    forgotten: list[int] = []
    pool = make_pool(4, 2, forgotten)
    table = pool.reserve(20)
    holds, retired, freed = 0, False, False
    for action in actions:
        if action == "retire":
            table.retire()
            retired = True
        elif action == "hold":
            if freed:
                with pytest.raises(RipresaError, match="after it was freed"):
                    table.hold()
            else:
                table.hold()
                holds += 1
        elif holds:
            table.drop()
            holds -= 1
        else:
            with pytest.raises(RipresaError, match="no hold"):
                table.drop()
        freed = freed or (retired and holds == 0)
        assert table.is_freed is freed
        assert pool.num_available_blocks == (4 if freed else 1)
        assert forgotten == ([0] if freed else [])
        pool.check_integrity()


@pytest.mark.parametrize(("num_blocks", "num_slots"), [(2, 2), (9, 1)], ids=["blocks", "slots"])
def test_a_reservation_that_fails_takes_nothing(num_blocks: int, num_slots: int) -> None:
    pool = make_pool(num_blocks, num_slots, [])
    first = pool.reserve(9)
    before = (pool.num_available_blocks, pool.num_free_slots)
    with pytest.raises(ResourceExhausted):
        pool.reserve(9)
    assert (pool.num_available_blocks, pool.num_free_slots) == before
    pool.check_integrity()
    first.retire()
    assert (pool.num_available_blocks, pool.num_free_slots) == (num_blocks, num_slots)


def test_whoever_gives_blocks_back_tells_it() -> None:
    told: list[int] = []
    pool = PagePool(
        BlockCache(BlockPool(4), 8),
        4,
        SlotPool(2),
        8,
        lambda slot: None,
        lambda: told.append(pool.num_available_blocks),
    )
    table, loan = pool.reserve(9), pool.borrow_new(2)
    assert told == []
    loan.end()
    assert told == [2]
    table.hold()
    table.retire()
    assert told == [2]
    table.drop()
    assert told == [2, 4]


def test_a_slot_returns_even_if_forgetting_it_fails() -> None:
    def forget(slot: int) -> None:
        raise RuntimeError("the runner is gone")

    pool = PagePool(BlockCache(BlockPool(2), 8), 2, SlotPool(1), 8, forget)
    table = pool.reserve(9)
    with pytest.raises(RuntimeError, match="runner is gone"):
        table.retire()
    assert (pool.num_available_blocks, pool.num_free_slots) == (2, 1)
    pool.check_integrity()
