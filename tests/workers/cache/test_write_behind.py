"""Does a store keep what it is offered, without anyone waiting, and go quiet when it cannot?"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from block_files import FORM, identity, stored

from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.cache.block_store import StoreCounters, StoredBlock, StoreStats
from ripresa.workers.cache.disk_store import DiskStore
from ripresa.workers.cache.write_behind import RETRY_S, TOUCH_INTERVAL_S, WriteBehind
from ripresa.workers.errors import Unavailable

NOW = 1_700_000_000.0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class MemoryStore:
    """A `BlockStore` that a test can hold up or break: what an object store would implement."""

    def __init__(self) -> None:
        self.held: dict[BlockIdentity, StoredBlock] = {}
        self.touched: list[tuple[BlockIdentity, float]] = []
        self.open = threading.Event()
        self.open.set()
        self.began = threading.Event()
        self.error: Exception | None = None
        self.num_maintained = 0
        self._counters = StoreCounters()

    def contains(self, identity: BlockIdentity) -> bool:
        return identity in self.held

    def get(self, identity: BlockIdentity) -> StoredBlock | None:
        return self.held.get(identity)

    def put(self, block: StoredBlock, used_at: float) -> None:
        self.began.set()
        self.open.wait()
        if self.error is not None:
            raise self.error
        self.held.setdefault(block.record.identity, block)
        self._counters.add(written=1)

    def touch(self, identity: BlockIdentity, used_at: float) -> bool:
        self.touched.append((identity, used_at))
        return identity in self.held

    def maintain(self) -> None:
        self.num_maintained += 1

    def stats(self) -> StoreStats:
        return self._counters.snapshot()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def writer(store: MemoryStore, clock: Clock) -> Iterator[WriteBehind]:
    made = WriteBehind(store, clock, max_queue_bytes=3 * FORM.block_bytes)
    yield made
    store.open.set()
    made.close()


def test_what_is_offered_is_kept(writer: WriteBehind, store: MemoryStore) -> None:
    writer.offer([(stored(1), NOW), (stored(2), NOW)])
    writer.flush()
    assert store.held == {identity(n): stored(n) for n in (1, 2)}
    assert (writer.stats().written, writer.stats().dropped) == (2, 0)
    assert store.num_maintained == 1


def test_a_slow_store_drops_what_does_not_fit_and_holds_nobody_up(
    writer: WriteBehind, store: MemoryStore
) -> None:
    store.open.clear()
    writer.offer([(stored(0), NOW)])
    store.began.wait()
    writer.offer([(stored(number), NOW) for number in range(1, 10)])
    assert not writer.has_room
    writer.drop(4)
    store.open.set()
    writer.flush()
    assert set(store.held) == {identity(number) for number in range(3)}
    assert writer.stats().dropped == 7 + 4
    assert writer.has_room


@pytest.mark.parametrize("error", [Unavailable("the disk is full"), RuntimeError("a defect")])
def test_a_store_that_fails_is_left_alone_for_a_while(
    writer: WriteBehind, store: MemoryStore, clock: Clock, error: Exception
) -> None:
    store.error = error
    store.open.clear()
    writer.offer([(stored(number), NOW) for number in range(3)])
    store.open.set()
    writer.flush()
    assert store.held == {}
    assert writer.stats().dropped == 3
    store.error = None
    assert not writer.has_room
    writer.offer([(stored(4), NOW)])
    writer.flush()
    assert store.held == {}
    clock.now += RETRY_S
    assert writer.has_room
    writer.offer([(stored(5), NOW)])
    writer.flush()
    assert set(store.held) == {identity(5)}
    assert writer.stats().dropped == 4


def test_uses_are_noted_once_in_a_while(
    writer: WriteBehind, store: MemoryStore, clock: Clock
) -> None:
    for at in (NOW, NOW + 1):
        writer.used([(identity(1), at), (identity(2), at)])
        writer.flush()
    assert store.touched == [(identity(1), NOW), (identity(2), NOW)]
    clock.now += TOUCH_INTERVAL_S
    writer.used([(identity(1), NOW + 2)])
    writer.flush()
    assert store.touched[2:] == [(identity(1), NOW + 2)]


def test_closing_writes_what_waits(store: MemoryStore, clock: Clock) -> None:
    writer = WriteBehind(store, clock)
    store.open.clear()
    writer.offer([(stored(number), NOW) for number in range(20)])
    closing = threading.Thread(target=writer.close)
    closing.start()
    store.open.set()
    closing.join()
    assert len(store.held) == 20
    writer.offer([(stored(21), NOW)])
    writer.close()
    assert len(store.held) == 20


def test_a_full_disk_is_quiet_and_recovers(tmp_path: Path, clock: Clock) -> None:
    is_full = True

    def write(descriptor: int, content: memoryview) -> int:
        if is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(descriptor, content)

    disk = DiskStore(tmp_path / "blocks", FORM, 1 << 20, 3600.0, lambda: NOW, write)
    writer = WriteBehind(disk, clock)
    for number in range(5):
        writer.offer([(stored(number), NOW)])
        writer.flush()
    assert (writer.stats().failures, writer.stats().dropped, writer.stats().written) == (1, 5, 0)
    is_full = False
    clock.now += RETRY_S
    writer.offer([(stored(6), NOW)])
    writer.flush()
    assert disk.get(identity(6)) == stored(6)
    writer.close()
