"""What does one safetensors file hold, and which bytes are a tensor's? Its header, checked.

The header is a count of bytes (8, little endian) and a JSON object: for each tensor its type, its
shape, and where its bytes lie behind the header. Every byte belongs to exactly one tensor.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ripresa.workers.errors import CheckpointError
from ripresa.workers.models.regular_file import open_regular
from ripresa.workers.models.strict_json import parse_json

MAX_HEADER_BYTES = 100 << 20
_READ_BYTES = 256 << 20
_MAX_DIMENSIONS = 8

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor's place in a file.

    Attributes:
        file: name of the file in the checkpoint's folder.
        dtype: a key of `DTYPES`, as the header spells it.
        shape: as stored.
        start, stop: its bytes in the file, from the file's beginning.
    """

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


class Shard:
    """An open safetensors file; it stays the same file if another takes its name.

    Raises:
        CheckpointError: it is missing, truncated, or its header is no header of these bytes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = open_regular(path)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{path.name} is missing in {path.parent}; copy the whole checkpoint folder"
            ) from error
        except OSError as error:
            raise CheckpointError(f"{path.name} cannot be opened: {error}") from error
        try:
            size = os.fstat(self._file.fileno()).st_size
            self.entries = {entry.name: entry for entry in self._read_header(size)}
        except (OSError, ValueError) as error:
            self._file.close()
            raise CheckpointError(
                f"{path.name} is corrupt or truncated ({error}); copy the file again"
            ) from error

    def close(self) -> None:
        """Rows that were opened from it stay readable."""
        self._file.close()

    def read(self, entry: TensorEntry) -> torch.Tensor:
        """A tensor's bytes, as stored: its `DTYPES` type and shape.

        Raises:
            CheckpointError: the file has become shorter, or the disk fails.
        """
        content = torch.empty(entry.num_bytes, dtype=torch.uint8)
        self.read_into(entry, content.numpy().data)
        return content.view(DTYPES[entry.dtype]).view(entry.shape)

    def read_into(
        self,
        entry: TensorEntry,
        target: memoryview,
        advance: Callable[[int], None] | None = None,
        first: int = 0,
    ) -> None:
        """Bytes of a tensor, as many as `target` takes.

        Args:
            first: the first one, from the tensor's beginning.
            advance: told of the bytes of each piece.

        Raises:
            CheckpointError: the file has become shorter, or the disk fails.
        """
        done = 0
        while done < len(target):
            piece = target[done : done + _READ_BYTES]
            try:
                count = os.preadv(self._file.fileno(), [piece], entry.start + first + done)
            except OSError as error:
                raise CheckpointError(
                    f"cannot be read from {entry.file}: {error.strerror}", tensor=entry.name
                ) from error
            if count == 0:
                raise CheckpointError(
                    f"ends early in {entry.file}: the file has been cut; copy it again",
                    tensor=entry.name,
                )
            done += count
            if advance is not None:
                advance(count)

    def duplicate(self) -> int:
        """A descriptor of this file that outlives the shard; the caller closes it."""
        return os.dup(self._file.fileno())

    def _read_header(self, size: int) -> Iterator[TensorEntry]:
        length = int.from_bytes(self._file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"{size} bytes cannot hold its header")
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"a header of {length} bytes is absurd")
        header = parse_json(self._file.read(length))
        if not isinstance(header, dict):
            raise ValueError("the header is no JSON object")
        _check_metadata(header.pop("__metadata__", {}))
        data = 8 + length
        entries = [_entry(self.path.name, name, text, data) for name, text in header.items()]
        entries.sort(key=lambda entry: (entry.start, entry.stop))
        end = data
        for entry in entries:
            if entry.start != end:
                raise ValueError(f"{entry.name!r} does not begin where the one before it ends")
            end = entry.stop
        if end != size:
            raise ValueError(f"its tensors end at byte {end}, the file at {size}")
        yield from entries


def _check_metadata(metadata: object) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("its metadata is no object of strings")


def _entry(file: str, name: str, text: object, data: int) -> TensorEntry:
    """One tensor of a header whose tensors begin at byte `data`."""
    if not isinstance(text, Mapping) or text.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name!r} is not described by dtype, shape and data_offsets")
    dtype = text["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{name!r} has the unknown type {dtype!r}")
    shape = _integers(text["shape"])
    offsets = _integers(text["data_offsets"])
    if shape is None or len(shape) > _MAX_DIMENSIONS or offsets is None or len(offsets) != 2:
        raise ValueError(f"{name!r} has no sensible shape or data_offsets")
    num_bytes = DTYPES[dtype].itemsize
    for length in shape:
        num_bytes *= length
    start, stop = offsets
    if stop - start != num_bytes:
        raise ValueError(f"{name!r} has {stop - start} bytes, its shape takes {num_bytes}")
    return TensorEntry(name, file, dtype, shape, data + start, data + stop)


def _integers(value: Any) -> tuple[int, ...] | None:
    """A list of sizes that a file could have."""
    if not isinstance(value, list):
        return None
    if any(type(v) is not int or not 0 <= v < 2**62 for v in value):
        return None
    return tuple(value)
