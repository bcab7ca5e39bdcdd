"""Which sessions will come back soon, and what of them is kept until then?

    turn over ── ends in tool calls ──▶ granted: blocks pinned, state kept
        │                                 │ answer comes ──▶ redeemed
        │                                 │ overdue ───────▶ lapsed: blocks and state go first
        └── next prompt ──▶ gone          └ closed, or the next prompt does not begin with it:
                                            released, likewise

The worker that ran a turn remembers its blocks; whoever parsed the answer says that it calls tools.
A session that comes back tells how long its tools took, overdue or not.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from typing import Any

from ripresa.workers.cache.block_books import Lease
from ripresa.workers.cache.block_cache import BlockCache
from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.cache.expected_turns import ExpectedTurn, ExpectedTurns
from ripresa.workers.cache.gap_estimates import GapEstimates
from ripresa.workers.cache.parked_states import ParkedStates
from ripresa.workers.errors import ErrorCode, RipresaError

MAX_TURNS = 4096
"""Ended turns that are remembered."""


class LeaseOutcome(StrEnum):
    """What happened to leases.

    YIELDED: gave up its pins before it ended, since too much was pinned or the pool was full; it
    has another outcome, too.
    """

    GRANTED = "granted"
    REDEEMED = "redeemed"
    LAPSED = "lapsed"
    RELEASED = "released"
    YIELDED = "yielded"


@dataclass(frozen=True, slots=True)
class EndedTurn:
    """A request that is over, and what may go on from it.

    Attributes:
        session_id: the session whose newest turn it is; None: found by its tokens alone.
        chain: its leading blocks that are held.
        num_blocks, last_block: of its full blocks how many there are, and the last one's hash;
            None if there is none.
        tail: token ids behind its full blocks.
        expected_s: seconds within which the client expects to go on; None if it did not say so.
    """

    request_id: str
    tenant_salt: bytes
    session_id: str | None
    chain: tuple[BlockIdentity, ...]
    num_blocks: int
    last_block: bytes | None
    tail: tuple[int, ...]
    expected_s: float | None = None


@dataclass(frozen=True, slots=True)
class Arrival:
    """A prompt, and its full blocks of `window` tokens by their hashes."""

    tenant_salt: bytes
    session_id: str | None
    token_ids: tuple[int, ...]
    hashes: Sequence[bytes]
    window: int

    def goes_on_from(self, turn: EndedTurn) -> bool:
        """Whether the prompt begins with all tokens of the turn."""
        count = turn.num_blocks
        if count > len(self.hashes) or (count and self.hashes[count - 1] != turn.last_block):
            return False
        start = count * self.window
        return self.token_ids[start : start + len(turn.tail)] == turn.tail


class _Open:
    """A turn that may be gone on from.

    Attributes:
        lease: its blocks; None once the lease has lapsed.
        lapses_at: None while none was granted.
    """

    __slots__ = ("ended_at", "lapses_at", "lease", "tools", "turn")

    def __init__(self, turn: EndedTurn, lease: Lease, ended_at: float) -> None:
        self.turn = turn
        self.lease: Lease | None = lease
        self.ended_at = ended_at
        self.lapses_at: float | None = None
        self.tools: tuple[str, ...] = ()

    @property
    def num_blocks(self) -> int:
        return 0 if self.lease is None else len(self.turn.chain)


class SessionLeases:
    """The newest turn of each session, and what was granted to it.

    Args:
        blocks, parked: what is kept, of one worker.
        max_blocks: turns are forgotten, oldest first, when they have more blocks than this in all;
            blocks of several turns count several times.
        max_time_s: longest lease.

    Attributes:
        expected: the turns that a lease was granted to, by when they are expected to go on.
    """

    def __init__(
        self, blocks: BlockCache, parked: ParkedStates[Any], max_blocks: int, max_time_s: float
    ) -> None:
        self._blocks = blocks
        self._parked = parked
        self._max_blocks = max_blocks
        self._max_time_s = max_time_s
        self._gaps = GapEstimates()
        self.expected = ExpectedTurns(blocks)
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._by_session: dict[tuple[bytes, str], _Open] = {}
        # Those of no session, by their last full blocks.
        self._by_block: dict[bytes, list[_Open]] = {}
        self._due: list[tuple[float, int, _Open]] = []
        self._num_granted = 0
        self._num_blocks = 0
        self._outcomes: Counter[LeaseOutcome] = Counter()

    def __len__(self) -> int:
        """Leases that are granted and not over."""
        return sum(o.lease is not None and o.lapses_at is not None for o in self._open.values())

    @property
    def outcomes(self) -> dict[LeaseOutcome, int]:
        """How often each came about."""
        self._outcomes[LeaseOutcome.YIELDED] = self._blocks.num_yielded
        return {outcome: self._outcomes[outcome] for outcome in LeaseOutcome}

    @property
    def next_lapse(self) -> float | None:
        """When the next lease lapses; None for none."""
        while self._due and not self._is_due_entry(*self._due[0]):
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else None

    def turn_over(self, turn: EndedTurn, now: float) -> None:
        """A turn has ended; its session may go on. A hint of the client's grants a lease."""
        if turn.session_id is None and turn.last_block is None:
            return
        before = self._of_session(turn.tenant_salt, turn.session_id)
        if before is not None:
            # Two requests of a session ran side by side: the later end is its newest turn.
            self._drop(before)
        if turn.request_id in self._open:
            self._drop(self._open[turn.request_id])
        entry = _Open(turn, self._blocks.lease(turn.chain), now)
        self._open[turn.request_id] = entry
        if turn.session_id is not None:
            self._by_session[turn.tenant_salt, turn.session_id] = entry
        elif turn.last_block is not None:
            self._by_block.setdefault(turn.last_block, []).append(entry)
        self._num_blocks += entry.num_blocks
        if turn.expected_s is not None:
            self._grant(entry, turn.expected_s, turn.expected_s, now)
        while len(self._open) > MAX_TURNS or self._num_blocks > self._max_blocks:
            self._drop(self._oldest())

    def grant(self, request_id: str, tools: Collection[str], now: float) -> bool:
        """The turn of this request ended in calls of `tools`; False if its session went on."""
        entry = self._open.get(request_id)
        if entry is None or entry.tools:
            return False
        entry.tools = tuple(tools)
        if entry.lapses_at is None:
            tenant_salt = entry.turn.tenant_salt
            seconds = self._gaps.expected(tenant_salt, tools)
            self._grant(entry, seconds, self._gaps.median(tenant_salt, tools), now)
        return True

    def arrived(self, prompt: Arrival, now: float) -> None:
        """A prompt was admitted, and has its cached blocks; it came at `now`."""
        entry = self._of_session(prompt.tenant_salt, prompt.session_id)
        if entry is not None and not prompt.goes_on_from(entry.turn):
            self._release(entry)
            return
        if entry is None:
            entry = self._of_prefix(prompt)
        if entry is not None:
            gap_s = max(0.0, now - entry.ended_at)
            self._gaps.observe(entry.turn.tenant_salt, entry.tools, gap_s)
            self._go_on(entry)

    def moved(self, tenant_salt: bytes, session_id: str) -> None:
        """The session goes on at another worker, which has taken its state along.

        That tells nothing of its tools: this worker may be leaving, and they still run.
        """
        self._parked.give_way(tenant_salt, session_id)
        entry = self._of_session(tenant_salt, session_id)
        if entry is not None:
            self._go_on(entry)

    def end_session(self, tenant_salt: bytes, session_id: str) -> None:
        """The session is closed: what is kept of it goes first. Idempotent."""
        entry = self._of_session(tenant_salt, session_id)
        if entry is not None:
            self._release(entry)
        self._parked.drop(tenant_salt, session_id)

    def end_turns(self, is_of: Callable[[bytes], bool]) -> None:
        """What tenants with such a salt have cached was forgotten, and their turns are."""
        for entry in tuple(self._open.values()):
            if is_of(entry.turn.tenant_salt):
                self._release(entry)

    def brought(self, turn: ExpectedTurn, identities: Collection[BlockIdentity]) -> None:
        """Blocks of an awaited turn are held again: if it is leased, that covers them, too."""
        self.expected.brought(turn, identities)
        entry = self._open[turn.request_id]
        if entry.lease is not None:
            held = [identity for identity in turn.chain if identity in self._blocks]
            entry.lease = self._blocks.renew(entry.lease, held)

    def lapse(self, now: float) -> None:
        """End the leases that are overdue."""
        while (due := self.next_lapse) is not None and due <= now:
            _, _, entry = heapq.heappop(self._due)
            assert entry.lease is not None
            self._outcomes[LeaseOutcome.LAPSED] += 1
            self._num_blocks -= entry.num_blocks
            self._blocks.lapse(entry.lease)
            entry.lease = None
            self._give_way(entry.turn)

    def _is_due_entry(self, due: float, _: int, entry: _Open) -> bool:
        is_open = self._open.get(entry.turn.request_id) is entry
        return is_open and entry.lease is not None and entry.lapses_at == due

    def _of_session(self, tenant_salt: bytes, session_id: str | None) -> _Open | None:
        return None if session_id is None else self._by_session.get((tenant_salt, session_id))

    def _of_prefix(self, prompt: Arrival) -> _Open | None:
        """The longest turn of no session with which the prompt begins."""
        for block_hash in reversed(prompt.hashes) if self._by_block else ():
            for entry in self._by_block.get(block_hash, ()):
                if prompt.goes_on_from(entry.turn):
                    return entry
        return None

    def _grant(self, entry: _Open, seconds: float, expected_s: float, now: float) -> None:
        assert entry.lease is not None
        lapses_at = entry.ended_at + min(seconds, self._max_time_s)
        if lapses_at <= now:
            return
        entry.lapses_at = lapses_at
        self._outcomes[LeaseOutcome.GRANTED] += 1
        self._num_granted += 1
        heapq.heappush(self._due, (lapses_at, self._num_granted, entry))
        self._blocks.pin(entry.lease, lapses_at)
        turn, ended_at = entry.turn, entry.ended_at
        self.expected.expect(
            ExpectedTurn(turn.request_id, turn.chain, ended_at, ended_at + expected_s)
        )
        if turn.session_id is not None:
            self._parked.lease(turn.tenant_salt, turn.session_id, lapses_at)

    def _go_on(self, entry: _Open) -> None:
        turn = entry.turn
        self._forget(entry, has_gone_on=True)
        if turn.session_id is not None:
            self._parked.end_lease(turn.tenant_salt, turn.session_id)
        if entry.lease is not None:
            self._outcomes[LeaseOutcome.REDEEMED] += entry.lapses_at is not None
            self._blocks.redeem(entry.lease)

    def _release(self, entry: _Open) -> None:
        """What is kept of the turn makes room first."""
        self._forget(entry)
        self._give_way(entry.turn)
        if entry.lease is not None:
            self._outcomes[LeaseOutcome.RELEASED] += entry.lapses_at is not None
            self._blocks.lapse(entry.lease)

    def _drop(self, entry: _Open) -> None:
        """The turn is not remembered any longer; what is kept of it stays where it is."""
        turn = entry.turn
        self._forget(entry)
        if turn.session_id is not None:
            self._parked.end_lease(turn.tenant_salt, turn.session_id)
        if entry.lease is not None:
            self._outcomes[LeaseOutcome.RELEASED] += entry.lapses_at is not None
            self._blocks.forget(entry.lease)

    def _forget(self, entry: _Open, *, has_gone_on: bool = False) -> None:
        turn = entry.turn
        del self._open[turn.request_id]
        self.expected.over(turn.request_id, has_gone_on=has_gone_on)
        if turn.session_id is not None:
            del self._by_session[turn.tenant_salt, turn.session_id]
        elif turn.last_block is not None:
            others = self._by_block[turn.last_block]
            others.remove(entry)
            if not others:
                del self._by_block[turn.last_block]
        self._num_blocks -= entry.num_blocks

    def _give_way(self, turn: EndedTurn) -> None:
        if turn.session_id is not None:
            self._parked.give_way(turn.tenant_salt, turn.session_id)

    def _oldest(self) -> _Open:
        """The oldest turn without a lease, or else that pins nothing, or else the oldest."""
        entries = self._open.values()
        idle = (entry for entry in entries if entry.lapses_at is None)
        unpinned = (o for o in entries if o.lease is None or o.lease.pinned_until is None)
        return next(chain(idle, unpinned, entries))

    def check_integrity(self) -> None:
        """Raise RipresaError (INTERNAL) unless the leases agree with their turns."""
        found = [*self._by_session.values(), *chain.from_iterable(self._by_block.values())]
        if sorted(map(id, self._open.values())) != sorted(map(id, found)):
            raise RipresaError(ErrorCode.INTERNAL, "a session's newest turn is not remembered")
        if self._num_blocks != sum(entry.num_blocks for entry in self._open.values()):
            raise RipresaError(ErrorCode.INTERNAL, "the blocks of the open turns are miscounted")
        self.expected.check_integrity(self._open)
        outcomes = self.outcomes
        ended = (LeaseOutcome.REDEEMED, LeaseOutcome.LAPSED, LeaseOutcome.RELEASED)
        num_over = sum(outcomes[outcome] for outcome in ended)
        if outcomes[LeaseOutcome.GRANTED] != num_over + len(self):
            raise RipresaError(ErrorCode.INTERNAL, "a lease was lost, or ended twice")
        leases = [e.lease for e in self._open.values() if e.lease is not None]
        num_pinning = sum(lease.pinned_until is not None for lease in leases)
        if num_pinning != self._blocks.num_pinning_leases:
            raise RipresaError(ErrorCode.INTERNAL, "blocks are pinned for no open turn")
