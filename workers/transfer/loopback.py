"""How do bytes move between two workers in one process? By handing the tensor over.

The engine of a single process uses it, and every test that needs no second process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ripresa.workers.errors import Unavailable
from ripresa.workers.transfer.base import Lane, LaneConfig, LaneEndpoint
from ripresa.workers.transfer.checksum import corrupt, payload_checksum

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Crossing:
    """A payload between the ends, with the checksum it left with."""

    payload: torch.Tensor
    checksum: int
    taken: asyncio.Future[None]


class _Wire:
    """What the two ends of one lane share."""

    def __init__(self) -> None:
        self.num_ends = 0
        self.both_here = asyncio.Event()
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.payloads: asyncio.Queue[_Crossing] = asyncio.Queue()


class LoopbackTransport:
    """Makes both ends of every lane of one process; give the same object to both sides.

    Args:
        config: timeouts.
        damage: what happens to every payload on its way; None for nothing (tests).
    """

    def __init__(
        self,
        config: LaneConfig | None = None,
        damage: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self._config = config or LaneConfig()
        self.damage = damage
        self._wires: dict[str, _Wire] = {}

    @property
    def name(self) -> str:
        return "loopback"

    @property
    def num_wires(self) -> int:
        """Lanes of which an end is still there."""
        return len(self._wires)

    def address(self) -> None:
        """Both ends have the same object."""

    def sending_end(self, endpoint: LaneEndpoint) -> Lane:
        return self._end(endpoint)

    def receiving_end(self, endpoint: LaneEndpoint) -> Lane:
        return self._end(endpoint)

    def forget(self, lane_id: str) -> None:
        """An end of this lane was discarded."""
        self._wires.pop(lane_id, None)

    def close(self) -> None:
        """Nothing is shared beyond the lanes, which close by themselves."""

    def _end(self, endpoint: LaneEndpoint) -> Lane:
        endpoint.require_transport(self.name)
        wire = self._wires.setdefault(endpoint.lane_id, _Wire())
        wire.num_ends += 1
        if wire.num_ends == 2:
            wire.both_here.set()
        return LoopbackLane(endpoint.lane_id, wire, self, self._config)


class LoopbackLane:
    """One end of a lane; see `Lane` for the contract. A lost end is felt at the other at once."""

    def __init__(
        self,
        lane_id: str,
        wire: _Wire,
        transport: LoopbackTransport,
        config: LaneConfig,
    ) -> None:
        self._lane_id = lane_id
        self._wire = wire
        self._config = config
        self._transport = transport
        self._discarded = False

    async def open(self) -> None:
        await self._or_lost(self._wire.both_here.wait(), self._config.open_timeout_s)

    async def send(self, payload: torch.Tensor) -> int:
        taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        checksum = payload_checksum(payload)
        if self._transport.damage is not None:
            payload = self._transport.damage(payload)
        self._wire.payloads.put_nowait(_Crossing(payload, checksum, taken))
        await self._or_lost(taken, self._config.chunk_timeout_s)
        return checksum

    async def receive(self, num_bytes: int) -> tuple[torch.Tensor, int]:
        arrival = self._wire.payloads.get()
        crossing = await self._or_lost(arrival, self._config.chunk_timeout_s)
        payload = crossing.payload
        if payload.numel() != num_bytes:
            self.discard("sizes differ")
            raise Unavailable(f"lane {self._lane_id}: {payload.numel()} bytes, not {num_bytes}")
        if payload_checksum(payload) != crossing.checksum:
            self.discard("a corrupt payload")
            raise corrupt(f"a payload of lane {self._lane_id}")
        # Its sender may have given up meanwhile: what has crossed has crossed.
        if not crossing.taken.done():
            crossing.taken.set_result(None)
        return payload, crossing.checksum

    def discard(self, reason: str) -> None:
        if self._discarded:
            return
        self._discarded = True
        if not self._wire.lost.done():
            self._wire.lost.set_result(reason)
        self._transport.forget(self._lane_id)

    async def wait_closed(self) -> None:
        """Nothing runs in the background."""

    async def _or_lost(self, awaitable: Awaitable[T], timeout_s: float) -> T:
        task = asyncio.ensure_future(awaitable)
        either: set[asyncio.Future[Any]] = {task, self._wire.lost}
        try:
            await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            # What has crossed has crossed, even if the other end is discarded right after.
            if task.done():
                return task.result()
            if self._wire.lost.done():
                raise Unavailable(f"lane {self._lane_id} was lost: {self._wire.lost.result()}")
            raise Unavailable(f"lane {self._lane_id}: nothing moved for {timeout_s:g} s")
        except BaseException:
            self.discard("a call on the other end ended early")
            raise
        finally:
            task.cancel()


def loopback_transport(
    host: str, device: torch.device | None = None, config: LaneConfig | None = None
) -> LoopbackTransport:
    """Lanes inside this process; it has no address and moves tensors of any device."""
    return LoopbackTransport(config)
