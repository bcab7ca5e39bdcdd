"""Does a worker's report count, and how far can the worker be trusted?

            unknown, gap, other epoch                  number 0         last part
    report ───────────────────────────▶ SendAll(epoch) ────────▶ parts ──────────▶ EXACT
                                              CATCHING_UP                            │ late
    lease over, reported lost, new incarnation: gone at once  ◀──────────── BLIND ◀──┘

A demand makes a new epoch, which only a worker that got the demand can quote. So whatever was on
its way when a worker was given up stays without effect, for ever. Pure: time is an argument.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from ripresa.cluster.directory.chains import ANYONE
from ripresa.cluster.directory.events import Epoch, Holder, Refused, Report, SendAll, Standing
from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.cache.cache_events import CopyAdvice, Room

MAX_FENCES = 100_000
"""Workers whose dead incarnations are remembered; a forgotten one still cannot come back without
answering a demand."""


MAX_COPY_NEWS = 20_000
"""Blocks whose holders changed between two reports of a worker."""


class CopyNews:
    """What a worker is still to be told of its blocks, by identity; the last word counts.

    A worker that would have to hear too much at once is told to forget instead: a hint.
    """

    __slots__ = ("_is_copied", "_is_new")

    def __init__(self) -> None:
        self._is_copied: dict[BlockIdentity, bool] = {}
        self._is_new = False

    def forget(self) -> None:
        """What was said before may be wrong."""
        self._is_copied.clear()
        self._is_new = True

    def tell(self, identity: BlockIdentity, *, is_copied: bool) -> None:
        """Another worker keeps the block, or this one does."""
        if len(self._is_copied) >= MAX_COPY_NEWS:
            self.forget()
        self._is_copied[identity] = is_copied

    def take(self) -> CopyAdvice | None:
        """Everything, once; None if there is nothing."""
        if not self._is_copied and not self._is_new:
            return None
        news, is_new = self._is_copied, self._is_new
        self._is_copied, self._is_new = {}, False
        return CopyAdvice(
            is_new,
            tuple(identity for identity, is_copied in news.items() if is_copied),
            tuple(identity for identity, is_copied in news.items() if not is_copied),
        )


class Session:
    """One incarnation of a worker, as the directory knows it.

    Attributes:
        bit: its bit in the masks of holders.
        epoch: of the newest demand.
        num_reports: reports of this epoch that counted.
        is_complete: all that it holds has been sent.
        heard_at: when the last report counted; before the first one, when it was first met.
        num_drifted_blocks: wrong entries that receipts found in this epoch.
        copies: changes of who keeps its blocks, that it has not been told.
        room: what it last said of its room, when `heard_at`.
    """

    __slots__ = (
        "bit",
        "copies",
        "epoch",
        "heard_at",
        "holder",
        "incarnation",
        "is_complete",
        "num_drifted_blocks",
        "num_reports",
        "room",
        "worker",
    )

    def __init__(self, worker: str, incarnation: int, bit: int, epoch: Epoch, now: float) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self.bit = bit
        self.heard_at = now
        self.copies = CopyNews()
        self.room: Room | None = None
        self.holder = Holder(worker, incarnation, Standing.CATCHING_UP)
        self.demand(epoch)

    def demand(self, epoch: Epoch) -> SendAll:
        """What it sent so far may lack something; it has to begin again."""
        self.epoch = epoch
        self.num_reports = 0
        self.is_complete = False
        self.num_drifted_blocks = 0
        return SendAll(epoch)


class DeltaStreams:
    """The sessions of all workers.

    Args:
        directory: incarnation of the directory, never used before.
        late_s: a worker unheard of for so long is blind.
        lease_s: a worker unheard of for so long is gone.
    """

    def __init__(self, directory: str, late_s: float, lease_s: float) -> None:
        if not 0 < late_s < lease_s:
            raise ValueError(f"0 < late_s < lease_s must hold, got {late_s} and {lease_s}")
        self._directory = directory
        self._late_s = late_s
        self._lease_s = lease_s
        self._num_demands = 0
        self._sessions: dict[str, Session] = {}
        self._by_bit: dict[int, Session] = {}
        self._free_bits: list[int] = []
        self._next_bit = ANYONE << 1
        self._fences: OrderedDict[str, int] = OrderedDict()
        self._lapse_check_at = float("-inf")
        self._trusted = 0
        self._trusted_until = float("-inf")

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def get(self, worker: str, incarnation: int) -> Session | None:
        session = self._sessions.get(worker)
        return session if session is not None and session.incarnation == incarnation else None

    def by_bit(self, bit: int) -> Session:
        return self._by_bit[bit]

    def refuses(self, report: Report) -> Refused | None:
        lowest = self._fences.get(report.worker)
        return None if lowest is None or report.incarnation >= lowest else Refused(lowest)

    def superseded(self, report: Report) -> Session | None:
        """The session that a report of a later incarnation ends."""
        session = self._sessions.get(report.worker)
        return session if session and session.incarnation < report.incarnation else None

    def admit(self, report: Report, now: float) -> Session | SendAll | None:
        """The session of a report that counts, a demand, or None for a repeated report.

        Ask `refuses` and end what is `superseded` before. A session whose `num_reports` is 1
        afterwards begins anew: what it reported before is void.
        """
        session = self._sessions.get(report.worker)
        if session is None:
            session = self._open(report, now)
        if report.epoch != session.epoch:
            # A demand that was answered already would make the answer look like a repetition.
            return self.demand(session) if session.num_reports else SendAll(session.epoch)
        if report.number < session.num_reports:
            return None
        if report.number > session.num_reports:
            return self.demand(session)
        session.num_reports += 1
        session.is_complete = report.is_complete
        if now - session.heard_at >= self._late_s:
            self._trusted_until = float("-inf")
        session.heard_at = now
        session.room = report.room
        return session

    def demand(self, session: Session) -> SendAll:
        """Have a worker send everything again."""
        return session.demand(self._next_epoch())

    def end(self, session: Session) -> None:
        """Give a worker up. Its bit must have left all holdings."""
        del self._sessions[session.worker]
        del self._by_bit[session.bit]
        self._free_bits.append(session.bit)
        self._trusted_until = float("-inf")

    def fence(self, worker: str, lowest_incarnation: int) -> None:
        """Refuse earlier incarnations from now on."""
        self._fences[worker] = max(lowest_incarnation, self._fences.get(worker, 0))
        self._fences.move_to_end(worker)
        if len(self._fences) > MAX_FENCES:
            self._fences.popitem(last=False)

    def lapsed(self, now: float) -> list[Session]:
        """Sessions to be ended because their leases are over."""
        if now < self._lapse_check_at:
            return []
        gone = [s for s in self._sessions.values() if now - s.heard_at >= self._lease_s]
        heard = [s.heard_at for s in self._sessions.values() if now - s.heard_at < self._lease_s]
        # A session that opens later lapses later than this.
        self._lapse_check_at = min(heard, default=now) + self._lease_s
        return gone

    def holder(self, session: Session, now: float) -> Holder:
        if now - session.heard_at >= self._late_s:
            standing = Standing.BLIND
        elif session.is_complete:
            standing = Standing.EXACT
        else:
            standing = Standing.CATCHING_UP
        if session.holder.standing is not standing:
            session.holder = Holder(session.worker, session.incarnation, standing)
        return session.holder

    def trusted(self, now: float) -> int:
        """Bits of the workers that are not blind."""
        if now >= self._trusted_until:
            fresh = [s for s in self._sessions.values() if now - s.heard_at < self._late_s]
            self._trusted = sum(session.bit for session in fresh)
            self._trusted_until = min((s.heard_at for s in fresh), default=now) + self._late_s
        return self._trusted

    def _open(self, report: Report, now: float) -> Session:
        if self._free_bits:
            bit = self._free_bits.pop()
        else:
            bit = self._next_bit
            self._next_bit <<= 1
        session = Session(report.worker, report.incarnation, bit, self._next_epoch(), now)
        self._sessions[report.worker] = session
        self._by_bit[bit] = session
        self.fence(report.worker, report.incarnation)
        self._trusted_until = float("-inf")
        return session

    def _next_epoch(self) -> Epoch:
        self._num_demands += 1
        return Epoch(self._directory, self._num_demands)
