"""Do all placements of a table give the same rows, and is a changed file noticed by each?"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ripresa.workers.config import EngramPlacement
from ripresa.workers.errors import CheckpointError, Unavailable
from ripresa.workers.models import row_store
from ripresa.workers.models.row_store import RowStore, open_rows
from ripresa.workers.models.shard import Shard, TensorEntry

ROWS, ROW_BYTES = 3000, 33
ON_FILE = (EngramPlacement.HOST_SHARED, EngramPlacement.NVME)


def write_table(path: Path) -> np.ndarray:
    """A file with a table behind another tensor, at no multiple of a page."""
    content = np.random.default_rng(1).integers(0, 256, (ROWS, ROW_BYTES), np.uint8)
    header = {
        "before": {"dtype": "U8", "shape": [5], "data_offsets": [0, 5]},
        "table": {
            "dtype": "U8",
            "shape": [ROWS, ROW_BYTES],
            "data_offsets": [5, 5 + content.size],
        },
    }
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"12345" + content.tobytes())
    return content


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rows") / "model.safetensors"


@pytest.fixture(scope="module")
def table(path: Path) -> np.ndarray:
    return write_table(path)


@pytest.fixture
def own(tmp_path: Path) -> tuple[Path, np.ndarray]:
    """A table's file that a test may spoil."""
    path = tmp_path / "model.safetensors"
    return path, write_table(path)


def open_table(path: Path, placement: EngramPlacement, told: list[int] | None = None) -> RowStore:
    told = [] if told is None else told
    shard = Shard(path)
    store = open_rows(shard, shard.entries["table"], placement, told.append)
    shard.close()
    return store


@pytest.fixture(scope="module")
def stores(path: Path, table: np.ndarray) -> list[RowStore]:
    return [open_table(path, placement) for placement in EngramPlacement]


@settings(max_examples=80)
@given(numbers=st.lists(st.integers(0, ROWS - 1), max_size=60))
def test_every_placement_gives_the_stored_rows_in_any_order(
    numbers: list[int], stores: list[RowStore], table: np.ndarray
) -> None:
    index = np.array(numbers, dtype=np.int64)
    for store in stores:
        assert np.array_equal(store.take(index), table[index])


def test_what_is_taken_is_a_copy(stores: list[RowStore], table: np.ndarray) -> None:
    for store in stores:
        store.take(np.array([7]))[:] = 0
        assert np.array_equal(store.take(np.array([7])), table[[7]])


def test_what_becomes_resident_is_told(path: Path, table: np.ndarray) -> None:
    for placement in EngramPlacement:
        told: list[int] = []
        open_table(path, placement, told)
        assert sum(told) == (table.size if placement.is_resident else 0)


