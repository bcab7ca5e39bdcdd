"""How do rows pass through the network? The two halves of a V4.1-class model.

Source: model specification, sections 3, 4, 9 and 13. The encoder half is the embedding and the
layers below E; layer E's KV projections belong to both halves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ripresa.kernels import dispatch as ops
from ripresa.workers.cache.kv_cache import KVCache
from ripresa.workers.models.deepseek_v41.attention import Attention, StepContext
from ripresa.workers.models.deepseek_v41.config import LayerRole, ModelConfig
from ripresa.workers.models.deepseek_v41.engram import Engram
from ripresa.workers.models.deepseek_v41.engram_ids import Ids
from ripresa.workers.models.deepseek_v41.rows import Rows, WindowPlan
from ripresa.workers.models.deepseek_v41.weights import LayerWeights, SiteWeights, Weights

Observer = Callable[[str, int, torch.Tensor], None]
"""Called with (name, layer, tensor) for what verification compares."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """What the encoder half makes of a step.

    Attributes:
        rows: those that passed every layer.
        streams, pre: their streams [T, n, d] and pre-mix [T, n] between layer E-1 and layer E.
        num_row_layers: all rows, counted once for each layer that they passed.
    """

    rows: Rows
    streams: torch.Tensor
    pre: torch.Tensor
    num_row_layers: int


class DeepseekV41:
    """A half, or all, of the model over one rank's KV memory.

    Args:
        min_rows: pad matrix products to this many rows, so that a row's numbers do not depend on
            its batch mates (`numerics: deterministic`); 0 does not pad.
        workspace_bytes: bound of the index scores held at once.
        engram: the model's n-gram memories, if it has any.
        round_inputs: round the inputs of linears that the release quantises (`w8a8`).
        observer: sees intermediate tensors; for verification.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        cache: KVCache,
        min_rows: int,
        workspace_bytes: int,
        engram: Engram | None = None,
        round_inputs: bool = False,
        observer: Observer | None = None,
    ) -> None:
        self._config = config
        self._weights = weights
        self._min_rows = min_rows
        self._engram = engram
        self._round_inputs = round_inputs
        self._attention = Attention(config, cache, min_rows, workspace_bytes, round_inputs)
        self._observe = observer

    def encode(
        self,
        rows: Rows,
        token_ids: torch.Tensor,
        source_windows: Sequence[tuple[int, int]],
        table_rows: Mapping[int, Ids],
    ) -> Encoded:
        """Rows through the encoder half; block KV of every Full layer up to E is written.

        Where runs have layer starts, a layer computes its rows from there on and keeps the window
        rows of those below, which the layer before has computed for it.

        Args:
            token_ids: [T] int64.
            table_rows: what `Engram.lookup` gave for these rows; empty without n-gram memories.
            source_windows: of each run, layer E's own window rows in [first, stop) are kept too.

        """
        c = self._config
        step = self._attention.context(rows)
        embedded = self._weights.embed.index_select(0, token_ids)
        streams = embedded[:, None, :].expand(-1, c.hc_mult, -1).contiguous()
        pre = streams.new_zeros(len(token_ids), c.hc_mult)
        pre[:, 0] = 1.0
        first, num_row_layers = rows, 0
        for layer in range(c.split):
            if not rows.num_rows:
                break
            if layer in table_rows:
                assert self._engram is not None
                table = table_rows[layer]
                if rows is not first:
                    table = table[first.places(rows).cpu().numpy()]
                if self._observe:
                    self._observe("engram_rows", layer, torch.from_numpy(table))
                streams = self._engram.inject(layer, streams, table)
            kept = rows.at(layer)
            if kept is not rows:
                self._leave_out(layer, streams, pre, step, rows.left_out(kept))
                places = rows.places(kept)
                streams, pre = streams.index_select(0, places), pre.index_select(0, places)
                rows, step = kept, self._attention.narrowed(step, kept)
            if rows.num_rows:
                streams, pre = self._layer(layer, streams, pre, step, rows.window())
            num_row_layers += rows.num_rows
        if not rows.num_rows:
            return Encoded(rows, streams, pre, num_row_layers)
        source = self._weights.source
        x = ops.hc_collapse(streams, pre)
        x = ops.rms_norm(x, source.attn_norm, c.rms_norm_eps)
        self._attention.write_entries(c.split, source, x, rows)
        if any(stop for _, stop in source_windows):
            self._attention.write_window(c.split, source, x, step, source_windows)
        return Encoded(rows, streams, pre, num_row_layers)

    def decode(
        self,
        rows: Rows,
        streams: torch.Tensor,
        pre: torch.Tensor,
        source_floors: Sequence[int],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows through layers E and above, over block KV that is already written.

        Args:
            streams, pre: encoder output of the rows.
            source_floors: layer E's window floor of each run.

        Returns:
            streams [T, n, d] and pre-mix [T, n] after the last layer.
        """
        c = self._config
        step = self._attention.context(rows)
        for layer in range(c.split, c.num_hidden_layers):
            window = rows.window(source_floors) if layer == c.split else rows.window()
            streams, pre = self._layer(layer, streams, pre, step, window)
        return streams, pre

    def logits(self, streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
        """[T, vocab] float32 of rows after the last layer."""
        norm, head = self._weights.norm, self._weights.head
        if norm is None or head is None:
            raise RuntimeError("an encoder half has no head")
        y = ops.rms_norm(ops.hc_collapse(streams, pre), norm, self._config.rms_norm_eps)
        if self._observe:
            self._observe("final_norm", 0, y)
        return ops.linear(y, head, self._min_rows)

    def _layer(
        self,
        layer: int,
        streams: torch.Tensor,
        pre: torch.Tensor,
        step: StepContext,
        window: WindowPlan,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        c = self._config
        weights = self._weights.layers[layer]
        pre_next, post, comb = self._mix(streams, weights.attn_site)
        x = self._attention_input(weights, streams, pre)
        if self._observe:
            self._observe("attn_input", layer, x)
        if weights.source is not None and layer < c.split:
            self._attention.write_entries(layer, weights.source, x, step.rows)
        y = self._attention(layer, weights, x, step, window)
        if self._observe and c.role(layer) in (LayerRole.FULL, LayerRole.REINDEX):
            assert step.entries is not None
            self._observe("positions", layer, step.rows.positions)
            self._observe("selected", layer, step.entries)
        streams = ops.hc_expand(y, streams, post, comb)
        pre = pre_next
        pre_next, post, comb = self._mix(streams, weights.ffn_site)
        x = ops.hc_collapse(streams, pre)
        y = self._experts(weights, ops.rms_norm(x, weights.ffn_norm, c.rms_norm_eps))
        streams = ops.hc_expand(y, streams, post, comb)
        if self._observe:
            self._observe("hidden", layer, streams)
            self._observe("pre_mix", layer, pre_next)
        return streams, pre_next

    def _leave_out(
        self,
        layer: int,
        streams: torch.Tensor,
        pre: torch.Tensor,
        step: StepContext,
        rows: Rows,
    ) -> None:
        """Of rows that pass the layers below only, keep what later rows of this one read."""
        if rows.num_rows:
            places, weights = step.rows.places(rows), self._weights.layers[layer]
            x = self._attention_input(
                weights, streams.index_select(0, places), pre.index_select(0, places)
            )
            self._attention.keep_window(layer, weights, x, step, rows)

    def _attention_input(
        self, weights: LayerWeights, streams: torch.Tensor, pre: torch.Tensor
    ) -> torch.Tensor:
        x = ops.hc_collapse(streams, pre)
        return ops.rms_norm(x, weights.attn_norm, self._config.rms_norm_eps)

    def _mix(
        self, streams: torch.Tensor, site: SiteWeights
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        c = self._config
        return ops.hc_mix(
            streams,
            site.fn,
            site.base,
            site.scale,
            c.hc_sinkhorn_iters,
            c.hc_eps,
            c.rms_norm_eps,
            self._min_rows,
        )

    def _experts(self, weights: LayerWeights, x: torch.Tensor) -> torch.Tensor:
        c = self._config
        scores = ops.linear(x, weights.gate, self._min_rows)
        share, picked = ops.moe_route(
            scores,
            weights.gate_bias,
            c.num_experts_per_tok,
            c.routed_scaling_factor,
            self._min_rows,
        )
        if self._round_inputs:
            x = ops.round_linear_input(x)
        routed = ops.moe_experts(
            x,
            share,
            picked,
            weights.w13,
            weights.w2,
            c.swiglu_limit,
            self._min_rows,
            self._round_inputs,
        )
        shared = ops.swiglu_expert(
            x,
            weights.shared_w13,
            weights.shared_w2,
            c.swiglu_limit,
            None,
            self._min_rows,
            self._round_inputs,
        )
        return routed.add_(shared)
