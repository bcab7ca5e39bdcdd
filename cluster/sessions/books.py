"""What does a cluster know of its opened sessions? Transcripts as trees of turns; plain Python.

A turn is what a client added and what the model said to it. Naming an older turn as the parent of a
new one makes a branch. Messages are bytes of the gateways' own; they are only kept here.
"""

from __future__ import annotations

import heapq
import math
import secrets
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

MAX_EXPIRED = 10_000
"""Expired sessions that are still told from those that never were."""
RECORD_BYTES = 500
"""What a session or a turn takes beside its content, about."""

Key = tuple[str, str]
"""A tenant and his session's id."""


class Refusal(StrEnum):
    """Why a session cannot do what was asked; names of `ErrorInfo.reason`."""

    SESSION_NOT_FOUND = "SESSION_NOT_FOUND"
    SESSION_EXPIRED = "SESSION_EXPIRED"
    SESSION_EXISTS = "SESSION_EXISTS"
    TURN_NOT_FOUND = "TURN_NOT_FOUND"
    SESSION_TOO_LARGE = "SESSION_TOO_LARGE"


class SessionEnd(StrEnum):
    """Why a session is open no more. EVICTED: it had to make room."""

    CLOSED = "closed"
    EXPIRED = "expired"
    EVICTED = "evicted"


@dataclass(frozen=True, slots=True)
class SessionHead:
    """What is fixed for a session.

    Attributes:
        conversation: its configuration and preamble.
        num_tokens: of that, as it was rendered; two heads may differ in it and be the same.
        idle_ttl_s: it expires when nothing was asked of it for so many seconds.
    """

    model: str
    cache_salt: str
    conversation: bytes
    idle_ttl_s: float
    num_tokens: int = field(default=0, compare=False)

    @property
    def num_bytes(self) -> int:
        return RECORD_BYTES + len(self.conversation)


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One turn.

    Attributes:
        parent_id: the turn that it goes on from; empty for the session's root.
        messages: what the client added, and the answer.
        said_key, said: the answer as the model said it, and what it is found by in a prompt; empty
            where it stands as it is rendered.
        num_tokens: of the whole conversation up to here.
        worker_id: who streamed the answer.
    """

    turn_id: str
    parent_id: str
    messages: bytes
    said_key: bytes
    said: bytes
    num_tokens: int
    worker_id: str

    @property
    def num_bytes(self) -> int:
        return RECORD_BYTES + len(self.messages) + len(self.said)


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """A session as clients see it; times in seconds since the epoch.

    Attributes:
        head_turn: the newest turn; None before the first.
    """

    head: SessionHead
    created: float
    expires: float
    head_turn: TurnRecord | None


@dataclass(frozen=True, slots=True)
class SessionPath:
    """The conversation up to one turn, oldest turn first.

    Attributes:
        incarnation: of the session; one that is opened later under the same id has another.
    """

    head: SessionHead
    turns: tuple[TurnRecord, ...]
    incarnation: str


@dataclass(slots=True)
class _Session:
    head: SessionHead
    incarnation: str
    created: float
    expires: float
    num_bytes: int
    turns: dict[str, TurnRecord] = field(default_factory=dict)


class _ByExpiry:
    """Some of the sessions, those first that expire first."""

    def __init__(self, sessions: Mapping[Key, _Session]) -> None:
        self._sessions = sessions
        # A session stands here once for each of its uses; all but the last have no meaning.
        self._heap: list[tuple[float, Key]] = []
        self._compact_at = 0

    def add(self, key: Key) -> None:
        """Take note of a session's use."""
        heapq.heappush(self._heap, (self._sessions[key].expires, key))
        if len(self._heap) > self._compact_at:
            self._heap = sorted({entry for entry in self._heap if self._counts(entry)})
            self._compact_at = 64 + 4 * len(self._heap)

    def pop(self, expired_at: float = math.inf) -> Key | None:
        """Take out the first one that has expired then; None if there is none."""
        while self._heap and self._heap[0][0] <= expired_at:
            entry = heapq.heappop(self._heap)
            # Two uses at one time stand here as equals.
            if self._counts(entry) and self._heap[:1] != [entry]:
                return entry[1]
        return None

    def _counts(self, entry: tuple[float, Key]) -> bool:
        session = self._sessions.get(entry[1])
        return session is not None and session.expires == entry[0]


@dataclass(slots=True)
class _Holder:
    """A tenant who has sessions."""

    sessions: _ByExpiry
    num_bytes: int = 0


