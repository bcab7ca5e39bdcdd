"""What happens to a transfer when the process at one end dies or stops?"""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import torch
from transfer_sides import (
    DECODER,
    ChildProcess,
    Leftovers,
    ProcessSides,
    RecordingSink,
    StreamServer,
    blocks,
    leaked_since,
    leftovers,
    manifest,
    payload,
    receiver_calls,
    state,
)

from ripresa.workers.address import WorkerAddress, WorkerKind
from ripresa.workers.errors import Unavailable
from ripresa.workers.transfer.base import Accept, ControlMessage, LaneConfig, SendSection
from ripresa.workers.transfer.faults import delay
from ripresa.workers.transfer.inbound import InboundTransfers
from ripresa.workers.transfer.outbound import OutboundTransfers
from ripresa.workers.transfer.registry import create_transport

pytestmark = pytest.mark.slow

BLOCK_BYTES = 100_000  # 100 chunks, far more than are under way at once
# The defaults are as short as a lane that nothing is wrong with allows.
LIMITS = {"chunk_bytes": 1_000, "idle_timeout_s": 3.0}
CONFIG = LaneConfig(**LIMITS)
MID_SECTION = 150  # a chunk in the middle of the second block

StartReceiver = Callable[..., ChildProcess]


@pytest.fixture
def receivers() -> Iterator[StartReceiver]:
    started: list[ChildProcess] = []

    def start(**options: object) -> ChildProcess:
        child = ChildProcess(
            "receiver_process.py", config=LIMITS, block_bytes=BLOCK_BYTES, **options
        )
        started.append(child)
        return child

    yield start
    for child in started:
        child.stop()


async def send_two_blocks(backend: OutboundTransfers, receiver: str, transfer_id: str) -> None:
    transfer = await backend.offer(
        WorkerAddress(receiver, WorkerKind.DECODE), manifest(transfer_id)
    )
    for section in (*(blocks(k, k, k + 1, BLOCK_BYTES) for k in range(2)), state(2)):
        await transfer.send(section, payload(section))
    await transfer.complete()


async def test_receiver_killed_in_a_section_costs_its_own_transfer_only(
    receivers: StartReceiver,
) -> None:
    dying = receivers(strike=[MID_SECTION, signal.SIGKILL])
    healthy = receivers()
    sides = await ProcessSides.connect(int(dying.first_line), CONFIG)
    other = await ProcessSides.connect(int(healthy.first_line), CONFIG)
    peers = {"decoder-0": sides.peer, "decoder-1": other.peer}
    backend = OutboundTransfers(
        "encoder-9",
        lambda receiver: peers[receiver.worker_id],
        create_transport("gloo", "127.0.0.1", torch.device("cpu"), CONFIG),
        CONFIG,
    )
    await send_two_blocks(backend, "decoder-1", "before")
    doomed = asyncio.create_task(send_two_blocks(backend, "decoder-0", "doomed"))
    alongside = [send_two_blocks(backend, "decoder-1", f"alongside {k}") for k in range(5)]
    await asyncio.gather(*alongside)
    with pytest.raises(Unavailable):
        await doomed
    assert dying.wait() == -signal.SIGKILL
    await send_two_blocks(backend, "decoder-1", "after")
    await backend.drain()
    backend.check_integrity()
    assert backend.num_open_lanes == 1
    with pytest.raises(Unavailable):
        await send_two_blocks(backend, "decoder-0", "to the dead")
    for transfer_id in ("before", "after", *(f"alongside {k}" for k in range(5))):
        assert await other.receiver("ends", transfer_id) == ["complete"]
    await backend.drain()
    backend.check_integrity()
    await backend.close()
    await other.receiver("settle")
    await other.close()
    await sides.close()


async def test_receiver_stopped_in_a_section_recovers_with_a_new_lane(
    receivers: StartReceiver,
) -> None:
    child = receivers(strike=[MID_SECTION, signal.SIGSTOP])
    sides = await ProcessSides.connect(int(child.first_line), CONFIG)
    with pytest.raises(Unavailable):
        await send_two_blocks(sides.backend, "decoder-0", "stopped")
    await sides.backend.drain()
    sides.backend.check_integrity()
    assert sides.backend.num_open_lanes == 0
    child.signal(signal.SIGCONT)
    assert (await sides.receiver("end_of", "stopped")).startswith("failed")
    await send_two_blocks(sides.backend, "decoder-0", "again")
    assert await sides.receiver("ends", "again") == ["complete"]
    assert len(await sides.receiver("ends", "stopped")) == 1
    await sides.receiver("settle")
    await sides.close()


