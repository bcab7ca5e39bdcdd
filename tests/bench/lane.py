"""How fast does a gloo lane move 50 MB between two processes, next to copying them in memory?

    python tests/bench/lane.py [--megabytes 50] [--section-megabytes 10] [--repeats 7]

The measured time is a whole transfer as an encoder worker makes it: offer, sections with their
checksums on both sides, complete. The receiver drops what has arrived verified. The copy is one
thread and the same bytes; transfers and copies alternate, so that both meet the same load of the
machine. Medians. Target: at least 0.25 of the copy.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # after the environment is set

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent / "workers" / "transfer"))

from transfer_sides import (  # noqa: E402
    DECODER,
    ChildProcess,
    ProcessSides,
    blocks,
    manifest,
    payload,
    state,
)

from ripresa.workers.transfer.base import LaneConfig, Section  # noqa: E402

TARGET = 0.25


async def transfer_seconds(
    sides: ProcessSides, transfer_id: str, sections: list[Section], payloads: list[torch.Tensor]
) -> float:
    began = time.perf_counter()
    transfer = await sides.backend.offer(DECODER, manifest(transfer_id))
    for section, data in zip(sections, payloads, strict=True):
        await transfer.send(section, data)
    await transfer.complete()
    return time.perf_counter() - began


def copy_seconds(source: torch.Tensor, target: torch.Tensor) -> float:
    began = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - began


def commit() -> str:
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=FOLDER, capture_output=True, text=True
    )
    return described.stdout.strip() or "not a git checkout"


async def measure(num_bytes: int, section_bytes: int, repeats: int) -> float:
    config = LaneConfig()
    num_blocks = max(1, num_bytes // section_bytes)
    sections = [blocks(k, k, k + 1, section_bytes) for k in range(num_blocks)]
    sections.append(state(num_blocks))
    payloads = [payload(section) for section in sections]
    moved = sum(section.num_bytes for section in sections)
    source = torch.cat(payloads)
    target = torch.zeros_like(source)
    lanes, copies = [], []
    child = ChildProcess("receiver_process.py", block_bytes=section_bytes, keep_record=False)
    try:
        sides = await ProcessSides.connect(int(child.first_line), config)
        await transfer_seconds(sides, "opens the lane", sections, payloads)
        for number in range(repeats):
            lanes.append(await transfer_seconds(sides, f"number {number}", sections, payloads))
            copies.append(copy_seconds(source, target))
        await sides.close()
    finally:
        child.stop()
    lane, copy = statistics.median(lanes), statistics.median(copies)
    print(f"bytes        {moved:,} in {len(sections)} sections, chunks of {config.chunk_bytes:,}")
    print(f"lane         {moved / lane / 1e9:.2f} GB/s ({lane * 1e3:.1f} ms, median of {repeats})")
    print(f"memory copy  {moved / copy / 1e9:.2f} GB/s ({copy * 1e3:.1f} ms, one thread)")
    print(f"ratio        {copy / lane:.2f} (target {TARGET})")
    return copy / lane


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=50, help="bytes of a transfer, in 10^6")
    parser.add_argument("--section-megabytes", type=float, default=10, help="bytes of a section")
    parser.add_argument("--repeats", type=int, default=15, help="transfers, and copies")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"machine      {os.cpu_count()} x {platform.machine()}, {platform.platform()}")
    print(f"versions     python {platform.python_version()}, torch {torch.__version__}")
    print(f"commit       {commit()}")
    print(f"command      python {' '.join([os.path.relpath(sys.argv[0]), *sys.argv[1:]])}")
    ratio = asyncio.run(
        measure(
            options.megabytes * 1_000_000,
            int(options.section_megabytes * 1_000_000),
            options.repeats,
        )
    )
    return 0 if ratio >= TARGET else 1


if __name__ == "__main__":
    raise SystemExit(main())
