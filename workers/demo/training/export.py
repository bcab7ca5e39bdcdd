"""How does a trained model become a checkpoint? The folder that workers load, in bf16."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from ripresa.workers.demo.build_tokenizer import TOKENIZER
from ripresa.workers.demo.training.trainer import unwritten
from ripresa.workers.models.deepseek_v41.config import ModelConfig
from ripresa.workers.models.deepseek_v41.tensor_specs import Storage, text_specs


def export(
    folder: Path, document: Mapping[str, Any], parameters: Mapping[str, torch.Tensor]
) -> None:
    """Write `config.json`, `tokenizer.json` and `model.safetensors`; the folder may exist.

    Hyper-connection parameters, sinks and picking biases stay float32, as in the release.

    Raises:
        RipresaError: a file cannot be written.
    """
    tensors = {}
    for spec in text_specs(ModelConfig.from_dict(document)):
        dtype = torch.float32 if spec.storage is Storage.F32 else torch.bfloat16
        tensors[spec.name] = parameters[spec.name].detach().to(dtype).contiguous()
    files = {
        "config.json": json.dumps(document, indent=2).encode() + b"\n",
        "tokenizer.json": TOKENIZER.read_bytes(),
        "model.safetensors": save(tensors, metadata={"format": "pt"}),
    }
    for name, content in files.items():
        temporary = folder / f".{name}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(content)
            temporary.replace(folder / name)
        except OSError as error:
            raise unwritten(folder / name, error) from error
        finally:
            temporary.unlink(missing_ok=True)
