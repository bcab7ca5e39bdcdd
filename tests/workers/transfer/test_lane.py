"""Does one process-group lane open, fail and close as promised? And which transport is chosen?"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from pathlib import Path

import pytest
import torch
from transfer_sides import leaked_since, leftovers

from ripresa.workers.errors import ConfigError, Unavailable
from ripresa.workers.transfer.base import Lane, LaneConfig, LaneEndpoint
from ripresa.workers.transfer.checksum import (
    RunningChecksum,
    payload_checksum,
    transfer_checksum,
)
from ripresa.workers.transfer.lane import ProcessGroupTransport
from ripresa.workers.transfer.process_group import (
    SENDER_RANK,
    LaneGroup,
    StoreServer,
    Work,
    check_nccl,
    require_nccl,
)
from ripresa.workers.transfer.registry import choose_transport, create_transport

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CONFIG = LaneConfig(chunk_timeout_s=0.5, open_timeout_s=0.5)
"""For ends that nobody meets; see `LaneConfig` for how long it can take to meet."""


def endpoint(transport: ProcessGroupTransport, generation: int) -> LaneEndpoint:
    return LaneEndpoint("encoder-0", "a", generation, "gloo", 1000, transport.address())


def listeners(port: int) -> list[str]:
    """The local addresses, in the kernel's notation, that listen on a port."""
    tables = [Path("/proc/net", name).read_text() for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()]
    return [row[1] for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "0A"]


@pytest.mark.parametrize("num_bytes", [0, 1, 999, 1000, 1001, 10_000])
async def test_payloads_of_every_size_cross_with_their_checksum(num_bytes: int) -> None:
    transport = ProcessGroupTransport("gloo", "127.0.0.1", LaneConfig())
    where = endpoint(transport, num_bytes)
    sender, receiver = transport.sending_end(where), transport.receiving_end(where)
    await asyncio.gather(sender.open(), receiver.open())
    for seed in range(3):
        data = torch.randint(
            0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
        )
        sent, (arrived, checksum) = await asyncio.gather(
            sender.send(data), receiver.receive(num_bytes)
        )
        assert torch.equal(arrived, data)
        assert sent == checksum == payload_checksum(data)
    for lane in (sender, receiver):
        lane.discard("done")
        await lane.wait_closed()


async def test_end_without_another_end_gives_up_and_leaves_nothing() -> None:
    transport = ProcessGroupTransport("gloo", "127.0.0.1", CONFIG)
    transport.address()
    gc.collect()  # what earlier tests left would hide a leak when it goes
    before = await leftovers()
    for generation in range(3):
        lane = transport.sending_end(endpoint(transport, generation))
        with pytest.raises(Unavailable, match="did not come"):
            await lane.open()
        with pytest.raises(Unavailable):
            await lane.send(torch.zeros(1, dtype=torch.uint8))
        await lane.wait_closed()
    assert await leaked_since(before, leftovers) == (0, 0)


async def test_lane_to_a_store_that_is_gone_is_unavailable() -> None:
    transport = ProcessGroupTransport("gloo", "127.0.0.1", CONFIG)
    where = endpoint(transport, 0)
    transport.close()
    lane = transport.receiving_end(where)
    with pytest.raises(Unavailable):
        await lane.open()
    await lane.wait_closed()


async def opened(transport: ProcessGroupTransport, generation: int) -> tuple[Lane, Lane]:
    """Both ends of a lane, sender first."""
    where = endpoint(transport, generation)
    sender, receiver = transport.sending_end(where), transport.receiving_end(where)
    await asyncio.gather(sender.open(), receiver.open())
    return sender, receiver


async def test_a_cancelled_and_a_discarded_call_return_before_the_thread_does() -> None:
    transport = ProcessGroupTransport("gloo", "127.0.0.1", LaneConfig())
    sender, receiver = await opened(transport, 0)
    # Nobody sends, so that it cannot be through by then.
    receiving = asyncio.create_task(receiver.receive(5_000))
    await asyncio.sleep(0)
    receiver.discard("the test says so")
    # The thread may have noticed by itself.
    with pytest.raises(Unavailable, match=r"the test says so|the lane was discarded"):
        await receiving
    sender.discard("done")
    await asyncio.gather(sender.wait_closed(), receiver.wait_closed())

    sender, receiver = await opened(transport, 1)
    sending = asyncio.create_task(sender.send(torch.zeros(5_000, dtype=torch.uint8)))
    await asyncio.sleep(0)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    receiver.discard("done")
    await asyncio.gather(sender.wait_closed(), receiver.wait_closed())