class Receiving:
    """This process as the receiver of a sender process, which it may strike."""

    def __init__(self) -> None:
        self.sink = RecordingSink(BLOCK_BYTES)
        transport = create_transport("gloo", "127.0.0.1", torch.device("cpu"), CONFIG)
        self.inbound = InboundTransfers(self.sink, transport, CONFIG)
        self.strike: Callable[[], None] | None = None
        calls = receiver_calls(self.inbound, self.sink)
        self.server = StreamServer({**calls, "deliver": self.deliver})

    async def deliver(self, message: ControlMessage) -> Accept | None:
        if isinstance(message, SendSection) and message.section.index == 1 and self.strike:
            self.strike()
        return await self.inbound.deliver(message)


@pytest.fixture
async def receiving() -> AsyncIterator[Receiving]:
    made = Receiving()
    yield made
    await made.inbound.close()
    await made.server.stop()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_sender_lost_in_a_section_is_noticed_and_the_receiver_lives_on(
    receiving: Receiving, number: signal.Signals
) -> None:
    port = await receiving.server.start()
    sender = ChildProcess("sender_process.py", config=LIMITS, port=port, block_bytes=BLOCK_BYTES)
    receiving.strike = lambda: sender.signal(number)
    sender.tell("doomed")
    assert (await receiving.sink.end_of("doomed")).startswith("failed")
    assert len(receiving.sink.written["doomed"]) == 1
    receiving.strike = None
    sender.stop()
    healthy = ChildProcess("sender_process.py", config=LIMITS, port=port, block_bytes=BLOCK_BYTES)
    healthy.tell("healthy")
    assert await receiving.sink.end_of("healthy") == "complete"
    healthy.stop()
    assert len(receiving.sink.ended["doomed"]) == 1
    await receiving.inbound.drain()
    receiving.inbound.check_integrity()


async def test_sender_that_dies_between_sections_ends_by_the_idle_timeout(
    receiving: Receiving,
) -> None:
    port = await receiving.server.start()
    sender = ChildProcess("sender_process.py", config=LIMITS, port=port, block_bytes=BLOCK_BYTES)
    sender.tell("quiet", "pause")
    while len(receiving.sink.written.get("quiet", [])) < 1:
        receiving.sink.changed.clear()
        await receiving.sink.changed.wait()
    sender.signal(signal.SIGKILL)
    assert await receiving.sink.end_of("quiet") == "failed: nothing came for 3 s"
    sender.stop()
    await receiving.inbound.drain()
    receiving.inbound.check_integrity()


async def test_lanes_of_processes_leak_neither_threads_nor_descriptors(
    receivers: StartReceiver,
) -> None:
    child = receivers()
    sides = await ProcessSides.connect(int(child.first_line), CONFIG)

    async def round_trip(name: str) -> None:
        """A lane opens, works, is lost by a cancel in mid-section, and is replaced."""
        await send_two_blocks(sides.backend, "decoder-0", f"{name} first")
        transfer = await sides.backend.offer(DECODER, manifest(f"{name} cancelled"))
        section = blocks(0, 0, 1, BLOCK_BYTES)
        reached = asyncio.Event()
        sides.faults[len(sides.peer.delivered)] = delay(reached, asyncio.Event())
        sending = asyncio.create_task(transfer.send(section, payload(section)))
        await reached.wait()
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        sides.backend.peer_lost("decoder-0")
        await sides.receiver("peer_lost", "encoder-0")
        await sides.backend.drain()
        await sides.receiver("settle")

    async def leftovers_there() -> Leftovers:
        return await sides.receiver("leftovers")

    await round_trip("warm up")
    gc.collect()  # what earlier tests left would hide a leak when it goes
    here, there = await leftovers(), await leftovers_there()
    for number in range(5):
        await round_trip(f"round {number}")
    assert await leaked_since(here, leftovers) == (0, 0)
    assert await leaked_since(there, leftovers_there) == (0, 0)
    await sides.close()
