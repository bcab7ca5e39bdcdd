"""How is a small checkpoint in any storage format made? Seeded random tensors, several shards.

Names, types and layout are the release's, so that whatever reads one reads the other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ripresa.kernels import dispatch as ops
from ripresa.workers.errors import ConfigError
from ripresa.workers.models.checkpoint_index import INDEX_FILE
from ripresa.workers.models.deepseek_v41.config import MAX_FILE_BYTES, ModelConfig
from ripresa.workers.models.deepseek_v41.tensor_specs import (
    TILE,
    Storage,
    TensorSpec,
    scale_name,
    tensor_specs,
)
from ripresa.workers.models.random_weights import random_tensor
from ripresa.workers.models.strict_json import read_json

MAX_PARAMETERS = 2_000_000_000
QUANTISATION = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}

Tensors = dict[str, torch.Tensor]


class WeightFormat(StrEnum):
    """How linear weights and Engram tables are stored.

    F32, BF16: plain. F8, FP4: every linear, experts or not, in one quantised form; tables are E4M3.
    RELEASED: experts FP4, other linears F8, as the release has them.
    """

    F32 = "f32"
    BF16 = "bf16"
    F8 = "f8"
    FP4 = "fp4"
    RELEASED = "released"

    @property
    def quantised(self) -> bool:
        return self in (WeightFormat.F8, WeightFormat.FP4, WeightFormat.RELEASED)


def read_config(path: Path) -> dict[str, Any]:
    """A `config.json` as it is, for `write_tiny_checkpoint`.

    Raises:
        ConfigError: it cannot be read or is no JSON object.
    """
    try:
        document = read_json(path, MAX_FILE_BYTES)
    except (OSError, ValueError) as error:
        raise ConfigError("--config", f"{path} cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError("--config", f"{path} is no JSON object")
    return document


def write_tiny_checkpoint(
    folder: Path, document: Mapping[str, Any], weight_format: WeightFormat, seed: int, shards: int
) -> list[Path]:
    """Write `config.json`, the shards and their index.

    Args:
        folder: made if it is not there; must be empty.
        document: a parsed `config.json`; its quantization_config is set to suit the format.
        seed: another seed, other numbers.
        shards: files of about equal size, at most one per layer and group of other tensors.

    Returns:
        The files written.

    Raises:
        ConfigError: the config is no supported model, too large, or its sizes do not suit the
            format; or the folder is not empty, or cannot be written.
    """
    plain = {key: value for key, value in document.items() if key != "quantization_config"}
    content = plain | ({"quantization_config": QUANTISATION} if weight_format.quantised else {})
    specs = list(tensor_specs(ModelConfig.from_dict(content)))
    total = sum(spec.num_parameters for spec in specs)
    if total > MAX_PARAMETERS:
        raise ConfigError(
            "--config", f"has {total} parameters; a tiny checkpoint has at most {MAX_PARAMETERS}"
        )
    for spec in specs:
        _require_whole_groups(spec, weight_format)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError("DIR", f"{folder} is not empty; name a new folder")
        config_file = _write_json(folder / "config.json", content)
        return [config_file, *_write_shards(folder, specs, weight_format, seed, shards)]
    except OSError as error:
        raise ConfigError("DIR", f"{folder} cannot be written: {error}") from error


def stored_tensors(spec: TensorSpec, weight_format: WeightFormat, seed: int) -> Tensors:
    """A tensor and, if the format quantises it, its scales."""
    values = random_tensor(spec.name, spec.shape, seed)
    storage = _storage(spec, weight_format)
    if storage is None:
        wide = weight_format is WeightFormat.F32 or spec.storage is Storage.F32
        return {spec.name: values.to(torch.float32 if wide else torch.bfloat16)}
    quantise = {
        Storage.F8: ops.quantise_f8,
        Storage.F8_ROWS: ops.quantise_f8_rows,
        Storage.FP4: ops.quantise_fp4,
    }[storage]
    codes, scales = quantise(values.to(torch.float32))
    return {spec.name: codes, scale_name(spec.name): scales}


def _storage(spec: TensorSpec, weight_format: WeightFormat) -> Storage | None:
    """The quantised storage of a tensor in a format; None for plain."""
    if not spec.storage.quantised or not weight_format.quantised:
        return None
    if spec.storage is Storage.F8_ROWS or weight_format is WeightFormat.RELEASED:
        return spec.storage
    return Storage.F8 if weight_format is WeightFormat.F8 else Storage.FP4


def _require_whole_groups(spec: TensorSpec, weight_format: WeightFormat) -> None:
    storage = _storage(spec, weight_format)
    if storage in (Storage.FP4, Storage.F8_ROWS) and spec.shape[-1] % TILE:
        raise ConfigError(
            "--format",
            f"{weight_format} stores groups of {TILE} columns, and {spec.name} is "
            f"{list(spec.shape)}; change the config or use bf16",
        )


def _write_shards(
    folder: Path, specs: list[TensorSpec], weight_format: WeightFormat, seed: int, shards: int
) -> Iterator[Path]:
    weight_map: dict[str, str] = {}
    total = 0
    parts = _divide(specs, shards)
    for number, part in enumerate(parts, 1):
        name = f"model-{number:05}-of-{len(parts):05}.safetensors"
        tensors: Tensors = {}
        for spec in part:
            tensors |= stored_tensors(spec, weight_format, seed)
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
        yield folder / name
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    yield _write_json(folder / INDEX_FILE, index)


def _divide(specs: list[TensorSpec], shards: int) -> list[list[TensorSpec]]:
    """Consecutive parts of about equal size, cut between layers; Engram tables apart."""
    groups: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        first, _, rest = spec.name.partition(".")
        number = rest.partition(".")[0]
        key = f"{first}.{number}" if number.isdigit() else "others"
        groups.setdefault("tables" if spec.storage is Storage.F8_ROWS else key, []).append(spec)
    total = sum(spec.num_parameters for spec in specs)
    parts: list[list[TensorSpec]] = []
    done = 0
    for group in groups.values():
        if len(parts) * total <= done * shards:
            parts.append([])
        parts[-1] += group
        done += sum(spec.num_parameters for spec in group)
    return parts


def _write_json(path: Path, content: Mapping[str, Any]) -> Path:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return path
