"""Does a directory of blocks stay right when disks fill up, bits flip and processes are killed?"""

from __future__ import annotations

import errno
import os
import resource
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import block_files
import pytest
from block_files import FORM, identity, stored
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ripresa.workers.cache.block_file import encode
from ripresa.workers.cache.block_store import StoredBlock
from ripresa.workers.cache.cache_events import Origin
from ripresa.workers.cache.disk_space import PAGE_BYTES, TEMPORARY_AGE_S
from ripresa.workers.cache.disk_store import MIN_BLOCKS, DiskStore
from ripresa.workers.errors import ConfigError, Unavailable

NOW = 1_700_000_000.0
PAGES = -(-len(encode(stored(0), FORM)) // PAGE_BYTES) * PAGE_BYTES
CAPACITY = 64 * PAGES


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


def make(
    root: Path, clock: Clock | None = None, capacity: int = CAPACITY, **more: Any
) -> DiskStore:
    return DiskStore(root, more.pop("form", FORM), capacity, 3600.0, clock or Clock(), **more)


def files(root: Path) -> list[Path]:
    return sorted(root.glob("*/*/*.kv"))


def parts(root: Path) -> list[Path]:
    return sorted((root / "tmp").glob("*"))


def path_of(root: Path, block: StoredBlock) -> Path:
    (found,) = root.glob(f"*/*/{block.record.identity.hash.hex()}-*.kv")
    return found


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "blocks"


def test_a_block_is_found_by_this_and_by_every_later_store(root: Path) -> None:
    first, block = make(root), stored(1, (8,))
    assert first.get(identity(1, (8,))) is None
    first.put(block, NOW)
    assert first.get(identity(1, (8,))) == block
    second = make(root)
    assert second.contains(identity(1, (8,)))
    assert second.get(identity(1, (8,))) == block
    for other in (identity(1), identity(1, (16,)), identity(2)):
        assert not second.contains(other)
        assert second.get(other) is None
    stats = second.stats()
    assert (stats.hits, stats.misses, stats.bad) == (1, 3, 0)
    assert first.stats().written == 1
    assert first.stats().num_bytes == PAGES


def test_the_first_block_of_an_identity_stays(root: Path) -> None:
    store, block = make(root), stored(1)
    store.put(block, NOW)
    store.put(replace(block, payload=bytes(FORM.block_bytes)), NOW + 5)
    assert store.get(identity(1)) == block
    assert (store.stats().written, store.stats().known) == (1, 1)
    assert path_of(root, block).stat().st_mtime == NOW + 5


def test_other_users_cannot_read(root: Path) -> None:
    old = os.umask(0)
    try:
        make(root).put(stored(1), NOW)
    finally:
        os.umask(old)
    for path in (root, *root.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize("mode", [0o701, 0o710, 0o720, 0o755, 0o777])
def test_a_directory_that_others_enter_is_refused(root: Path, mode: int) -> None:
    root.mkdir()
    root.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 700") as refused:
        make(root)
    assert refused.value.field == "disk.path"
    assert list(root.iterdir()) == []


def test_a_directory_of_somebody_else_is_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: root.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="belongs to user"):
        make(root)
    assert list(root.iterdir()) == []


def test_a_path_that_is_no_directory_is_refused(root: Path) -> None:
    root.write_text("a file")
    for path in (root, root / "below"):
        with pytest.raises(ConfigError, match="cannot be used"):
            make(path)


def test_a_capacity_of_a_few_blocks_is_refused(root: Path) -> None:
    with pytest.raises(ConfigError, match="less than 16 blocks"):
        make(root, capacity=MIN_BLOCKS * FORM.block_bytes - 1)


# -- damage -------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def grow(path: Path) -> None:
    os.truncate(path, 10 * path.stat().st_size)


def fill_with_zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def make_link(path: Path) -> None:
    target = path.rename(path.parents[2] / "kept.elsewhere")
    path.symlink_to(target)


def make_dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.parent / "nothing")


def flip(position: float) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[int(position * (len(content) - 1))] ^= 4
        path.write_bytes(content)

    return damage


