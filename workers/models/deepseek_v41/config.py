"""What shape is the model? Geometry of a V4.1-class text model, from `config.json` alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from ripresa.workers.errors import ConfigError
from ripresa.workers.models.deepseek_v41.config_fields import Fields, require_implemented
from ripresa.workers.models.regular_file import file_within
from ripresa.workers.models.strict_json import read_json

MAX_FILE_BYTES = 1 << 20
"""A `config.json` has a few thousand bytes."""

# A config names sizes that loops are made from: a hostile one must not stall a worker.
_MAX_EXPERTS = 2**20
_MAX_HASHES = 2**12


class LayerRole(StrEnum):
    """What a layer does for global attention (CSA2)."""

    WINDOW = "window"
    FULL = "full"
    REINDEX = "reindex"
    REUSE = "reuse"


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """YaRN numbers of the compressed-attention layers."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class EngramConfig:
    """N-gram memory: which layers it precedes and how its tables are hashed."""

    layer_ids: tuple[int, ...]
    num_embeddings: tuple[int, ...]
    max_ngram_size: int
    vocab_size: int
    num_heads: int
    head_dim: int
    pad_token_id: int
    compressed_vocab_size: int


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """DSpark, the draft stages: what their tensors' shapes come from.

    Attributes:
        num_stages: 0 if the model has none.
        num_taps: decoder layers whose streams the first stage reads.
        markov_rank: width of the last stage's next-token table.
        n_routed_experts: experts of a stage.
    """

    num_stages: int
    num_taps: int
    markov_rank: int
    n_routed_experts: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Geometry of the text model; names follow the released `config.json`.

    `text_only`: `vision_config` is there and null, so that parts for images may lie unread in the
    checkpoint. `image_token_id`: what stands for a piece of an image; prompts may not hold it.

    Everything else (roles of layers, sources, the split E, byte counts) is derived from it.
    """

    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    swiglu_limit: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: RopeScaling
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    sliding_window: int
    compress_ratios: tuple[int, ...]
    compress_rope_theta: float
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram: EngramConfig
    draft: DraftConfig
    bos_token_id: int
    eos_token_id: int
    quantised: bool
    text_only: bool = False
    image_token_id: int | None = None

    @property
    def split(self) -> int:
        """E: first decoder layer, last KV source, candidate source."""
        return self.kv_source_layer_ids[-1]

    @property
    def num_encoder_layers(self) -> int:
        return self.split

    @property
    def num_decoder_layers(self) -> int:
        return self.num_hidden_layers - self.split

    def ratio(self, layer: int) -> int:
        """Compression ratio of a layer's pool; 0 is window attention only."""
        return self.compress_ratios[layer]

    def role(self, layer: int) -> LayerRole:
        if self.ratio(layer) == 0:
            return LayerRole.WINDOW
        if layer in self.kv_source_layer_ids:
            return LayerRole.FULL
        if layer in self.index_source_layer_ids:
            return LayerRole.REINDEX
        return LayerRole.REUSE

    def kv_source(self, layer: int) -> int:
        """The Full layer whose pool a layer with ratio > 0 reads."""
        return max(s for s in self.kv_source_layer_ids if s <= layer)

    def index_source(self, layer: int) -> int:
        """The layer whose selection a layer with ratio > 0 uses."""
        return max(s for s in self.index_source_layer_ids if s <= layer)

    @property
    def softmax_scale(self) -> float:
        return float(self.head_dim**-0.5)

    @classmethod
    def from_file(cls, path: Path) -> ModelConfig:
        """Read `config.json`.

        Raises:
            ConfigError: the file is missing, no JSON, or describes no supported model.
        """
        try:
            document = read_json(file_within(path.parent, path.name), MAX_FILE_BYTES)
        except FileNotFoundError as error:
            raise ConfigError(
                "model.path", f"{path} does not exist; point it at a checkpoint folder"
            ) from error
        except (OSError, ValueError, RuntimeError) as error:  # a link may lead to itself
            raise ConfigError("model.path", f"{path} cannot be read as JSON: {error}") from error
        return cls.from_dict(document)

    @classmethod
    def from_dict(cls, document: object) -> ModelConfig:
        """Parse a released-style config (with or without the `text_config` level).

        Raises:
            ConfigError: a field is missing, of the wrong type, or inconsistent with another.
        """
        if not isinstance(document, Mapping):
            raise ConfigError("config.json", "the top level must be a JSON object")
        for name in ("vision_config", "vision"):
            if document.get(name) is not None:
                raise ConfigError(
                    name,
                    'images are not supported; write "vision_config": null into config.json '
                    "instead to serve the text model alone, without the tensors for images",
                )
        text = document.get("text_config", document)
        if not isinstance(text, Mapping):
            raise ConfigError("text_config", "must be a JSON object")
        if text is not document and text.get("vision_config") is not None:
            raise ConfigError(
                "text_config.vision_config",
                "images are not supported; write null instead to serve the text model alone",
            )
        config = _parse(document, text)
        _validate(config, text)
        return config


