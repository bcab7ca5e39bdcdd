"""What does the disk tier cost, a block of the released model at a time?

    python tests/bench/disk.py [--blocks 1000] [--folder DIR]

One process, files of 114 kB, mostly in the page cache as right after a restart of the workers. The
copy of memory beside it says what the machine could do at best.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))

from block_files import identity, stored
from machine import print_header

from ripresa.workers.cache.block_file import BlockFormat
from ripresa.workers.cache.disk_store import DiskStore

BLOCK_BYTES = 113_920
FORM = BlockFormat(layout_digest=b"released sizes", weights="w", block_bytes=BLOCK_BYTES)


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=1000)
    parser.add_argument("--folder", type=Path, help="Where; default: the temporary folder.")
    options = parser.parse_args()
    count = options.blocks
    print_header(__file__)
    folder = Path(tempfile.mkdtemp(prefix="ripresa-disk-", dir=options.folder))
    store = DiskStore(folder / "blocks", FORM, 4 * count * BLOCK_BYTES, 1e9, time.time)
    blocks = [stored(number, form=FORM) for number in range(count)]
    try:
        now = time.time()
        results = {
            "write": seconds(lambda: [store.put(block, now) for block in blocks]),
            "write again": seconds(lambda: [store.put(block, now) for block in blocks]),
            "look, held": seconds(lambda: [store.contains(identity(n)) for n in range(count)]),
            "look, absent": seconds(
                lambda: [store.contains(identity(n + count)) for n in range(count)]
            ),
            "read, verified": seconds(lambda: [store.get(identity(n)) for n in range(count)]),
            "look through all": seconds(
                lambda: DiskStore(
                    folder / "blocks", FORM, 4 * count * BLOCK_BYTES, 1e9, time.time
                ).maintain()
            ),
            "copy of memory": seconds(lambda: [bytearray(block.payload) for block in blocks]),
        }
        assert store.stats().hits == count
    finally:
        shutil.rmtree(folder)
    print(f"{count} blocks of {BLOCK_BYTES} bytes")
    for name, taken in results.items():
        rate = f"{count * BLOCK_BYTES / taken / 1e6:10.0f} MB/s" if "look" not in name else ""
        print(f"{name:<18}{1e6 * taken / count:10.1f} us a block{rate}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
