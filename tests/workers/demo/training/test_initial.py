"""Do the first steps of a training already look back, and find what was said before?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from ripresa.workers.demo.build_tokenizer import TOKENIZER
from ripresa.workers.demo.training.initial import initial_parameters
from ripresa.workers.demo.training.sizes import Size, config_of
from ripresa.workers.models.deepseek_v41.config import ModelConfig
from ripresa.workers.models.deepseek_v41.engram_ids import compressed_ids
from ripresa.workers.models.deepseek_v41.trainable import attention
from ripresa.workers.models.deepseek_v41.trainable.model import TrainableModel

BLOCK = 64
REPEATED = 30


def observed(
    monkeypatch: pytest.MonkeyPatch, config: ModelConfig, token_ids: torch.Tensor
) -> list[list[torch.Tensor]]:
    """Attention by layer and block of queries: [rows, heads, keys], window rows first."""
    real = attention._SinkAttention.apply
    weights: list[torch.Tensor] = []

    def observe(q: Any, keys: Any, bias: Any, sink: Any, scale: float, span: Any) -> Any:
        logits = torch.einsum("mhd,nd->mhn", q[0], keys[0]) * scale + bias[0][:, None]
        weights.append(torch.softmax(logits, -1))
        return real(q, keys, bias, sink, scale, span)

    monkeypatch.setattr(attention._SinkAttention, "apply", observe)
    ids = compressed_ids(Tokenizer.from_file(str(TOKENIZER)))
    with torch.no_grad():
        TrainableModel(config, initial_parameters(config, 0), ids).forward(token_ids[None], True)
    blocks = len(token_ids) // BLOCK
    return [weights[first : first + blocks] for first in range(0, len(weights), blocks)]


@pytest.mark.parametrize("size", Size)
def test_heads_look_back_and_find_what_followed(
    size: Size, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig.from_dict(config_of(size))
    token_ids = torch.randint(100, 4096, (2 * BLOCK,), generator=torch.Generator().manual_seed(1))
    token_ids[BLOCK + 10 : BLOCK + 10 + REPEATED] = token_ids[10 : 10 + REPEATED]
    layers = observed(monkeypatch, config, token_ids)
    rows = torch.arange(BLOCK)
    for head, distance in enumerate((1, 2)):
        assert float(layers[0][1][rows, head, BLOCK + rows - distance].mean()) > 0.8
    # Two tokens of the repeat are known to be one; what followed them is a block and a token back.
    rows = torch.arange(12, 10 + REPEATED - 1)
    for layer in (2, config.split):
        found = layers[layer][1][rows, 0, rows + 1]
        if layer == config.split:
            found = found + layers[layer][1][rows, 0, 2 * BLOCK + rows + 1]
        assert float(found.mean()) > 0.5, layer
        assert float(layers[layer][1][rows, 3, rows + 1].mean()) < 0.1
