"""Is a checkpoint the model that its config describes? Every stored tensor finds its place.

Headers alone are compared, so this takes a moment for any size. A tensor that the config does not
imply is an error, not a surplus: it belongs to another model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from ripresa.workers.errors import CheckpointError
from ripresa.workers.models.checkpoint import PLAIN, check_scale
from ripresa.workers.models.checkpoint_index import INDEX_FILE, SINGLE_FILE
from ripresa.workers.models.deepseek_v41.config import ModelConfig
from ripresa.workers.models.deepseek_v41.tensor_specs import (
    PARTS_OF_HALF,
    TILE,
    Half,
    Part,
    Storage,
    TensorSpec,
    is_draft,
    is_vision,
    scale_name,
    scale_shape,
    stored_shape,
    tensor_specs,
)
from ripresa.workers.models.shard import TensorEntry


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of the model as a checkpoint stores it.

    Attributes:
        format: `f8`, `f8_rows`, `fp4`, or a plain type's name.
    """

    spec: TensorSpec
    entry: TensorEntry
    scale: TensorEntry | None
    format: str

    @property
    def num_bytes(self) -> int:
        return self.entry.num_bytes + (0 if self.scale is None else self.scale.num_bytes)


@dataclass(frozen=True, slots=True)
class Inventory:
    """Every tensor of a checkpoint.

    Attributes:
        stored: the text model's, and the draft stages' that are there.
        vision: what serves images, which is never read.
        unknown_draft: `mtp.` tensors of a config that has no draft stages.
    """

    stored: tuple[StoredTensor, ...]
    vision: tuple[TensorEntry, ...]
    unknown_draft: tuple[TensorEntry, ...]

    def of(self, parts: Collection[Part]) -> Iterator[StoredTensor]:
        return (tensor for tensor in self.stored if tensor.spec.part in parts)

    def read_by(self, half: Half) -> Iterator[StoredTensor]:
        """What a worker with this half decodes into float32: all but Engram's tables."""
        return self.of(PARTS_OF_HALF[half] - {Part.TABLE})


def take_inventory(entries: Mapping[str, TensorEntry], config: ModelConfig) -> Inventory:
    """Give every tensor of a checkpoint its place in the model.

    Raises:
        CheckpointError: a tensor of the text model is missing, or one is there that the config
            does not imply, or has another shape or type, or not the scales that it needs.
    """
    stored: list[StoredTensor] = []
    used: set[str] = set()
    missing: list[str] = []
    has_draft = any(is_draft(name) for name in entries)
    for spec in tensor_specs(config):
        entry = entries.get(spec.name)
        if entry is None:
            # Draft stages may have been left out, as a whole.
            if spec.part is not Part.DRAFT or has_draft:
                missing.append(spec.name)
            continue
        tensor = _place(spec, entry, entries)
        if tensor.scale is not None and not config.quantised:
            raise CheckpointError(
                f"is stored as {entry.dtype} in {entry.file}, but config.json has no "
                "quantization_config; they do not belong together",
                tensor=spec.name,
            )
        stored.append(tensor)
        used.add(spec.name)
        if tensor.scale is not None:
            used.add(tensor.scale.name)
    if missing:
        others = f", one of {len(missing)} missing tensors" if len(missing) > 1 else ""
        raise CheckpointError(
            f"is missing{others}: it is not in {_files(entries)}; copy the whole folder, or use "
            "the config.json that belongs to it",
            tensor=missing[0],
        )
    vision: list[TensorEntry] = []
    draft: list[TensorEntry] = []
    for name, entry in entries.items():
        if name in used:
            continue
        if is_vision(name):
            vision.append(entry)
        elif is_draft(name) and config.draft.num_stages == 0:
            draft.append(entry)
        else:
            raise CheckpointError(
                f"is unexpected: it is {entry.dtype} {list(entry.shape)} in {entry.file}, but "
                "config.json implies no tensor of this name",
                tensor=name,
            )
    return Inventory(tuple(stored), tuple(vision), tuple(draft))


def require_no_vision(inventory: Inventory, config: ModelConfig) -> None:
    """Refuse a checkpoint with parts that serve images, unless its config is for text alone.

    Raises:
        CheckpointError: naming the first of them.
    """
    if inventory.vision and not config.text_only:
        first = min(inventory.vision, key=lambda entry: entry.name)
        raise CheckpointError(
            f"serves images, as {len(inventory.vision)} tensors of this checkpoint do, in "
            f'{first.file}: images are not supported; write "vision_config": null into '
            "config.json to serve the text model alone, without them",
            tensor=first.name,
        )


def _files(entries: Mapping[str, TensorEntry]) -> str:
    """Where a tensor could have been."""
    files = sorted({entry.file for entry in entries.values()})
    if files == [SINGLE_FILE]:
        return SINGLE_FILE
    return f"{INDEX_FILE}, nor in any of its {len(files)} files"


def _place(
    spec: TensorSpec, entry: TensorEntry, entries: Mapping[str, TensorEntry]
) -> StoredTensor:
    """One tensor with its scales, if its type and shape are some storage of the spec."""
    if entry.dtype in PLAIN:
        _require_shape(spec, entry, spec.shape)
        return StoredTensor(spec, entry, None, entry.dtype.lower())
    storage = _quantised_storage(spec, entry.dtype)
    if storage is None:
        allowed = "F32, F16 or BF16"
        if spec.storage is Storage.F8_ROWS:
            allowed += ", or F8_E4M3 with a scale per row and 32 columns"
        elif spec.storage.quantised:
            allowed += ", F8_E4M3 or packed I8 with scales"
        raise CheckpointError(
            f"is stored as {entry.dtype} in {entry.file}; this tensor can be {allowed}",
            tensor=spec.name,
        )
    _require_shape(spec, entry, stored_shape(spec.shape, storage))
    name = scale_name(spec.name)
    scale = entries.get(name)
    if scale is None:
        raise CheckpointError(
            f"is missing: {spec.name} is stored as {entry.dtype} in {entry.file} and needs scales",
            tensor=name,
        )
    shape = scale_shape(spec.shape, storage)
    check_scale(scale, shape, spec.name)
    return StoredTensor(spec, entry, scale, storage.value)


def _quantised_storage(spec: TensorSpec, dtype: str) -> Storage | None:
    """The quantised storage that a type means for a tensor; None if it has none."""
    whole_groups = spec.shape[-1] % TILE == 0
    if spec.storage is Storage.F8_ROWS:
        return Storage.F8_ROWS if dtype == "F8_E4M3" and whole_groups else None
    if dtype == "I8":
        return Storage.FP4 if spec.storage.quantised and whole_groups else None
    return Storage.F8 if spec.storage.quantised and dtype == "F8_E4M3" else None


def _require_shape(spec: TensorSpec, entry: TensorEntry, shape: tuple[int, ...]) -> None:
    if entry.shape != shape:
        raise CheckpointError(
            f"is {list(entry.shape)} in {entry.file}, config.json implies {list(shape)}",
            tensor=spec.name,
        )
