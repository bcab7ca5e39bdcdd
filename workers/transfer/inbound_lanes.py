"""Which receiving ends of lanes does this worker hold? Opened on a sender's word, idle ones go."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass

import torch

from ripresa.workers.errors import ErrorCode, ResourceExhausted, RipresaError
from ripresa.workers.transfer.base import (
    Lane,
    LaneConfig,
    LaneEndpoint,
    LaneNotOpen,
    Transport,
)
from ripresa.workers.transfer.lane_pool import ClosingLanes


@dataclass(slots=True, eq=False)
class InboundLane:
    """A receiving end.

    Attributes:
        opening: ends when both ends have met, or raises why they did not.
        in_use: a section is on its way.
        protected_until: loop time before which it is kept although it carried nothing yet: its
            sender opened it for a section that is about to be announced.
    """

    endpoint: LaneEndpoint
    lane: Lane
    opening: asyncio.Task[None]
    protected_until: float
    in_use: bool = False

    async def receive(self, num_bytes: int) -> tuple[torch.Tensor, int]:
        await asyncio.shield(self.opening)
        return await self.lane.receive(num_bytes)


class InboundLanes:
    """The receiving ends of one worker, by lane id.

    Args:
        transport: makes the ends.
        config: `max_lanes` and timeouts.
    """

    def __init__(self, transport: Transport, config: LaneConfig) -> None:
        self._transport = transport
        self._config = config
        self._lanes: OrderedDict[str, InboundLane] = OrderedDict()
        self._closing = ClosingLanes()
        self._changed = asyncio.Event()

    @property
    def num_in_use(self) -> int:
        return sum(lane.in_use for lane in self._lanes.values())

    @property
    def num_open(self) -> int:
        return len(self._lanes)

    @property
    def num_closing(self) -> int:
        return len(self._closing)

    async def open(self, endpoint: LaneEndpoint) -> None:
        """Begin to open this worker's end. Idempotent; replaces an older lane of the same sender.

        Raises:
            LaneNotOpen: a newer lane of this sender is open; the message is late.
            ResourceExhausted: every lane stayed in use for half the control timeout.
            Unavailable: the sender uses another transport.
        """
        await self._make_room(endpoint)
        for other in self._of_sender(endpoint.sender):
            if endpoint == other.endpoint:
                return
            if endpoint.is_older_than(other.endpoint):
                raise LaneNotOpen(
                    f"lane {endpoint.lane_id} was replaced by {other.endpoint.lane_id}"
                )
            self.close(other.endpoint.lane_id, f"replaced by {endpoint.lane_id}")
        loop = asyncio.get_running_loop()
        lane = self._transport.receiving_end(endpoint)
        opening = loop.create_task(lane.open())
        self._lanes[endpoint.lane_id] = InboundLane(
            endpoint, lane, opening, loop.time() + self._config.idle_timeout_s
        )
        opening.add_done_callback(lambda task: self._opened(endpoint.lane_id, task))

    def take(self, lane_id: str) -> InboundLane:
        """The lane for one section.

        Raises:
            LaneNotOpen: it was closed, or never opened; a new one will do.
            RipresaError: another section is on it, which no sender may do.
        """
        lane = self._lanes.get(lane_id)
        if lane is None:
            raise LaneNotOpen(f"lane {lane_id} is not open here")
        if lane.in_use:
            raise RipresaError(
                ErrorCode.FAILED_PRECONDITION, f"lane {lane_id} already carries a section"
            )
        lane.in_use = True
        return lane

    def give_back(self, lane: InboundLane) -> None:
        """The section is over. If it failed, its transfer has closed the lane."""
        lane.in_use = False
        lane.protected_until = 0.0
        if lane.endpoint.lane_id in self._lanes:
            self._lanes.move_to_end(lane.endpoint.lane_id)
        self._changed.set()

    def close(self, lane_id: str, reason: str) -> None:
        """Give a lane up; a section on it fails at once. Idempotent."""
        lane = self._lanes.pop(lane_id, None)
        if lane is not None:
            self._closing.add(lane.lane, reason)
            self._changed.set()

    def peer_lost(self, sender: str) -> None:
        for lane in self._of_sender(sender):
            self.close(lane.endpoint.lane_id, f"{sender} died")

    def close_all(self, reason: str) -> None:
        for lane_id in list(self._lanes):
            self.close(lane_id, reason)

    async def drain(self) -> None:
        """Wait until lanes that open are open, and lanes that were given up are gone."""
        opening = [lane.opening for lane in self._lanes.values()]
        if opening:
            await asyncio.wait(opening)
        await self._closing.drain()

    def _of_sender(self, sender: str) -> list[InboundLane]:
        return [lane for lane in self._lanes.values() if lane.endpoint.sender == sender]

    async def _make_room(self, endpoint: LaneEndpoint) -> None:
        """Wait until this lane may be opened; one that it replaces makes room for it."""
        loop = asyncio.get_running_loop()
        try:
            # Half of it, so that the sender hears why before it gives up by itself.
            async with asyncio.timeout(self._config.control_timeout_s / 2):
                while (
                    not self._of_sender(endpoint.sender)
                    and len(self._lanes) >= self._config.max_lanes
                ):
                    idle = next(
                        (
                            lane
                            for lane in self._lanes.values()
                            if not lane.in_use and lane.protected_until <= loop.time()
                        ),
                        None,
                    )
                    if idle is not None:
                        self.close(idle.endpoint.lane_id, "made room for another lane")
                    else:
                        self._changed.clear()
                        await self._changed.wait()
        except TimeoutError as error:
            raise ResourceExhausted(
                f"all {self._config.max_lanes} lanes of this worker are in use; "
                "raise lanes.max_lanes or send less at once"
            ) from error

    def _opened(self, lane_id: str, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self.close(lane_id, f"it could not be opened: {task.exception()}")
