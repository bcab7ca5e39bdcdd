"""What does a checkpoint folder hold? Named tensors in safetensors files, read one at a time."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError, safe_open

from ripresa.workers.errors import CheckpointError

_PLAIN = (torch.bfloat16, torch.float32, torch.float16)


class Checkpoint:
    """A folder with `model.safetensors`, or `model.safetensors.index.json` and its shards.

    Opening reads headers only; `read` maps the one tensor that is asked for.

    Raises:
        CheckpointError: the folder, its index or a shard is missing or unreadable.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file_of = _tensor_files(folder)
        self._open: dict[Path, safe_open] = {}

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
        self._open.clear()

    def names(self) -> frozenset[str]:
        return frozenset(self._file_of)

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A plain (bf16, f16 or f32) tensor as float32 of exactly `shape`.

        Raises:
            CheckpointError: missing, of another shape or type, or not readable.
        """
        if name not in self._file_of:
            raise CheckpointError(
                f"{self.folder} has no tensor {name}; is it a V4.1 checkpoint of this config.json?",
                tensor=name,
            )
        path = self._file_of[name]
        try:
            tensor: torch.Tensor = self._shard(path).get_tensor(name)
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{path.name} cannot be read: {error}", tensor=name) from error
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"is {list(tensor.shape)} in {path.name}, config.json implies {list(shape)}",
                tensor=name,
            )
        if tensor.dtype not in _PLAIN:
            raise CheckpointError(
                f"is stored as {tensor.dtype} in {path.name}; only bf16, f16 and f32 are supported",
                tensor=name,
            )
        return tensor.to(torch.float32)

    def _shard(self, path: Path) -> safe_open:
        if path not in self._open:
            self._open[path] = _open_shard(path)
        return self._open[path]


def _open_shard(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; copy the whole checkpoint folder") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is corrupt or truncated ({error}); copy the file again"
        ) from error


def _tensor_files(folder: Path) -> dict[str, Path]:
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if not index.exists():
        if not single.exists():
            raise CheckpointError(
                f"{folder} holds neither model.safetensors nor model.safetensors.index.json"
            )
        return dict.fromkeys(_open_shard(single).keys(), single)
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        entries = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not a safetensors index: {error!r}") from error
    for name, file in entries.items():
        if Path(file).name != file or file in ("", ".", ".."):
            raise CheckpointError(f"{index.name} points outside the folder: {file!r}", tensor=name)
    return {name: folder / file for name, file in entries.items()}
