"""What does training start from? Random linears, silent sublayers, streams that pass on."""

from __future__ import annotations

import hashlib
import math

import torch

from ripresa.workers.models.deepseek_v41.config import ModelConfig
from ripresa.workers.models.deepseek_v41.tensor_specs import Shape, tensor_shapes

Tensors = dict[str, torch.Tensor]

LINEAR_GAIN = 0.7
EMBEDDING_DEVIATION = 0.5
READ, IGNORE = 2.0, -2.5
"""Logits of the stream that a site reads and of the others. Each site begins with another one."""
KEEP = 3.0
"""Logit of a stream going on as itself."""


def initial_parameters(config: ModelConfig, seed: int) -> Tensors:
    """float32 by released name; each tensor depends on the seed and its own name alone."""
    return {
        name: _initial(config, name, shape, _generator(seed, name))
        for name, shape in tensor_shapes(config).items()
    }


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


def _initial(
    config: ModelConfig, name: str, shape: Shape, generator: torch.Generator
) -> torch.Tensor:
    field = name.removesuffix(".weight").rpartition(".")[2]
    if field.endswith("norm") or field in ("q_weight", "k_weight"):
        return torch.ones(shape)
    if field in ("attn_sink", "bias", "wo_b", "w2"):
        return torch.zeros(shape)
    if field.startswith("hc_") and field.endswith("_base"):
        layer, site = int(name.split(".")[1]), int("ffn" in field)
        return _mixing(config.hc_mult, 2 * layer + site + 1)
    if field.startswith("hc_") and field.endswith("_scale"):
        return torch.full(shape, 0.1)
    noise = torch.randn(shape, generator=generator)
    if field == "embed":
        return noise * EMBEDDING_DEVIATION
    if field == "head":
        return noise * 0.02
    gain = {"fn": 1.0, "wgate": 0.1}.get(field.rpartition("_")[2], LINEAR_GAIN)
    return noise * gain / math.sqrt(shape[-1])


def _mixing(n: int, number: int) -> torch.Tensor:
    """The base of a site, whose `pre` is for the site after it, which has this number."""
    read = torch.full((n,), IGNORE)
    read[number % n] = READ
    return torch.cat((read, torch.zeros(n), (torch.eye(n) * KEEP).flatten()))
