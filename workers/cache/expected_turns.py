"""Which leased turns are expected to go on, when, and what was brought back for them by then?

    lease granted ── expected at ──▶ taken, shortly before ── brought back ──▶ gone on: used
                                                                            └─▶ over: unused

What brings blocks back is `Prefetch`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Container, Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.errors import ErrorCode, RipresaError


class PrefetchOutcome(StrEnum):
    """What became of a block that was brought back: the session that went on found it, or not."""

    USED = "used"
    UNUSED = "unused"


@dataclass(frozen=True, slots=True, eq=False)
class ExpectedTurn:
    """A turn that ended and will be gone on from.

    Attributes:
        chain: its leading blocks.
        ended_at, expected_at: when it ended, and will be gone on from.
    """

    request_id: str
    chain: tuple[BlockIdentity, ...]
    ended_at: float
    expected_at: float


@dataclass(slots=True)
class _Awaited:
    turn: ExpectedTurn
    brought: set[BlockIdentity] = field(default_factory=set)


class ExpectedTurns:
    """The turns of one worker whose sessions have not gone on, each until it is `over`.

    Args:
        blocks: what the worker holds.
    """

    def __init__(self, blocks: Container[BlockIdentity]) -> None:
        self._blocks = blocks
        self._awaited: dict[str, _Awaited] = {}
        self._queue: list[tuple[float, str]] = []
        self._outcomes: Counter[PrefetchOutcome] = Counter()

    @property
    def outcomes(self) -> dict[PrefetchOutcome, int]:
        """Blocks that were brought back, by what became of them."""
        return {outcome: self._outcomes[outcome] for outcome in PrefetchOutcome}

    @property
    def next_at(self) -> float | None:
        """When the next turn that was not taken is expected to go on; None for none."""
        return self._queue[0][0] if self._queue else None

    def expect(self, turn: ExpectedTurn) -> None:
        """A turn that is not awaited will be gone on from."""
        self._awaited[turn.request_id] = _Awaited(turn)
        insort(self._queue, (turn.expected_at, turn.request_id))

    def take(self) -> ExpectedTurn:
        """The turn that is expected first; it is awaited on, and not taken again.

        Raises IndexError when there is none.
        """
        _, request_id = self._queue.pop(0)
        return self._awaited[request_id].turn

    def awaits(self, turn: ExpectedTurn) -> bool:
        """Whether it was not gone on from yet, and still may be."""
        awaited = self._awaited.get(turn.request_id)
        return awaited is not None and awaited.turn is turn

    def brought(self, turn: ExpectedTurn, identities: Iterable[BlockIdentity]) -> None:
        """Blocks of an awaited turn are held again."""
        self._awaited[turn.request_id].brought.update(identities)

    def over(self, request_id: str, *, has_gone_on: bool) -> None:
        """Nobody waits for the turn any more. Nothing for one that was not awaited."""
        awaited = self._awaited.pop(request_id, None)
        if awaited is None:
            return
        entry = (awaited.turn.expected_at, request_id)
        place = bisect_left(self._queue, entry)
        if self._queue[place : place + 1] == [entry]:
            del self._queue[place]
        num_used = sum(each in self._blocks for each in awaited.brought) if has_gone_on else 0
        self._outcomes[PrefetchOutcome.USED] += num_used
        self._outcomes[PrefetchOutcome.UNUSED] += len(awaited.brought) - num_used

    def check_integrity(self, open_turns: Collection[str]) -> None:
        """Raise RipresaError (INTERNAL) if a turn is awaited that is none of these."""
        if not self._awaited.keys() <= set(open_turns):
            raise RipresaError(ErrorCode.INTERNAL, "a turn is awaited that is over")
        queued = [request_id for _, request_id in self._queue]
        if len(set(queued)) != len(queued) or not self._awaited.keys() >= set(queued):
            raise RipresaError(ErrorCode.INTERNAL, "the expected turns are not the awaited ones")
