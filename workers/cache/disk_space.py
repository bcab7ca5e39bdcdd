"""Which block files make room, when several processes fill one directory?

ledger   one file that every writer appends to, a byte for every 4 KiB that it is about to write:
         its length tells each process what all of them have written since its last look
scan     sizes and times of all files, seldom: when the ledger says that the bound may be passed,
         at the start, and every hour for the age

Nothing is locked. Two processes that scan at once remove the same oldest files. A process killed
between ledger and file leaves a count too high, which the next scan corrects.
"""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Lock

PAGE_BYTES = 4096
TEMPORARY = "tmp"
"""Folder of files that are being written."""
TEMPORARY_AGE_S = 3600.0
"""A file that is being written for longer than this belongs to a dead process."""
SCAN_INTERVAL_S = 3600.0

_LEDGER = "ledger"
_MAX_LEDGER_BYTES = 16 << 20
# A scan for lack of room leaves this share free, if it finds less than half of it: the next one
# is so many written bytes away.
_ROOM = 8
_FORMAT = re.compile(r"[0-9a-f]{32}")
_SHARD = re.compile(r"[0-9a-f]{2}")
_BLOCK = re.compile(r"[0-9a-f]{32}-[0-9a-f]{16}\.kv")
_PART = re.compile(r"[0-9a-f]{32}\.part")


class DiskSpace:
    """The bounds of one directory of block files, whatever model they are of.

    Files with other names than ours are neither counted nor touched.

    Args:
        root: the directory; it exists.
        capacity_bytes: most bytes of all block files, in whole pages.
        max_age_s: block files not used for longer than this are removed.
        clock: seconds since the epoch.

    Methods raise OSError if the directory cannot be used.
    """

    def __init__(
        self, root: Path, capacity_bytes: int, max_age_s: float, clock: Callable[[], float]
    ) -> None:
        self._root = root
        self._capacity_bytes = capacity_bytes
        self._max_age_s = max_age_s
        self._clock = clock
        self._scanned_bytes: int | None = None
        self._scanned_at = 0.0
        self._estimated_bytes = 0
        self._ledger_at_scan = 0
        self._num_evicted = 0
        self._lock = Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes held by all processes: those of the last scan, and by the ledger since."""
        return self._estimated_bytes

    def take_num_evicted(self) -> int:
        """Files removed since the last call."""
        with self._lock:
            number, self._num_evicted = self._num_evicted, 0
            return number

    def scan_if_due(self) -> None:
        """Look through everything if that was not done for an hour."""
        with self._lock:
            is_new = self._scanned_bytes is None
            if is_new or self._clock() - self._scanned_at >= SCAN_INTERVAL_S:
                self._scan(0)

    def remove(self, is_unwanted: Callable[[str], bool]) -> int:
        """Remove the block files of these paths; how many went."""
        with self._lock:
            number = 0
            for path, _, _ in self._blocks(self._clock()):
                if is_unwanted(path) and self._remove(path):
                    number += 1
            # They did not have to make room.
            self._num_evicted -= number
            self._scan(0)
            return number

    def reserve(self, num_bytes: int) -> None:
        """Make sure that a file of this size fits; called before it is written."""
        with self._lock:
            self._reserve(-(-num_bytes // PAGE_BYTES))

    def _reserve(self, num_pages: int) -> None:
        descriptor = os.open(
            self._root / _LEDGER,
            os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC,
            0o600,
        )
        try:
            os.write(descriptor, bytes(num_pages))
            length = os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
        is_new = self._scanned_bytes is None or length < self._ledger_at_scan
        if is_new or self._bytes_at(length) > self._capacity_bytes:
            self._scan(num_pages)
        else:
            self._estimated_bytes = self._bytes_at(length)

    def _scan(self, incoming_pages: int) -> None:
        """Count everything; remove what is too old, and the least recently used if it is too much.

        Args:
            incoming_pages: what is about to be written, and on the ledger.
        """
        length = self._ledger_length()
        now = self._clock()
        self._remove_abandoned(now)
        times, sizes, total = array("d"), array("q"), incoming_pages * PAGE_BYTES
        for path, used_at, size in self._blocks(now):
            if now - used_at > self._max_age_s:
                self._remove(path)
                continue
            times.append(used_at)
            sizes.append(size)
            total += size
        room = self._capacity_bytes // _ROOM
        if total > self._capacity_bytes - (room // 2 if incoming_pages else 0):
            total -= self._evict(times, sizes, total - self._capacity_bytes + room, now)
        self._scanned_bytes, self._scanned_at = total, now
        self._estimated_bytes = total
        self._ledger_at_scan = length
        if length > _MAX_LEDGER_BYTES:
            os.truncate(self._root / _LEDGER, 0)
            self._ledger_at_scan = 0

    def _bytes_at(self, ledger_length: int) -> int:
        """What may be held by now; too much if other processes have removed files."""
        assert self._scanned_bytes is not None
        return self._scanned_bytes + (ledger_length - self._ledger_at_scan) * PAGE_BYTES

    def _evict(self, times: array[float], sizes: array[int], num_bytes: int, now: float) -> int:
        """Remove the least recently used files of at least `num_bytes`; how many went."""
        # Names of a million files would take more memory than a second look at them takes time.
        freed = 0
        newest = float("-inf")
        for index in sorted(range(len(times)), key=times.__getitem__):
            if freed >= num_bytes:
                break
            freed += sizes[index]
            newest = times[index]
        removed = 0
        for path, used_at, size in self._blocks(now):
            if used_at <= newest and removed < freed and self._remove(path):
                removed += size
        return removed

    def _remove(self, path: str) -> bool:
        """Remove a file; False if another process was first."""
        try:
            os.unlink(path)
        except FileNotFoundError:
            return False
        self._num_evicted += 1
        return True

    def _remove_abandoned(self, now: float) -> None:
        for entry in _entries(self._root / TEMPORARY, _PART):
            status = _status(entry)
            if status is not None and now - status.st_mtime > TEMPORARY_AGE_S:
                Path(entry.path).unlink(missing_ok=True)

    def _blocks(self, now: float) -> Iterator[tuple[str, float, int]]:
        """Path, time of last use and bytes of every block file; no use lies in the future."""
        for form in _entries(self._root, _FORMAT):
            for shard in _entries(form.path, _SHARD):
                for entry in _entries(shard.path, _BLOCK):
                    status = _status(entry)
                    if status is not None:
                        pages = -(-status.st_size // PAGE_BYTES)
                        yield entry.path, min(status.st_mtime, now), pages * PAGE_BYTES

    def _ledger_length(self) -> int:
        try:
            return os.stat(self._root / _LEDGER, follow_symlinks=False).st_size
        except FileNotFoundError:
            return 0


def _entries(folder: Path | str, pattern: re.Pattern[str]) -> Iterator[os.DirEntry[str]]:
    """A folder's entries of ours; none if it is no folder (any more)."""
    try:
        listing = os.scandir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    with listing:
        for entry in listing:
            if pattern.fullmatch(entry.name) and not entry.is_symlink():
                yield entry


def _status(entry: os.DirEntry[str]) -> os.stat_result | None:
    """Of a file that is still there."""
    try:
        return entry.stat(follow_symlinks=False) if entry.is_file(follow_symlinks=False) else None
    except FileNotFoundError:
        return None
