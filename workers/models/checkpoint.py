"""What does a checkpoint folder hold? Named tensors in safetensors files, read one at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType

import torch

from ripresa.kernels import dispatch as ops
from ripresa.workers.config import EngramPlacement
from ripresa.workers.errors import CheckpointError
from ripresa.workers.models.checkpoint_index import open_shards
from ripresa.workers.models.row_store import RowStore, open_rows
from ripresa.workers.models.shard import TensorEntry

Progress = Callable[[int, int], None]
"""Called with bytes read so far and bytes that will be."""

TILE = 32
MAX_SCALE_CODE = 246
"""An E8M0 code of 2^119: times E4M3's 448 it is the largest that float32 holds. 255 is NaN."""

PLAIN = frozenset(("BF16", "F16", "F32"))


class Checkpoint:
    """A folder with `model.safetensors`, or `model.safetensors.index.json` and its shards.

    Opening reads headers only, and `read` one tensor and its scales; beside its result it needs the
    memory of the stored tensor. Nothing outside the folder is ever read.

    Args:
        folder: the checkpoint.
        progress: told after each tensor that is read.

    Raises:
        CheckpointError: the folder, its index or a shard is missing, corrupt or contradictory.
    """

    def __init__(self, folder: Path, progress: Progress | None = None) -> None:
        self.folder = folder
        self._shards = open_shards(folder)
        self._entries = {
            name: entry for shard in self._shards.values() for name, entry in shard.entries.items()
        }
        self._progress = progress
        self._num_read = 0
        self._num_expected = 0

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Rows that were opened stay readable."""
        for shard in self._shards.values():
            shard.close()

    def names(self) -> frozenset[str]:
        return frozenset(self._entries)

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        """Every tensor's type, shape and place."""
        return MappingProxyType(self._entries)

    def expect(self, num_bytes: int) -> None:
        """Say how many bytes will be read, for whoever follows the progress."""
        self._num_read, self._num_expected = 0, num_bytes

    def entry(self, name: str) -> TensorEntry:
        """A tensor's type, shape and place.

        Raises:
            CheckpointError: there is no such tensor.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise CheckpointError(
                f"{self.folder} has no such tensor; is it a V4.1 checkpoint of this config.json?",
                tensor=name,
            )
        return entry

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor as float32 of exactly `shape`, its scales applied.

        Plain tensors are bf16, f16 or f32. Quantised ones are E4M3 with a scale per 32 x 32 tile,
        or packed E2M1 with one per row and 32 columns; the scales of `X.weight` are `X.scale`.

        Raises:
            CheckpointError: missing, of another shape or type, without its scales, not readable,
                or not finite.
        """
        tensor = self._read_float32(name, shape)
        # The packed caches store a row that is not finite as zeros: it would go unnoticed.
        if not bool(tensor.isfinite().all()):
            file = self.entry(name).file
            raise CheckpointError(
                f"holds NaN or infinite values in {file}; copy the file again", tensor=name
            )
        return tensor

    def _read_float32(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        entry = self.entry(name)
        if entry.dtype in PLAIN:
            self._require_shape(entry, shape, shape)
            return self.read_raw(name).to(torch.float32)
        if entry.dtype == "F8_E4M3" and len(shape) == 2:
            self._require_shape(entry, shape, shape)
            tiles = (-(-shape[0] // TILE), -(-shape[1] // TILE))
            scale = self._read_scale(entry, tiles, "32 x 32 tile")
            return ops.dequantise_f8(self.read_raw(name), scale)
        if entry.dtype == "I8" and len(shape) == 2 and shape[1] % TILE == 0:
            self._require_shape(entry, (shape[0], shape[1] // 2), shape)
            groups = (shape[0], shape[1] // TILE)
            scale = self._read_scale(entry, groups, "row and 32 columns")
            return ops.dequantise_fp4(self.read_raw(name), scale)
        raise CheckpointError(
            f"is stored as {entry.dtype} in {entry.file}, which a tensor of shape {list(shape)} "
            "cannot be; F32, F16, BF16, F8_E4M3 with scales and packed I8 with scales are read",
            tensor=name,
        )

    def read_raw(self, name: str) -> torch.Tensor:
        """A tensor as it is stored, of the type and shape in `entry`.

        Raises:
            CheckpointError: missing or not readable.
        """
        entry = self.entry(name)
        content = self._shards[entry.file].read(entry)
        self._advance(entry.num_bytes)
        return content

    def pieces(self, name: str, num_bytes: int, every: int) -> Iterator[bytes]:
        """Pieces of a tensor as stored: one at each multiple of `every`, all of it if that is
        `num_bytes`, and the tensor's last bytes.

        Raises:
            CheckpointError: missing or not readable.
        """
        entry = self.entry(name)
        starts = list(range(0, entry.num_bytes, every))
        if starts and starts[-1] + num_bytes < entry.num_bytes:
            starts.append(entry.num_bytes - num_bytes)
        for first in starts:
            content = bytearray(min(num_bytes, entry.num_bytes - first))
            self._shards[entry.file].read_into(entry, memoryview(content), first=first)
            yield bytes(content)

    def open_rows(self, name: str, placement: EngramPlacement) -> RowStore:
        """The rows of a tensor, placed; they outlive the checkpoint's `close`.

        Raises:
            CheckpointError: missing, without rows, or not readable.
            ConfigError: the machine cannot place them so.
        """
        entry = self.entry(name)
        if not entry.shape or entry.num_bytes == 0:
            raise CheckpointError(f"has no rows in {entry.file}", tensor=name)
        return open_rows(self._shards[entry.file], entry, placement, self._advance)

    def _advance(self, num_bytes: int) -> None:
        self._num_read += num_bytes
        if self._progress is not None:
            self._progress(self._num_read, max(self._num_read, self._num_expected))

    def _read_scale(self, weight: TensorEntry, shape: tuple[int, int], per: str) -> torch.Tensor:
        """The E8M0 codes of a weight's scales, uint8."""
        name = f"{weight.name.removesuffix('.weight')}.scale"
        entry = self._entries.get(name)
        if entry is None:
            raise CheckpointError(
                f"is missing: {weight.name} is stored as {weight.dtype} in {weight.file} and needs "
                f"a scale per {per}",
                tensor=name,
            )
        check_scale(entry, shape, weight.name)
        codes = self.read_raw(name).view(torch.uint8)
        check_scale_codes(codes, entry)
        return codes

    def _require_shape(
        self, entry: TensorEntry, stored: tuple[int, ...], logical: tuple[int, ...]
    ) -> None:
        if entry.shape != stored:
            raise CheckpointError(
                f"is {list(entry.shape)} in {entry.file}, config.json implies {list(stored)}"
                + ("" if stored == logical else f" for {list(logical)} packed in pairs"),
                tensor=entry.name,
            )


def check_scale(entry: TensorEntry, shape: tuple[int, int], weight: str) -> None:
    """Refuse scales of another type or shape than a weight needs.

    Raises:
        CheckpointError: naming the scale's tensor and file.
    """
    if entry.dtype != "F8_E8M0" or entry.shape != shape:
        raise CheckpointError(
            f"is {entry.dtype} {list(entry.shape)} in {entry.file}, but {weight} needs F8_E8M0 "
            f"{list(shape)}",
            tensor=entry.name,
        )


def check_scale_codes(codes: torch.Tensor, entry: TensorEntry) -> None:
    """Refuse scales that are NaN, or so large that a weight could be infinite.

    Args:
        codes: E8M0 codes of any shape, uint8.

    Raises:
        CheckpointError: naming the scale's tensor and file.
    """
    largest = int(codes.max()) if codes.numel() else 0
    if largest > MAX_SCALE_CODE:
        value = "NaN" if largest == 255 else f"2^{largest - 127}, which overflows,"
        raise CheckpointError(
            f"holds the scale {value} in {entry.file}: the file is damaged; copy it again",
            tensor=entry.name,
        )


class ProgressLines:
    """Says how far a load is: after two seconds first, then whenever that time has doubled.

    Args:
        what: how the lines begin.
        say: what takes a line.
    """

    def __init__(
        self, what: str, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._what = what
        self._say = say
        self._clock = clock
        self._began = clock()
        self._next_s = 2.0

    def __call__(self, done: int, total: int) -> None:
        elapsed = self._clock() - self._began
        if elapsed >= self._next_s:
            self._next_s = 2 * elapsed
            self._say(f"{self._what}: {done / 1e9:.1f} of {total / 1e9:.1f} GB in {elapsed:.0f} s")
