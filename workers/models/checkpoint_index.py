"""Which file of a checkpoint folder holds which tensor? The index, held against every header."""

from __future__ import annotations

from pathlib import Path

from ripresa.workers.errors import CheckpointError
from ripresa.workers.models.regular_file import file_within
from ripresa.workers.models.shard import Shard
from ripresa.workers.models.strict_json import read_json

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

MAX_INDEX_BYTES = 256 << 20
_MAX_SHARDS = 4096


def open_shards(folder: Path) -> dict[str, Shard]:
    """Every shard of a folder, open, by file name. Headers are read, tensors are not.

    Raises:
        CheckpointError: the folder, its index or a shard is missing, corrupt or contradictory:
            a tensor that is in two shards, in another than the index says, or in no index.
    """
    file_of = _read_index(folder)
    paths = _paths(folder, file_of)
    shards: dict[str, Shard] = {}
    try:
        for file, path in paths.items():
            shards[file] = Shard(path)
        if file_of:
            _compare(file_of, shards)
    except CheckpointError:
        for shard in shards.values():
            shard.close()
        raise
    return shards


def shard_paths(folder: Path) -> list[Path]:
    """The shards that a folder should have; nothing is opened but the index.

    Raises:
        CheckpointError: there is no usable index, and no single file.
    """
    return list(_paths(folder, _read_index(folder)).values())


def _paths(folder: Path, file_of: dict[str, str]) -> dict[str, Path]:
    """Path by file name, ascending; the single file if no index names any."""
    if not file_of:
        return {SINGLE_FILE: _path(folder, SINGLE_FILE, None)}
    first_of: dict[str, str] = {}
    for name, file in file_of.items():
        first_of.setdefault(file, name)
    if len(first_of) > _MAX_SHARDS:
        raise CheckpointError(f"{INDEX_FILE} names {len(first_of)} files, an absurd number")
    return {file: _path(folder, file, name) for file, name in sorted(first_of.items())}


def _compare(file_of: dict[str, str], shards: dict[str, Shard]) -> None:
    """Index and headers must say the same about every tensor."""
    seen: dict[str, str] = {}
    for file, shard in shards.items():
        for name in shard.entries:
            if name in seen:
                raise CheckpointError(
                    f"is in {seen[name]} and in {file}; one of the files belongs to another "
                    "checkpoint",
                    tensor=name,
                )
            seen[name] = file
    for name, file in file_of.items():
        if seen.get(name) != file:
            place = f"it is in {seen[name]}" if name in seen else "it is in no shard"
            raise CheckpointError(f"{INDEX_FILE} puts it into {file}, but {place}", tensor=name)
    for name, file in seen.items():
        if name not in file_of:
            raise CheckpointError(f"is in {file}, but not in {INDEX_FILE}", tensor=name)


def _read_index(folder: Path) -> dict[str, str]:
    """File name by tensor; empty for a folder with a single file and no index."""
    if not (folder / INDEX_FILE).exists():
        if not (folder / SINGLE_FILE).exists():
            raise CheckpointError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}")
        return {}
    try:
        document = read_json(file_within(folder, INDEX_FILE), MAX_INDEX_BYTES)
    except (OSError, ValueError, RuntimeError) as error:  # a link may lead to itself
        raise CheckpointError(f"{INDEX_FILE} is not a safetensors index: {error}") from error
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{INDEX_FILE} is not a safetensors index: it has no weight_map")
    for name, file in weight_map.items():
        if not isinstance(file, str):
            raise CheckpointError(f"{INDEX_FILE} gives it no file name", tensor=name)
    return weight_map


def _path(folder: Path, file: str, tensor: str | None) -> Path:
    try:
        return file_within(folder, file)
    except (OSError, ValueError, RuntimeError) as error:  # a link may lead to itself
        raise CheckpointError(f"{INDEX_FILE} points outside: {error}", tensor=tensor) from error
