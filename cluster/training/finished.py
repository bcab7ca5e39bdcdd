"""What did a training end with? Its parameters, or those of any other checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from ripresa.cluster.training.run import CHECKPOINT, STATE
from ripresa.workers.demo.build_tokenizer import TOKENIZER
from ripresa.workers.demo.training.trainer import UNREADABLE
from ripresa.workers.errors import ConfigError
from ripresa.workers.models.checkpoint import Checkpoint
from ripresa.workers.models.deepseek_v41.config import ModelConfig
from ripresa.workers.models.deepseek_v41.engram_ids import compressed_ids
from ripresa.workers.models.deepseek_v41.tensor_specs import tensor_shapes
from ripresa.workers.models.deepseek_v41.trainable.model import TrainableModel

Tensors = dict[str, torch.Tensor]


def finished_parameters(folder: Path, config: ModelConfig) -> Tensors:
    """float32 by released name: as they were trained where the state is kept, else as stored.

    Args:
        folder: a training's, or a checkpoint.
        config: what the parameters must be of.

    Raises:
        ConfigError: the training has not ended, or the parameters are of another model.
        CheckpointError: there is neither.
    """
    state = folder / STATE
    if not state.exists():
        other, parameters = read_parameters(folder)
        if other != config:
            raise ConfigError("--from", f"{folder} holds a model of another size; name its --size")
        return parameters
    try:
        content: dict[str, Any] = torch.load(state, weights_only=True, mmap=True)
    except UNREADABLE as error:
        raise ConfigError(
            "--from", f"{state} cannot be read: {error}; name the training's checkpoint"
        ) from error
    number, stop = content["number"], content["identity"]["plan"]["num_steps"]
    if number < stop:
        raise ConfigError(
            "--from",
            f"{state} is at step {number} of {stop}; let that training end, or name a checkpoint",
        )
    trained: Tensors = content["parameters"]
    if {name: tuple(p.shape) for name, p in trained.items()} != tensor_shapes(config):
        raise ConfigError("--from", f"{folder} holds a model of another size; name its --size")
    return {name: values.clone() for name, values in trained.items()}


def read_parameters(folder: Path) -> tuple[ModelConfig, Tensors]:
    """A checkpoint's geometry, and its parameters as float32 by released name.

    Args:
        folder: a checkpoint, or a training's with one in it.

    Raises:
        ConfigError, CheckpointError: naming what is missing or wrong.
    """
    folder = _checkpoint_in(folder)
    config = ModelConfig.from_file(folder / "config.json")
    with Checkpoint(folder) as checkpoint:
        shapes = tensor_shapes(config)
        return config, {name: checkpoint.read(name, shape) for name, shape in shapes.items()}


def check_same_size(folders: Sequence[Path]) -> None:
    """See that some models, each a training's folder or a checkpoint, can be compared.

    Raises:
        ConfigError: one has another geometry than the first, or none.
    """
    first, *others = folders
    config = ModelConfig.from_file(_checkpoint_in(first) / "config.json")
    for folder in others:
        if ModelConfig.from_file(_checkpoint_in(folder) / "config.json") != config:
            raise ConfigError(
                "AFTER", f"{folder} holds a model of another size than {first}; compare equal ones"
            )


def _checkpoint_in(folder: Path) -> Path:
    return folder / CHECKPOINT if (folder / CHECKPOINT).is_dir() else folder


def trainable(config: ModelConfig, parameters: Mapping[str, torch.Tensor]) -> TrainableModel:
    """A model over the demo model's vocabulary."""
    ids = compressed_ids(Tokenizer.from_file(str(TOKENIZER)))
    return TrainableModel(config, parameters, ids)
