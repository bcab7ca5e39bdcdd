"""Which models can be trained? The bundled model's geometry, and a twin a quarter as large."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Any

from ripresa.workers.demo.checkpoint import DEMO_MODEL, DEMO_TWIN


class Size(StrEnum):
    """`demo`: 12 M parameters, 8 layers. `tiny`: 3.4 M, 6 layers, the same in everything else."""

    DEMO = "demo"
    TINY = "tiny"

    @property
    def bundled(self) -> Path:
        """Folder of the bundled checkpoint."""
        return DEMO_MODEL if self is Size.DEMO else DEMO_TWIN


_TINY = {
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 6,
    "q_lora_rank": 64,
    "o_lora_rank": 32,
    "compress_ratios": [0, 2, 2, 1, 1, 1],
    "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 3, 5],
    "candidate_source_layer_id": 3,
    "index_n_heads": 2,
    "index_head_dim": 32,
}


def config_of(size: Size) -> dict[str, Any]:
    """A `config.json`."""
    document: dict[str, Any] = json.loads((DEMO_MODEL / "config.json").read_text())
    if size is Size.TINY:
        document["text_config"] |= _TINY
    return document
