"""Which lane carries a sender's next section? One a receiver, opened lazily."""

from __future__ import annotations

import asyncio
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from ripresa.workers.errors import Unavailable
from ripresa.workers.transfer.base import (
    CloseLane,
    Lane,
    LaneConfig,
    LaneEndpoint,
    OpenLane,
    Peer,
    Transport,
)
from ripresa.workers.transfer.control import Notices, deliver


class ClosingLanes:
    """Lanes that were given up, until their threads and sockets are gone."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def add(self, lane: Lane, reason: str) -> None:
        lane.discard(reason)
        task = asyncio.get_running_loop().create_task(lane.wait_closed())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def drain(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)


@dataclass(frozen=True, slots=True)
class OpenedLane:
    """A lane with the name that both ends know it by."""

    endpoint: LaneEndpoint
    lane: Lane
    peer: Peer


@dataclass(slots=True)
class _Route:
    """The way to one receiver. The lock is first come, first served: one section at a time."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    opened: OpenedLane | None = None
    num_users: int = 0


class Turn:
    """The use of one receiver's lane for one section; made by `LanePool.section`."""

    def __init__(self, pool: LanePool, route: _Route, peer: Peer) -> None:
        self._pool = pool
        self._route = route
        self._peer = peer

    async def lane(self) -> OpenedLane:
        """The lane; opened now if there is none.

        Raises:
            Unavailable: it could not be opened, or the pool is closed.
        """
        return self._route.opened or await self._pool.open(self._route, self._peer)

    def lose(self, reason: str) -> None:
        """Give the lane up, if it is still there."""
        if self._route.opened is not None:
            self._pool.discard(self._route, reason)


class LanePool:
    """The sending ends of one worker's lanes.

    Args:
        worker_id: this worker, the sender.
        transport: makes the lanes.
        config: `max_lanes` and timeouts.
        notices: carries the word that a lane was closed.
    """

    def __init__(
        self, worker_id: str, transport: Transport, config: LaneConfig, notices: Notices
    ) -> None:
        self._incarnation = uuid.uuid4().hex[:8]
        self._worker_id = worker_id
        self._transport = transport
        self._config = config
        self._notices = notices
        self._routes: OrderedDict[str, _Route] = OrderedDict()
        self._num_opened_ever = 0
        self._changed = asyncio.Event()
        self._closing = ClosingLanes()
        self._closed = False

    @property
    def num_open(self) -> int:
        return sum(route.opened is not None for route in self._routes.values())

    @property
    def num_users(self) -> int:
        """Sections that hold a lane or wait for one."""
        return sum(route.num_users for route in self._routes.values())

    @property
    def num_closing(self) -> int:
        return len(self._closing)

    @asynccontextmanager
    async def section(self, receiver: str, peer: Peer) -> AsyncIterator[Turn]:
        """This caller's turn to send one section; an error inside the block loses the lane."""
        route = self._routes.setdefault(receiver, _Route())
        route.num_users += 1
        try:
            async with route.lock:
                turn = Turn(self, route, peer)
                try:
                    yield turn
                except BaseException as error:
                    turn.lose(f"a section ended by {error!r}")
                    raise
                self._routes.move_to_end(receiver)
        finally:
            route.num_users -= 1
            self._forget_if_unused(receiver, route)
            self._changed.set()

    def peer_lost(self, receiver: str) -> None:
        """The receiver died: give its lane up; what uses it fails at once."""
        route = self._routes.get(receiver)
        if route is not None and route.opened is not None:
            self.discard(route, f"{receiver} died", tell_peer=False)
            self._forget_if_unused(receiver, route)
            self._changed.set()

    def close(self) -> None:
        """Give every lane up. Idempotent."""
        self._closed = True
        for receiver, route in list(self._routes.items()):
            if route.opened is not None:
                self.discard(route, "the worker closed its lanes")
            self._forget_if_unused(receiver, route)
        self._changed.set()

    async def drain(self) -> None:
        """Wait until lanes that were given up are gone."""
        await self._closing.drain()

    async def open(self, route: _Route, peer: Peer) -> OpenedLane:
        """Open a route's lane (for `Turn`, which holds the route's lock)."""
        await self._make_room()
        self._num_opened_ever += 1
        endpoint = LaneEndpoint(
            self._worker_id,
            self._incarnation,
            self._num_opened_ever,
            self._transport.name,
            self._config.chunk_bytes,
            self._transport.address(),
        )
        opened = OpenedLane(endpoint, self._transport.sending_end(endpoint), peer)
        route.opened = opened
        try:
            await deliver(peer, OpenLane(endpoint), self._config.control_timeout_s)
            await opened.lane.open()
        except BaseException as error:
            if route.opened is opened:
                self.discard(route, f"opening ended by {error!r}")
            raise
        return opened

    async def _make_room(self) -> None:
        while True:
            if self._closed:
                raise Unavailable("the worker closed its lanes; use another worker")
            if self.num_open < self._config.max_lanes:
                return
            idle = next((r for r in self._routes if not self._routes[r].num_users), None)
            if idle is not None:
                self.discard(self._routes.pop(idle), "made room for another lane")
            else:
                self._changed.clear()
                await self._changed.wait()

    def discard(self, route: _Route, reason: str, tell_peer: bool = True) -> None:
        """Give a route's lane up (for `Turn`)."""
        opened, route.opened = route.opened, None
        assert opened is not None
        self._closing.add(opened.lane, reason)
        if tell_peer:
            self._notices.post(opened.peer, CloseLane(opened.endpoint.lane_id))

    def _forget_if_unused(self, receiver: str, route: _Route) -> None:
        if not route.num_users and route.opened is None and self._routes.get(receiver) is route:
            del self._routes[receiver]
