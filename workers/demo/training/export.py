"""How does a trained model become a checkpoint? The folder that workers load, in bf16."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ripresa.workers.demo.build_tokenizer import TOKENIZER
from ripresa.workers.models.deepseek_v41.config import ModelConfig
from ripresa.workers.models.deepseek_v41.tensor_specs import Storage, text_specs


def export(
    folder: Path, document: Mapping[str, Any], parameters: Mapping[str, torch.Tensor]
) -> None:
    """Write `config.json`, `tokenizer.json` and `model.safetensors`; the folder may exist.

    Hyper-connection parameters, sinks and picking biases stay float32, as in the release.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    (folder / "tokenizer.json").write_bytes(TOKENIZER.read_bytes())
    tensors = {}
    for spec in text_specs(ModelConfig.from_dict(document)):
        dtype = torch.float32 if spec.storage is Storage.F32 else torch.bfloat16
        tensors[spec.name] = parameters[spec.name].detach().to(dtype).contiguous()
    temporary = folder / ".model.safetensors"
    save_file(tensors, temporary, metadata={"format": "pt"})
    temporary.replace(folder / "model.safetensors")