class SessionBooks:
    """The opened sessions of all tenants.

    Room is made by the tenant who holds the most, at the time: those of his sessions go that would
    expire first. So no tenant loses a session because of one who holds more, and none at all while
    he holds no more than his share.

    Args:
        max_bytes: what they may take, about.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._sessions: dict[Key, _Session] = {}
        self._expired: OrderedDict[Key, None] = OrderedDict()
        self._by_expiry = _ByExpiry(self._sessions)
        self._holders: dict[str, _Holder] = {}
        self._num_bytes = 0
        self._ended = dict.fromkeys(SessionEnd, 0)

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    @property
    def num_bytes(self) -> int:
        """What the sessions take, about."""
        return self._num_bytes

    def ended(self, now: float) -> dict[SessionEnd, int]:
        """How many sessions are open no more, by why."""
        self._expire(now)
        return dict(self._ended)

    def open(self, key: Key, head: SessionHead, now: float) -> SessionFacts | Refusal:
        """Open a session, or find the same one opened before."""
        self._expire(now)
        session = self._sessions.get(key)
        if session is None:
            if not self._make_room(key, head.num_bytes):
                return Refusal.SESSION_TOO_LARGE
            session = self._sessions[key] = _Session(head, secrets.token_hex(8), now, now, 0)
            self._expired.pop(key, None)
            self._grow(key, session, head.num_bytes)
        elif session.head != head:
            return Refusal.SESSION_EXISTS
        self._touch(key, session, now)
        return self._facts(session)

    def get(self, key: Key, now: float) -> SessionFacts | Refusal:
        """A session as it is; asking does not keep it."""
        found = self._find(key, now)
        return found if isinstance(found, Refusal) else self._facts(found)

    def path(self, key: Key, turn_id: str, now: float) -> SessionPath | Refusal:
        """The conversation up to a turn; empty for the root."""
        session = self._find(key, now)
        if isinstance(session, Refusal):
            return session
        turns: list[TurnRecord] = []
        while turn_id:
            turn = session.turns.get(turn_id)
            if turn is None:
                return Refusal.TURN_NOT_FOUND
            turns.append(turn)
            turn_id = turn.parent_id
        self._touch(key, session, now)
        return SessionPath(session.head, tuple(reversed(turns)), session.incarnation)

    def append(self, key: Key, incarnation: str, turn: TurnRecord, now: float) -> Refusal | None:
        """Add a turn; one that is known already changes nothing.

        Args:
            incarnation: of the session that the turn goes on from, by its `path`.
        """
        session = self._find(key, now)
        if isinstance(session, Refusal):
            return session
        if session.incarnation != incarnation:
            return Refusal.SESSION_NOT_FOUND
        if turn.turn_id in session.turns:
            return None
        if turn.parent_id and turn.parent_id not in session.turns:
            return Refusal.TURN_NOT_FOUND
        if not self._make_room(key, turn.num_bytes):
            return Refusal.SESSION_TOO_LARGE
        session.turns[turn.turn_id] = turn
        self._grow(key, session, turn.num_bytes)
        self._touch(key, session, now)
        return None

    def close(self, key: Key, now: float) -> SessionHead | Refusal:
        """Forget a session; what it was."""
        session = self._find(key, now)
        if isinstance(session, Refusal):
            return session
        self._forget(key, SessionEnd.CLOSED)
        return session.head

    def _find(self, key: Key, now: float) -> _Session | Refusal:
        self._expire(now)
        session = self._sessions.get(key)
        if session is not None:
            return session
        return Refusal.SESSION_EXPIRED if key in self._expired else Refusal.SESSION_NOT_FOUND

    def _grow(self, key: Key, session: _Session, num_bytes: int) -> None:
        holder = self._holders.get(key[0])
        if holder is None:
            holder = self._holders[key[0]] = _Holder(_ByExpiry(self._sessions))
        for one in (session, holder):
            one.num_bytes += num_bytes
        self._num_bytes += num_bytes

    def _touch(self, key: Key, session: _Session, now: float) -> None:
        session.expires = now + session.head.idle_ttl_s
        self._remember(key)

    def _remember(self, key: Key) -> None:
        self._by_expiry.add(key)
        self._holders[key[0]].sessions.add(key)

    def _expire(self, now: float) -> None:
        while (key := self._by_expiry.pop(now)) is not None:
            self._forget(key, SessionEnd.EXPIRED)

    def _make_room(self, kept: Key, num_bytes: int) -> bool:
        """Let sessions go so that one may grow; whether there is room. If not, none has gone."""
        excess = self._num_bytes + num_bytes - self._max_bytes
        if excess <= 0:
            return True
        tenant = kept[0]
        held = {name: holder.num_bytes for name, holder in self._holders.items()}
        held[tenant] = held.get(tenant, 0) + num_bytes
        victims: list[Key] = []
        is_kept_out = False
        while excess > 0:
            most = max(held, key=lambda name: (held[name], name == tenant))
            key = self._holders[most].sessions.pop() if most in self._holders else None
            if key is None:
                break
            if key == kept:
                is_kept_out = True
                continue
            victims.append(key)
            size = self._sessions[key].num_bytes
            held[most] -= size
            excess -= size
        if is_kept_out:
            self._remember(kept)
        for key in victims:
            if excess > 0:
                self._remember(key)
            else:
                self._forget(key, SessionEnd.EVICTED)
        return excess <= 0

    def _forget(self, key: Key, why: SessionEnd) -> None:
        session = self._sessions.pop(key)
        self._num_bytes -= session.num_bytes
        holder = self._holders[key[0]]
        holder.num_bytes -= session.num_bytes
        if not holder.num_bytes:
            del self._holders[key[0]]
        self._ended[why] += 1
        if why is SessionEnd.CLOSED:
            return
        self._expired[key] = None
        if len(self._expired) > MAX_EXPIRED:
            self._expired.popitem(last=False)

    def _facts(self, session: _Session) -> SessionFacts:
        newest = next(reversed(session.turns.values()), None)
        return SessionFacts(session.head, session.created, session.expires, newest)
