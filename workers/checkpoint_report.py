"""What is in a checkpoint folder, and who would read which part of it? From headers alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from ripresa.workers.memory_plan import size
from ripresa.workers.models.checkpoint import Checkpoint
from ripresa.workers.models.deepseek_v41.config import ModelConfig
from ripresa.workers.models.deepseek_v41.engram_ids import engram_hashes
from ripresa.workers.models.deepseek_v41.inventory import (
    Inventory,
    StoredTensor,
    take_inventory,
)
from ripresa.workers.models.deepseek_v41.tensor_specs import Half, Part


def report_checkpoint(folder: Path) -> Iterator[str]:
    """Lines about a checkpoint that this package would load.

    Raises:
        ConfigError, CheckpointError: it would not; naming the field, or tensor and file, at fault.
    """
    config = ModelConfig.from_file(folder / "config.json")
    if config.engram.layer_ids:
        engram_hashes(config.engram)  # the table rows that they give must be the config's
    with Checkpoint(folder) as checkpoint:
        inventory = take_inventory(checkpoint.entries, config)
        entries = checkpoint.entries
    yield from _model(config)
    total = sum(entry.num_bytes for entry in entries.values())
    shards = Counter[str]()
    for entry in entries.values():
        shards[entry.file] += entry.num_bytes
    yield f"checkpoint: {len(entries)} tensors, {total} bytes, {len(shards)} files"
    for file in sorted(shards):
        count = sum(entry.file == file for entry in entries.values())
        yield f"  {file:<40}{size(shards[file]):>10}  {count} tensors"
    yield "parts"
    for part in Part:
        tensors = list(inventory.of({part}))
        note = ": recognised, NOT LOADED yet" if part is Part.DRAFT else ""
        if tensors:
            yield f"  {part:<16}{_sum(tensors)}{note}"
    yield from _unread(inventory, config)
    yield "formats"
    formats: dict[str, list[StoredTensor]] = {}
    for tensor in inventory.stored:
        formats.setdefault(tensor.format, []).append(tensor)
    for name, tensors in sorted(formats.items()):
        yield f"  {name:<16}{_sum(tensors)}"
    yield "readers"
    whole = sum(tensor.num_bytes for tensor in inventory.read_by(Half.ALL))
    for half, reader in ((Half.ENCODER, "encoder worker"), (Half.ALL, "decode worker")):
        mine = list(inventory.read_by(half))
        share = sum(tensor.num_bytes for tensor in mine) / whole
        files = len({tensor.entry.file for tensor in mine})
        yield f"  {reader:<16}{_sum(mine)}, {share:.1%}, from {files} files"
    tables = list(inventory.of({Part.TABLE}))
    if tables:
        yield f"  {'Engram tables':<16}{_sum(tables)}, mapped by both, one copy a machine"


def _model(config: ModelConfig) -> Iterator[str]:
    roles = Counter(str(config.role(layer)) for layer in range(config.num_hidden_layers))
    shown = ", ".join(f"{count} {role}" for role, count in sorted(roles.items()))
    yield (
        f"model: {config.num_hidden_layers} layers ({shown}), "
        f"{config.num_encoder_layers} in the encoder half"
    )
    sources = ", ".join(
        f"{layer} (ratio {config.ratio(layer)})" for layer in config.kv_source_layer_ids
    )
    yield f"  KV sources at layers {sources}"
    if config.engram.layer_ids:
        yield f"  Engram before layers {', '.join(map(str, config.engram.layer_ids))}"


def _unread(inventory: Inventory, config: ModelConfig) -> Iterator[str]:
    """What is in the files and never loaded, said out loud."""
    if inventory.vision:
        num_bytes = sum(entry.num_bytes for entry in inventory.vision)
        note = "" if config.text_only else '; a worker starts only with "vision_config": null'
        yield (
            f"  {'vision':<16}{_amount(len(inventory.vision), num_bytes)}: NOT LOADED, images are "
            f"not supported{note}"
        )
    if inventory.unknown_draft:
        num_bytes = sum(entry.num_bytes for entry in inventory.unknown_draft)
        yield (
            f"  {'draft':<16}{_amount(len(inventory.unknown_draft), num_bytes)}: NOT LOADED, "
            "config.json has no draft stages"
        )


def _sum(tensors: Iterable[StoredTensor]) -> str:
    """Names in the files, scales included, and their bytes."""
    counted = [(1 if t.scale is None else 2, t.num_bytes) for t in tensors]
    return _amount(sum(count for count, _ in counted), sum(num for _, num in counted))


def _amount(count: int, num_bytes: int) -> str:
    return f"{count:>7} tensors {size(num_bytes):>10}"
