"""How does the model learn? The V4.1 text model over whole sequences, with gradients.

The serving model (`../model.py`) computes the same numbers a step at a time over caches. Parameters
have their released names, so that a trained model is a checkpoint like any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from ripresa.kernels import dispatch as kernels
from ripresa.workers.models.deepseek_v41.config import LayerRole, ModelConfig
from ripresa.workers.models.deepseek_v41.engram_ids import Ids, engram_hashes, ngrams_of
from ripresa.workers.models.deepseek_v41.trainable import ops
from ripresa.workers.models.deepseek_v41.trainable.attention import attend, block_biases, block_rows
from ripresa.workers.models.deepseek_v41.trainable.cuts import Cuts
from ripresa.workers.models.deepseek_v41.trainable.selection import (
    Selection,
    choose,
    choose_candidates,
    index_scores,
    visible_entries,
)

Tensor = torch.Tensor


@dataclass(slots=True)
class Pool:
    """What a Full layer made. entries: [B, N, D]; keys: [B, N, index D], for the indexer."""

    entries: Tensor
    keys: Tensor


@dataclass(slots=True)
class Pass:
    """What the layers of one forward share.

    Attributes:
        batch, length: of the sequences.
        window_phases, pool_phases: complex64 [T, rope / 2].
        dense: every visible entry is read, whatever the indexer says.
        cuts: where windows begin anew, and up to where pools are known.
        known: by Full layer, the pools of an uncut forward of the sequences of `cuts.cached`.
        pools: by Full layer.
        selections: by index source.
        biases: of the latest selection; for layers without a pool `window_biases`.
        candidates: bool [B, rows, entries] of each block, once layer E has run.
        counts: rows that picked each expert, a list a layer: [experts] int64.
    """

    batch: int
    length: int
    window_phases: Tensor
    pool_phases: Tensor
    dense: bool
    window_biases: list[Tensor]
    cuts: Cuts | None
    known: Mapping[int, Pool]
    biases: list[Tensor] = field(default_factory=list)
    pools: dict[int, Pool] = field(default_factory=dict)
    selections: dict[int, Selection] = field(default_factory=dict)
    candidates: list[Tensor] | None = None
    counts: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Output:
    """What a forward computed.

    Attributes:
        hidden: [B, T, d], which the head multiplies.
        index_loss: the indexers' own, a mean over index sources.
        selections: by index source.
        counts: [layers, experts] int64, rows that picked each expert.
    """

    hidden: Tensor
    index_loss: Tensor
    selections: Mapping[int, Selection]
    counts: Tensor


class TrainableModel:
    """The model over parameters that somebody else owns and changes.

    Args:
        parameters: float32 by released name, as `tensor_shapes` lists them.
        compressed_ids: [vocab_size] for n-gram hashing; None for a model without Engram.
        packed: round what is cached as the packed KV format does; gradients pass as if not.
        dtype: of the large matrix products; everything else is float32.
    """

    def __init__(
        self,
        config: ModelConfig,
        parameters: Mapping[str, Tensor],
        compressed_ids: Ids | None,
        packed: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.config = c = config
        self._parameters = parameters
        self._ids = compressed_ids
        self._hashes = engram_hashes(c.engram)
        self._packed = packed
        self._dtype = dtype
        self._window_grid = kernels.window_grid(c.head_dim)
        self._entry_grid = kernels.entry_grid(c.head_dim)
        self._index_grid = kernels.index_grid(c.index_head_dim)
        scaling = c.rope_scaling
        self._window_frequencies = kernels.rope_frequencies(c.qk_rope_head_dim, c.rope_theta)
        self._pool_frequencies = kernels.rope_frequencies(
            c.qk_rope_head_dim,
            c.compress_rope_theta,
            scaling.factor,
            scaling.beta_fast,
            scaling.beta_slow,
            scaling.original_max_position_embeddings,
        )

    def forward(self, token_ids: Tensor, dense: bool = False, cuts: Cuts | None = None) -> Output:
        """Every row of some sequences, all of which begin at position 0.

        Args:
            token_ids: [B, T] int64; T is a multiple of the window.
            dense: read every visible entry, so that attention is not limited to a selection.
            cuts: where workers would have begun to compute; the rows before are as without. Costs
                a second forward of the encoder half, without gradients, up to the last boundary.

        Raises:
            ValueError: T is no such multiple, or `cuts` are none of such sequences.
        """
        known: Mapping[int, Pool] = {}
        if cuts is not None:
            cuts.check(*token_ids.shape)
            if len(cuts.cached):
                stop = int(cuts.boundary.max())
                stop += -stop % self.config.sliding_window
                known = self.pools(token_ids[cuts.cached, :stop], dense)
        c = self.config
        state, streams, pre = self._through(c.num_hidden_layers, token_ids, dense, cuts, known)
        hidden = ops.rms_norm(
            ops.collapse(streams, pre), self._parameters["norm.weight"], c.rms_norm_eps
        )
        losses = [selection.loss() for selection in state.selections.values()]
        return Output(
            hidden.view(*token_ids.shape, -1),
            torch.stack(losses).mean() if losses else hidden.new_zeros(()),
            state.selections,
            torch.stack(state.counts),
        )

    @torch.no_grad()
    def pools(self, token_ids: Tensor, dense: bool = False) -> Mapping[int, Pool]:
        """What a cache would hold of some sequences, by Full layer; the encoder half's work.

        Args, Raises: as `forward`.
        """
        c = self.config
        state, streams, pre = self._through(c.split, token_ids, dense, None, {})
        weights = _Layer(self._parameters, c.split)
        x, *_ = self._read(streams, pre, weights, "attn")
        return state.pools | {c.split: self._compress(c.split, weights, x, state)}

    def _through(
        self,
        num_layers: int,
        token_ids: Tensor,
        dense: bool,
        cuts: Cuts | None,
        known: Mapping[int, Pool],
    ) -> tuple[Pass, Tensor, Tensor]:
        """The first layers: what they share, and the streams and pre-mix behind them."""
        c = self.config
        batch, length = token_ids.shape
        if length % c.sliding_window:
            raise ValueError(f"{length} tokens are no multiple of the window {c.sliding_window}")
        positions = torch.arange(length)
        embedded = F.embedding(token_ids.flatten(), self._parameters["embed.weight"])
        streams = embedded[:, None].expand(-1, c.hc_mult, -1).contiguous()
        pre = F.one_hot(torch.zeros(len(streams), dtype=torch.int64), c.hc_mult).to(streams.dtype)
        floors = None if cuts is None else cuts.floors(in_encoder=True)
        state = Pass(
            batch,
            length,
            kernels.rope_phases(positions, self._window_frequencies),
            kernels.rope_phases(positions, self._pool_frequencies),
            dense,
            block_biases(length, c.sliding_window, None, self._dtype, floors),
            cuts,
            known,
        )
        for layer in range(num_layers):
            if layer in c.engram.layer_ids:
                streams = self._inject(layer, streams, token_ids)
            streams, pre = self._layer(layer, streams, pre, state)
        return state, streams, pre

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., d] -> [..., vocab]."""
        return F.linear(hidden, self._parameters["head.weight"])

    def loss(self, hidden: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Cross entropy of rows' next tokens: its weighted sum, and each row's without gradients.

        Args:
            hidden: [R, d]; targets: [R] int64; weights: [R].
        """
        head = self._parameters["head.weight"]
        return ops.next_token_loss(hidden, head, targets, weights, self._dtype)

    def _layer(
        self, layer: int, streams: Tensor, pre: Tensor, state: Pass
    ) -> tuple[Tensor, Tensor]:
        weights = _Layer(self._parameters, layer)
        x, pre_next, post, comb = self._read(streams, pre, weights, "attn")
        y = self._attention(layer, weights, x, state)
        streams = ops.write_streams(y, streams, post, comb)
        x, pre, post, comb = self._read(streams, pre_next, weights, "ffn")
        y = self._experts(weights, x, state)
        return ops.write_streams(y, streams, post, comb), pre

    def _read(
        self, streams: Tensor, pre: Tensor, weights: _Layer, site: str
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        c = self.config
        fn, base, scale = (weights[f"hc_{site}_{part}"] for part in ("fn", "base", "scale"))
        x, pre_next, post, comb = ops.read_streams(
            streams, pre, fn, base, scale, c.hc_sinkhorn_iters, c.hc_eps, c.rms_norm_eps
        )
        x = ops.rms_norm(x, weights[f"{site}_norm.weight"], c.rms_norm_eps)
        return x, pre_next, post, comb

    def _attention(self, layer: int, weights: _Layer, x: Tensor, state: Pass) -> Tensor:
        c = self.config
        role = c.role(layer)
        batch, length = state.batch, state.length
        phases = state.window_phases if role is LayerRole.WINDOW else state.pool_phases
        latent = self._linear(x, weights["attn.wq_a.weight"])
        latent = ops.rms_norm(latent, weights["attn.q_norm.weight"], c.rms_norm_eps)
        q = self._linear(latent, weights["attn.wq_b.weight"])
        q = ops.rotate(q.view(batch, length, c.num_attention_heads, -1), phases[:, None])
        rows = self._linear(x, weights["attn.wkv.weight"])
        rows = ops.rms_norm(rows, weights["attn.kv_norm.weight"], c.rms_norm_eps)
        rows = ops.rotate(rows.view(batch, length, -1), phases)
        rows = self._cached(rows, self._window_grid)
        if role is LayerRole.FULL:
            state.pools[layer] = self._compress(layer, weights, x, state)
        if role in (LayerRole.FULL, LayerRole.REINDEX):
            self._select(layer, weights, x, latent, state)
        entries, selection = None, None
        if role is not LayerRole.WINDOW:
            entries = state.pools[c.kv_source(layer)].entries
            selection = state.selections[c.index_source(layer)]
        out, shares = attend(
            q,
            rows,
            entries,
            state.window_biases if entries is None else state.biases,
            [] if selection is None else [chosen.shape[-1] for chosen in selection.chosen],
            weights["attn.attn_sink"],
            c.softmax_scale,
            c.sliding_window,
        )
        if selection is not None:
            selection.add_attended(shares)
        out = ops.rotate(out, phases.conj()[:, None]).reshape(batch * length, c.o_groups, -1)
        wo_a = weights["attn.wo_a.weight"].view(c.o_groups, c.o_lora_rank, -1)
        out = torch.bmm(out.transpose(0, 1), wo_a.transpose(1, 2)).transpose(0, 1).flatten(1)
        return self._linear(out, weights["attn.wo_b.weight"])

    def _compress(self, layer: int, weights: _Layer, x: Tensor, state: Pass) -> Pool:
        """A Full layer's entries and index keys of every group of tokens."""
        c = self.config
        ratio = c.ratio(layer)
        values = F.linear(x, weights["attn.compressor.wkv.weight"])
        if ratio == 2:
            gates = F.linear(x, weights["attn.compressor.wgate.weight"]).unflatten(0, (-1, 2))
            values = (torch.softmax(gates, 1) * values.unflatten(0, (-1, 2))).sum(1)
        latent = ops.rms_norm(values, weights["attn.compressor.norm.weight"], c.rms_norm_eps)
        latent = latent.view(state.batch, -1, c.head_dim)
        phases = state.pool_phases[::ratio]
        # The indexer learns from its own loss, and nothing before it does.
        keys = F.linear(latent.detach(), weights["attn.indexer.wk.weight"])
        keys = ops.rms_norm(keys, weights["attn.indexer.k_norm.weight"], c.rms_norm_eps)
        entries = self._cached(ops.rotate(latent, phases), self._entry_grid)
        keys = self._cached(ops.rotate(keys, phases), self._index_grid)
        if state.cuts is not None and state.known:
            known = state.known[layer]
            entries = state.cuts.with_cached(entries, known.entries, ratio)
            keys = state.cuts.with_cached(keys, known.keys, ratio)
        return Pool(entries, keys)

    def _select(self, layer: int, weights: _Layer, x: Tensor, latent: Tensor, state: Pass) -> None:
        """Score the pool's entries and choose; layer E also chooses its candidate blocks."""
        c = self.config
        size, ratio = block_rows(c.sliding_window), c.ratio(layer)
        shape = (state.batch, state.length, c.index_n_heads, -1)
        q = F.linear(latent.detach(), weights["attn.indexer.wq_b.weight"]).view(shape)
        q = self._cached(ops.rotate(q, state.pool_phases[:, None]), self._index_grid)
        head_weights = F.linear(x.detach(), weights["attn.indexer.weights_proj.weight"])
        head_weights = head_weights.view(shape[:3]) * (c.index_head_dim * c.index_n_heads) ** -0.5
        keys = state.pools[c.kv_source(layer)].keys
        scores, chosen, candidates = [], [], []
        blocks = (rows.unflatten(1, (-1, size)).unbind(1) for rows in (q, head_weights))
        for block, (queries, shares) in enumerate(zip(*blocks, strict=True)):
            visible = visible_entries(block * size, size, ratio)
            score = index_scores(queries, shares, keys[:, : visible.shape[1]])
            scores.append(score)
            allowed = visible
            fixed = score.detach()
            if layer == c.split:
                candidates.append(
                    choose_candidates(
                        fixed, visible, c.candidate_topk_blocks, c.candidate_block_size
                    )
                )
            elif layer > c.split:
                assert state.candidates is not None
                allowed = state.candidates[block]
            if state.dense:
                chosen.append(visible.expand(score.shape))
            else:
                chosen.append(choose(fixed, allowed, c.index_topk))
        if layer == c.split:
            state.candidates = candidates
        state.selections[layer] = Selection(scores, chosen, state.dense)
        floors = None if state.cuts is None else state.cuts.floors(layer < c.split)
        state.biases = block_biases(state.length, c.sliding_window, chosen, self._dtype, floors)

    def _experts(self, weights: _Layer, x: Tensor, state: Pass) -> Tensor:
        c = self.config
        gate = F.softplus(F.linear(x, weights["ffn.gate.weight"])).sqrt()
        picked = torch.topk(
            gate.detach() + weights["ffn.gate.bias"], c.num_experts_per_tok, dim=-1
        ).indices
        share = gate.gather(-1, picked)
        share = share / (share.sum(-1, keepdim=True) + 1e-20) * c.routed_scaling_factor
        counts = torch.bincount(picked.flatten(), minlength=c.n_routed_experts)
        state.counts.append(counts)
        order = picked.flatten().argsort(stable=True)
        rows = order.div(c.num_experts_per_tok, rounding_mode="floor")
        sizes = counts.tolist()
        inputs = x.index_select(0, rows).split(sizes)
        shares = share.flatten().index_select(0, order).split(sizes)
        answers = [
            self._expert(weights, f"ffn.experts.{expert}", inputs[expert], shares[expert])
            for expert in range(c.n_routed_experts)
        ]
        shared = self._expert(weights, "ffn.shared_experts", x, None)
        return shared.index_add(0, rows, torch.cat(answers))

    def _expert(self, weights: _Layer, name: str, x: Tensor, share: Tensor | None) -> Tensor:
        limit = self.config.swiglu_limit
        w13 = torch.cat((weights[f"{name}.w1.weight"], weights[f"{name}.w3.weight"]))
        gate, up = self._linear(x, w13).chunk(2, -1)
        z = F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
        if share is not None:
            z = z * share[:, None]
        return self._linear(z, weights[f"{name}.w2.weight"])

    def _inject(self, layer: int, streams: Tensor, token_ids: Tensor) -> Tensor:
        engram = self.config.engram
        assert self._ids is not None
        pad = int(self._ids[engram.pad_token_id])
        nothing = np.empty(0, dtype=np.int64)
        ngrams = np.concatenate(
            [
                ngrams_of(self._ids[sequence], nothing, 0, engram.max_ngram_size, pad)
                for sequence in token_ids.numpy()
            ]
        )
        weights = _Layer(self._parameters, layer)
        numbers = torch.from_numpy(self._hashes[layer].rows(ngrams))
        rows = F.embedding(numbers, weights["engram.embed.weight"]).flatten(1)
        return ops.inject(
            streams,
            self._linear(rows, weights["engram.wkv.weight"]),
            weights["engram.q_weight"],
            weights["engram.k_weight"],
            self.config.rms_norm_eps,
        )

    def _linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return ops.linear(x, weight, self._dtype)

    def _cached(self, x: Tensor, grid: kernels.Grid) -> Tensor:
        return ops.rounded(x, grid) if self._packed else x


@dataclass(frozen=True, slots=True)
class _Layer:
    """The parameters of one layer, by their names within it."""

    parameters: Mapping[str, Tensor]
    layer: int

    def __getitem__(self, name: str) -> Tensor:
        return self.parameters[f"layers.{self.layer}.{name}"]
