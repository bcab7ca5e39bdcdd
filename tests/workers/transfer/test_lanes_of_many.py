"""Do lanes stay few, independent and replaceable when one worker talks to many?"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from transfer_sides import RecordingSink, blocks, manifest, payload, state

from ripresa.workers.address import WorkerAddress, WorkerKind
from ripresa.workers.errors import ConfigError, ResourceExhausted, Unavailable
from ripresa.workers.transfer.base import (
    LaneConfig,
    LaneEndpoint,
    LaneNotOpen,
    OpenLane,
    Peer,
)
from ripresa.workers.transfer.faults import FaultyPeer, delay
from ripresa.workers.transfer.inbound import InboundTransfers
from ripresa.workers.transfer.loopback import LoopbackTransport
from ripresa.workers.transfer.outbound import OutboundTransfers

SECTIONS = (blocks(0, 0, 2), state(1))
FIRST_SECTION = 2  # after Offer and OpenLane


def decoder(number: int) -> WorkerAddress:
    return WorkerAddress(str(number), WorkerKind.DECODE)


class Fleet:
    """Senders and receivers of one process."""

    def __init__(self, config: LaneConfig, num_senders: int, num_receivers: int) -> None:
        self.transport = LoopbackTransport(config)
        self.sinks = [RecordingSink() for _ in range(num_receivers)]
        self.inbound = [InboundTransfers(sink, self.transport, config) for sink in self.sinks]
        self.peers: dict[str, Peer] = {str(k): peer for k, peer in enumerate(self.inbound)}
        self.senders = [
            OutboundTransfers(
                f"encoder-{k}",
                lambda receiver: self.peers[receiver.worker_id],
                self.transport,
                config,
            )
            for k in range(num_senders)
        ]

    async def send(self, sender: int, receiver: int, name: str) -> None:
        wanted = replace(manifest(name), sender=f"encoder-{sender}")
        transfer = await self.senders[sender].offer(decoder(receiver), wanted)
        for section in SECTIONS:
            await transfer.send(section, payload(section))
        await transfer.complete()
        assert self.sinks[receiver].ended[name] == ["complete"]

    async def settle(self) -> None:
        for sender in self.senders:
            await sender.drain()
            sender.check_integrity()
        for receiver in self.inbound:
            await receiver.drain()
            receiver.check_integrity()


async def test_sender_keeps_at_most_max_lanes_and_closes_the_least_recently_used() -> None:
    fleet = Fleet(LaneConfig(max_lanes=2), 1, 4)
    for number, receiver in enumerate((0, 1, 0, 2)):
        await fleet.send(0, receiver, f"one by one {number}")
    assert fleet.senders[0].num_open_lanes == 2
    await fleet.settle()
    open_at = [receiver.num_open_lanes for receiver in fleet.inbound]
    assert open_at == [1, 0, 1, 0], "receiver 1's lane was used least recently"
    await asyncio.gather(*(fleet.send(0, k % 4, f"all at once {k}") for k in range(16)))
    assert fleet.senders[0].num_open_lanes <= 2
    await fleet.settle()
    assert fleet.transport.num_wires == fleet.senders[0].num_open_lanes


async def test_receiver_keeps_at_most_max_lanes() -> None:
    fleet = Fleet(LaneConfig(max_lanes=2), 5, 1)
    for sender in range(5):
        await fleet.send(sender, 0, f"one by one {sender}")
    assert fleet.inbound[0].num_open_lanes == 2
    await asyncio.gather(*(fleet.send(k % 5, 0, f"all at once {k}") for k in range(15)))
    assert fleet.inbound[0].num_open_lanes <= 2
    await fleet.settle()


async def test_receiver_whose_lanes_are_all_busy_refuses_another() -> None:
    config = LaneConfig(max_lanes=1, control_timeout_s=0.2)
    receiver = InboundTransfers(RecordingSink(), LoopbackTransport(config), config)
    await receiver.deliver(OpenLane(LaneEndpoint("encoder-0", "a", 1, "loopback", 1000)))
    with pytest.raises(ResourceExhausted, match="max_lanes"):
        await receiver.deliver(OpenLane(LaneEndpoint("encoder-1", "b", 1, "loopback", 1000)))
    await receiver.close()


async def test_late_word_of_an_older_lane_does_not_replace_a_newer_one() -> None:
    config = LaneConfig(open_timeout_s=1.0)
    receiver = InboundTransfers(RecordingSink(), LoopbackTransport(config), config)
    older = LaneEndpoint("encoder-0", "a", 1, "loopback", 1000)
    newer = replace(older, generation=2)
    await receiver.deliver(OpenLane(newer))
    with pytest.raises(LaneNotOpen):
        await receiver.deliver(OpenLane(older))
    assert receiver.num_open_lanes == 1
    await receiver.drain()
    assert receiver.num_open_lanes == 0, "the other end never came"
    receiver.check_integrity()


async def test_slow_receiver_slows_its_own_lane_only() -> None:
    fleet = Fleet(LaneConfig(chunk_timeout_s=30), 1, 2)
    reached, release = asyncio.Event(), asyncio.Event()
    fleet.peers["0"] = FaultyPeer(fleet.inbound[0], {FIRST_SECTION: delay(reached, release)})
    slow = asyncio.create_task(fleet.send(0, 0, "slow"))
    await reached.wait()
    await asyncio.gather(*(fleet.send(0, 1, f"quick {k}") for k in range(5)))
    assert not slow.done()
    release.set()
    await slow
    await fleet.settle()


async def test_bytes_in_flight_are_bounded_over_all_lanes() -> None:
    largest = max(section.num_bytes for section in SECTIONS)
    fleet = Fleet(LaneConfig(max_bytes_in_flight=largest, chunk_timeout_s=30), 1, 2)
    reached, release = asyncio.Event(), asyncio.Event()
    fleet.peers["0"] = FaultyPeer(fleet.inbound[0], {FIRST_SECTION: delay(reached, release)})
    first = asyncio.create_task(fleet.send(0, 0, "first"))
    await reached.wait()
    second = await fleet.senders[0].offer(decoder(1), manifest("second"))
    waiting = asyncio.create_task(second.send(SECTIONS[0], payload(SECTIONS[0])))
    done, _ = await asyncio.wait({waiting}, timeout=0.05)
    assert not done
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    release.set()
    await first
    await fleet.send(0, 1, "third")
    await fleet.settle()


async def test_keep_alives_outlast_the_idle_timeout_and_silence_does_not() -> None:
    # Three keep-alives a timeout: a process that gets no core for a moment is not silent.
    fleet = Fleet(LaneConfig(idle_timeout_s=2.0), 1, 1)
    peer = FaultyPeer(fleet.inbound[0], {})
    fleet.peers["0"] = peer
    transfer = await fleet.senders[0].offer(decoder(0), manifest("computing for long"))
    heard = asyncio.Event()

    async def count(message: object, deliver: object) -> None:
        heard.set()
        return await deliver(message)  # type: ignore[operator,no-any-return]

    peer.faults[6] = count  # after six of them more than a timeout has passed
    await heard.wait()
    for section in SECTIONS:
        await transfer.send(section, payload(section))
    await transfer.complete()
    assert fleet.sinks[0].ended["computing for long"] == ["complete"]

    dying = await fleet.senders[0].offer(decoder(0), manifest("dying"))
    fleet.senders[0].peer_lost("0")  # the sender falls silent without a word
    assert "nothing came" in await fleet.sinks[0].end_of("dying")
    with pytest.raises(Unavailable):
        await dying.send(SECTIONS[0], payload(SECTIONS[0]))
    await fleet.settle()


async def test_sink_that_raises_ends_the_transfer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(LaneConfig(), 1, 1)
    with monkeypatch.context() as patch:
        patch.setattr(fleet.sinks[0], "write", lambda *_: 1 / 0)
        with pytest.raises(Unavailable, match="ZeroDivisionError"):
            await fleet.send(0, 0, "write fails")
    assert len(fleet.sinks[0].ended["write fails"]) == 1
    await fleet.send(0, 0, "afterwards")
    await fleet.settle()


async def test_integrity_check_finds_what_is_left_over() -> None:
    fleet = Fleet(LaneConfig(), 1, 1)
    await fleet.senders[0].offer(decoder(0), manifest("still running"))
    for side in (*fleet.senders, *fleet.inbound):
        with pytest.raises(Exception, match="transfers"):
            side.check_integrity()
    await fleet.senders[0].close()
    await fleet.inbound[0].close()
    await fleet.settle()


def test_limits_must_be_positive() -> None:
    with pytest.raises(ConfigError, match=r"lanes\.chunk_bytes"):
        LaneConfig(chunk_bytes=0)
