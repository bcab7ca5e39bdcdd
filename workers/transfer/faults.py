"""How is a broken control way played? A `Peer` around a peer, with a fault at chosen messages.

FaultyPeer(receiver, {3: drop})      the fourth message is lost
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from ripresa.workers.transfer.base import Accept, Complete, ControlMessage, Peer

Deliver = Callable[[ControlMessage], Awaitable[Accept | None]]
Fault = Callable[[ControlMessage, Deliver], Awaitable[Accept | None]]


class FaultyPeer:
    """Delivers messages to `peer`, but the n-th one (from 0) through `faults[n]`.

    Keep-alives are counted like the rest. After a fault raised `PeerDied`, every message does.
    """

    def __init__(self, peer: Peer, faults: Mapping[int, Fault]) -> None:
        self._peer = peer
        self.faults = faults
        self._dead: PeerDied | None = None
        self.delivered: list[ControlMessage] = []

    async def deliver(self, message: ControlMessage) -> Accept | None:
        if self._dead is not None:
            raise self._dead
        fault = self.faults.get(len(self.delivered))
        self.delivered.append(message)
        try:
            return await (
                fault(message, self._peer.deliver) if fault else self._peer.deliver(message)
            )
        except PeerDied as error:
            self._dead = error
            raise


class PeerDied(ConnectionError):
    """The peer is gone and takes no further message."""


async def drop(message: ControlMessage, deliver: Deliver) -> Accept | None:
    """The message is lost; its sender waits until its own timeout."""
    await asyncio.get_running_loop().create_future()
    raise AssertionError("a dropped message has no answer")


async def drop_answer(message: ControlMessage, deliver: Deliver) -> Accept | None:
    """The message arrives, its answer is lost."""
    await deliver(message)
    return await drop(message, deliver)


async def repeat(message: ControlMessage, deliver: Deliver) -> Accept | None:
    """The message arrives twice at the same time and once more afterwards."""
    first, second = await asyncio.gather(deliver(message), deliver(message))
    third = await deliver(message)
    assert first == second == third
    return first


async def kill(message: ControlMessage, deliver: Deliver) -> Accept | None:
    """The peer dies before it takes the message."""
    raise PeerDied("the peer died")


async def miscount(message: ControlMessage, deliver: Deliver) -> Accept | None:
    """The transfer is completed with a checksum that its payloads do not have."""
    assert isinstance(message, Complete)
    return await deliver(replace(message, checksum=message.checksum ^ 1))


def delay(reached: asyncio.Event, release: asyncio.Event) -> Fault:
    """The message waits for `release`; `reached` tells that it does.

    It then arrives even if its sender has cancelled the call, as on a real network.
    """

    async def arrive(message: ControlMessage, deliver: Deliver) -> Accept | None:
        await release.wait()
        return await deliver(message)

    async def delayed(message: ControlMessage, deliver: Deliver) -> Accept | None:
        reached.set()
        arrival = asyncio.get_running_loop().create_task(arrive(message, deliver))
        late.add(arrival)
        arrival.add_done_callback(forget)
        return await asyncio.shield(arrival)

    def forget(arrival: asyncio.Task[Accept | None]) -> None:
        late.discard(arrival)
        if not arrival.cancelled():
            # A cancelled call has nobody left to hear of a refusal.
            arrival.exception()

    late: set[asyncio.Task[Accept | None]] = set()
    return delayed
