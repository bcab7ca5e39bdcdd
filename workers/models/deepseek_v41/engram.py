"""How does the n-gram memory enter the streams? Hash the tokens, gather rows, inject.

Source: model specification, section 10. The only state is a request's own token ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ripresa.kernels import dispatch as ops
from ripresa.workers.models.deepseek_v41.config import ModelConfig
from ripresa.workers.models.deepseek_v41.engram_ids import Ids, engram_hashes, ngrams_of
from ripresa.workers.models.deepseek_v41.weights import EngramWeights


class Engram:
    """The n-gram memories of a model; holds no state of its own.

    Args:
        weights: by layer.
        compressed_ids: [vocab_size] int64, the compressed id of each token.
        min_rows: least height of matrix products (numerics setting).
        round_inputs: round the input of the projection (`w8a8`).
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[int, EngramWeights],
        compressed_ids: Ids,
        min_rows: int,
        round_inputs: bool,
    ) -> None:
        self._config = config
        self._weights = weights
        self._ids = compressed_ids
        self._hashes = engram_hashes(config.engram)
        self._min_rows = min_rows
        self._round_inputs = round_inputs

    @property
    def layers(self) -> frozenset[int]:
        """The layers before which something is injected."""
        return frozenset(self._weights)

    def lookup(self, runs: Sequence[tuple[Sequence[int], Sequence[int], int]]) -> dict[int, Ids]:
        """Table rows of a step's tokens, by layer: [T, columns] int64.

        Args:
            runs: (tokens, the tokens right before them, position of the first) of each run.

        Raises:
            ValueError: a run lacks the tokens before it.
        """
        engram = self._config.engram
        pad = int(self._ids[engram.pad_token_id])
        ngrams = np.concatenate(
            [
                ngrams_of(
                    self._ids[np.asarray(tokens, dtype=np.int64)],
                    self._ids[np.asarray(before, dtype=np.int64)],
                    start,
                    engram.max_ngram_size,
                    pad,
                )
                for tokens, before, start in runs
            ]
        )
        return {layer: self._hashes[layer].rows(ngrams) for layer in self._weights}

    def inject(self, layer: int, streams: torch.Tensor, table_rows: Ids) -> torch.Tensor:
        """Streams [T, n, d] with the layer's memory added; table_rows: [T, columns]."""
        weights = self._weights[layer]
        index = torch.from_numpy(table_rows.reshape(-1))
        rows = weights.table.rows(index).to(streams.device).view(len(streams), -1)
        if self._round_inputs:
            rows = ops.round_linear_input(rows)
        return ops.engram_inject(
            streams,
            ops.linear(rows, weights.wkv, self._min_rows),
            weights.q_weight,
            weights.k_weight,
            self._config.rms_norm_eps,
            self._min_rows,
        )