def check_w8a8(config: ModelConfig) -> None:
    """Refuse rounded linear inputs (`w8a8`) for a model that the release would not round.

    Raises:
        ConfigError: its weights are not quantised, or an input has no whole groups of 32.
    """
    if not config.quantised:
        raise ConfigError(
            "model.w8a8",
            "the inputs of plain weights are never rounded, and this config.json has no "
            "quantization_config; set it to false",
        )
    widths = {
        "hidden_size": config.hidden_size,
        "q_lora_rank": config.q_lora_rank,
        "moe_intermediate_size": config.moe_intermediate_size,
        "o_lora_rank times o_groups": config.o_lora_rank * config.o_groups,
    }
    if config.engram.layer_ids:
        engram = config.engram
        width = (engram.max_ngram_size - 1) * engram.num_heads * engram.head_dim
        widths["width of Engram's rows"] = width
    for name, width in widths.items():
        if width % 32:
            raise ConfigError(
                "model.w8a8",
                f"inputs are rounded in groups of 32, and the {name}, {width}, is no multiple of "
                "it; set it to false",
            )


def _parse(document: Mapping[str, Any], text: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(text, "text_config." if text is not document else "")
    require_implemented(document, fields)
    scaling = fields.section("rope_scaling")
    top = Fields(document, "")
    return ModelConfig(
        vocab_size=fields.integer("vocab_size", 4),
        hidden_size=fields.integer("hidden_size"),
        moe_intermediate_size=fields.integer("moe_intermediate_size"),
        num_hidden_layers=fields.count("num_hidden_layers", 2),
        num_attention_heads=fields.integer("num_attention_heads"),
        head_dim=fields.integer("head_dim"),
        qk_rope_head_dim=fields.integer("qk_rope_head_dim", 2),
        q_lora_rank=fields.integer("q_lora_rank"),
        o_lora_rank=fields.integer("o_lora_rank"),
        o_groups=fields.count("o_groups"),
        swiglu_limit=fields.number("swiglu_limit"),
        rms_norm_eps=fields.number("rms_norm_eps"),
        max_position_embeddings=fields.integer("max_position_embeddings", 2),
        rope_theta=fields.number("rope_theta"),
        rope_scaling=RopeScaling(
            factor=scaling.number("factor"),
            beta_fast=scaling.number("beta_fast"),
            beta_slow=scaling.number("beta_slow"),
            original_max_position_embeddings=scaling.integer("original_max_position_embeddings"),
        ),
        n_routed_experts=fields.count("n_routed_experts"),
        n_shared_experts=fields.count("n_shared_experts"),
        num_experts_per_tok=fields.count("num_experts_per_tok"),
        routed_scaling_factor=fields.number("routed_scaling_factor"),
        sliding_window=fields.count("sliding_window", 2),
        compress_ratios=fields.integers("compress_ratios"),
        compress_rope_theta=fields.number("compress_rope_theta"),
        kv_source_layer_ids=fields.integers("kv_source_layer_ids"),
        index_source_layer_ids=fields.integers("index_source_layer_ids"),
        index_n_heads=fields.integer("index_n_heads"),
        index_head_dim=fields.integer("index_head_dim"),
        index_topk=fields.count("index_topk"),
        candidate_source_layer_id=fields.integer("candidate_source_layer_id", 0),
        candidate_topk_blocks=fields.count("candidate_topk_blocks"),
        candidate_block_size=fields.count("candidate_block_size"),
        hc_mult=fields.count("hc_mult"),
        hc_sinkhorn_iters=fields.count("hc_sinkhorn_iters"),
        hc_eps=fields.number("hc_eps"),
        engram=_parse_engram(fields),
        draft=_parse_draft(fields),
        # Ids stand in the text config or beside it.
        bos_token_id=fields.integer("bos_token_id", 0, top.integer("bos_token_id", 0, 0)),
        eos_token_id=fields.integer("eos_token_id", 0, top.integer("eos_token_id", 0, 1)),
        quantised=document.get("quantization_config") is not None,
        text_only="vision_config" in document or "vision_config" in text,
        image_token_id=_image_token_id(top, fields),
    )


def _image_token_id(*levels: Fields) -> int | None:
    """From wherever a config names it."""
    for level in levels:
        if level.has("image_token_id"):
            return level.integer("image_token_id", 0)
    return None


def _parse_engram(fields: Fields) -> EngramConfig:
    layer_ids = fields.integers("engram_layer_ids") if fields.has("engram_layer_ids") else ()
    if not layer_ids:
        return EngramConfig((), (), 0, 0, 0, 0, 0, 0)
    return EngramConfig(
        layer_ids=layer_ids,
        num_embeddings=fields.integers("engram_num_embeddings", 1),
        max_ngram_size=fields.count("engram_max_ngram_size", 2),
        vocab_size=fields.integer("engram_vocab_size"),
        num_heads=fields.count("engram_n_heads"),
        head_dim=fields.integer("engram_head_dim"),
        pad_token_id=fields.integer("engram_pad_token_id", 0),
        compressed_vocab_size=fields.integer("engram_compressed_vocab_size"),
    )


def _parse_draft(fields: Fields) -> DraftConfig:
    stages = "num_nextn_predict_layers"
    if not fields.has(stages) or fields.count(stages, 0) == 0:
        return DraftConfig(0, 0, 0, 0)
    return DraftConfig(
        num_stages=fields.count(stages),
        num_taps=len(fields.integers("dspark_target_layer_ids")),
        markov_rank=fields.integer("dspark_markov_rank"),
        n_routed_experts=fields.count("dspark_n_routed_experts"),
    )


def _validate(config: ModelConfig, text: Mapping[str, Any]) -> None:
    c = config
    layers = c.num_hidden_layers
    if len(c.compress_ratios) < layers:
        raise ConfigError("compress_ratios", f"needs an entry for each of {layers} layers")
    if any(r not in (0, 1, 2) for r in c.compress_ratios):
        raise ConfigError("compress_ratios", "only ratios 0, 1 and 2 are supported")
    for name in ("kv_source_layer_ids", "index_source_layer_ids"):
        ids = getattr(c, name)
        if not ids or list(ids) != sorted(set(ids)) or ids[-1] >= layers:
            raise ConfigError(name, f"must be ascending layer numbers below {layers}")
        if any(c.ratio(i) == 0 for i in ids):
            raise ConfigError(name, "every source layer needs a compression ratio above 0")
    if not set(c.kv_source_layer_ids) <= set(c.index_source_layer_ids):
        raise ConfigError("index_source_layer_ids", "must contain every KV source layer")
    if c.candidate_source_layer_id != c.split:
        raise ConfigError(
            "candidate_source_layer_id",
            f"must be the last KV source layer {c.split}: the encoder ends there",
        )
    if c.split < 1:
        raise ConfigError("kv_source_layer_ids", "the last KV source cannot be layer 0")
    first_source = c.kv_source_layer_ids[0]
    for layer in range(layers):
        if c.ratio(layer) == 0:
            if layer >= c.split:
                raise ConfigError("compress_ratios", f"decoder layer {layer} must have ratio 1")
            continue
        if layer < first_source:
            raise ConfigError("compress_ratios", f"layer {layer} has no KV source at or below it")
        if c.ratio(layer) != c.ratio(c.kv_source(layer)):
            raise ConfigError("compress_ratios", f"layer {layer} differs from its KV source")
        if c.index_source(layer) < c.kv_source(layer):
            raise ConfigError("index_source_layer_ids", f"layer {layer} selects from another pool")
        if layer >= c.split and c.ratio(layer) != 1:
            raise ConfigError("compress_ratios", f"decoder layer {layer} must have ratio 1")
    if any(layer >= c.split for layer in c.engram.layer_ids):
        raise ConfigError("engram_layer_ids", f"must lie below the split at layer {c.split}")
    _validate_engram(c)
    if c.sliding_window % 2:
        raise ConfigError("sliding_window", "must be even: blocks hold whole pairs")
    if c.qk_rope_head_dim % 2 or c.qk_rope_head_dim > min(c.head_dim, c.index_head_dim):
        raise ConfigError("qk_rope_head_dim", "must be even and fit both head sizes")
    if c.num_attention_heads % c.o_groups:
        raise ConfigError("o_groups", "must divide num_attention_heads")
    if c.num_experts_per_tok > c.n_routed_experts:
        raise ConfigError("num_experts_per_tok", "exceeds n_routed_experts")
    if c.draft.num_stages and not c.draft.num_taps:
        raise ConfigError("dspark_target_layer_ids", "draft stages need a layer to read")
    draft_experts = c.draft.num_stages * c.draft.n_routed_experts
    if layers * c.n_routed_experts + draft_experts > _MAX_EXPERTS:
        raise ConfigError("n_routed_experts", "times the layers is absurdly large")
    if max(c.bos_token_id, c.eos_token_id) >= c.vocab_size:
        raise ConfigError("eos_token_id", "and bos_token_id must lie below vocab_size")
    if c.n_shared_experts != 1:
        raise ConfigError("n_shared_experts", "only one shared expert is supported")
    if (c.candidate_topk_blocks - 1) * c.candidate_block_size + 1 < c.index_topk:
        raise ConfigError(
            "candidate_topk_blocks", "the candidate pool could hold fewer entries than index_topk"
        )


def _validate_engram(c: ModelConfig) -> None:
    engram = c.engram
    if list(engram.layer_ids) != sorted(set(engram.layer_ids)):
        raise ConfigError("engram_layer_ids", "must be ascending layer numbers")
    if len(engram.layer_ids) != len(engram.num_embeddings):
        raise ConfigError("engram_num_embeddings", "needs one entry for each Engram layer")
    if not engram.layer_ids:
        return
    if engram.max_ngram_size > 4:
        raise ConfigError(
            "engram_max_ngram_size", f"at most 4 is supported, is {engram.max_ngram_size}"
        )
    hashes = len(engram.layer_ids) * (engram.max_ngram_size - 1) * engram.num_heads
    if hashes > _MAX_HASHES:
        raise ConfigError("engram_n_heads", f"gives {hashes} hashes a token, an absurd number")
    least = (engram.max_ngram_size - 1) * engram.num_heads * engram.vocab_size
    if min(engram.num_embeddings) < least:  # before primes of any size are looked for
        raise ConfigError(
            "engram_num_embeddings",
            f"the other engram fields give tables of at least {least} rows, is "
            f"{list(engram.num_embeddings)}; the config does not belong to a V4.1-class checkpoint",
        )
    if not engram.compressed_vocab_size <= c.vocab_size:
        raise ConfigError("engram_compressed_vocab_size", "must be at most vocab_size")
    if engram.pad_token_id >= c.vocab_size:
        raise ConfigError("engram_pad_token_id", "must lie below vocab_size")
