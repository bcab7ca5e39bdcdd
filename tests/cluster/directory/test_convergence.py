"""Does the directory come to know the truth, whatever a network does to the reports?

Workers change and report; reports are lost, repeated and reordered; workers and the directory
restart. At the end the network is kind, and every answer is compared with a search through what
the workers really hold. All along nothing may name a worker that was gone for good.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import hypothesis.strategies as st
from directory_sides import W, chain, lineage_at
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ripresa.cluster.directory.events import (
    Accepted,
    HeldKind,
    Holding,
    Lineage,
    Refused,
    Report,
    Standing,
    Tier,
)
from ripresa.cluster.directory.index import DirectorySettings, PrefixIndex
from ripresa.cluster.directory.outbox import Item, Outbox
from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.cache.cache_events import origin

PROMPTS = (chain("a", 4), chain("b", 4, shared=2), (*chain("a", 3), b"c3"))
LINEAGES = tuple(tuple(cuts) for size in range(3) for cuts in combinations((W, 2 * W, 3 * W), size))
NAMES = ("u", "v")
LEASE_S = 3.0

Known = tuple[HeldKind, Lineage, Tier, str, int]


class Process:
    """A worker process: what it holds, and its outbox."""

    def __init__(self, name: str, incarnation: int) -> None:
        self.name = name
        self.incarnation = incarnation
        self.outbox = Outbox(name, incarnation, max_items=3)
        self.held: set[Item] = set()
        self.is_refused = False


def items_of(prompt: Sequence[bytes], block: int, restarts: Lineage) -> BlockIdentity:
    return BlockIdentity(prompt[block], lineage_at(restarts, block))


def has_block(held: set[Item], prompt: Sequence[bytes], block: int, restarts: Lineage) -> bool:
    identity = BlockIdentity(prompt[block], restarts)
    return any(Item(HeldKind.BLOCK, identity, tier) in held for tier in Tier)


def longest_chains(held: set[Item], prompt: Sequence[bytes]) -> set[tuple[Lineage, int]]:
    """By trying every lineage and every length."""
    return {
        (restarts, length)
        for restarts in LINEAGES
        for length in range(1, len(prompt) + 1)
        if lineage_at(restarts, length - 1) == restarts
        if all(has_block(held, prompt, i, lineage_at(restarts, i)) for i in range(length))
        if length == len(prompt) or not has_block(held, prompt, length, restarts)
    }


class DirectoryMachine(RuleBasedStateMachine):
    capacity_blocks = 1_000

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.num_directories = 0
        self.processes: dict[str, Process] = {}
        self.network: list[tuple[Process, Report]] = []
        self.dead: set[tuple[str, int]] = set()
        self.gone: set[tuple[str, int]] = set()

    @initialize()
    def begin(self) -> None:
        self.restart_directory()
        for name in NAMES:
            self.processes[name] = Process(name, 1)

    def restart_directory(self) -> None:
        self.num_directories += 1
        self.index = PrefixIndex(
            DirectorySettings(window=W, capacity_blocks=self.capacity_blocks, lease_s=LEASE_S),
            f"d{self.num_directories}",
        )

    @rule()
    def kill_directory(self) -> None:
        self.restart_directory()

    @rule(
        name=st.sampled_from(NAMES),
        prompt=st.sampled_from(PROMPTS),
        blocks=st.tuples(st.integers(0, 3), st.integers(1, 4)),
        restarts=st.sampled_from(LINEAGES),
        kind=st.sampled_from((HeldKind.BLOCK, HeldKind.BLOCK, HeldKind.WINDOW)),
        tier=st.sampled_from((Tier.DEVICE, Tier.DEVICE, Tier.DISK)),
        is_held=st.sampled_from((True, True, False)),
    )
    def change(
        self,
        name: str,
        prompt: tuple[bytes, ...],
        blocks: tuple[int, int],
        restarts: Lineage,
        kind: HeldKind,
        tier: Tier,
        is_held: bool,
    ) -> None:
        process = self.processes[name]
        for block in range(blocks[0], min(sum(blocks), len(prompt))):
            item = Item(kind, items_of(prompt, block, restarts), tier)
            if is_held:
                process.held.add(item)
                process.outbox.hold(item, origin("t", prompt, block))
            else:
                process.held.discard(item)
                process.outbox.drop(item)

    @rule(name=st.sampled_from(NAMES))
    def send(self, name: str) -> None:
        process = self.processes[name]
        self.network.append((process, process.outbox.next_report()))

    @rule(data=st.data(), is_answered=st.booleans(), is_kept=st.booleans())
    def deliver(self, data: st.DataObject, is_answered: bool, is_kept: bool) -> None:
        if not self.network:
            return
        number = data.draw(st.integers(0, len(self.network) - 1))
        process, report = self.network[number]
        if not is_kept:
            del self.network[number]
        self.carry(process, report, is_answered)

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        if self.network:
            del self.network[data.draw(st.integers(0, len(self.network) - 1))]

    def carry(self, process: Process, report: Report, is_answered: bool) -> None:
        reply = self.index.report(report, self.now)
        is_alive = self.processes[process.name] is process
        if is_answered and is_alive and process.outbox.next_report() is report:
            process.outbox.take(reply)
            process.is_refused |= isinstance(reply, Refused)

    @rule(name=st.sampled_from(NAMES))
    def restart_worker(self, name: str) -> None:
        old = self.processes[name]
        self.dead.add((name, old.incarnation))
        self.processes[name] = Process(name, old.incarnation + 1)

    @rule(name=st.sampled_from(NAMES))
    def find_lost(self, name: str) -> None:
        """A dead incarnation is reported; a living one never is here."""
        incarnation = self.processes[name].incarnation - 1
        if incarnation:
            self.index.lost(name, incarnation)

    @rule(seconds=st.sampled_from((0.5, 1.0, 3.0)))
    def tick(self, seconds: float) -> None:
        self.now += seconds

    def known(self) -> set[Known]:
        return {
            (h.kind, h.restarts, h.tier, h.worker, h.incarnation)
            for prompt in PROMPTS
            for stretch in self.index.lookup(prompt, self.now).stretches
            for h in stretch.holdings
        }

    @invariant()
    def the_dead_stay_gone(self) -> None:
        if not self.processes:
            return
        named = {(worker, incarnation) for *_, worker, incarnation in self.known()}
        assert named <= self.sessions()
        assert not named & self.gone
        self.gone |= self.dead - named - self.sessions()
        self.index.check_integrity()

    def sessions(self) -> set[tuple[str, int]]:
        """Incarnations that still have a lease."""
        return {(h.worker, h.incarnation) for h in self.index.workers(self.now)}

    def teardown(self) -> None:
        if not self.processes:
            return
        for _ in range(2):
            # What is still under way arrives, and changes nothing in the end.
            for process, report in self.network:
                self.carry(process, report, is_answered=False)
            self.settle()
            # The dead lose their leases while the living renew theirs.
            for _ in range(4):
                self.now += LEASE_S / 3
                self.settle()
            self.compare()

    def settle(self) -> None:
        for process in self.processes.values():
            for _ in range(40):
                report = process.outbox.next_report()
                reply = self.index.report(report, self.now)
                process.outbox.take(reply)
                assert not isinstance(reply, Refused)
                if isinstance(reply, Accepted) and not process.outbox.has_changes:
                    break
            else:
                raise AssertionError(f"{process.name} does not come to an end")

    def compare(self) -> None:
        everything = set().union(*(process.held for process in self.processes.values()))
        for prompt in PROMPTS:
            found = self.index.lookup(prompt, self.now)
            assert {(p.holder.worker, p.restarts, p.num_blocks) for p in found.prefixes} == {
                (process.name, *reach)
                for process in self.processes.values()
                for reach in longest_chains(process.held, prompt)
            }
            assert all(p.holder.standing is Standing.EXACT for p in found.prefixes)
            assert set(found.chains) == longest_chains(everything, prompt)
            for stretch in found.stretches:
                for block in range(stretch.start, stretch.stop):
                    assert set(stretch.holdings) == self.holdings(prompt[block])
            length = found.stretches[-1].stop if found.stretches else 0
            assert length == len(prompt) or not any(
                item.identity.hash == prompt[length] and item.kind is HeldKind.BLOCK
                for item in everything
            )

    def holdings(self, block_hash: bytes) -> set[Holding]:
        return {
            Holding(item.kind, item.identity.restarts, item.tier, p.name, p.incarnation)
            for p in self.processes.values()
            for item in p.held
            if item.identity.hash == block_hash
        }


DirectoryMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestConvergence = DirectoryMachine.TestCase


class SmallDirectoryMachine(DirectoryMachine):
    """A directory that must forget: what it says is true, though not everything."""

    capacity_blocks = 3

    def compare(self) -> None:
        assert len(self.index) <= self.capacity_blocks
        for prompt in PROMPTS:
            for stretch in self.index.lookup(prompt, self.now).stretches:
                for block in range(stretch.start, stretch.stop):
                    assert set(stretch.holdings) <= self.holdings(prompt[block])


SmallDirectoryMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestForgetting = SmallDirectoryMachine.TestCase