DAMAGES = {
    "truncated": truncate,
    "empty": empty,
    "grown": grow,
    "zeros": fill_with_zeros,
    "pipe": make_pipe,
    "link": make_link,
    "dangling link": make_dangling,
    **{f"flipped at {position}": flip(position) for position in (0, 0.005, 0.1, 0.5, 0.9, 1)},
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_block_is_a_counted_miss_and_goes(
    root: Path, damage: Callable[[Path], None]
) -> None:
    store, block = make(root), stored(1)
    store.put(block, NOW)
    store.put(stored(2), NOW)
    damage(path_of(root, block))
    assert store.get(identity(1)) is None
    assert (store.stats().misses, store.stats().bad) == (1, 1)
    assert len(files(root)) == 1
    assert store.get(identity(1)) is None
    assert (store.stats().misses, store.stats().bad) == (2, 1)
    store.put(block, NOW)
    assert store.get(identity(1)) == block
    assert store.get(identity(2)) == stored(2)


def test_a_file_that_a_power_loss_left_empty_is_written_again(root: Path) -> None:
    store, block = make(root), stored(1)
    store.put(block, NOW)
    empty(path_of(root, block))
    assert not store.contains(identity(1))
    store.put(block, NOW)
    assert store.get(identity(1)) == block


def test_a_block_moved_to_anothers_name_is_bad(root: Path) -> None:
    store = make(root)
    for number in (1, 2):
        store.put(stored(number), NOW)
    path_of(root, stored(1)).rename(path_of(root, stored(2)))
    assert store.get(identity(2)) is None
    assert store.stats().bad == 1


def test_foreign_files_and_other_models_are_left_alone(root: Path) -> None:
    clock = Clock()
    other = replace(FORM, layout_digest=b"another model")
    first, second = make(root, clock), make(root, clock, form=other)
    first.put(stored(1), NOW)
    second.put(stored(1, form=other), NOW)
    assert [s.stats().written for s in (first, second)] == [1, 1]
    foreign = [
        root / "README",
        root / "ledger.old",
        root / ("f" * 32),
        root / "tmp" / "notes.part",
        root / FORM.name / "zz" / "x",
        root / FORM.name / "00" / "a.kv",
        root / FORM.name / "00" / f"{'0' * 32}-{'0' * 16}.kv\n",
        root / FORM.name / "00" / ("0" * 32 + ".kv"),
        root / os.fsdecode(b"\xff\xfe"),
    ]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * 10 * CAPACITY)
        os.utime(path, (1, 1))
    outside = root.parent / "outside"
    outside.mkdir()
    (outside / "00").mkdir()
    victim = outside / "00" / f"{'0' * 32}-{'0' * 16}.kv"
    victim.write_bytes(b"not ours")
    os.utime(victim, (1, 1))
    (root / ("e" * 32)).symlink_to(outside)
    third = make(root, clock)
    third.maintain()
    assert third.stats().num_bytes == 2 * PAGES
    assert third.get(identity(1)) == stored(1)
    assert second.get(identity(1)) == stored(1, form=other)
    assert victim.exists()
    assert all(path.exists() for path in foreign)


# -- bounds -------------------------------------------------------------------------------------


def test_the_least_recently_used_blocks_make_room(root: Path) -> None:
    store = make(root, capacity=32 * PAGES)
    for number in range(30):
        store.put(stored(number), NOW - 100 + number)
    for number in (3, 5):
        assert store.touch(identity(number), NOW)
    assert not store.touch(identity(99), NOW)
    for number in range(30, 40):
        store.put(stored(number), NOW - 100 + number)
        assert len(files(root)) <= 32
    held = {number for number in range(40) if store.contains(identity(number))}
    assert {3, 5} <= held
    evicted = sorted(set(range(40)) - held)
    assert evicted == [number for number in range(40) if number not in (3, 5)][: len(evicted)]
    assert store.stats().evicted == len(evicted) >= 8


def test_old_blocks_go_by_their_last_use(root: Path) -> None:
    clock = Clock()
    store = make(root, clock)
    for number in range(4):
        store.put(stored(number), NOW)
    clock.now += 3000
    store.touch(identity(1), clock.now)
    clock.now += 1000
    store.maintain()
    assert [store.contains(identity(number)) for number in range(4)] == [False, True, False, False]
    assert store.stats().evicted == 3