async def test_discarded_lane_stops_at_the_next_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = ProcessGroupTransport("gloo", "127.0.0.1", LaneConfig())
    where = endpoint(transport, 0)
    sender, receiver = transport.sending_end(where), transport.receiving_end(where)
    await asyncio.gather(sender.open(), receiver.open())
    moved: list[int] = []
    tenth, discarded = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    move = LaneGroup.move

    def counted(group: LaneGroup, chunk: torch.Tensor) -> Work:
        if group.rank == SENDER_RANK:
            moved.append(chunk.numel())
            if len(moved) == 10:
                loop.call_soon_threadsafe(tenth.set)
                assert discarded.wait(30)
        return move(group, chunk)

    monkeypatch.setattr(LaneGroup, "move", counted)
    data = torch.zeros(100_000, dtype=torch.uint8)
    sending = asyncio.create_task(sender.send(data))
    receiving = asyncio.create_task(receiver.receive(data.numel()))
    await tenth.wait()
    sender.discard("in the middle of a payload")
    discarded.set()
    await sender.wait_closed()
    assert len(moved) == 10
    for call in (sending, receiving):
        with pytest.raises(Unavailable):
            await call
    await receiver.wait_closed()


async def test_store_forgets_closed_lanes_and_listens_on_its_host_only() -> None:
    transport = ProcessGroupTransport("gloo", "127.0.0.1", LaneConfig())
    address = transport.address()
    store = transport.store
    assert isinstance(store, StoreServer)
    for generation in range(3):
        where = endpoint(transport, generation)
        ends = transport.sending_end(where), transport.receiving_end(where)
        await asyncio.gather(*(end.open() for end in ends))
        assert store.num_keys > 0
        for end in ends:
            end.discard("done")
            await end.wait_closed()
        assert store.num_keys == 0
    assert listeners(address[1]) == [f"0100007F:{address[1]:04X}"]


def test_ends_of_different_transports_refuse_each_other() -> None:
    transport = ProcessGroupTransport("gloo", "127.0.0.1", CONFIG)
    with pytest.raises(Unavailable, match="configure the same transport"):
        transport.receiving_end(LaneEndpoint("encoder-0", "a", 0, "nccl", 1000, ("host", 1)))


def test_checksum_of_pieces_is_the_checksum_of_the_whole() -> None:
    data = torch.arange(1000).to(torch.uint8)
    running = RunningChecksum()
    for piece in torch.split(data, 77):
        running.update(piece)
    assert running.value() == payload_checksum(data)
    assert transfer_checksum([1, 2]) != transfer_checksum([2, 1])


@pytest.mark.parametrize(
    ("name", "sender", "receiver", "chosen"),
    [
        ("auto", CPU, CPU, "gloo"),
        ("auto", CUDA, CPU, "gloo"),
        ("auto", CPU, CUDA, "gloo"),
        ("auto", CUDA, CUDA, "nccl"),
        ("gloo", CUDA, CUDA, "gloo"),
        ("loopback", CPU, CPU, "loopback"),
    ],
)
def test_auto_takes_nccl_between_gpus_only(
    name: str, sender: torch.device, receiver: torch.device, chosen: str
) -> None:
    assert choose_transport(name, sender, receiver) == chosen


def test_every_name_makes_its_transport() -> None:
    for name in ("gloo", "loopback"):
        assert create_transport(name, "127.0.0.1", CPU).name == name
    for attempt in (
        lambda: create_transport("pigeon", "127.0.0.1", CPU),
        lambda: choose_transport("pigeon", CPU, CPU),
    ):
        with pytest.raises(ConfigError, match="pigeon"):
            attempt()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_nccl_without_a_gpu_says_what_to_use_instead() -> None:
    for attempt in (
        lambda: create_transport("nccl", "127.0.0.1", CPU),
        lambda: check_nccl(CUDA),
    ):
        with pytest.raises(ConfigError, match="use gloo"):
            attempt()


def test_nccl_refuses_an_error_mode_that_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    for mode in ("1", "3"):
        monkeypatch.setenv(name, mode)
        with pytest.raises(ConfigError, match=name):
            require_nccl(CUDA)
    monkeypatch.delenv(name)
    require_nccl(CUDA)
    assert os.environ[name] == "2"
    monkeypatch.delenv(name)
