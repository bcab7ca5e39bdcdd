"""Do blocks with the same holders share one object, also after a holder has left them all?"""

from __future__ import annotations

from ripresa.cluster.directory.events import HeldKind, Tier
from ripresa.cluster.directory.holdings import HoldingsTable, Row

BLOCK = Row(HeldKind.BLOCK, (), Tier.DEVICE)
ON_DISK = Row(HeldKind.BLOCK, (), Tier.DISK)
WINDOW = Row(HeldKind.WINDOW, (), Tier.HOST)
A, B, C = 2, 4, 8


def test_equal_holders_are_one_object() -> None:
    table = HoldingsTable()
    one = table.add(table.add(table.empty, BLOCK, A), BLOCK, B)
    other = table.add(table.add(table.empty, BLOCK, B), BLOCK, A)
    assert one is other
    assert table.add(one, BLOCK, A) is one
    assert table.remove(one, BLOCK, C) is one
    assert table.remove(table.remove(one, BLOCK, A), BLOCK, B) is table.empty


def test_a_chain_counts_in_whatever_tier() -> None:
    table = HoldingsTable()
    holdings = table.add(table.add(table.empty, BLOCK, A), ON_DISK, B)
    assert holdings.chains == (((), A | B),)
    assert table.remove(holdings, ON_DISK, B).chains == (((), A),)
    assert table.add(table.empty, WINDOW, A).chains == ()


def test_one_that_leaves_leaves_everything() -> None:
    table = HoldingsTable()
    shared = table.add(table.add(table.empty, BLOCK, A), BLOCK, B)
    alone = table.add(table.add(table.empty, BLOCK, A), WINDOW, A)
    assert table.discard(A)
    assert (dict(shared.masks), shared.chains) == ({BLOCK: B}, (((), B),))
    assert (dict(alone.masks), alone.chains) == ({}, ())
    assert not table.discard(A)


def test_objects_are_shared_after_one_left() -> None:
    table = HoldingsTable()
    kept = table.add(table.add(table.empty, BLOCK, A), BLOCK, B)
    table.discard(A)
    assert table.add(table.empty, BLOCK, B) is kept
    grown = table.add(table.add(table.empty, BLOCK, A), BLOCK, B)
    assert grown.chains == (((), A | B),)
    assert kept.chains == (((), B),)


def test_what_no_block_has_takes_no_memory() -> None:
    table = HoldingsTable()
    holdings = [table.add(table.empty, BLOCK, 1 << bit) for bit in range(1, 50)]
    assert len(table) == 49
    del holdings
    assert len(table) == 0
