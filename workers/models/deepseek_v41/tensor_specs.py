"""Which tensors does a V4.1 checkpoint hold? Every name, with its shape, storage and reader.

Source: model specification, section 2. A quantised `X.weight` has its scales in `X.scale`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain

from ripresa.workers.models.deepseek_v41.config import LayerRole, ModelConfig

Shape = tuple[int, ...]

TILE = 32
"""Columns, and in F8 also rows, of a quantised weight that share a scale."""


class Half(StrEnum):
    """What a worker holds: the encoder half, or every layer."""

    ENCODER = "encoder"
    ALL = "all"


class Storage(StrEnum):
    """How the release stores a tensor.

    Plain tensors are floats of any width wherever they come from. A tensor that the release
    quantises may come plain, or in either quantised form; Engram tables plain or as F8_ROWS.
    """

    BF16 = "bf16"
    F32 = "f32"
    F8 = "f8"
    """E4M3, an E8M0 scale per 32 x 32 tile."""
    F8_ROWS = "f8_rows"
    """E4M3, an E8M0 scale per row and 32 columns."""
    FP4 = "fp4"
    """E2M1, two a byte, an E8M0 scale per row and 32 columns."""

    @property
    def quantised(self) -> bool:
        return self in (Storage.F8, Storage.F8_ROWS, Storage.FP4)


class Part(StrEnum):
    """Who reads a tensor.

    ENCODER: layers below E and the embedding, both halves. SOURCE: of layer E, what makes pool
    entries, both halves. DECODER: the rest of the text model. TABLE: Engram's tables, both halves,
    in host memory. DRAFT: speculative stages, not read yet. VISION: not supported, never read.
    """

    ENCODER = "encoder"
    SOURCE = "source"
    DECODER = "decoder"
    TABLE = "engram table"
    DRAFT = "draft"
    VISION = "vision"


PARTS_OF_HALF: dict[Half, frozenset[Part]] = {
    Half.ENCODER: frozenset((Part.ENCODER, Part.SOURCE, Part.TABLE)),
    Half.ALL: frozenset((Part.ENCODER, Part.SOURCE, Part.TABLE, Part.DECODER)),
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor: its logical shape [out, in], the release's storage of it, its reader."""

    name: str
    shape: Shape
    storage: Storage
    part: Part

    @property
    def num_parameters(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def released_bytes(self) -> int:
        """Bytes of the tensor and its scales as the release stores them."""
        plain = {Storage.BF16: 2, Storage.F32: 4}
        if self.storage in plain:
            return plain[self.storage] * self.num_parameters
        codes = self.num_parameters
        scale = scale_shape(self.shape, self.storage)
        return (codes // 2 if self.storage is Storage.FP4 else codes) + scale[0] * scale[1]


def scale_name(weight: str) -> str:
    """The name of a quantised weight's scales."""
    return f"{weight.removesuffix('.weight')}.scale"


def scale_shape(shape: Shape, storage: Storage) -> tuple[int, int]:
    """The shape of a quantised tensor's scales; `shape` is the logical [out, in]."""
    rows, columns = shape
    groups = -(-columns // TILE)
    return (-(-rows // TILE), groups) if storage is Storage.F8 else (rows, groups)


def stored_shape(shape: Shape, storage: Storage) -> Shape:
    """The shape that the file gives: FP4 packs two columns into one byte."""
    return (*shape[:-1], shape[-1] // 2) if storage is Storage.FP4 else shape


_VISION = re.compile(r"(vision|aligner)\..+|image_(start|end|newline)|.+\.ffn\.gate\.bias_vl")


def is_vision(name: str) -> bool:
    """Whether a tensor of the release serves images only."""
    return _VISION.fullmatch(name) is not None


def is_draft(name: str) -> bool:
    """Whether a tensor belongs to the draft stages."""
    return name.startswith("mtp.")


def tensor_specs(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of the text model and its draft stages, without the scales' own names."""
    yield from text_specs(config)
    yield from _draft_specs(config)


def text_specs(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of the text model, Engram included."""
    c = config
    yield TensorSpec("embed.weight", (c.vocab_size, c.hidden_size), Storage.BF16, Part.ENCODER)
    for layer in range(c.num_hidden_layers):
        for spec in chain(_layer_specs(c, layer), _source_specs(c, layer)):
            yield replace(spec, name=f"layers.{layer}.{spec.name}")
    yield from _engram_specs(c)
    yield TensorSpec("norm.weight", (c.hidden_size,), Storage.BF16, Part.DECODER)
    yield TensorSpec("head.weight", (c.vocab_size, c.hidden_size), Storage.BF16, Part.DECODER)


def half_specs(config: ModelConfig, half: Half) -> Iterator[TensorSpec]:
    """The tensors that a worker with this half reads."""
    parts = PARTS_OF_HALF[half]
    return (spec for spec in text_specs(config) if spec.part in parts)


def tensor_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Shapes [out, in] of the text model by name, Engram included."""
    return {spec.name: spec.shape for spec in text_specs(config)}


def engram_columns(config: ModelConfig) -> int:
    """Width of the concatenated table rows of one token."""
    engram = config.engram
    return (engram.max_ngram_size - 1) * engram.num_heads * engram.head_dim


def _layer_specs(c: ModelConfig, layer: int) -> Iterator[TensorSpec]:
    """A layer without what only Full and Reindex layers have; names without its prefix."""
    d, n, inner = c.hidden_size, c.hc_mult, c.moe_intermediate_size
    group_in = c.num_attention_heads * c.head_dim // c.o_groups
    part = Part.ENCODER if layer < c.split else Part.DECODER
    # An encoder worker makes layer E's pool entries and window rows, and so reads these of it.
    source = Part.SOURCE if layer == c.split else part
    yield TensorSpec("attn_norm.weight", (d,), Storage.BF16, source)
    yield TensorSpec("ffn_norm.weight", (d,), Storage.BF16, part)
    for site in ("attn", "ffn"):
        yield TensorSpec(f"hc_{site}_fn", ((2 + n) * n, n * d), Storage.F32, part)
        yield TensorSpec(f"hc_{site}_base", ((2 + n) * n,), Storage.F32, part)
        yield TensorSpec(f"hc_{site}_scale", (3,), Storage.F32, part)
    heads_out = c.num_attention_heads * c.head_dim
    yield TensorSpec("attn.wq_a.weight", (c.q_lora_rank, d), Storage.F8, part)
    yield TensorSpec("attn.q_norm.weight", (c.q_lora_rank,), Storage.BF16, part)
    yield TensorSpec("attn.wq_b.weight", (heads_out, c.q_lora_rank), Storage.F8, part)
    yield TensorSpec("attn.wkv.weight", (c.head_dim, d), Storage.F8, source)
    yield TensorSpec("attn.kv_norm.weight", (c.head_dim,), Storage.BF16, source)
    yield TensorSpec("attn.attn_sink", (c.num_attention_heads,), Storage.F32, part)
    yield TensorSpec("attn.wo_a.weight", (c.o_groups * c.o_lora_rank, group_in), Storage.F8, part)
    yield TensorSpec("attn.wo_b.weight", (d, c.o_groups * c.o_lora_rank), Storage.F8, part)
    yield TensorSpec("ffn.gate.weight", (c.n_routed_experts, d), Storage.BF16, part)
    yield TensorSpec("ffn.gate.bias", (c.n_routed_experts,), Storage.F32, part)
    for expert in range(c.n_routed_experts):
        yield from _expert_specs(f"ffn.experts.{expert}", d, inner, Storage.FP4, part)
    yield from _expert_specs("ffn.shared_experts", d, inner, Storage.F8, part)


def _expert_specs(
    prefix: str, d: int, inner: int, storage: Storage, part: Part
) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{prefix}.w1.weight", (inner, d), storage, part)
    yield TensorSpec(f"{prefix}.w2.weight", (d, inner), storage, part)
    yield TensorSpec(f"{prefix}.w3.weight", (inner, d), storage, part)


def _source_specs(c: ModelConfig, layer: int) -> Iterator[TensorSpec]:
    """What Full and Reindex layers have beside; names without the layer's prefix."""
    d, head, key = c.hidden_size, c.head_dim, c.index_head_dim
    role = c.role(layer)
    part = Part.ENCODER if layer < c.split else Part.DECODER
    source = Part.SOURCE if layer == c.split else part
    if role is LayerRole.FULL:
        yield TensorSpec("attn.compressor.wkv.weight", (head, d), Storage.BF16, source)
        if c.ratio(layer) == 2:
            yield TensorSpec("attn.compressor.wgate.weight", (head, d), Storage.BF16, source)
        yield TensorSpec("attn.compressor.norm.weight", (head,), Storage.BF16, source)
        yield TensorSpec("attn.indexer.wk.weight", (key, head), Storage.BF16, source)
        yield TensorSpec("attn.indexer.k_norm.weight", (key,), Storage.BF16, source)
    if role in (LayerRole.FULL, LayerRole.REINDEX):
        queries = (c.index_n_heads * key, c.q_lora_rank)
        yield TensorSpec("attn.indexer.wq_b.weight", queries, Storage.F8, part)
        yield TensorSpec(
            "attn.indexer.weights_proj.weight", (c.index_n_heads, d), Storage.BF16, part
        )


def _engram_specs(c: ModelConfig) -> Iterator[TensorSpec]:
    engram, d, n = c.engram, c.hidden_size, c.hc_mult
    for layer, rows in zip(engram.layer_ids, engram.num_embeddings, strict=True):
        prefix = f"layers.{layer}.engram"
        yield TensorSpec(
            f"{prefix}.embed.weight", (rows, engram.head_dim), Storage.F8_ROWS, Part.TABLE
        )
        shape = ((n + 1) * d, engram_columns(c))
        yield TensorSpec(f"{prefix}.wkv.weight", shape, Storage.F8, Part.ENCODER)
        yield TensorSpec(f"{prefix}.q_weight", (n, d), Storage.BF16, Part.ENCODER)
        yield TensorSpec(f"{prefix}.k_weight", (n, d), Storage.BF16, Part.ENCODER)


def _draft_specs(c: ModelConfig) -> Iterator[TensorSpec]:
    """DSpark: window layers of fewer experts, with a projection before and heads behind them."""
    draft, d = c.draft, c.hidden_size
    if draft.num_stages == 0:
        return
    stage_config = replace(c, n_routed_experts=draft.n_routed_experts)
    for stage in range(draft.num_stages):
        for spec in _layer_specs(stage_config, 0):
            yield replace(spec, name=f"mtp.{stage}.{spec.name}", part=Part.DRAFT)
    last = f"mtp.{draft.num_stages - 1}"
    vocabulary = (c.vocab_size, draft.markov_rank)
    for name, shape, storage in (
        ("mtp.0.main_proj.weight", (d, draft.num_taps * d), Storage.F8),
        ("mtp.0.main_norm.weight", (d,), Storage.BF16),
        (f"{last}.norm.weight", (d,), Storage.BF16),
        (f"{last}.markov_head.embed.weight", vocabulary, Storage.BF16),
        (f"{last}.markov_head.head.weight", vocabulary, Storage.BF16),
        (f"{last}.confidence_head.proj.weight", (1, d + draft.markov_rank), Storage.BF16),
    ):
        yield TensorSpec(name, shape, storage, Part.DRAFT)
