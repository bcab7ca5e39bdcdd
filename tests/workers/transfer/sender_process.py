"""The sending side of a transfer test as a process of its own.

    sender_process.py '{"config": {...}, "port": n, "block_bytes": n}'

Reads JSON lines [transfer_id, "pause"?] and sends one transfer of three sections for each; with
`pause` it stays silent after the first section, keep-alives apart. Ends with its standard input.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import torch
from transfer_sides import DECODER, StreamClient, blocks, manifest, payload, state

from ripresa.workers.transfer.base import LaneConfig
from ripresa.workers.transfer.outbound import OutboundTransfers
from ripresa.workers.transfer.registry import create_transport


async def run(options: dict[str, Any]) -> None:
    config = LaneConfig(**options["config"])
    client = await StreamClient.connect(options["port"])
    transport = create_transport("gloo", "127.0.0.1", torch.device("cpu"), config)
    backend = OutboundTransfers("encoder-0", lambda _: client, transport, config)
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        transfer_id, *pause = json.loads(line)
        transfer = await backend.offer(DECODER, manifest(transfer_id))
        for section in (*(blocks(k, k, k + 1, options["block_bytes"]) for k in range(2)), state(2)):
            await transfer.send(section, payload(section))
            if pause:
                await asyncio.to_thread(sys.stdin.read)
        await transfer.complete()
    await backend.close()
    await client.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(run(json.loads(sys.argv[1])))
