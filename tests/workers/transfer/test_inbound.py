"""Does a receiver keep its promises to the sink, whatever comes in whatever order?"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transfer_sides import RecordingSink, blocks, manifest, payload, state

from ripresa.workers.errors import RipresaError, Unavailable
from ripresa.workers.transfer.base import (
    CloseLane,
    Complete,
    Fail,
    KeepAlive,
    Lane,
    LaneConfig,
    LaneEndpoint,
    Manifest,
    Offer,
    OpenLane,
    Section,
    SendSection,
)
from ripresa.workers.transfer.checksum import payload_checksum, transfer_checksum
from ripresa.workers.transfer.inbound import InboundTransfers
from ripresa.workers.transfer.loopback import LoopbackTransport

CONFIG = LaneConfig(chunk_timeout_s=20, open_timeout_s=20, idle_timeout_s=20)
SECTIONS = (blocks(0, 0, 2), state(1))


class Bench:
    """A receiver, and the sending ends of lanes that the test moves by hand."""

    def __init__(self) -> None:
        self.transport = LoopbackTransport(CONFIG)
        self.sink = RecordingSink()
        self.inbound = InboundTransfers(self.sink, self.transport, CONFIG)
        self._num_lanes = 0

    async def open_lane(self) -> tuple[str, Lane]:
        self._num_lanes += 1
        endpoint = LaneEndpoint("encoder-0", "a", self._num_lanes, "loopback", 1000)
        lane = self.transport.sending_end(endpoint)
        await self.inbound.deliver(OpenLane(endpoint))
        await lane.open()
        return endpoint.lane_id, lane

    def expect(self, wanted: Manifest, lane_id: str, section: Section) -> asyncio.Task[object]:
        message = SendSection(wanted.transfer_id, wanted.generation, lane_id, section)
        return asyncio.create_task(self.inbound.deliver(message))

    async def settle(self) -> None:
        await self.inbound.drain()
        self.inbound.check_integrity()
        assert not self.sink.violations


async def test_fail_in_a_section_ends_it_at_once_and_gives_the_lane_up() -> None:
    bench, wanted = Bench(), manifest("failed by its sender")
    await bench.inbound.deliver(Offer(wanted))
    lane_id, _ = await bench.open_lane()
    arriving = bench.expect(wanted, lane_id, SECTIONS[0])
    await asyncio.sleep(0)
    await bench.inbound.deliver(Fail(wanted.transfer_id, wanted.generation, "changed my mind"))
    assert bench.inbound.num_open_lanes == 0
    with pytest.raises(Unavailable, match="changed my mind"):
        await arriving
    assert len(bench.sink.ended[wanted.transfer_id]) == 1
    await bench.settle()


@pytest.mark.parametrize("num_turns", range(12))
async def test_nothing_is_written_after_the_end(num_turns: int) -> None:
    """The payload arrives while Fail does; every interleaving of the two is tried."""
    bench, wanted = Bench(), manifest("a race")
    await bench.inbound.deliver(Offer(wanted))
    lane_id, lane = await bench.open_lane()
    arriving = bench.expect(wanted, lane_id, SECTIONS[0])
    sending = asyncio.create_task(lane.send(payload(SECTIONS[0])))
    for _ in range(num_turns):
        await asyncio.sleep(0)
    await bench.inbound.deliver(Fail(wanted.transfer_id, wanted.generation, "too late?"))
    lane.discard("the test is over")
    await asyncio.gather(arriving, sending, return_exceptions=True)
    assert len(bench.sink.ended[wanted.transfer_id]) == 1
    await bench.settle()


async def test_corrupt_section_costs_the_lane_at_the_receiver() -> None:
    bench, wanted = Bench(), manifest("corrupt")
    await bench.inbound.deliver(Offer(wanted))
    lane_id, lane = await bench.open_lane()
    bench.transport.damage = lambda data: data + 1
    arriving = bench.expect(wanted, lane_id, SECTIONS[0])
    results = await asyncio.gather(
        arriving, lane.send(payload(SECTIONS[0])), return_exceptions=True
    )
    assert all(isinstance(result, RipresaError) for result in results)
    assert bench.inbound.num_open_lanes == 0
    await bench.settle()


async def test_second_section_on_a_busy_lane_is_refused() -> None:
    bench, first, second = Bench(), manifest("first"), manifest("second")
    for wanted in (first, second):
        await bench.inbound.deliver(Offer(wanted))
    lane_id, lane = await bench.open_lane()
    arriving = bench.expect(first, lane_id, SECTIONS[0])
    await asyncio.sleep(0)
    with pytest.raises(RipresaError, match="already carries"):
        await bench.expect(second, lane_id, SECTIONS[0])
    await asyncio.gather(arriving, lane.send(payload(SECTIONS[0])))
    await bench.inbound.close()
    assert {name: len(ends) for name, ends in bench.sink.ended.items()} == {"first": 1, "second": 1}
    await bench.settle()


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["offer", "section", "silent section", "complete", "fail", "alive", "close", "lost"]
        ),
        st.integers(0, 3),  # transfer
        st.integers(0, 1),  # request
        st.integers(0, 2),  # generation
        st.integers(0, 1),  # section
    ),
    max_size=25,
)


@given(ACTIONS)
@settings(max_examples=200, deadline=None)
def test_any_sequence_of_messages_keeps_the_sink_s_contract(
    actions: list[tuple[str, int, int, int, int]],
) -> None:
    async def run() -> None:
        bench = Bench()
        lane_id, lane = await bench.open_lane()
        running: list[asyncio.Task[object]] = []
        for action, transfer, request, generation, number in actions:
            wanted = manifest(
                f"t{transfer}", generation=generation, request_id=f"request {request}"
            )
            key = (wanted.transfer_id, generation)
            section = SECTIONS[number]
            if action == "offer":
                running.append(asyncio.create_task(bench.inbound.deliver(Offer(wanted))))
            elif action in ("section", "silent section"):
                if bench.inbound.num_open_lanes == 0:
                    lane_id, lane = await bench.open_lane()
                running.append(bench.expect(wanted, lane_id, section))
                if action == "section":
                    running.append(asyncio.create_task(lane.send(payload(section))))
            elif action == "complete":
                agreed = transfer_checksum([payload_checksum(payload(s)) for s in SECTIONS])
                running.append(asyncio.create_task(bench.inbound.deliver(Complete(*key, agreed))))
            elif action == "fail":
                await bench.inbound.deliver(Fail(*key, "said so"))
            elif action == "alive":
                running.append(asyncio.create_task(bench.inbound.deliver(KeepAlive(*key))))
            elif action == "close":
                await bench.inbound.deliver(CloseLane(lane_id))
            else:
                bench.inbound.peer_lost("encoder-0")
            for _ in range(number * 4):
                await asyncio.sleep(0)
        await bench.inbound.close()
        lane.discard("the test is over")
        outcomes = await asyncio.gather(*running, return_exceptions=True)
        unexpected = [o for o in outcomes if isinstance(o, Exception)]
        assert all(isinstance(error, RipresaError) for error in unexpected), unexpected
        assert sorted(bench.sink.opened) == sorted(bench.sink.ended)
        assert all(len(ends) == 1 for ends in bench.sink.ended.values())
        await bench.settle()

    asyncio.run(run())


async def test_sender_that_restarts_gets_a_new_lane() -> None:
    bench = Bench()
    await bench.open_lane()
    reborn = LaneEndpoint("encoder-0", "b", 1, "loopback", 1000)
    lane = bench.transport.sending_end(reborn)
    await bench.inbound.deliver(OpenLane(reborn))
    await lane.open()
    assert bench.inbound.num_open_lanes == 1
    wanted = replace(manifest("of the new life"), sender="encoder-0")
    await bench.inbound.deliver(Offer(wanted))
    arriving = bench.expect(wanted, reborn.lane_id, SECTIONS[0])
    await asyncio.gather(arriving, lane.send(payload(SECTIONS[0])))
    await bench.inbound.close()
    await bench.settle()
