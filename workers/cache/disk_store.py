"""Which blocks does a directory of this machine hold, for all workers that share it?

ROOT/                        0700, this user's
  FORMAT/HH/HASH-LINEAGE.kv  0600; FORMAT names model, weights, KV format, geometry and rules
  tmp/                       files that are being written
  ledger                     see `disk_space.py`

A file appears under its name complete, by a rename, or not at all: there is nothing to lock, and a
process can be killed at any moment. Nothing is synced to the disk. What a power loss leaves behind
is found by the checksum, and costs a miss; a sync would cost every write, for a cache.

Time of last use is the file's modification time.
"""

from __future__ import annotations

import logging
import os
import stat
import uuid
from collections.abc import Callable
from pathlib import Path

from ripresa.workers.cache.block_file import (
    MAX_START_BYTES,
    BadBlock,
    BlockFormat,
    decode,
    encode,
    file_name,
    tenant_of,
)
from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.cache.block_store import StoreCounters, StoredBlock, StoreStats
from ripresa.workers.cache.disk_space import TEMPORARY, DiskSpace
from ripresa.workers.errors import ConfigError, Unavailable

logger = logging.getLogger(__name__)

MIN_BLOCKS = 16
"""Fewer would be evicted as fast as they are written."""

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class DiskStore:
    """Block files of one format; implements `BlockStore`. Any number of processes may share it.

    Args:
        root: the directory; made if it is missing.
        form: what all blocks have in common; files of other formats are never opened, and share
            the bounds.
        capacity_bytes, max_age_s: bounds of the whole directory.
        clock: seconds since the epoch.
        write: as `os.write` (tests break it).

    Raises:
        ConfigError: the directory cannot be used, or others could read or change it.
    """

    def __init__(
        self,
        root: Path,
        form: BlockFormat,
        capacity_bytes: int,
        max_age_s: float,
        clock: Callable[[], float],
        write: Callable[[int, memoryview], int] = os.write,
    ) -> None:
        self._root = root
        self._form = form
        self._folder = root / form.name
        self._write = write
        self._counters = StoreCounters()
        if capacity_bytes < MIN_BLOCKS * form.block_bytes:
            raise ConfigError(
                "disk.capacity_bytes",
                f"{capacity_bytes} is less than {MIN_BLOCKS} blocks of this model, "
                f"{MIN_BLOCKS * form.block_bytes}",
            )
        _prepare(root)
        self._space = DiskSpace(root, capacity_bytes, max_age_s, clock)

    def contains(self, identity: BlockIdentity) -> bool:
        try:
            status = os.stat(self._path(identity), follow_symlinks=False)
        except OSError:
            return False
        # A power loss can leave a name without its bytes; that one may be written again.
        return stat.S_ISREG(status.st_mode) and status.st_size > self._form.block_bytes

    def get(self, identity: BlockIdentity) -> StoredBlock | None:
        path = self._path(identity)
        try:
            content = self._read(path)
            block = decode(content, identity, self._form)
        except FileNotFoundError:
            self._counters.add(misses=1)
            return None
        except (OSError, BadBlock):
            self._counters.add(misses=1, bad=1)
            _remove(path)
            return None
        self._counters.add(hits=1, bytes_read=len(content))
        return block

    def put(self, block: StoredBlock, used_at: float) -> None:
        identity = block.record.identity
        if self.touch(identity, used_at):
            self._counters.add(known=1)
            return
        try:
            content = encode(block, self._form)
        except ValueError as error:
            # Of this block alone: the next one may well be kept.
            self._counters.add(failures=1)
            logger.warning("a block cannot be kept on disk: %s", error)
            return
        if not self._root.is_dir():
            _prepare(self._root)
        try:
            self._space.reserve(len(content))
            self._publish(self._path(identity), content, used_at)
        except OSError as error:
            self._counters.add(failures=1)
            raise Unavailable(
                f"the disk tier cannot write below {self._root}: {error.strerror or error}"
            ) from error
        finally:
            self._note_space()
        self._counters.add(written=1, bytes_written=len(content))

    def touch(self, identity: BlockIdentity, used_at: float) -> bool:
        if not self.contains(identity):
            return False
        try:
            os.utime(self._path(identity), (used_at, used_at), follow_symlinks=False)
        except OSError:
            return False
        return True

    def forget(self, tenant: str | None) -> int:
        def is_his(path: str) -> bool:
            return path.startswith(f"{self._folder}/") and (
                tenant is None or self._tenant(path) in (tenant, None)
            )

        try:
            return self._space.remove(is_his)
        except OSError as error:
            raise Unavailable(
                f"the disk tier cannot look through {self._root}: {error.strerror or error}"
            ) from error
        finally:
            self._note_space()

    def _tenant(self, path: str) -> str | None:
        """Whose block a file is; None for a bad file, and one that is gone."""
        try:
            descriptor = os.open(path, _READ)
            try:
                return tenant_of(os.read(descriptor, MAX_START_BYTES))
            finally:
                os.close(descriptor)
        except (OSError, BadBlock):
            return None

    def maintain(self) -> None:
        try:
            self._space.scan_if_due()
        except OSError as error:
            self._counters.add(failures=1)
            raise Unavailable(
                f"the disk tier cannot look through {self._root}: {error.strerror or error}"
            ) from error
        finally:
            self._note_space()

    def stats(self) -> StoreStats:
        return self._counters.snapshot()

    def _path(self, identity: BlockIdentity) -> str:
        name = file_name(identity)
        return f"{self._folder}/{name[:2]}/{name}"

    def _read(self, path: str) -> bytes:
        descriptor = os.open(path, _READ)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size > self._form.max_file_bytes:
                raise BadBlock("it is no file of a block's size")
            parts = []
            while part := os.read(descriptor, self._form.max_file_bytes):
                parts.append(part)
            return b"".join(parts)
        finally:
            os.close(descriptor)

    def _publish(self, path: str, content: bytes, used_at: float) -> None:
        temporary = f"{self._root}/{TEMPORARY}/{uuid.uuid4().hex}.part"
        descriptor = self._create(temporary)
        try:
            try:
                rest = memoryview(content)
                while rest:
                    rest = rest[self._write(descriptor, rest) :]
                os.utime(descriptor, (used_at, used_at))
            finally:
                os.close(descriptor)
            try:
                os.rename(temporary, path)
            except FileNotFoundError:
                _make(self._folder)
                _make(Path(path).parent)
                os.rename(temporary, path)
        except BaseException:
            _remove(temporary)
            raise

    def _create(self, temporary: str) -> int:
        try:
            return os.open(temporary, _CREATE, 0o600)
        except FileNotFoundError:
            _make(self._root / TEMPORARY)
            return os.open(temporary, _CREATE, 0o600)

    def _note_space(self) -> None:
        self._counters.add(evicted=self._space.take_num_evicted())
        self._counters.set_num_bytes(self._space.num_bytes)


def _prepare(root: Path) -> None:
    """Make the directory, or refuse one that is not this user's alone."""
    try:
        _make(root)
        status = root.stat()
    except OSError as error:
        raise ConfigError(
            "disk.path", f"{root} cannot be used: {error.strerror or error}"
        ) from error
    if status.st_uid != os.geteuid():
        raise ConfigError(
            "disk.path",
            f"{root} belongs to user {status.st_uid}, not to {os.geteuid()}, who runs this worker; "
            "name a directory of its own",
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(
            "disk.path",
            f"other users can enter {root}, and block KV tells of prompts; chmod 700 it",
        )


def _make(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def _remove(path: str) -> None:
    """Remove a file of ours if that is possible; what cannot be removed is found bad again."""
    try:
        os.unlink(path)
    except OSError:
        return
