"""What does one layer's attention compute? Window rows, pool entries, selection and output.

Source: model specification, sections 5, 7 and 8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ripresa.kernels import dispatch as ops
from ripresa.workers.cache.kv_cache import KVCache
from ripresa.workers.models.deepseek_v41.config import LayerRole, ModelConfig
from ripresa.workers.models.deepseek_v41.rows import ReadGroup, Rows, WindowPlan
from ripresa.workers.models.deepseek_v41.weights import LayerWeights, SourceWeights


@dataclass(slots=True)
class StepContext:
    """What the layers of one half share during one step.

    Attributes:
        rows: the rows and their memory.
        window_phases, pool_phases: complex64 [T, rope / 2] for ratio-0 and other layers.
        slots: [T, index_topk] int64 pool rows, the latest selection; None before the first.
        entries: [T, index_topk] int64 entry numbers of the same selection, -1 for none.
        candidates: candidate blocks of each read group, once layer E has run.
        numbered: the selection counted through, for entries that are gathered row by row.
        unpacked: decoded entries of a source layer for all groups, where that is less than
            decoding each row's selection in each layer.
    """

    rows: Rows
    window_phases: torch.Tensor
    pool_phases: torch.Tensor
    slots: torch.Tensor | None = None
    entries: torch.Tensor | None = None
    candidates: list[torch.Tensor | None] | None = None
    numbered: torch.Tensor | None = None
    unpacked: dict[int, torch.Tensor] = field(default_factory=dict)


class Attention:
    """The attention of every layer; holds no state of its own.

    Args:
        min_rows: least height of matrix products (numerics setting).
        workspace_bytes: bound of the index scores held at once.
        round_inputs: round the inputs of linears that the release quantises (`w8a8`).
    """

    def __init__(
        self,
        config: ModelConfig,
        cache: KVCache,
        min_rows: int,
        workspace_bytes: int,
        round_inputs: bool,
    ) -> None:
        self._config = config
        self._cache = cache
        self._min_rows = min_rows
        self._workspace_bytes = workspace_bytes
        self._round_inputs = round_inputs
        scaling = config.rope_scaling
        self._window_frequencies = ops.rope_frequencies(config.qk_rope_head_dim, config.rope_theta)
        self._pool_frequencies = ops.rope_frequencies(
            config.qk_rope_head_dim,
            config.compress_rope_theta,
            scaling.factor,
            scaling.beta_fast,
            scaling.beta_slow,
            scaling.original_max_position_embeddings,
        )

    def context(self, rows: Rows) -> StepContext:
        return StepContext(
            rows=rows,
            window_phases=ops.rope_phases(rows.positions, self._window_frequencies),
            pool_phases=ops.rope_phases(rows.positions, self._pool_frequencies),
        )

    def narrowed(self, step: StepContext, rows: Rows) -> StepContext:
        """What the layers share from now on, when only `rows` of the step's rows go on."""
        places = step.rows.places(rows)
        return StepContext(
            rows,
            step.window_phases.index_select(0, places),
            step.pool_phases.index_select(0, places),
            None if step.slots is None else step.slots.index_select(0, places),
            None if step.entries is None else step.entries.index_select(0, places),
            # Decoded entries lie as the groups do.
            unpacked=step.unpacked if rows.grouping == step.rows.grouping else {},
        )

    def __call__(
        self,
        layer: int,
        weights: LayerWeights,
        x: torch.Tensor,
        step: StepContext,
        window: WindowPlan,
    ) -> torch.Tensor:
        """Attention of normed inputs x [T, d]; returns [T, d].

        Window rows are written to the layer's rings; pool entries are read, not written.
        """
        c = self._config
        role = c.role(layer)
        phases = step.window_phases if role is LayerRole.WINDOW else step.pool_phases
        projected = ops.linear(self._input(x), weights.w_in, self._min_rows)
        latent, kv = projected.split((c.q_lora_rank, c.head_dim), dim=-1)
        latent = ops.rms_norm(latent, weights.q_norm, c.rms_norm_eps)
        queries = ops.linear(self._input(latent), weights.wq_b, self._min_rows)
        width = c.num_attention_heads * c.head_dim
        q = ops.rope_(queries[:, :width].unflatten(-1, (c.num_attention_heads, -1)), phases)
        rows = self._window_rows(weights, kv, phases)
        buffer = self._window_buffer(layer, rows, window)
        if role in (LayerRole.FULL, LayerRole.REINDEX):
            assert weights.index_proj is not None
            index_weights = ops.linear(x, weights.index_proj, self._min_rows)
            self._select(layer, queries[:, width:], index_weights, step)
        pool, slots = (None, None) if role is LayerRole.WINDOW else self._entries(layer, step)
        out = ops.window_attention(
            q,
            buffer,
            window.lo,
            window.hi,
            weights.sink,
            c.softmax_scale,
            c.sliding_window,
            pool,
            slots,
            window.tiles,
        )
        out = ops.rope_(out, phases.conj()).flatten(1)
        out = ops.grouped_linear(out, weights.wo_a, self._min_rows)
        return ops.linear(self._input(out), weights.wo_b, self._min_rows)

    def _input(self, x: torch.Tensor) -> torch.Tensor:
        """The input of a quantised linear as it is multiplied."""
        return ops.round_linear_input(x) if self._round_inputs else x

    def write_entries(
        self, layer: int, weights: SourceWeights, x: torch.Tensor, rows: Rows
    ) -> None:
        """Compress normed inputs x [T, d] of a Full layer into its pool and open pairs."""
        c = self._config
        ratio = c.ratio(layer)
        plan = rows.entries(ratio)
        projected = ops.linear(x, weights.project, self._min_rows)
        if ratio == 1:
            latent = projected.index_select(0, plan.second)
            latent = ops.rms_norm(latent, weights.norm, c.rms_norm_eps)
        else:
            values, gates = projected.split(c.head_dim, dim=-1)
            kept = self._cache.open_pairs[layer]
            older = kept.index_select(0, plan.run_slots)
            latent = ops.compress_pairs(
                torch.cat((values, older[:, 0])),
                torch.cat((gates, older[:, 1])),
                plan.first,
                plan.second,
                weights.norm,
                c.rms_norm_eps,
                self._min_rows,
            )
            if len(plan.open_slot):
                pair = torch.stack((values[plan.open_from], gates[plan.open_from]), dim=1)
                kept.index_copy_(0, plan.open_slot, pair)
        if not len(plan.pool_row):
            return
        phases = ops.rope_phases(plan.position, self._pool_frequencies)
        keys = ops.linear(latent, weights.wk, self._min_rows)
        keys = ops.rope_(ops.rms_norm(keys, weights.k_norm, c.rms_norm_eps), phases)
        self._cache.write_entries(layer, plan.pool_row, ops.rope_(latent, phases), keys)

    def write_window(
        self,
        layer: int,
        weights: SourceWeights,
        x: torch.Tensor,
        step: StepContext,
        kept: Sequence[tuple[int, int]],
    ) -> None:
        """Keep layer E's own window rows of normed inputs x [T, d] in each run's [first, stop)."""
        rows = ops.linear(self._input(x), weights.window, self._min_rows)
        rows = ops.rms_norm(rows, weights.window_norm, self._config.rms_norm_eps)
        rows = ops.rope_(rows, step.pool_phases)
        ring_from, ring_to = step.rows.ring_rows(
            [stop for _, stop in kept], [first for first, _ in kept]
        )
        records = self._cache.grids.window.encode(rows.index_select(0, ring_from))
        self._cache.rings[layer].index_copy_(0, ring_to, records)

    def keep_window(
        self, layer: int, weights: LayerWeights, x: torch.Tensor, step: StepContext, rows: Rows
    ) -> None:
        """Keep the window rows of normed inputs x [T, d] of rows that the layer leaves out."""
        c = self._config
        is_window = c.role(layer) is LayerRole.WINDOW
        phases = step.window_phases if is_window else step.pool_phases
        projected = ops.linear(self._input(x), weights.w_in, self._min_rows)
        kv = projected[:, c.q_lora_rank : c.q_lora_rank + c.head_dim]
        kept = self._window_rows(weights, kv, phases.index_select(0, step.rows.places(rows)))
        ring_from, ring_to = rows.ring_rows([run.stop for run in rows.runs])
        records = self._cache.grids.window.encode(kept.index_select(0, ring_from))
        self._cache.rings[layer].index_copy_(0, ring_to, records)

    def _window_rows(
        self, weights: LayerWeights, kv: torch.Tensor, phases: torch.Tensor
    ) -> torch.Tensor:
        """Window rows [T, head_dim] from their projection."""
        return ops.rope_(ops.rms_norm(kv, weights.kv_norm, self._config.rms_norm_eps), phases)

    def _window_buffer(self, layer: int, rows: torch.Tensor, plan: WindowPlan) -> torch.Tensor:
        """The packed window rows [N, head_dim]; afterwards the newest rows are in the ring."""
        grid, ring = self._cache.grids.window, self._cache.rings[layer]
        records = grid.encode(rows)
        context = ring.index_select(0, plan.context_from)
        buffer = rows.new_zeros(plan.num_buffer_rows, rows.shape[1])
        known = torch.cat((context, records))
        buffer.index_copy_(0, plan.buffer_to, grid.decode(known))
        if len(plan.cut_from):
            self._cache.cut_rows[layer] = known.index_select(0, plan.cut_from)
        ring.index_copy_(0, plan.ring_to, records.index_select(0, plan.ring_from))
        return buffer

    def _entries(self, layer: int, step: StepContext) -> tuple[torch.Tensor, torch.Tensor]:
        """Float32 entries of a layer's pool, and the latest selection as rows of them."""
        source = self._config.kv_source(layer)
        assert step.slots is not None
        assert step.entries is not None
        whole = self._cache.float_entries(source)
        if whole is not None:
            return whole, step.slots
        groups = step.rows.reads(self._config.ratio(layer))
        if step.slots.numel() <= sum(group.pool_rows.numel() for group in groups):
            if step.numbered is None:
                count = torch.arange(step.slots.numel(), device=step.slots.device)
                step.numbered = count.view_as(step.slots).masked_fill_(step.slots < 0, -1)
            chosen = step.slots.clamp(min=0).flatten()
            return self._cache.entries(source, chosen), step.numbered
        if source not in step.unpacked:
            pool_rows = torch.cat([group.pool_rows.flatten() for group in groups])
            step.unpacked[source] = self._cache.entries(source, pool_rows)
        if step.numbered is None:
            base = step.rows.unpacked_base(self._config.ratio(layer))
            step.numbered = (step.entries + base[:, None]).masked_fill_(step.entries < 0, -1)
        return step.unpacked[source], step.numbered

    def _select(
        self,
        layer: int,
        index_queries: torch.Tensor,
        index_weights: torch.Tensor,
        step: StepContext,
    ) -> None:
        """Choose each row's pool entries; layer E also chooses its candidate blocks."""
        c = self._config
        ratio = c.ratio(layer)
        q = index_queries.unflatten(-1, (c.index_n_heads, -1))
        q = self._cache.grids.key.round_trip(ops.rope_(q, step.pool_phases))
        weights = index_weights * (c.index_head_dim**-0.5 * c.index_n_heads**-0.5)
        groups = step.rows.reads(ratio)
        if layer == c.split:
            step.candidates = [self._candidates(layer, q, weights, group) for group in groups]
        slots = q.new_empty(q.shape[0], c.index_topk, dtype=torch.int64)
        entries = torch.empty_like(slots)
        for number, group in enumerate(groups):
            restricted = step.candidates if layer > c.split else None
            chosen = ops.select_entries(
                *self._grouped(q, weights, group),
                self._key_reader(layer, group),
                group.visible,
                c.index_topk,
                self._workspace_bytes,
                restricted[number] if restricted is not None else None,
                c.candidate_block_size,
                self._min_rows,
            )
            width = group.pool_rows.shape[1]
            places = chosen.clamp(min=0, max=width - 1).flatten(1)
            mine = group.pool_rows.gather(1, places).view_as(chosen)
            slots[group.rows] = torch.where(chosen < 0, -1, mine).flatten(0, 1)
            entries[group.rows] = chosen.flatten(0, 1)
        step.slots, step.entries, step.numbered = slots, entries, None

    def _candidates(
        self, layer: int, q: torch.Tensor, weights: torch.Tensor, group: ReadGroup
    ) -> torch.Tensor | None:
        c = self._config
        if int(group.visible.max()) <= c.candidate_topk_blocks * c.candidate_block_size:
            return None
        return ops.select_candidates(
            *self._grouped(q, weights, group),
            self._key_reader(layer, group),
            group.visible,
            c.candidate_topk_blocks,
            c.candidate_block_size,
            self._workspace_bytes,
            self._min_rows,
        )

    def _grouped(
        self, q: torch.Tensor, weights: torch.Tensor, group: ReadGroup
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shape = group.visible.shape
        return q[group.rows].unflatten(0, shape), weights[group.rows].unflatten(0, shape)

    def _key_reader(self, layer: int, group: ReadGroup) -> Callable[[int, int], torch.Tensor]:
        source = self._config.kv_source(layer)

        def read(first: int, last: int) -> torch.Tensor:
            pool_rows = group.pool_rows[:, first:last]
            missing = last - first - pool_rows.shape[1]
            if missing > 0:
                pool_rows = torch.nn.functional.pad(pool_rows, (0, missing))
            keys = self._cache.index_keys(source, pool_rows.flatten())
            return keys.view(*pool_rows.shape, -1)

        return read