def test_a_clock_that_was_ahead_fills_nothing_for_ever(root: Path) -> None:
    store = make(root, capacity=32 * PAGES)
    for number in range(100):
        store.put(stored(number), NOW + 1e6 + number)
        assert len(files(root)) <= 32
    assert store.contains(identity(99))


def test_files_are_seldom_looked_through(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make(root, capacity=1024 * PAGES)
    looks = []
    scan = store._space._scan
    monkeypatch.setattr(store._space, "_scan", lambda pages: looks.append(pages) or scan(pages))  # type: ignore[func-returns-value]
    for number in range(4000):
        store.put(stored(number), NOW + number * 1e-3)
    # Once at the start, and once for every eighth of the capacity beyond the first one.
    assert len(looks) <= 1 + 1 + 3 * 8


class Bounded(RuleBasedStateMachine):
    """Three processes' stores, one directory: never over the bound, no block ever a wrong one."""

    folder: Path

    def __init__(self) -> None:
        super().__init__()
        self.root = self.folder / os.urandom(8).hex()
        self.clock = Clock()
        self.stores = [make(self.root, self.clock, capacity=24 * PAGES) for _ in range(3)]

    @rule(number=st.integers(0, 60), which=st.integers(0, 2), step=st.floats(0, 900))
    def put(self, number: int, which: int, step: float) -> None:
        self.clock.now += step
        self.stores[which].put(stored(number), self.clock.now)
        assert self.stores[(which + 1) % 3].get(identity(number)) == stored(number)

    @rule(number=st.integers(0, 60), which=st.integers(0, 2))
    def get(self, number: int, which: int) -> None:
        assert self.stores[which].get(identity(number)) in (None, stored(number))

    @rule(which=st.integers(0, 2))
    def maintain(self, which: int) -> None:
        self.stores[which].maintain()

    @rule(which=st.integers(0, 2))
    def restart(self, which: int) -> None:
        self.stores[which] = make(self.root, self.clock, capacity=24 * PAGES)

    @rule()
    def lose_the_ledger(self) -> None:
        (self.root / "ledger").unlink(missing_ok=True)

    @rule(share=st.floats(0, 1))
    def remove_a_file(self, share: float) -> None:
        held = files(self.root)
        if held:
            held[int(share * (len(held) - 1))].unlink()

    @invariant()
    def is_bounded(self) -> None:
        assert len(files(self.root)) <= 24
        assert parts(self.root) == []


def test_any_history_stays_within_the_bounds(tmp_path: Path) -> None:
    Bounded.folder = tmp_path
    case = Bounded.TestCase
    case.settings = settings(max_examples=25, stateful_step_count=60, deadline=None)
    case().runTest()


# -- a full disk --------------------------------------------------------------------------------


class FullDisk:
    """Writes as many bytes as are left, and then fails, as the kernel does."""

    def __init__(self, left: int, code: int = errno.ENOSPC) -> None:
        self.left = left
        self.code = code

    def __call__(self, descriptor: int, content: memoryview) -> int:
        if self.left == 0:
            raise OSError(self.code, os.strerror(self.code))
        written = os.write(descriptor, content[: self.left])
        self.left -= written
        return written


def test_a_disk_that_is_full_at_any_byte_leaves_nothing_behind(root: Path) -> None:
    disk = FullDisk(0)
    store = make(root, write=disk)
    size = len(encode(stored(1), FORM))
    for left in range(size):
        disk.left = left
        with pytest.raises(Unavailable, match="No space left"):
            store.put(stored(1), NOW)
        assert files(root) == parts(root) == []
        assert store.get(identity(1)) is None
    disk.left = size
    store.put(stored(1), NOW)
    assert store.get(identity(1)) == stored(1)
    assert (store.stats().failures, store.stats().written) == (size, 1)


@pytest.mark.parametrize("code", [errno.EIO, errno.EDQUOT, errno.EROFS])
def test_other_errors_of_the_disk_are_told_as_well(root: Path, code: int) -> None:
    store = make(root, write=FullDisk(10, code))
    with pytest.raises(Unavailable, match=os.strerror(code)):
        store.put(stored(1), NOW)
    assert files(root) == parts(root) == []


def test_the_kernels_own_limit_leaves_nothing_behind(root: Path) -> None:
    """A real file system that refuses the rest of a write: no injected errors."""
    store = make(root)
    store.put(stored(1), NOW)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (700, hard))
    try:
        with pytest.raises(Unavailable, match="File too large"):
            store.put(stored(2), NOW)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert parts(root) == []
    assert store.get(identity(1)) == stored(1)
    store.put(stored(2), NOW)
    assert store.get(identity(2)) == stored(2)


