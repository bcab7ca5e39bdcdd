"""Does nothing that a worker has to tell get lost when it has to begin again?"""

from __future__ import annotations

from directory_sides import W, chain, summary

from ripresa.cluster.directory.events import (
    Accepted,
    Follow,
    HeldKind,
    Lead,
    Receipt,
    Reply,
    SendAll,
    Tier,
)
from ripresa.cluster.directory.index import DirectorySettings, PrefixIndex
from ripresa.cluster.directory.outbox import Item, Outbox
from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.cache.cache_events import Origin, origin

HASHES = chain("a", 6)


def exchange(outbox: Outbox, index: PrefixIndex) -> Reply:
    reply = index.report(outbox.next_report(), 0)
    outbox.take(reply)
    return reply


def holding(num_blocks: int, max_items: int = 2_000) -> Outbox:
    outbox = Outbox("w", 1, max_items)
    for block in range(num_blocks):
        item = Item(HeldKind.BLOCK, BlockIdentity(HASHES[block], ()), Tier.DEVICE)
        outbox.hold(item, origin("t", HASHES, block))
    return outbox


def test_everything_held_travels_in_parts_of_whole_chains() -> None:
    index = PrefixIndex(DirectorySettings(window=W), "d")
    outbox = holding(5, max_items=2)
    assert isinstance(exchange(outbox, index), SendAll)
    parts = []
    while outbox.has_changes:
        parts.append(outbox.next_report())
        assert exchange(outbox, index) == Accepted()
    assert [run.hashes for part in parts for run in part.runs] == [
        HASHES[:2],
        HASHES[2:4],
        HASHES[4:5],
    ]
    assert [part.is_complete for part in parts] == [False, False, True]
    assert summary(index.lookup(HASHES, 0).prefixes) == {("w", (), 5)}


def test_an_end_that_met_a_demand_is_told_again() -> None:
    index = PrefixIndex(DirectorySettings(window=W, max_drifted_blocks=1), "d")
    outbox = holding(3)
    (other,) = chain("b", 1)
    outbox.hold(
        Item(HeldKind.BLOCK, BlockIdentity(other, ()), Tier.DEVICE), Origin("t", other, None)
    )
    exchange(outbox, index)
    exchange(outbox, index)
    index.lookup_or_claim(HASHES, "leader", 0)
    outbox.lead("leader", HASHES)
    assert exchange(outbox, index) == Accepted()
    index.receipt(Receipt("w", 1, (other,), (), 1, 0), 0)
    outbox.finish("leader")
    assert isinstance(exchange(outbox, index), SendAll)
    assert isinstance(index.lookup_or_claim(HASHES, "next", 0).flight, Follow)
    assert exchange(outbox, index) == Accepted()
    assert index.lookup_or_claim(HASHES, "next", 0).flight == Lead(3, 6, 1.0)