def resident_bytes(path: Path) -> int:
    """How much of a file is in the page cache, in whole pages."""
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    pages = np.zeros(-(-len(mapped) // mmap.PAGESIZE), dtype=np.uint8)
    address = np.frombuffer(mapped, dtype=np.uint8).ctypes.data
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.mincore(
        ctypes.c_void_p(address), ctypes.c_size_t(len(mapped)), ctypes.c_void_p(pages.ctypes.data)
    )
    assert not failed, os.strerror(ctypes.get_errno())
    return int((pages & 1).sum()) * mmap.PAGESIZE


def drop_from_page_cache(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.parametrize("advice", [row_store._MADV_POPULATE_READ, 10_000])
def test_a_shared_table_is_in_the_page_cache_from_the_start(
    own: tuple[Path, np.ndarray], monkeypatch: pytest.MonkeyPatch, advice: int
) -> None:
    """Also where the kernel does not know the call that asks for it."""
    path, table = own
    monkeypatch.setattr(row_store, "_PIECE", 4 * mmap.PAGESIZE)
    monkeypatch.setattr(row_store, "_MADV_POPULATE_READ", advice)
    drop_from_page_cache(path)
    store = open_table(path, EngramPlacement.HOST_SHARED)
    assert resident_bytes(path) >= table.size
    assert np.array_equal(store.take(np.array([ROWS - 1])), table[[-1]])


def test_a_step_s_rows_are_read_once_each_in_the_file_s_order(
    path: Path, table: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_table(path, EngramPlacement.NVME)
    reads: list[tuple[int, int]] = []
    preadv = os.preadv

    def watch(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        reads.append((offset, sum(len(buffer) for buffer in buffers)))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", watch)
    numbers = np.array([900, 5, 6, 7, 2999, 5, 900, 100])
    assert np.array_equal(store.take(numbers), table[numbers])
    assert reads == sorted(reads)
    assert [length // ROW_BYTES for _, length in reads] == [3, 1, 1, 1]


Change = Callable[[Path, TensorEntry], object]
CHANGES: dict[str, Change] = {
    "cut": lambda path, entry: os.truncate(path, entry.start + 100),
    "emptied": lambda path, entry: os.truncate(path, 0),
    "longer": lambda path, entry: path.open("ab").write(b"x"),
    "written to": lambda path, entry: os.utime(path, ns=(0, 12345)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("placement", ON_FILE)
def test_a_file_that_changes_under_a_worker_is_told(
    own: tuple[Path, np.ndarray], placement: EngramPlacement, change: str
) -> None:
    path, _ = own
    store = open_table(path, placement)
    entry = Shard(path).entries["table"]
    CHANGES[change](path, entry)
    with pytest.raises(
        Unavailable, match=r"table: model\.safetensors was changed or cut"
    ) as caught:
        store.take(np.array([ROWS - 1]))
    assert "restart the worker" in caught.value.message


def test_a_file_cut_between_look_and_read_is_told(
    own: tuple[Path, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, table = own
    store = open_table(path, EngramPlacement.NVME)
    monkeypatch.setattr(row_store._OpenFile, "require_unchanged", lambda self: None)
    entry = Shard(path).entries["table"]
    os.truncate(path, entry.start + 10 * ROW_BYTES + 5)
    assert np.array_equal(store.take(np.array([9])), table[[9]])
    for number in (10, 11, ROWS - 1):
        with pytest.raises(Unavailable, match="has become shorter"):
            store.take(np.array([9, number]))


def test_a_worker_s_own_copy_does_not_mind(own: tuple[Path, np.ndarray]) -> None:
    path, table = own
    store = open_table(path, EngramPlacement.HOST_NUMA)
    os.truncate(path, 0)
    assert np.array_equal(store.take(np.arange(ROWS)), table)


@pytest.mark.parametrize("placement", ON_FILE)
def test_a_file_of_the_same_name_does_not_replace_the_open_one(
    own: tuple[Path, np.ndarray], placement: EngramPlacement
) -> None:
    path, table = own
    store = open_table(path, placement)
    path.unlink()
    path.write_bytes(b"another")
    assert np.array_equal(store.take(np.array([1])), table[[1]])


@pytest.mark.parametrize("placement", [EngramPlacement.HOST_SHARED, EngramPlacement.HOST_NUMA])
def test_a_file_cut_before_its_rows_are_placed_is_told(
    own: tuple[Path, np.ndarray], placement: EngramPlacement
) -> None:
    path, _ = own
    shard = Shard(path)
    os.truncate(path, shard.entries["table"].start + 10)
    with pytest.raises(CheckpointError, match=r"table: .*model\.safetensors"):
        open_rows(shard, shard.entries["table"], placement, lambda num_bytes: None)


def test_descriptors_are_given_back(tmp_path: Path) -> None:
    path = tmp_path / "table"
    write_table(path)

    def num_open() -> int:
        """Of this file alone: others' come and go with what other tests left."""
        return sum(os.path.realpath(fd) == str(path) for fd in Path("/proc/self/fd").iterdir())

    shard = Shard(path)
    assert num_open() == 1
    shard.close()
    for placement in EngramPlacement:
        for _ in range(5):
            open_table(path, placement).take(np.array([0]))
    assert num_open() == 0
