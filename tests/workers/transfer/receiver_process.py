"""The receiving side of a transfer test as a process of its own.

    receiver_process.py '{"config": {...}, "block_bytes": n, "strike": [chunk, signal]}'

Prints its control port, serves until its standard input closes. `strike` sends this process a
signal while the chunk with that number (over all sections, from 1) is being received.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import torch
from transfer_sides import RecordingSink, StreamServer

from ripresa.workers.transfer import lane
from ripresa.workers.transfer.base import LaneConfig
from ripresa.workers.transfer.inbound import InboundTransfers
from ripresa.workers.transfer.registry import create_transport


def strike_at_chunk(chunk: int, signal_number: int) -> None:
    count = 0

    class Striking(lane.RunningChecksum):
        def update(self, piece: torch.Tensor) -> None:
            nonlocal count
            count += 1
            if count == chunk:
                os.kill(os.getpid(), signal_number)
            super().update(piece)

    lane.RunningChecksum = Striking  # type: ignore[misc]


def threads_and_descriptors() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


async def serve(options: dict[str, Any]) -> None:
    config = LaneConfig(**options.get("config", {}))
    sink = RecordingSink(
        **({"block_bytes": options["block_bytes"]} if "block_bytes" in options else {})
    )
    transport = create_transport("gloo", "127.0.0.1", torch.device("cpu"), config)
    receiver = InboundTransfers(sink, transport, config)

    async def record() -> tuple[Any, ...]:
        return sink.opened, sink.written, sink.ended

    async def settle() -> None:
        await receiver.drain()
        receiver.check_integrity()

    async def leftovers() -> tuple[int, int]:
        return threads_and_descriptors()

    server = StreamServer(
        {
            "deliver": receiver.deliver,
            "record": record,
            "end_of": sink.end_of,
            "settle": settle,
            "leftovers": leftovers,
            "close": receiver.close,
        }
    )
    print(await server.start(), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop()


if __name__ == "__main__":
    torch.set_num_threads(1)
    settings = json.loads(sys.argv[1])
    if "strike" in settings:
        strike_at_chunk(*settings["strike"])
    asyncio.run(serve(settings))
