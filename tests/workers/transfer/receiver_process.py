"""The receiving side of a transfer test as a process of its own.

    receiver_process.py '{"config": {...}, "block_bytes": n, "strike": [chunk, signal]}'

All keys are optional. It prints its control port and serves until its standard input closes.
`strike` sends this process a signal while the chunk with that number (over all sections, from 1)
is being received; `keep_record` false drops payloads unread.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import torch
from transfer_sides import BLOCK_BYTES, RecordingSink, StreamServer, receiver_calls

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


async def serve(options: dict[str, Any]) -> None:
    config = LaneConfig(**options.get("config", {}))
    sink = RecordingSink(options.get("block_bytes", BLOCK_BYTES), options.get("keep_record", True))
    transport = create_transport("gloo", "127.0.0.1", torch.device("cpu"), config)
    inbound = InboundTransfers(sink, transport, config)
    server = StreamServer(receiver_calls(inbound, sink))
    print(await server.start(), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await inbound.close()
    await server.stop()


if __name__ == "__main__":
    torch.set_num_threads(1)
    settings = json.loads(sys.argv[1])
    if "strike" in settings:
        strike_at_chunk(*settings["strike"])
    asyncio.run(serve(settings))
