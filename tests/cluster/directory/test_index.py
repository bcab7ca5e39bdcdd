"""Does the directory say who holds what, and forget what is gone?"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from directory_sides import SETTINGS, W, Worker, chain, runs, summary

from ripresa.cluster.directory.events import (
    Accepted,
    Chain,
    Epoch,
    Follow,
    HeldKind,
    Lead,
    Receipt,
    Refused,
    Report,
    SendAll,
    Standing,
    Tier,
)
from ripresa.cluster.directory.index import DirectorySettings, PrefixIndex, shard_of
from ripresa.workers.address import WorkerAddress, WorkerKind
from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.cache.cache_events import CopyAdvice, Origin, Room, Unkept
from ripresa.workers.replay import ReplayMode

HASHES = chain("a", 6)


@pytest.fixture
def index() -> PrefixIndex:
    return PrefixIndex(SETTINGS, "d1")


def prefixes(index: PrefixIndex, now: float = 0) -> set[tuple[str, tuple[int, ...], int]]:
    return summary(index.lookup(HASHES, now).prefixes)


def test_nothing_is_known_of_a_prompt_nobody_holds(index: PrefixIndex) -> None:
    found = index.lookup(HASHES, 0)
    assert found == ((), (), ())


def test_each_worker_reaches_as_far_as_its_chain_is_whole(index: PrefixIndex) -> None:
    Worker(index, "whole").hold(HASHES)
    Worker(index, "short").hold(HASHES[:2])
    holey = Worker(index, "holey")
    holey.hold(HASHES)
    holey.drop(HASHES[3:4])
    Worker(index, "headless").send(*runs(HASHES)[1:])
    assert prefixes(index) == {("whole", (), 6), ("short", (), 2), ("holey", (), 3)}


def test_lineages_are_kept_apart_and_go_on_where_they_branch(index: PrefixIndex) -> None:
    worker = Worker(index, "w")
    worker.hold(HASHES[:4])
    worker.hold(HASHES, (2 * W,))
    assert prefixes(index) == {("w", (), 4), ("w", (2 * W,), 6)}


def test_a_lineage_without_its_beginning_is_no_chain(index: PrefixIndex) -> None:
    worker = Worker(index, "w")
    worker.send(*runs(HASHES, (2 * W,))[2:])
    worker.send(*runs(HASHES)[:1])
    assert prefixes(index) == {("w", (), 1)}


def test_workers_hold_chains_together(index: PrefixIndex) -> None:
    Worker(index, "head").hold(HASHES[:3])
    Worker(index, "tail").send(*runs(HASHES)[3:])
    found = index.lookup(HASHES, 0)
    assert summary(found.prefixes) == {("head", (), 3)}
    assert found.chains == (Chain((), 6),)
    assert [(s.start, s.stop, [h.worker for h in s.holdings]) for s in found.stretches] == [
        (0, 3, ["head"]),
        (3, 6, ["tail"]),
    ]


def test_a_chain_may_lie_in_several_tiers(index: PrefixIndex) -> None:
    worker = Worker(index, "w")
    worker.hold(HASHES[:2])
    worker.send(*runs(HASHES, tier=Tier.DISK)[1:])
    found = index.lookup(HASHES, 0)
    assert summary(found.prefixes) == {("w", (), 6)}
    assert [{h.tier for h in stretch.holdings} for stretch in found.stretches] == [
        {Tier.DEVICE},
        {Tier.DEVICE, Tier.DISK},
        {Tier.DISK},
    ]
    worker.send(*runs(HASHES, tier=Tier.DISK, is_held=False)[1:])
    assert prefixes(index) == {("w", (), 2)}


def test_windows_are_found_by_boundary_and_lineage(index: PrefixIndex) -> None:
    one, two = Worker(index, "one"), Worker(index, "two")
    one.hold(HASHES)
    two.hold(HASHES, (W,))
    one.send(*runs(HASHES, kind=HeldKind.WINDOW)[3:5])
    two.send(*runs(HASHES, (W,), kind=HeldKind.WINDOW, tier=Tier.HOST)[4:5])
    found = index.lookup(HASHES, 0)
    assert {(h.worker, h.restarts) for h in found.windows(5)} == {("one", ()), ("two", (W,))}
    assert {h.worker for h in found.windows(4)} == {"one"}
    assert found.windows(3) == found.windows(6) == found.windows(0) == ()
    assert summary(found.prefixes) == {("one", (), 6), ("two", (), 1), ("two", (W,), 6)}


def test_a_window_without_its_block_is_no_prefix(index: PrefixIndex) -> None:
    worker = Worker(index, "w")
    worker.send(*runs(HASHES, kind=HeldKind.WINDOW))
    assert index.lookup(HASHES, 0) == ((), (), ())


def test_a_late_worker_is_blind_then_gone_in_one_step(index: PrefixIndex) -> None:
    Worker(index, "w", now=0).hold(HASHES, now=0.5)
    assert index.lookup(HASHES, 1.4).prefixes[0].holder.standing is Standing.EXACT
    blind = index.lookup(HASHES, 1.5)
    assert blind.prefixes[0].holder.standing is Standing.BLIND
    assert blind.chains == ()
    assert index.lookup(HASHES, 3.4).prefixes
    assert index.lookup(HASHES, 3.5) == ((), (), ())
    assert index.workers(3.5) == []


def test_a_blind_worker_that_speaks_again_counts_again(index: PrefixIndex) -> None:
    worker = Worker(index, "w", now=0)
    worker.hold(HASHES, now=0)
    assert index.lookup(HASHES, 2).chains == ()
    assert isinstance(worker.send(now=2.5), Accepted)
    assert index.lookup(HASHES, 2.6).chains == (Chain((), 6),)
    assert index.lookup(HASHES, 3.4).chains == (Chain((), 6),)


def test_a_missing_number_makes_the_worker_send_everything(index: PrefixIndex) -> None:
    worker = Worker(index, "w")
    worker.hold(HASHES[:3])
    worker.number += 1
    demand = worker.send(*runs(HASHES))
    assert isinstance(demand, SendAll)
    assert index.lookup(HASHES, 0).prefixes[0].holder.standing is Standing.CATCHING_UP
    assert prefixes(index) == {("w", (), 3)}
    worker.epoch, worker.number = demand.epoch, 0
    assert isinstance(worker.send(*runs(HASHES)[:2], is_complete=False), Accepted)
    assert prefixes(index) == {("w", (), 2)}
    assert index.lookup(HASHES, 0).prefixes[0].holder.standing is Standing.CATCHING_UP
    worker.send(*runs(HASHES)[2:4])
    assert prefixes(index) == {("w", (), 4)}
    assert index.lookup(HASHES, 0).prefixes[0].holder.standing is Standing.EXACT


def test_a_repeated_report_counts_once(index: PrefixIndex) -> None:
    worker = Worker(index, "w")
    first = Report("w", 1, worker.epoch, worker.number, runs(HASHES))
    index.report(first, 0)
    worker.number += 1
    worker.drop(HASHES[1:])
    assert isinstance(index.report(first, 0), Accepted)
    assert prefixes(index) == {("w", (), 1)}


def test_a_report_from_before_the_directorys_restart_is_answered_with_a_demand() -> None:
    before, after = PrefixIndex(SETTINGS, "d1"), PrefixIndex(SETTINGS, "d2")
    worker = Worker(before, "w")
    worker.index = after
    demand = worker.send(*runs(HASHES))
    assert isinstance(demand, SendAll)
    assert demand.epoch.directory == "d2"
    assert prefixes(after) == set()


def test_a_worker_that_lost_its_place_is_not_taken_for_an_echo(index: PrefixIndex) -> None:
    worker = Worker(index, "w")
    worker.hold(HASHES)
    worker.epoch, worker.number = None, 0
    demand = worker.send(*runs(HASHES)[:1])
    assert isinstance(demand, SendAll)
    worker.epoch = demand.epoch
    worker.send(*runs(HASHES)[:1])
    assert prefixes(index) == {("w", (), 1)}


def test_nothing_that_was_under_way_revives_a_dead_worker(index: PrefixIndex) -> None:
    worker = Worker(index, "w", incarnation=1)
    worker.hold(HASHES)
    late = Report("w", 1, worker.epoch, worker.number, runs(HASHES))
    snapshot = Report("w", 1, worker.epoch, 0, runs(HASHES))
    for report in (late, snapshot):
        assert isinstance(index.report(report, 10), SendAll)
        assert index.lookup(HASHES, 10) == ((), (), ())
    index.lost("w", 1)
    for report in (late, snapshot):
        assert index.report(report, 10) == Refused(2)
    assert index.workers(10) == []


def test_a_new_incarnation_ends_the_old_one_at_once(index: PrefixIndex) -> None:
    old = Worker(index, "w", incarnation=3)
    old.hold(HASHES)
    new = Worker(index, "w", incarnation=4)
    assert index.lookup(HASHES, 0) == ((), (), ())
    new.hold(HASHES[:1])
    assert old.send(*runs(HASHES)) == Refused(4)
    assert prefixes(index) == {("w", (), 1)}


def test_losing_an_old_incarnation_spares_the_new_one(index: PrefixIndex) -> None:
    Worker(index, "w", incarnation=2).hold(HASHES)
    index.lost("w", 1)
    assert prefixes(index) == {("w", (), 6)}


def test_bits_of_the_dead_serve_the_living(index: PrefixIndex) -> None:
    Worker(index, "one").hold(HASHES)
    Worker(index, "two").hold(HASHES[:4])
    assert prefixes(index) == {("one", (), 6), ("two", (), 4)}
    index.lost("one", 1)
    Worker(index, "three").hold(HASHES[:2])
    assert prefixes(index) == {("two", (), 4), ("three", (), 2)}
    assert {h.worker for s in index.lookup(HASHES, 0).stretches for h in s.holdings} == {
        "two",
        "three",
    }


def test_blocks_that_nobody_holds_leave_the_memory(index: PrefixIndex) -> None:
    one, two = Worker(index, "one"), Worker(index, "two")
    one.hold(HASHES)
    two.hold(HASHES[:2])
    one.drop(HASHES)
    assert len(index) == 2
    index.lost("two", 1)
    one.send()
    assert len(index) == 0
    assert index.usage() == {}
    index.check_integrity()


def test_a_receipt_removes_what_is_not_there(index: PrefixIndex) -> None:
    worker = Worker(index, "w")
    worker.hold(HASHES, (2 * W,))
    worker.send(*runs(HASHES, (2 * W,), kind=HeldKind.WINDOW)[1:2])
    assert index.lookup(HASHES, 0).windows(2)
    index.receipt(Receipt("w", 1, HASHES, (2 * W,), 5, 3, missing_windows=(2,)), 0)
    assert prefixes(index) == {("w", (), 2), ("w", (2 * W,), 3)}
    assert index.lookup(HASHES, 0).windows(2) == ()
    assert index.counters.num_overestimated_blocks == 2
    assert index.counters.num_drifted_blocks == 3


def test_a_receipt_of_more_than_was_known_only_counts(index: PrefixIndex) -> None:
    Worker(index, "w").hold(HASHES[:1])
    index.receipt(Receipt("w", 1, HASHES, (), 1, 4), 0)
    assert prefixes(index) == {("w", (), 1)}
    assert index.counters.num_underestimated_blocks == 3


def test_a_receipt_about_the_dead_changes_nothing(index: PrefixIndex) -> None:
    Worker(index, "w", incarnation=2).hold(HASHES)
    index.receipt(Receipt("w", 1, HASHES, (), 6, 0), 0)
    assert prefixes(index) == {("w", (), 6)}
    assert index.counters.num_late_receipts == 1


def test_a_cache_that_was_wiped_silently_is_found_out() -> None:
    index = PrefixIndex(DirectorySettings(window=W, max_drifted_blocks=6), "d1")
    worker = Worker(index, "w")
    worker.hold(HASHES)
    worker.hold(chain("b", 3))
    index.receipt(Receipt("w", 1, HASHES, (), 6, 0), 0)
    demand = worker.send()
    assert isinstance(demand, SendAll)
    assert index.lookup(chain("b", 3), 0).prefixes[0].holder.standing is Standing.CATCHING_UP
    worker.epoch, worker.number = demand.epoch, 0
    worker.send()
    assert index.lookup(chain("b", 3), 0) == ((), (), ())


def test_copies_are_counted_by_lineage(index: PrefixIndex) -> None:
    Worker(index, "one").hold(HASHES[:4], (2 * W,))
    Worker(index, "two").hold(HASHES[:3])
    assert index.num_copies(HASHES, (2 * W,), 0) == [2, 2, 1, 1, 0, 0]
    assert index.num_copies(HASHES, (), 0) == [2, 2, 1, 0, 0, 0]


def test_modes_miss_what_they_cannot_reuse(index: PrefixIndex) -> None:
    Worker(index, "w").hold(HASHES[:5], (2 * W, 4 * W))
    firsts = {
        (mode, interval): index.lookup_or_claim(HASHES, f"{mode}{interval}", 0, mode, interval)
        for mode, interval in (
            (ReplayMode.BOUNDED, None),
            (ReplayMode.EXACT, None),
            (ReplayMode.CANONICAL, 2 * W),
            (ReplayMode.CANONICAL, 4 * W),
            (ReplayMode.CANONICAL, W),
        )
    }
    leads = [answer.flight for answer in firsts.values()]
    assert [lead.first for lead in leads if isinstance(lead, Lead)] == [5, 2, 5, 2, 1]


def test_a_blind_worker_does_not_keep_others_from_computing(index: PrefixIndex) -> None:
    Worker(index, "w").hold(HASHES)
    assert index.lookup_or_claim(HASHES, "r", 0.5).flight is None
    flight = index.lookup_or_claim(HASHES, "r", 2).flight
    assert flight is not None
    assert flight.first == 0


def test_the_follower_learns_who_computes(index: PrefixIndex) -> None:
    worker = Worker(index, "w", incarnation=7)
    assert index.lookup_or_claim(HASHES, "leader", 0).flight == Lead(0, 6, 1.0)
    assert worker.send(leading=("leader", "unheard of")) == Accepted(("unheard of",))
    follower = HASHES[:3] + chain("b", 5)[3:]
    assert index.lookup_or_claim(follower, "f", 0).flight == Follow("leader", 0, 3, "w", 7)
    worker.hold(HASHES[:2])
    assert index.lookup_or_claim(follower, "f", 0).flight == Follow("leader", 2, 3, "w", 7)
    worker.hold(HASHES[:3])
    assert index.lookup_or_claim(follower, "f", 0).flight == Lead(3, 5, 1.0)


def test_a_follower_who_hears_gone_leads_from_there(index: PrefixIndex) -> None:
    worker = Worker(index, "w")
    index.lookup_or_claim(HASHES, "leader", 0)
    worker.send(*runs(HASHES)[:2], leading=("leader",))
    assert index.lookup_or_claim(HASHES, "f", 0).flight == Follow("leader", 2, 6, "w", 1)
    assert index.lookup_or_claim(HASHES, "f", 0, gone="leader").flight == Lead(2, 6, 1.0)
    assert index.lookup_or_claim(HASHES, "g", 0, gone="leader").flight == Follow(
        "f", 2, 6, None, None
    )
    assert worker.send(leading=("leader",)) == Accepted(("leader",))


def test_claims_of_a_dead_worker_are_free_at_once(index: PrefixIndex) -> None:
    worker = Worker(index, "w")
    index.lookup_or_claim(HASHES, "leader", 0)
    worker.send(leading=("leader",))
    index.lost("w", 1)
    assert index.lookup_or_claim(HASHES, "next", 0).flight == Lead(0, 6, 1.0)


def test_the_end_of_a_led_request_is_part_of_a_report(index: PrefixIndex) -> None:
    worker = Worker(index, "w")
    index.lookup_or_claim(HASHES, "leader", 0)
    worker.send(leading=("leader",))
    worker.send(ended=("leader",))
    assert index.lookup_or_claim(HASHES, "next", 0).flight == Lead(0, 6, 1.0)


def test_the_memory_is_bounded_and_the_largest_tenant_gives() -> None:
    index = PrefixIndex(DirectorySettings(window=W, capacity_blocks=10), "d1")
    worker = Worker(index, "w")
    small, old, new = chain("s", 3), chain("o", 4), chain("n", 8)
    worker.send(*runs(small, tenant="small"))
    worker.send(*runs(old, tenant="large"))
    worker.send(*runs(new, tenant="large"))
    assert index.usage() == {"small": 3, "large": 7}
    assert summary(index.lookup(small, 0).prefixes) == {("w", (), 3)}
    assert index.lookup(old, 0).prefixes == ()
    assert summary(index.lookup(new, 0).prefixes) == {("w", (), 7)}
    assert index.counters.num_forgotten_blocks == 5
    index.check_integrity()


def test_a_looked_up_prefix_outlives_a_forgotten_one_and_loses_its_end_first() -> None:
    index = PrefixIndex(DirectorySettings(window=W, capacity_blocks=8), "d1")
    worker = Worker(index, "w")
    first, second = chain("f", 4, shared=1), chain("s", 4, shared=1)
    worker.hold(first)
    worker.hold(second)
    index.lookup(first, 0)
    worker.hold(chain("x", 3))
    assert summary(index.lookup(second, 0).prefixes) == {("w", (), 2)}
    assert summary(index.lookup(first, 0).prefixes) == {("w", (), 4)}
    index.check_integrity()


def test_an_impossible_epoch_is_answered_with_a_demand(index: PrefixIndex) -> None:
    worker = Worker(index, "w")
    worker.epoch = Epoch("d1", 10**9)
    assert isinstance(worker.send(*runs(HASHES)), SendAll)
    assert prefixes(index) == set()


def test_shards_are_chosen_by_the_first_block_alone() -> None:
    shards = {shard_of(f"{i}".encode(), 4) for i in range(100)}
    assert shards == {0, 1, 2, 3}
    assert shard_of(HASHES[0], 1) == 0


def advice_of(worker: Worker) -> CopyAdvice | None:
    reply = worker.send()
    assert isinstance(reply, Accepted)
    return reply.advice


def identities(hashes: Sequence[bytes]) -> tuple[BlockIdentity, ...]:
    return tuple(BlockIdentity(each, ()) for each in hashes)


def test_who_speaks_last_of_a_block_keeps_it(index: PrefixIndex) -> None:
    first, later = Worker(index, "first"), Worker(index, "later")
    first.hold(HASHES)
    reply = later.send(*runs(HASHES[:3]))
    assert isinstance(reply, Accepted)
    assert reply.advice == CopyAdvice(kept=identities(HASHES[:3]))
    assert advice_of(first) == CopyAdvice(copied=identities(HASHES[:3]))
    # Used where it is a copy, it is kept there; a word that crossed this one does not count.
    reply = first.send(*runs(HASHES[:1]))
    assert isinstance(reply, Accepted)
    assert reply.advice == CopyAdvice(kept=identities(HASHES[:1]))
    assert advice_of(later) == CopyAdvice(copied=identities(HASHES[:1]))
    # Another lineage is another block.
    other = later.send(*runs(HASHES[:2], (W,)))
    assert isinstance(other, Accepted)
    assert other.advice == CopyAdvice(kept=identities(HASHES[:1]))


def test_the_last_holder_hears_that_it_is_alone(index: PrefixIndex) -> None:
    first, later = Worker(index, "first"), Worker(index, "later")
    first.hold(HASHES[:2])
    later.hold(HASHES[:2])
    assert advice_of(first) == CopyAdvice(copied=identities(HASHES[:2]))
    later.send(*runs(HASHES[1:2], is_held=False))
    assert advice_of(first) == CopyAdvice(kept=identities(HASHES[1:2]))
    index.lost("later", 1)
    assert advice_of(first) == CopyAdvice(is_new=True)


def test_when_the_keeper_lets_go_one_other_holder_keeps(index: PrefixIndex) -> None:
    workers = [Worker(index, name) for name in ("a", "b", "c")]
    for worker in workers:
        worker.hold(HASHES[:1])
    for worker in workers:
        advice_of(worker)
    workers[2].send(*runs(HASHES[:1], is_held=False))
    told = [advice_of(worker) for worker in workers]
    assert told == [CopyAdvice(kept=identities(HASHES[:1])), None, None]
    # A copy that goes is news for nobody.
    workers[1].send(*runs(HASHES[:1], is_held=False))
    assert advice_of(workers[0]) is None


def test_a_last_copy_is_one_whatever_else_its_holder_keeps(index: PrefixIndex) -> None:
    first, later = Worker(index, "first"), Worker(index, "later")
    later.hold(HASHES[:1], (0,))
    later.hold(HASHES[:1])
    first.hold(HASHES[:1])
    assert advice_of(later) == CopyAdvice(copied=identities(HASHES[:1]))
    first.send(*runs(HASHES[:1], is_held=False))
    assert advice_of(later) == CopyAdvice(kept=identities(HASHES[:1]))


def test_a_block_that_is_forgotten_is_nobodys_copy() -> None:
    index = PrefixIndex(DirectorySettings(window=W, capacity_blocks=4), "d1")
    first, later = Worker(index, "first"), Worker(index, "later")
    first.hold(HASHES[:1])
    later.hold(HASHES[:1])
    assert advice_of(first) == CopyAdvice(copied=identities(HASHES[:1]))
    later.hold(chain("other", 4))
    assert index.num_copies(HASHES[:1], (), 0) == [0]
    assert advice_of(first) == CopyAdvice(kept=identities(HASHES[:1]))


def test_a_last_copy_goes_where_the_oldest_block_is_oldest(index: PrefixIndex) -> None:
    ages = {"a": 5.0, "b": 50.0, "c": 500.0}
    workers = {name: Worker(index, name) for name in ages}
    for name, worker in workers.items():
        worker.send()
        worker.send(room=Room(WorkerKind.DECODE, ages[name]))
    workers["a"].hold(HASHES)
    workers["b"].send(*runs(HASHES[2:3]), room=Room(WorkerKind.DECODE, 50.0))
    asked = [
        Unkept(identity, Origin("t", HASHES[0], None), age)
        for identity, age in zip(identities(HASHES), (10.0, 5e3, 1.0, 1.0), strict=False)
    ]
    c = WorkerAddress("c", WorkerKind.DECODE)
    # The third has another holder; which of the others are young enough says the keeper.
    assert index.find_keepers("a", asked, 0.0) == [c, c, None, c]
    assert index.find_keepers("a", asked[1:2], 0.0) == [None]
    assert index.find_keepers("a", [], 0.0) == []
    # Who says nothing of its room gets nothing; c's block has become older meanwhile.
    workers["c"].send()
    b = WorkerAddress("b", WorkerKind.DECODE)
    assert index.find_keepers("a", asked[:1], 0.0) == [b]
