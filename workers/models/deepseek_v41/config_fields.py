"""Which fields may a `config.json` have, and which of their values does this model compute?

Whatever a config says is read, known to change nothing, or refused by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ripresa.workers.errors import ConfigError

# A config names sizes that loops and tables are made from: a hostile one must not stall a worker.
_MAX_SIZE = 2**40
_MAX_COUNT = 2**14

# What fields of this family of models may say here: what this model computes anyway. A config
# without them says the same.
_ONLY: dict[str, tuple[object, ...]] = {
    "model_type": ("deepseek_v41", "deepseek_v41_text"),
    "scoring_func": ("sqrtsoftplus",),
    "topk_method": ("noaux_tc",),
    "norm_topk_prob": (True,),
    "hidden_act": ("silu",),
    "tie_word_embeddings": (False,),
    "num_key_value_heads": (1,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "n_group": (1, None),
    "topk_group": (1, None),
    "first_k_dense_replace": (0, None),
    "moe_layer_freq": (1, None),
    "num_hash_layers": (0, None),
    "gate_temperature": (1, None),
    "rope_interleave": (True,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
}
_ONLY_SCALING: dict[str, tuple[object, ...]] = {
    "rope_type": ("yarn",),
    "type": ("yarn",),
    "mscale": (0, None),
    "mscale_all_dim": (0, None),
    "attention_factor": (1, None),
    "truncate": (True,),
}
_ONLY_QUANTISATION: dict[str, tuple[object, ...]] = {
    "quant_method": ("fp8",),
    "fmt": ("e4m3",),
    "activation_scheme": ("dynamic",),
    "weight_block_size": ([32, 32],),
    "scale_fmt": ("ue8m0",),
    "expert_dtype": ("fp4",),
}
_READ_SCALING = frozenset(("factor", "beta_fast", "beta_slow", "original_max_position_embeddings"))
_READ = frozenset(
    (
        "vocab_size",
        "hidden_size",
        "moe_intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "head_dim",
        "qk_rope_head_dim",
        "q_lora_rank",
        "o_lora_rank",
        "o_groups",
        "swiglu_limit",
        "rms_norm_eps",
        "max_position_embeddings",
        "rope_theta",
        "rope_scaling",
        "n_routed_experts",
        "n_shared_experts",
        "num_experts_per_tok",
        "routed_scaling_factor",
        "sliding_window",
        "compress_ratios",
        "compress_rope_theta",
        "kv_source_layer_ids",
        "index_source_layer_ids",
        "index_n_heads",
        "index_head_dim",
        "index_topk",
        "candidate_source_layer_id",
        "candidate_topk_blocks",
        "candidate_block_size",
        "hc_mult",
        "hc_sinkhorn_iters",
        "hc_eps",
        "engram_layer_ids",
        "engram_num_embeddings",
        "engram_max_ngram_size",
        "engram_vocab_size",
        "engram_n_heads",
        "engram_head_dim",
        "engram_compressed_vocab_size",
        "num_nextn_predict_layers",
        "dspark_target_layer_ids",
        "dspark_markov_rank",
        "dspark_n_routed_experts",
    )
)
_ON_TOP = frozenset(("text_config", "quantization_config", "vision_config", "vision"))
# Of training, of other software, or of the draft stages, which are not run.
_WITHOUT_EFFECT = frozenset(
    (
        "architectures",
        "auto_map",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "use_cache",
        "initializer_range",
        "attention_dropout",
        "hidden_dropout",
        "dropout",
        "pretraining_tp",
        "ep_size",
        "aux_loss_alpha",
        "seq_aux",
        "router_aux_loss_coef",
        "output_router_logits",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "is_encoder_decoder",
        "is_decoder",
        "name_or_path",
        "_name_or_path",
        "_attn_implementation",
        "dspark_block_size",
        "dspark_num_experts_per_tok",
    )
)


def require_implemented(document: Mapping[str, Any], fields: Fields) -> None:
    """Refuse what would make another model of the same tensors.

    Raises:
        ConfigError: a field has a value that is not implemented, or is not known at all.
    """
    top = Fields(document, "")
    if top.is_same(fields):
        fields.require(_ONLY, _READ | _ON_TOP | _WITHOUT_EFFECT)
    else:
        top.require(_ONLY, _ON_TOP | _WITHOUT_EFFECT)
        fields.require(_ONLY, _READ | _WITHOUT_EFFECT | {"vision_config"})
    fields.section("rope_scaling").require(_ONLY_SCALING, _READ_SCALING)
    if document.get("quantization_config") is not None:
        top.section("quantization_config").require(_ONLY_QUANTISATION, frozenset())


class Fields:
    """Typed access to one JSON object; every complaint names the field."""

    def __init__(self, values: Mapping[str, Any], prefix: str) -> None:
        self._values = values
        self._prefix = prefix

    def count(self, name: str, low: int = 1) -> int:
        """How many there are of something that has tensors, or costs time, of its own."""
        value = self.integer(name, low)
        if value > _MAX_COUNT:
            raise self._error(name, f"is absurdly large: {value}")
        return value

    def integer(self, name: str, low: int = 1, default: int | None = None) -> int:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._error(name, f"must be an integer, is {_shown(value)}")
        if value < low:
            raise self._error(name, f"must be at least {low}, is {_shown(value)}")
        if value > _MAX_SIZE:
            raise self._error(name, f"is absurdly large: {_shown(value)}")
        return value

    def number(self, name: str) -> float:
        value = self._get(name, None)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._error(name, f"must be a number, is {_shown(value)}")
        if not 0 < value <= _MAX_SIZE:
            raise self._error(name, f"must be above 0 and not absurdly large, is {_shown(value)}")
        return float(value)

    def integers(self, name: str, low: int = 0) -> tuple[int, ...]:
        value = self._get(name, None)
        if not isinstance(value, list) or any(
            isinstance(v, bool) or not isinstance(v, int) or not low <= v <= _MAX_SIZE
            for v in value
        ):
            raise self._error(name, f"must be a list of integers of at least {low}")
        return tuple(value)

    def has(self, name: str) -> bool:
        return name in self._values

    def section(self, name: str) -> Fields:
        value = self._get(name, None)
        if not isinstance(value, Mapping):
            raise self._error(name, "must be a JSON object")
        return Fields(value, f"{self._prefix}{name}.")

    def is_same(self, other: Fields) -> bool:
        """Whether both read one JSON object."""
        return self._values is other._values

    def require(
        self, only: Mapping[str, tuple[object, ...]], others: frozenset[str] | set[str]
    ) -> None:
        """Every field is one of `only`, with one of its values, or of `others`, or some token's id.

        Raises:
            ConfigError: naming the first field that is not.
        """
        for name, value in self._values.items():
            if name in only:
                if value not in only[name]:
                    raise self._error(
                        name, f"only {_shown(only[name][0])} is supported, is {_shown(value)}"
                    )
            elif name not in others and not name.endswith("_token_id"):
                raise self._error(
                    _shown(name)[1:-1],
                    f"is not known, is {_shown(value)}: it may change what the model computes. "
                    "If it does not, take it out of config.json",
                )

    def _get(self, name: str, default: object) -> Any:
        if name not in self._values:
            if default is None:
                raise self._error(name, "is missing")
            return default
        return self._values[name]

    def _error(self, name: str, message: str) -> ConfigError:
        return ConfigError(f"{self._prefix}{name}", message)


def _shown(value: object) -> str:
    """A value of a config that nobody vouches for, in an error message."""
    try:
        text = repr(value)
    except ValueError:  # more digits than Python prints
        return "a huge number"
    return text if len(text) <= 80 else f"{text[:80]}..."
