"""Block files for the tests of the disk tier, and a process that writes them until it is killed."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from ripresa.workers.cache.block_file import BlockFormat
from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.cache.block_record import BlockRecord, Producer
from ripresa.workers.cache.block_store import StoredBlock
from ripresa.workers.cache.cache_events import Origin
from ripresa.workers.cache.disk_store import DiskStore

FORM = BlockFormat(layout_digest=b"layout of a test", weights="w1", block_bytes=900)

ORIGIN = Origin("a tenant", b"first block's ha", None)


def identity(number: int, restarts: tuple[int, ...] = ()) -> BlockIdentity:
    return BlockIdentity(number.to_bytes(16, "big"), restarts)


def stored(number: int, restarts: tuple[int, ...] = (), form: BlockFormat = FORM) -> StoredBlock:
    record = BlockRecord(identity(number, restarts), Producer.PREFILL, form.weights, ORIGIN)
    word = f"{number} {restarts} ".encode()
    return StoredBlock(record, (word * form.block_bytes)[: form.block_bytes])


def write_for_ever(root: Path, first: int, capacity_bytes: int) -> None:
    """Write ascending blocks, telling each one on stdout once it is there."""
    store = DiskStore(root, FORM, capacity_bytes, 1e9, time.time)
    number = first
    while True:
        store.put(stored(number), time.time())
        print(number, flush=True)
        number += 1


if __name__ == "__main__":
    write_for_ever(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