def test_a_directory_that_was_removed_is_made_again(root: Path) -> None:
    store = make(root)
    store.put(stored(1), NOW)
    for path in sorted(root.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    root.rmdir()
    assert store.get(identity(1)) is None
    store.put(stored(1), NOW)
    assert make(root).get(identity(1)) == stored(1)


# -- killed processes ---------------------------------------------------------------------------


def writer(root: Path, first: int, capacity: int) -> subprocess.Popen[str]:
    script = [sys.executable, block_files.__file__, str(root), str(first), str(capacity)]
    return subprocess.Popen(script, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("capacity", [CAPACITY, 1 << 40], ids=["evicting", "growing"])
def test_killed_writers_leave_whole_blocks_and_no_lock(root: Path, capacity: int) -> None:
    told: list[int] = []
    for round_number in range(3):
        writers = [writer(root, 10**7 * round_number + 10**6 * n, capacity) for n in range(3)]
        for process in writers:
            assert process.stdout is not None
            told += [int(process.stdout.readline()) for _ in range(40)]
        for process in writers:
            os.kill(process.pid, signal.SIGKILL)
        for process in writers:
            told += [int(line) for line in process.communicate()[0].splitlines()]
    store = make(root, capacity=capacity)
    held = {int(path.name[:32], 16) for path in files(root)}
    for number in held:
        assert store.get(identity(number)) == stored(number)
    if capacity == CAPACITY:
        # Each writer may be between its look at the ledger and its file.
        assert len(held) <= 64 + 3
    else:
        assert set(told) <= held
    assert len(parts(root)) <= 9
    store.put(stored(1), NOW)
    assert store.get(identity(1)) == stored(1)


def test_what_a_dead_writer_had_begun_goes_after_an_hour(root: Path) -> None:
    clock = Clock()
    clock.now = time.time()
    make(root, clock)
    (root / "tmp").mkdir(mode=0o700, exist_ok=True)
    begun = root / "tmp" / f"{'a' * 32}.part"
    begun.write_bytes(b"half a blo")
    make(root, clock).maintain()
    assert begun.exists()
    clock.now += TEMPORARY_AGE_S + 60
    make(root, clock).maintain()
    assert not begun.exists()


def test_a_tenant_s_blocks_are_forgotten_and_nobody_else_s(root: Path) -> None:
    store, others = make(root), make(root, form=replace(FORM, weights="w2"))
    his = stored(1, (8,))
    record = replace(his.record, identity=identity(2), origin=Origin("another", b"f" * 16, None))
    another = StoredBlock(record, his.payload)
    foreign = stored(3, form=replace(FORM, weights="w2"))
    store.put(his, NOW)
    store.put(another, NOW)
    others.put(foreign, NOW)
    (root / "notes.txt").write_text("of somebody")
    bad = path_of(root, his).with_name(f"{'0' * 32}-{'0' * 16}.kv")
    bad.write_bytes(b"no block")
    before = store.stats().num_bytes
    assert store.forget("a tenant") == 2  # the bad one could be his
    assert store.get(his.record.identity) is None
    assert store.get(another.record.identity) == another
    assert others.get(foreign.record.identity) == foreign
    assert store.stats().num_bytes < before + PAGES
    assert store.forget("a tenant") == 0
    assert store.forget(None) == 1
    assert others.get(foreign.record.identity) == foreign
    assert (root / "notes.txt").exists()
    assert store.stats().evicted == 0
