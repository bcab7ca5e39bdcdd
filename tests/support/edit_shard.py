"""How does a test change what a safetensors file says? Header and bytes, apart and together."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Header = dict[str, Any]


def read_shard(path: Path) -> tuple[Header, bytes]:
    """The header's JSON and the bytes behind it."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write_shard(path: Path, header: Header, data: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def edit_header(path: Path, edit: Callable[[Header], object]) -> None:
    """Change a file's header in place; its bytes stay."""
    header, data = read_shard(path)
    edit(header)
    write_shard(path, header, data)


def shard_of(folder: Path, tensor: str) -> Path:
    """The file that the index gives a tensor."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return folder / index["weight_map"][tensor]


def edit_index(folder: Path, edit: Callable[[Header], object]) -> None:
    """Change a folder's index in place."""
    path = folder / "model.safetensors.index.json"
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))


def remove_tensor(folder: Path, name: str) -> None:
    """Without it and its bytes, in a file that is whole otherwise."""
    path = shard_of(folder, name)
    header, data = read_shard(path)
    start, stop = header.pop(name)["data_offsets"]
    for entry in header.values():
        if entry.get("data_offsets", [0])[0] >= stop:
            entry["data_offsets"] = [offset - (stop - start) for offset in entry["data_offsets"]]
    write_shard(path, header, data[:start] + data[stop:])
    edit_index(folder, lambda document: document["weight_map"].pop(name))


def flip_payload(folder: Path, name: str, content: bytes) -> None:
    """Overwrite the first bytes of a tensor."""
    path = shard_of(folder, name)
    header, data = read_shard(path)
    start = header[name]["data_offsets"][0]
    write_shard(path, header, data[:start] + content + data[start + len(content) :])
