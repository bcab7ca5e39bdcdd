"""Which decode worker keeps which session's state? A gateway's memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from ripresa.cluster.routing.execution import last_hash
from ripresa.cluster.routing.planner import SessionHome

MAX_SESSIONS = 65536
"""Sessions that a gateway remembers; forgetting one costs a replay."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """Where a session's last turn ended.

    Attributes:
        last_block: hash of the last full block of its tokens; None if it has none.
    """

    home: SessionHome
    last_block: bytes | None


class SessionHomes:
    """The last turn of each session, by tenant.

    Args:
        window: W, tokens in a block.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._turns: OrderedDict[tuple[bytes, str], _Turn] = OrderedDict()

    def find(
        self, tenant_salt: bytes, session_id: str | None, hashes: Sequence[bytes]
    ) -> SessionHome | None:
        """Where a session's state should be that these blocks go on from; None for nowhere."""
        if session_id is None:
            return None
        turn = self._turns.get((tenant_salt, session_id))
        if turn is None:
            return None
        if last_hash(hashes, turn.home.num_tokens, self._window) != turn.last_block:
            return None
        return turn.home

    def put(
        self, tenant_salt: bytes, session_id: str, home: SessionHome, hashes: Sequence[bytes]
    ) -> None:
        """A turn is over; `hashes` are those of its tokens."""
        key = (tenant_salt, session_id)
        self._turns[key] = _Turn(home, last_hash(hashes, home.num_tokens, self._window))
        self._turns.move_to_end(key)
        if len(self._turns) > MAX_SESSIONS:
            self._turns.popitem(last=False)
