"""Where do a large table's rows lie while a worker serves, and how are some of them fetched?

A released Engram table has 100 GB, of which a token reads 24 rows. `EngramPlacement` says which of
the three classes holds it; all of them give the same bytes. What a file's owner does to it while a
worker serves from it is noticed: `Unavailable` ends the worker, and another one serves the request.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ripresa.workers.config import EngramPlacement
from ripresa.workers.errors import CheckpointError, Unavailable
from ripresa.workers.models.shard import Shard, TensorEntry
from ripresa.workers.numa import bind_to_local_node

Bytes = NDArray[np.uint8]

_PAGE = mmap.PAGESIZE
_PIECE = 256 << 20
_MADV_POPULATE_READ = 22  # Linux 5.14; the mmap module does not name it yet


class RowStore(Protocol):
    """A tensor's rows as stored bytes."""

    def take(self, numbers: NDArray[np.int64]) -> Bytes:
        """[N] row numbers within the tensor -> [N, bytes of a row], a copy.

        Raises:
            Unavailable: the file was changed or cut, or cannot be read any more.
        """


def open_rows(
    shard: Shard, entry: TensorEntry, placement: EngramPlacement, advance: Callable[[int], None]
) -> RowStore:
    """The rows of a tensor with at least one dimension and one byte; they outlive the shard.

    Args:
        advance: told of bytes as they become resident.

    Raises:
        CheckpointError: the file cannot be mapped or read.
        ConfigError: memory cannot be had from the worker's NUMA node.
    """
    match placement:
        case EngramPlacement.HOST_SHARED:
            return SharedRows(shard, entry, advance)
        case EngramPlacement.HOST_NUMA:
            return LocalRows(shard, entry, advance)
        case EngramPlacement.NVME:
            return FileRows(shard, entry)


class SharedRows:
    """`host_shared`: the file's pages, mapped and read in before the worker serves.

    Workers of a machine share them: there is one copy in the page cache. The kernel may drop pages
    when memory is short; they then come from the disk again.

    A file that was changed or cut is noticed at the next `take`. A cut between that look and the
    copy of the rows, some microseconds, still ends the process by SIGBUS: whoever cannot rule
    that out takes another placement.
    """

    def __init__(self, shard: Shard, entry: TensorEntry, advance: Callable[[int], None]) -> None:
        self._file = _OpenFile(shard, entry)
        skipped = entry.start % mmap.ALLOCATIONGRANULARITY
        try:
            mapped = mmap.mmap(
                self._file.descriptor,
                skipped + entry.num_bytes,
                access=mmap.ACCESS_READ,
                offset=entry.start - skipped,
            )
            for first in range(0, len(mapped), _PIECE):
                self._populate(mapped, first, min(_PIECE, len(mapped) - first))
                advance(min(_PIECE, entry.num_bytes - first))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"cannot be mapped from {entry.file}: {error}", tensor=entry.name
            ) from error
        content = np.frombuffer(mapped, dtype=np.uint8, count=entry.num_bytes, offset=skipped)
        self._rows = content.reshape(entry.shape[0], -1)

    def take(self, numbers: NDArray[np.int64]) -> Bytes:
        self._file.require_unchanged()
        return np.take(self._rows, numbers, axis=0)

    def _populate(self, mapped: mmap.mmap, first: int, length: int) -> None:
        try:
            mapped.madvise(_MADV_POPULATE_READ, first, length)
        except OSError:
            # An older kernel, or a file that was cut: only then must no page be touched.
            self._file.require_unchanged()
            np.frombuffer(mapped, dtype=np.uint8, count=length, offset=first)[::_PAGE].max()


class LocalRows:
    """`host_numa`: a copy of the rows in this worker's own memory, on its NUMA node.

    Each worker has one. What happens to the file afterwards does not matter.
    """

    def __init__(self, shard: Shard, entry: TensorEntry, advance: Callable[[int], None]) -> None:
        memory = mmap.mmap(-1, entry.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        bind_to_local_node(memory)
        shard.read_into(entry, memoryview(memory), advance)
        content = np.frombuffer(memory, dtype=np.uint8)
        self._rows = content.reshape(entry.shape[0], -1)

    def take(self, numbers: NDArray[np.int64]) -> Bytes:
        return np.take(self._rows, numbers, axis=0)


class FileRows:
    """`nvme`: rows stay in the file and are read when they are asked for.

    Each row is read once a call, in the file's order, after the kernel was told of all of them, so
    that a disk works on many at a time. Nothing is kept resident and nothing is read ahead.
    """

    def __init__(self, shard: Shard, entry: TensorEntry) -> None:
        self._file = _OpenFile(shard, entry)
        self._entry = entry
        self._row_bytes = entry.num_bytes // entry.shape[0]
        os.posix_fadvise(self._file.descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def take(self, numbers: NDArray[np.int64]) -> Bytes:
        self._file.require_unchanged()
        distinct, places = np.unique(numbers, return_inverse=True)
        rows = np.empty((len(distinct), self._row_bytes), dtype=np.uint8)
        if len(distinct):
            self._announce(distinct)
            ends = np.flatnonzero(np.diff(distinct) != 1) + 1
            for first, last in zip([0, *ends], [*ends, len(distinct)], strict=True):
                self._read(rows[first:last], int(distinct[first]))
        return rows[places.reshape(-1)]

    def _announce(self, distinct: NDArray[np.int64]) -> None:
        begin = self._entry.start + distinct * self._row_bytes
        pages = np.concatenate((begin // _PAGE, (begin + self._row_bytes - 1) // _PAGE))
        for page in np.unique(pages).tolist():
            os.posix_fadvise(self._file.descriptor, page * _PAGE, _PAGE, os.POSIX_FADV_WILLNEED)

    def _read(self, rows: Bytes, number: int) -> None:
        """Neighbouring rows from `number` on."""
        view = rows.reshape(-1).data
        offset = self._entry.start + number * self._row_bytes
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._file.descriptor, [view[done:]], offset + done)
            except OSError as error:
                raise self._file.unavailable(f"cannot be read: {error.strerror}") from error
            if count == 0:
                raise self._file.unavailable("has become shorter")
            done += count


class _OpenFile:
    """A shard's file, open for as long as rows are read from it."""

    def __init__(self, shard: Shard, entry: TensorEntry) -> None:
        self._entry = entry
        self.descriptor = shard.duplicate()
        weakref.finalize(self, os.close, self.descriptor)
        self._stamp = self._look()

    def _look(self) -> tuple[int, int]:
        status = os.fstat(self.descriptor)
        return status.st_size, status.st_mtime_ns

    def require_unchanged(self) -> None:
        """Raise Unavailable if the file has another size or was written to."""
        if self._look() != self._stamp:
            raise self.unavailable("was changed or cut")

    def unavailable(self, what: str) -> Unavailable:
        return Unavailable(
            f"{self._entry.name}: {self._entry.file} {what} while it is served; put the "
            "checkpoint's file back and restart the worker"
        )
