"""What is in a checkpoint that nobody trained? Seeded random tensors under the released names.

Every number comes from integers by single correctly rounded float32 operations, so a seed gives the
same bits on every machine; each tensor depends on its own name alone.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch

Shape = tuple[int, ...]

GAIN = 1.6
"""Standard deviation of a linear layer's output over that of its input, and of the logits."""


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
