"""Which tensors make which half of the model, and in what form do the layers use them?

Checkpoint names and shapes are those of the release (model specification, section 2). At load,
projections that read the same input are stacked into one matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ripresa.workers.config import EngramPlacement
from ripresa.workers.models.checkpoint import Checkpoint
from ripresa.workers.models.deepseek_v41.config import LayerRole, ModelConfig
from ripresa.workers.models.deepseek_v41.engram_table import EngramTable
from ripresa.workers.models.deepseek_v41.inventory import require_no_vision, take_inventory
from ripresa.workers.models.deepseek_v41.tensor_specs import Half as Half
from ripresa.workers.models.deepseek_v41.tensor_specs import Part, tensor_shapes


@dataclass(frozen=True, slots=True)
class SiteWeights:
    """One hyper-connection site: fn [(2 + n) n, n d], base [(2 + n) n], scale [3]."""

    fn: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor


@dataclass(frozen=True, slots=True)
class SourceWeights:
    """What a Full layer makes pool entries with; at E all that an encoder worker has of the layer.

    Attributes:
        attn_norm: [d]; project: [head_dim or 2 head_dim, d], values above gates.
        norm: [head_dim]; wk: [index_head_dim, head_dim]; k_norm: [index_head_dim].
        window: [head_dim, d] and window_norm [head_dim], the layer's window-row projection.
    """

    attn_norm: torch.Tensor
    project: torch.Tensor
    norm: torch.Tensor
    wk: torch.Tensor
    k_norm: torch.Tensor
    window: torch.Tensor
    window_norm: torch.Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """A whole layer.

    Attributes:
        w_in: wq_a and wkv, stacked: both read the normed input.
        index_proj: [index_n_heads, d] head weights of index sources; never quantised.
        wq_b: query and (index sources) indexer query projections, stacked.
        wo_a: [o_groups, o_lora_rank, heads * head_dim / o_groups].
        w13: [experts, 2 I, d]; w2: [experts, d, I]; the shared expert's apart.
        source: of Full layers.
    """

    attn_site: SiteWeights
    ffn_site: SiteWeights
    attn_norm: torch.Tensor
    ffn_norm: torch.Tensor
    w_in: torch.Tensor
    index_proj: torch.Tensor | None
    q_norm: torch.Tensor
    wq_b: torch.Tensor
    kv_norm: torch.Tensor
    sink: torch.Tensor
    wo_a: torch.Tensor
    wo_b: torch.Tensor
    gate: torch.Tensor
    gate_bias: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    shared_w13: torch.Tensor
    shared_w2: torch.Tensor
    source: SourceWeights | None


@dataclass(frozen=True, slots=True)
class EngramWeights:
    """The n-gram memory before one layer.

    Attributes:
        wkv: [(n + 1) d, columns * dim], a key for each stream, then the value.
        q_weight, k_weight: [n, d].
    """

    table: EngramTable
    wkv: torch.Tensor
    q_weight: torch.Tensor
    k_weight: torch.Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    """One half, or all, of the model in float32."""

    half: Half
    embed: torch.Tensor
    layers: tuple[LayerWeights, ...]
    source: SourceWeights
    engram: dict[int, EngramWeights]
    norm: torch.Tensor | None
    head: torch.Tensor | None
    num_parameters: int


def load_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    half: Half,
    placement: EngramPlacement = EngramPlacement.HOST_SHARED,
) -> Weights:
    """Read one half from a checkpoint; tensors of the other are not touched.

    One tensor at a time goes straight to where it is kept, Engram's tables where `placement` says.

    Raises:
        CheckpointError: the checkpoint is not the model of this config, or a tensor cannot be read.
        ConfigError: the machine cannot place the tables so.
    """
    inventory = take_inventory(checkpoint.entries, config)
    require_no_vision(inventory, config)
    read = [*inventory.read_by(half)]
    if placement.is_resident:
        read += inventory.of({Part.TABLE})
    checkpoint.expect(sum(tensor.num_bytes for tensor in read))
    loader = _Loader(checkpoint, tensor_shapes(config))
    count = config.num_hidden_layers if half is Half.ALL else config.split
    embed = loader.take("embed.weight")
    layers = tuple(_load_layer(loader, config, layer) for layer in range(count))
    if half is Half.ALL:
        source = layers[config.split].source
        assert source is not None
        norm, head = loader.take("norm.weight"), loader.take("head.weight")
    else:
        source, norm, head = _load_source(loader, config, config.split), None, None
    sizes = zip(config.engram.layer_ids, config.engram.num_embeddings, strict=True)
    engram = {
        layer: _load_engram(loader, checkpoint, config, layer, rows, placement)
        for layer, rows in sizes
    }
    return Weights(half, embed, layers, source, engram, norm, head, loader.num_parameters)


class _Loader:
    """Takes tensors by name as float32 and counts distinct parameters."""

    def __init__(self, checkpoint: Checkpoint, shapes: dict[str, tuple[int, ...]]) -> None:
        self._checkpoint = checkpoint
        self._shapes = shapes
        self._taken: set[str] = set()
        self.num_parameters = 0

    def take(self, name: str) -> torch.Tensor:
        tensor = self._checkpoint.read(name, self._shapes[name])
        if name not in self._taken:
            self._taken.add(name)
            self.num_parameters += tensor.numel()
        return tensor

    def stack(self, *names: str) -> torch.Tensor:
        """Matrices with the same number of columns, one above the other."""
        rows = [self._shapes[name][0] for name in names]
        stacked = torch.empty((sum(rows), self._shapes[names[0]][1]))
        for part, name in zip(stacked.split(rows), names, strict=True):
            part.copy_(self.take(name))
        return stacked

    def stack_experts(self, experts: list[tuple[str, ...]]) -> torch.Tensor:
        """[experts, rows, columns]: for each expert its matrices, one above the other."""
        rows = [self._shapes[name][0] for name in experts[0]]
        stacked = torch.empty((len(experts), sum(rows), self._shapes[experts[0][0]][1]))
        for expert, names in zip(stacked, experts, strict=True):
            for part, name in zip(expert.split(rows), names, strict=True):
                part.copy_(self.take(name))
        return stacked


def _load_layer(loader: _Loader, config: ModelConfig, layer: int) -> LayerWeights:
    def name(suffix: str) -> str:
        return f"layers.{layer}.{suffix}"

    def site(kind: str) -> SiteWeights:
        parts = (loader.take(name(f"hc_{kind}_{part}")) for part in ("fn", "base", "scale"))
        return SiteWeights(*parts)

    inputs = [name("attn.wq_a.weight"), name("attn.wkv.weight")]
    queries = [name("attn.wq_b.weight")]
    index_proj = None
    if config.role(layer) in (LayerRole.FULL, LayerRole.REINDEX):
        index_proj = loader.take(name("attn.indexer.weights_proj.weight"))
        queries.append(name("attn.indexer.wq_b.weight"))
    experts = [name(f"ffn.experts.{number}") for number in range(config.n_routed_experts)]
    wo_a = loader.take(name("attn.wo_a.weight"))
    return LayerWeights(
        attn_site=site("attn"),
        ffn_site=site("ffn"),
        attn_norm=loader.take(name("attn_norm.weight")),
        ffn_norm=loader.take(name("ffn_norm.weight")),
        w_in=loader.stack(*inputs),
        index_proj=index_proj,
        q_norm=loader.take(name("attn.q_norm.weight")),
        wq_b=loader.stack(*queries),
        kv_norm=loader.take(name("attn.kv_norm.weight")),
        sink=loader.take(name("attn.attn_sink")),
        wo_a=wo_a.view(config.o_groups, config.o_lora_rank, -1),
        wo_b=loader.take(name("attn.wo_b.weight")),
        gate=loader.take(name("ffn.gate.weight")),
        gate_bias=loader.take(name("ffn.gate.bias")),
        w13=loader.stack_experts([(f"{e}.w1.weight", f"{e}.w3.weight") for e in experts]),
        w2=loader.stack_experts([(f"{e}.w2.weight",) for e in experts]),
        shared_w13=loader.stack(
            name("ffn.shared_experts.w1.weight"), name("ffn.shared_experts.w3.weight")
        ),
        shared_w2=loader.take(name("ffn.shared_experts.w2.weight")),
        source=(
            _load_source(loader, config, layer) if config.role(layer) is LayerRole.FULL else None
        ),
    )


def _load_source(loader: _Loader, config: ModelConfig, layer: int) -> SourceWeights:
    prefix = f"layers.{layer}.attn"
    projections = [f"{prefix}.compressor.wkv.weight"]
    if config.ratio(layer) == 2:
        projections.append(f"{prefix}.compressor.wgate.weight")
    return SourceWeights(
        attn_norm=loader.take(f"layers.{layer}.attn_norm.weight"),
        project=loader.stack(*projections),
        norm=loader.take(f"{prefix}.compressor.norm.weight"),
        wk=loader.take(f"{prefix}.indexer.wk.weight"),
        k_norm=loader.take(f"{prefix}.indexer.k_norm.weight"),
        window=loader.take(f"{prefix}.wkv.weight"),
        window_norm=loader.take(f"{prefix}.kv_norm.weight"),
    )


def _load_engram(
    loader: _Loader,
    checkpoint: Checkpoint,
    config: ModelConfig,
    layer: int,
    num_rows: int,
    placement: EngramPlacement,
) -> EngramWeights:
    prefix = f"layers.{layer}.engram"
    name = f"{prefix}.embed.weight"
    return EngramWeights(
        table=EngramTable(checkpoint, name, num_rows, config.engram.head_dim, placement),
        wkv=loader.take(f"{prefix}.wkv.weight"),
        q_weight=loader.take(f"{prefix}.q_weight"),
        k_weight=loader.take(f"{prefix}.k_weight"),
    )
