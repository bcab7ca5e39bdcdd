"""Which workers hold which prefixes, and who computes what is missing? The directory itself.

Soft state and hints: a worker checks what is said about it, so that a wrong or lost entry costs
time, never a result. Pure: no Ray, no clock (time is an argument, in seconds, never falling), no
randomness. A lookup costs a step a block and one more where the holders change; a worker's death
costs a step for each distinct set of holders, not for each block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from ripresa.cluster.directory.chains import ANYONE, Reach, Span, reaches, usable_blocks
from ripresa.cluster.directory.deltas import DeltaStreams, Session
from ripresa.cluster.directory.events import (
    Accepted,
    Answer,
    Chain,
    Follow,
    HeldKind,
    Holder,
    Holding,
    HotPrefix,
    Lead,
    Lineage,
    Lookup,
    Prefix,
    Receipt,
    Reply,
    Report,
    Run,
    SendAll,
    Stretch,
    Tier,
)
from ripresa.cluster.directory.holdings import Holdings, HoldingsTable, Row
from ripresa.cluster.directory.hot_prefixes import HotPrefixes
from ripresa.cluster.directory.prefix_memory import Node, PrefixMemory
from ripresa.cluster.directory.single_flight import SingleFlight
from ripresa.cluster.placement import keeping_worker
from ripresa.workers.address import WorkerAddress
from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.cache.cache_events import Unkept
from ripresa.workers.replay import ReplayMode

SWEPT_PER_REPORT = 2_000


@dataclass(frozen=True, slots=True)
class DirectorySettings:
    """Limits of one directory shard.

    Attributes:
        window: W, tokens in a block.
        capacity_blocks: blocks that are remembered.
        late_s, lease_s: a worker unheard of for so long is blind, and gone.
        claim_s: a leader unheard of for so long leads no more.
        max_claimed_blocks: blocks in all claims together.
        max_drifted_blocks: so many wrong entries of a worker, found by receipts, and it has to
            send everything again.
    """

    window: int
    capacity_blocks: int = 1_000_000
    late_s: float = 1.0
    lease_s: float = 3.0
    claim_s: float = 1.0
    max_claimed_blocks: int = 200_000
    max_drifted_blocks: int = 64


@dataclass(slots=True)
class DirectoryCounters:
    """What happened so far.

    Attributes:
        num_repeated, num_demands, num_refused: reports that did not count, by reason.
        num_forgotten_blocks: blocks that had to make room.
        num_receipts, num_late_receipts: the latter speak of workers that are gone.
        num_overestimated_blocks, num_underestimated_blocks: planned minus real hits, by sign.
        num_drifted_blocks: wrong entries that receipts removed.
        num_lookup_blocks, num_found_blocks: asked for by lookups, and held by somebody.
    """

    num_lookups: int = 0
    num_lookup_blocks: int = 0
    num_found_blocks: int = 0
    num_leads: int = 0
    num_follows: int = 0
    num_reports: int = 0
    num_repeated: int = 0
    num_demands: int = 0
    num_refused: int = 0
    num_lapsed_workers: int = 0
    num_forgotten_blocks: int = 0
    num_receipts: int = 0
    num_late_receipts: int = 0
    num_overestimated_blocks: int = 0
    num_underestimated_blocks: int = 0
    num_drifted_blocks: int = 0


def shard_of(first_hash: bytes, num_shards: int) -> int:
    """Which shard knows the prompts that begin with this block."""
    digest = blake2b(first_hash, digest_size=8).digest()
    return int.from_bytes(digest, "little") % num_shards


class PrefixIndex:
    """One shard of the directory.

    Args:
        incarnation: names this directory process; never used before.
    """

    def __init__(self, settings: DirectorySettings, incarnation: str) -> None:
        self.settings = settings
        self.counters = DirectoryCounters()
        self._table = HoldingsTable()
        self._memory = PrefixMemory(settings.capacity_blocks, self._table.empty)
        self._streams = DeltaStreams(incarnation, settings.late_s, settings.lease_s)
        self._flight = SingleFlight(settings.claim_s, settings.max_claimed_blocks)
        self._hot = HotPrefixes()

    def __len__(self) -> int:
        """Remembered blocks, some perhaps held by nobody any more."""
        return len(self._memory)

    def usage(self) -> dict[str, int]:
        """Remembered blocks by tenant."""
        return self._memory.usage()

    def workers(self, now: float) -> list[Holder]:
        """Workers whose leases hold, by name."""
        self._expire(now)
        return sorted(self._streams.holder(session, now) for session in self._streams)

    def lookup(self, hashes: Sequence[bytes], now: float) -> Lookup:
        """What is known of a prompt.

        Args:
            hashes: of the prompt's full blocks, in order.
        """
        self._expire(now)
        self.counters.num_lookups += 1
        spans = self._spans(hashes, now)
        trusted = self._streams.trusted(now)
        prefixes: list[Prefix] = []
        chains: list[Chain] = []
        for reach in reaches(spans, self.settings.window, trusted):
            if reach.mask & ANYONE:
                chains.append(Chain(reach.restarts, reach.num_blocks))
            prefixes += self._prefixes(reach, now)
        stretches = [Stretch(start, stop, self._resolve(h)) for start, stop, h in spans]
        return Lookup(tuple(prefixes), tuple(chains), tuple(stretches))

    def lookup_or_claim(
        self,
        hashes: Sequence[bytes],
        request: str,
        now: float,
        mode: ReplayMode = ReplayMode.BOUNDED,
        interval: int | None = None,
        gone: str | None = None,
    ) -> Answer:
        """What is known of a prompt, and who computes its first missing block: one step.

        Args:
            request: unique in the cluster. What it led before is free again.
            mode, interval: blocks that this mode cannot reuse count as missing.
            gone: a leader whose worker said that the blocks will not come.
        """
        if gone is not None:
            self._flight.release(gone)
        found = self.lookup(hashes, now)
        window = self.settings.window
        first = max(
            (usable_blocks(*chain, window, mode, interval) for chain in found.chains), default=0
        )
        flight = self._flight.enter(hashes, first, request, (mode, interval), now)
        self.counters.num_leads += isinstance(flight, Lead)
        self.counters.num_follows += isinstance(flight, Follow)
        return Answer(found, flight)

    @property
    def num_claims(self) -> int:
        """Requests that lead, some perhaps overdue."""
        return len(self._flight)

    def is_claimed(self, request: str, now: float) -> bool:
        """Whether a request leads."""
        return self._flight.is_claimed(request, now)

    def leader(self, request: str, now: float) -> tuple[str, int] | None:
        """Worker and incarnation that compute for a leading request; None before it is told."""
        return self._flight.leader(request, now)

    def release(self, request: str) -> None:
        """A request that may lead does so no more. Idempotent."""
        self._flight.release(request)

    def report(self, report: Report, now: float) -> Reply:
        """Take what a worker says of itself, whatever the order in which it arrives."""
        self._expire(now)
        refused = self._streams.refuses(report)
        if refused is not None:
            self.counters.num_refused += 1
            return refused
        superseded = self._streams.superseded(report)
        if superseded is not None:
            self._end(superseded)
        admitted = self._streams.admit(report, now)
        if admitted is None:
            self.counters.num_repeated += 1
            return Accepted()
        if isinstance(admitted, SendAll):
            self.counters.num_demands += 1
            return admitted
        self.counters.num_reports += 1
        if admitted.num_reports == 1:
            self._forget_holder(admitted)
        for run in report.runs:
            self._apply(admitted, run)
        forgotten = self._memory.shrink()
        self.counters.num_forgotten_blocks += len(forgotten)
        self._tell_forgotten(forgotten)
        self._memory.sweep(SWEPT_PER_REPORT)
        for request in report.ended:
            self._flight.release(request)
        return Accepted(
            tuple(
                request
                for request in report.leading
                if not self._flight.confirm(request, report.worker, report.incarnation, now)
            ),
            admitted.copies.take(),
        )

    def lost(self, worker: str, incarnation: int) -> None:
        """This incarnation of a worker, and every earlier one, is dead for good."""
        self._streams.fence(worker, incarnation + 1)
        for session in self._streams:
            if session.worker == worker and session.incarnation <= incarnation:
                self._end(session)
                return

    def receipt(self, receipt: Receipt, now: float) -> None:
        """Correct what is known of a worker by what one admission found there.

        Only wrong entries are removed. Blocks that were there although nobody knew are in a report
        on its way; entering them here could outlive that report's successor.
        """
        self._expire(now)
        counters = self.counters
        counters.num_receipts += 1
        error = receipt.num_planned - receipt.num_real
        counters.num_overestimated_blocks += max(0, error)
        counters.num_underestimated_blocks += max(0, -error)
        session = self._streams.get(receipt.worker, receipt.incarnation)
        if session is None:
            counters.num_late_receipts += 1
            return
        missing = [(i, HeldKind.BLOCK) for i in range(receipt.num_real, receipt.num_planned)]
        missing += [(i - 1, HeldKind.WINDOW) for i in receipt.missing_windows]
        for block, kind in missing:
            stop = (block + 1) * self.settings.window
            restarts = tuple(x for x in receipt.restarts if x < stop)
            drifted = self._drop(session, kind, receipt.hashes[block], restarts)
            session.num_drifted_blocks += drifted
            counters.num_drifted_blocks += drifted
        if session.num_drifted_blocks >= self.settings.max_drifted_blocks:
            # Its next report is answered with this demand.
            self._streams.demand(session)

    def num_copies(self, hashes: Sequence[bytes], restarts: Lineage, now: float) -> list[int]:
        """How many workers hold each block in this lineage; 1 is a last copy."""
        self._expire(now)
        counts = []
        for block, block_hash in enumerate(hashes):
            node = self._memory.find(block_hash)
            chains = dict(node.holdings.chains) if node is not None else {}
            stop = (block + 1) * self.settings.window
            counts.append(chains.get(tuple(x for x in restarts if x < stop), 0).bit_count())
        return counts

    def find_keepers(
        self, worker: str, blocks: Sequence[Unkept], now: float
    ) -> list[WorkerAddress | None]:
        """Who should keep each of these blocks, which `worker` is about to evict.

        One worker for all of them, chosen by the youngest: what is older than its own next block
        to go it refuses. None where nobody's is older, or another worker holds the block anyway.
        """
        self._expire(now)
        trusted = self._streams.trusted(now)
        others = {
            session.worker: (session.room.kind, session.room.age_s + now - session.heard_at)
            for session in self._streams
            if session.room is not None and session.bit & trusted and session.worker != worker
        }
        own = next((s.bit for s in self._streams if s.worker == worker), 0)
        ages = {name: age for name, (_, age) in others.items()}
        ages[worker] = min((block.age_s for block in blocks), default=0.0)
        keeper = keeping_worker(worker, ages)
        if keeper == worker:
            return [None] * len(blocks)
        address = WorkerAddress(keeper, others[keeper][0])
        found: list[WorkerAddress | None] = []
        for block in blocks:
            node = self._memory.find(block.identity.hash)
            holders = 0 if node is None else _mask(node.holdings, block.identity.restarts)
            is_last = not holders & trusted & ~own
            found.append(address if is_last else None)
        return found

    def top(self, count: int, tenant: str | None, now: float) -> list[HotPrefix]:
        """The prefixes that lookups found most often, and who holds their last blocks now."""
        self._expire(now)
        found = []
        for last_hash, use in self._hot.top(count, tenant):
            node = self._memory.find(last_hash)
            holdings = () if node is None else self._resolve(node.holdings)
            workers = tuple(sorted({h.worker for h in holdings if h.kind is HeldKind.BLOCK}))
            age_s = now - use.used_at
            found.append(HotPrefix(last_hash, use.num_blocks, use.num_hits, workers, age_s))
        return found

    def check_integrity(self) -> None:
        """Raise RipresaError (INTERNAL) unless the parts agree."""
        self._memory.check_integrity()

    def _spans(self, hashes: Sequence[bytes], now: float) -> list[Span]:
        """The prompt up to the first block that nobody holds; its end counts as used now."""
        spans: list[Span] = []
        start, last = 0, None
        parting, parting_stop = None, 0
        current: Holdings | None = None
        stop = 0
        for node in map(self._memory.find, hashes):
            if node is None:
                break
            holdings = node.holdings
            if holdings is not current:
                if not holdings.chains:
                    break
                if current is not None:
                    spans.append(Span(start, stop, current))
                current, start = holdings, stop
            last = node
            stop += 1
            if node.num_children > 1:
                parting, parting_stop = node, stop
        counters = self.counters
        counters.num_lookup_blocks += len(hashes)
        counters.num_found_blocks += stop
        if last is not None and current is not None:
            spans.append(Span(start, stop, current))
            self._memory.touch(last)
            self._hot.hit(last.hash, last.tenant, stop, now)
            if parting is not None and parting is not last:
                self._hot.hit(parting.hash, parting.tenant, parting_stop, now)
        return spans

    def _prefixes(self, reach: Reach, now: float) -> list[Prefix]:
        found = []
        mask = reach.mask & ~ANYONE
        while mask:
            bit = mask & -mask
            mask ^= bit
            holder = self._streams.holder(self._streams.by_bit(bit), now)
            found.append(Prefix(holder, reach.restarts, reach.num_blocks))
        return found

    def _resolve(self, holdings: Holdings) -> tuple[Holding, ...]:
        if holdings.resolved is None:
            holdings.resolved = tuple(
                Holding(*row, session.worker, session.incarnation)
                for row, mask in holdings.masks.items()
                for session in self._sessions_of(mask)
            )
        return holdings.resolved

    def _sessions_of(self, mask: int) -> list[Session]:
        return [self._streams.by_bit(1 << i) for i in range(mask.bit_length()) if mask >> i & 1]

    def _apply(self, session: Session, run: Run) -> None:
        row = Row(run.kind, run.restarts, run.tier)
        parent = run.parent
        for block_hash in run.hashes:
            if run.is_held:
                node = self._memory.add(block_hash, parent, run.tenant)
                before = node.holdings
                node.holdings = self._table.add(before, row, session.bit)
                parent = block_hash
                if run.kind is HeldKind.BLOCK:
                    self._tell_keepers(session, BlockIdentity(block_hash, run.restarts), node)
                    self._flight.computed(block_hash, run.restarts)
            else:
                found = self._memory.find(block_hash)
                if found is not None:
                    self._remove(session, row, found)
                    if run.kind is HeldKind.BLOCK:
                        self._tell_next_keeper(session, row, found)

    def _drop(self, session: Session, kind: HeldKind, block_hash: bytes, restarts: Lineage) -> bool:
        """Remove an entry in every tier; whether there was one."""
        node = self._memory.find(block_hash)
        if node is None:
            return False
        before = node.holdings
        for tier in Tier:
            self._remove(session, Row(kind, restarts, tier), node)
        return node.holdings is not before

    def _remove(self, session: Session, row: Row, node: Node) -> None:
        left = self._table.remove(node.holdings, row, session.bit)
        if left is not node.holdings:
            node.holdings = left
            self._memory.prune(node)

    def _tell_keepers(self, session: Session, identity: BlockIdentity, node: Node) -> None:
        """Whoever spoke last of a block keeps it; what the others hold are copies."""
        others = _mask(node.holdings, identity.restarts) & ~session.bit
        if others:
            session.copies.tell(identity, is_copied=False)
            for other in self._sessions_of(others & node.keepers):
                other.copies.tell(identity, is_copied=True)
        node.keepers = (node.keepers & ~others) | session.bit

    def _tell_next_keeper(self, session: Session, row: Row, node: Node) -> None:
        """A block that its keeper has let go is kept by another one of its holders."""
        node.keepers &= ~session.bit
        mask = _mask(node.holdings, row.restarts)
        # Where there are several lineages, a keeper's bit may be another one's.
        if mask and (not mask & node.keepers or len(node.holdings.chains) > 1):
            likely = mask & node.keepers or mask
            keeper = self._streams.by_bit(likely & -likely)
            keeper.copies.tell(BlockIdentity(node.hash, row.restarts), is_copied=False)
            node.keepers |= keeper.bit

    def _tell_forgotten(self, nodes: Sequence[Node]) -> None:
        """Nobody will say which of these blocks' holders is the last: none of them has a copy."""
        for node in nodes:
            for restarts, mask in node.holdings.chains:
                if mask & mask - 1:
                    for session in self._sessions_of(mask):
                        session.copies.tell(BlockIdentity(node.hash, restarts), is_copied=False)

    def _expire(self, now: float) -> None:
        for session in self._streams.lapsed(now):
            self.counters.num_lapsed_workers += 1
            self._end(session)
        self._flight.expire(now)

    def _end(self, session: Session) -> None:
        """All of a worker's entries and claims vanish."""
        self._forget_holder(session)
        self._flight.release_worker(session.worker, session.incarnation)
        self._streams.end(session)

    def _forget_holder(self, session: Session) -> None:
        if self._table.discard(session.bit):
            self._memory.begin_sweep()
            # Of its blocks one by one nothing is known any more: who has a copy may be the last.
            for other in self._streams:
                if other is not session:
                    other.copies.forget()


def _mask(holdings: Holdings, restarts: Lineage) -> int:
    """Holders of block KV of this lineage."""
    return next((mask for lineage, mask in holdings.chains if lineage == restarts), 0)
