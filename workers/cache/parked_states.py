"""Which conversations could go on here as if they had never paused?

After a turn the whole state of its request stays in host memory, by session: rings of all layers,
the open pair, the partial block. Whole blocks are not part of it: they stay in the block cache, and
without them the image is worthless. An image is for exactly its tokens.

A running request that has to give up its pages parks the same image, with the blocks that were its
own: others need their pages now.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Generic, Protocol, TypeVar

from ripresa.workers.replay import Recipe
from ripresa.workers.replay_query import ParkedImage


class Payload(Protocol):
    """Something that takes memory."""

    @property
    def nbytes(self) -> int: ...


P = TypeVar("P", bound=Payload)

TOKEN_BYTES = 36
"""Memory of one token id in a tuple: an int of its own, and the place of it."""


@dataclass(frozen=True, slots=True)
class ParkedState(Generic[P]):
    """One request's state after its last row.

    Attributes:
        token_ids: tokens of all processed positions; the last sampled one is not among them.
        recipe: what the request followed.
        payload: as the runner's `import_image` takes it.
        expires: engine clock in seconds from which on it is worthless.
        first_block, blocks: whole blocks from this number on, as the runner's `import_blocks` takes
            them. None for a session's state: they stay in the block cache.
    """

    token_ids: tuple[int, ...]
    recipe: Recipe
    payload: P
    expires: float
    first_block: int = 0
    blocks: P | None = None

    @property
    def num_bytes(self) -> int:
        """Of payloads and token ids; a long conversation's ids take more than its rings."""
        blocks = 0 if self.blocks is None else self.blocks.nbytes
        return self.payload.nbytes + blocks + TOKEN_BYTES * len(self.token_ids)

    @property
    def image(self) -> ParkedImage:
        """As the planner sees it."""
        recipe = self.recipe
        return ParkedImage(
            num_tokens=len(self.token_ids),
            swa_floor=recipe.swa_floor,
            decoder_start=recipe.decoder_start,
            source_floor=recipe.source_floor,
            restarts=recipe.restarts,
            tail=recipe.tail,
        )


@dataclass(frozen=True, slots=True)
class Preempted:
    """A running request that gave up its pages; its state is kept until it goes on or ends."""

    request_id: str


@dataclass(frozen=True, slots=True)
class ParkedSession(Generic[P]):
    """A session and its state."""

    tenant_salt: bytes
    session_id: str
    state: ParkedState[P]


class ParkedStates(Generic[P]):
    """The newest state of each session, and of each preempted request.

    The least recently parked ones make room: sessions without a lease, then those whose lease ends
    first, then requests that run.

    Args:
        capacity_bytes: most bytes of payloads and token ids.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._held: OrderedDict[tuple[bytes, str | Preempted], ParkedState[P]] = OrderedDict()
        self._leased: dict[tuple[bytes, str | Preempted], float] = {}
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._held)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def put(self, tenant_salt: bytes, session_id: str | Preempted, state: ParkedState[P]) -> None:
        """Keep a session's state in place of an older one, if it fits at all."""
        self.drop(tenant_salt, session_id)
        if state.num_bytes > self._capacity_bytes:
            return
        while self._num_bytes + state.num_bytes > self._capacity_bytes:
            self.drop(*self._next_to_go())
        self._held[tenant_salt, session_id] = state
        self._num_bytes += state.num_bytes

    def lease(self, tenant_salt: bytes, session_id: str, until: float) -> None:
        """Keep a session's state before those of sessions without a lease, and as long as it runs.

        Nothing if there is none.
        """
        owner = (tenant_salt, session_id)
        state = self._held.get(owner)
        if state is not None:
            self._held[owner] = replace(state, expires=max(state.expires, until))
            self._leased[owner] = until

    def end_lease(self, tenant_salt: bytes, session_id: str) -> None:
        """The state is one of many again. Idempotent."""
        self._leased.pop((tenant_salt, session_id), None)

    def find(
        self,
        tenant_salt: bytes,
        session_id: str | Preempted,
        token_ids: tuple[int, ...],
        now: float,
    ) -> ParkedState[P] | None:
        """The session's state if it is for a true prefix of these tokens and not overdue."""
        state = self._held.get((tenant_salt, session_id))
        if state is None:
            return None
        if now >= state.expires:
            self.drop(tenant_salt, session_id)
            return None
        num_tokens = len(state.token_ids)
        if num_tokens >= len(token_ids) or state.token_ids != token_ids[:num_tokens]:
            return None
        return state

    def find_exact(
        self, tenant_salt: bytes, session_id: str, num_tokens: int, digest: bytes, now: float
    ) -> ParkedState[P] | None:
        """The session's state if it is for as many tokens of this `token_digest`, in time."""
        state = self._held.get((tenant_salt, session_id))
        if state is None or now >= state.expires or len(state.token_ids) != num_tokens:
            return None
        return state if token_digest(state.token_ids) == digest else None

    def sessions(self, now: float) -> list[ParkedSession[P]]:
        """Sessions whose states are in time, the latest first."""
        return [
            ParkedSession(salt, owner, state)
            for (salt, owner), state in reversed(self._held.items())
            if isinstance(owner, str) and now < state.expires
        ]

    def give_way(self, tenant_salt: bytes, session_id: str) -> None:
        """The session goes on elsewhere, or may be over: its state makes room before all others."""
        self.end_lease(tenant_salt, session_id)
        if (tenant_salt, session_id) in self._held:
            self._held.move_to_end((tenant_salt, session_id), last=False)

    def clear(self) -> None:
        """Forget every session's state."""
        self._held.clear()
        self._leased.clear()
        self._num_bytes = 0

    def drop(self, tenant_salt: bytes, session_id: str | Preempted) -> None:
        """Forget a session's state. Idempotent."""
        state = self._held.pop((tenant_salt, session_id), None)
        self._leased.pop((tenant_salt, session_id), None)
        if state is not None:
            self._num_bytes -= state.num_bytes

    def _next_to_go(self) -> tuple[bytes, str | Preempted]:
        """Whose state makes room next; there must be one."""
        sessions = (owner for owner in self._held if isinstance(owner[1], str))
        free = next((owner for owner in sessions if owner not in self._leased), None)
        if free is not None:
            return free
        return min(self._leased, key=self._leased.__getitem__, default=next(iter(self._held)))


def token_digest(token_ids: tuple[int, ...]) -> bytes:
    """Names a state's tokens without sending them."""
    return sha256(array("q", token_ids).tobytes()).digest()
