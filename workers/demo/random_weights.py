"""What is in a checkpoint that nobody trained? Seeded random tensors under the released names.

Every number comes from integers by single correctly rounded float32 operations, so a (config, seed)
gives the same bits on every machine; each tensor depends on its own name alone.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ripresa.workers.errors import ConfigError
from ripresa.workers.models.deepseek_v41.config import ModelConfig
from ripresa.workers.models.deepseek_v41.weights import tensor_shapes

Shape = tuple[int, ...]

GAIN = 1.6
"""Standard deviation of a linear layer's output over that of its input, and of the logits."""


def random_checkpoint(config_json: Mapping[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Every text tensor of a model, by released name.

    Linear weights, embeddings and norms are bf16; hyper-connection parameters, attention sinks and
    gate biases float32. Engram tables and draft stages are there if the config has them.

    Args:
        config_json: a parsed `config.json` with the released field names, without
            `quantization_config`.
        seed: another seed, other numbers.

    Raises:
        ConfigError: the config describes no supported model, or asks for quantised storage.
    """
    config = ModelConfig.from_dict(config_json)
    if config.quantised:
        raise ConfigError(
            "quantization_config", "random weights are plain bf16; remove the field from the config"
        )
    shapes = checkpoint_shapes(config, config_json.get("text_config", config_json))
    return {name: random_tensor(name, shape, seed) for name, shape in shapes.items()}


def checkpoint_shapes(config: ModelConfig, text: Mapping[str, Any]) -> dict[str, Shape]:
    """Shapes [out, in] by name: the layers', Engram's and the draft stages' tensors.

    Args:
        config: the parsed config.
        text: its `text_config` object, for the fields of the draft stages.
    """
    return tensor_shapes(config) | _engram_shapes(config) | _draft_shapes(config, text)


def _engram_shapes(config: ModelConfig) -> dict[str, Shape]:
    engram, d, n = config.engram, config.hidden_size, config.hc_mult
    columns = (engram.max_ngram_size - 1) * engram.num_heads
    shapes: dict[str, Shape] = {}
    for layer, rows in zip(engram.layer_ids, engram.num_embeddings, strict=True):
        prefix = f"layers.{layer}.engram"
        shapes[f"{prefix}.embed.weight"] = (rows, engram.head_dim)
        shapes[f"{prefix}.wkv.weight"] = ((n + 1) * d, columns * engram.head_dim)
        shapes[f"{prefix}.q_weight"] = shapes[f"{prefix}.k_weight"] = (n, d)
    return shapes


def _draft_shapes(config: ModelConfig, text: Mapping[str, Any]) -> dict[str, Shape]:
    stages: int = text.get("num_nextn_predict_layers", 0)
    if not stages:
        return {}
    d, rank = config.hidden_size, text["dspark_markov_rank"]
    window_layers = replace(
        config,
        num_hidden_layers=stages,
        compress_ratios=(0,) * stages,
        n_routed_experts=text["dspark_n_routed_experts"],
    )
    shapes = {
        name.replace("layers.", "mtp.", 1): shape
        for name, shape in tensor_shapes(window_layers).items()
        if name.startswith("layers.")
    }
    last = f"mtp.{stages - 1}"
    return shapes | {
        "mtp.0.main_proj.weight": (d, len(text["dspark_target_layer_ids"]) * d),
        "mtp.0.main_norm.weight": (d,),
        f"{last}.norm.weight": (d,),
        f"{last}.markov_head.embed.weight": (config.vocab_size, rank),
        f"{last}.markov_head.head.weight": (config.vocab_size, rank),
        f"{last}.confidence_head.proj.weight": (1, d + rank),
    }


def random_tensor(name: str, shape: Shape, seed: int) -> torch.Tensor:
    """One tensor of a random checkpoint: uniform around the mean that suits its kind."""
    mean, deviation, dtype = _kind(name, shape)
    words = np.random.Philox(key=np.array([seed, _hash64(name)], dtype=np.uint64))
    count = math.prod(shape)
    bits = words.random_raw(-(-count // 4)).astype("<u8").view("<u2")[:count]
    centred = (bits.astype(np.float32) - np.float32(32767.5)) / np.float32(32768)
    values = centred * np.float32(deviation * math.sqrt(3)) + np.float32(mean)
    return torch.from_numpy(values).to(dtype).reshape(shape)


def _kind(name: str, shape: Shape) -> tuple[float, float, torch.dtype]:
    """Mean, standard deviation and storage type of a tensor."""
    field = name.removesuffix(".weight").rpartition(".")[2]
    if field.startswith("hc_"):
        kinds = {"fn": (0.0, GAIN / math.sqrt(shape[-1])), "base": (0.0, 0.5), "scale": (0.5, 0.2)}
        return *kinds[field.rpartition("_")[2]], torch.float32
    if field == "attn_sink":
        return 0.0, 0.5, torch.float32
    if field == "bias":
        return 0.0, 0.1, torch.float32
    if field == "norm" or field.endswith("_norm"):
        return 1.0, 0.2, torch.bfloat16
    if field in ("q_weight", "k_weight"):
        return 1.0, 0.3, torch.bfloat16
    if field == "embed":
        return 0.0, 1.0, torch.bfloat16
    return 0.0, GAIN / math.sqrt(shape[-1]), torch.bfloat16


def _hash64(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
