"""Which small model do the checkpoint tests use? Every kind of layer, Engram and a draft stage."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from ripresa.workers.models.deepseek_v41.config import ModelConfig
from ripresa.workers.models.tiny_checkpoint import WeightFormat, write_tiny_checkpoint

TEXT: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "vocab_size": 96,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 32,
    "o_lora_rank": 16,
    "o_groups": 2,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-20,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "rope_theta": 10000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 64,
    },
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "sliding_window": 8,
    "compress_ratios": [0, 2, 1, 1, 0],
    "compress_rope_theta": 160000,
    "kv_source_layer_ids": [1, 2],
    "index_source_layer_ids": [1, 2, 3],
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 8,
    "candidate_source_layer_id": 2,
    "candidate_topk_blocks": 3,
    "candidate_block_size": 4,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 4,
    "hc_eps": 1e-06,
    "engram_layer_ids": [1],
    "engram_num_embeddings": [384],
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 50,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 48,
    "num_nextn_predict_layers": 1,
    "dspark_target_layer_ids": [2, 3],
    "dspark_markov_rank": 16,
    "dspark_n_routed_experts": 2,
}


def tiny_config(**changes: Any) -> dict[str, Any]:
    """A `config.json`, with some text fields changed."""
    return {"model_type": "deepseek_v41", "text_config": copy.deepcopy(TEXT) | changes}


def tiny_checkpoint(
    folder: Path,
    weight_format: WeightFormat = WeightFormat.RELEASED,
    *,
    shards: int = 3,
    **changes: Any,
) -> ModelConfig:
    """Write one; returns its geometry."""
    write_tiny_checkpoint(folder, tiny_config(**changes), weight_format, seed=5, shards=shards)
    return ModelConfig.from_file(folder / "config.json")
