"""Are random checkpoints complete, of the released form, and the same everywhere?"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from ripresa.workers.demo.checkpoint import DEMO_MODEL
from ripresa.workers.models.deepseek_v41.config import ModelConfig
from ripresa.workers.models.deepseek_v41.tensor_specs import tensor_specs
from ripresa.workers.models.random_weights import GAIN, random_tensor
from ripresa.workers.models.tiny_checkpoint import WeightFormat, stored_tensors

FORMS = {"BF16": torch.bfloat16, "F32": torch.float32}


def config_of(case: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((case / "checkpoint" / "config.json").read_text())
    return document


def plain_tensors(document: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    tensors = {}
    for spec in tensor_specs(ModelConfig.from_dict(document)):
        tensors |= stored_tensors(spec, WeightFormat.BF16, seed)
    return tensors


@pytest.mark.parametrize(
    "case", ["case_a_plain_float", "case_b_grids_engram_replay", "case_g_plain_replay"]
)
def test_names_shapes_and_types_are_those_of_the_golden_checkpoints(
    shared: Path, case: str
) -> None:
    folder = shared / "golden" / case
    tensors = plain_tensors(config_of(folder), seed=1)
    with safe_open(folder / "checkpoint" / "model.safetensors", "pt") as golden:
        expected = {
            name: (golden.get_slice(name).get_shape(), FORMS[golden.get_slice(name).get_dtype()])
            for name in golden.keys()  # noqa: SIM118
        }
    assert {name: (list(t.shape), t.dtype) for name, t in tensors.items()} == expected


def test_draft_stages_and_engram_have_their_tensors(shared: Path) -> None:
    folder = shared / "golden" / "case_c_quantised_dspark"
    document = config_of(folder)
    shapes = {spec.name: spec.shape for spec in tensor_specs(ModelConfig.from_dict(document))}
    with safe_open(folder / "checkpoint" / "model.safetensors", "pt") as golden:
        expected = {}
        for name in golden.keys():  # noqa: SIM118
            if not name.endswith(".scale"):
                *outer, inner = golden.get_slice(name).get_shape()
                packed = golden.get_slice(name).get_dtype() == "I8"
                expected[name] = (*outer, inner * 2 if packed else inner)
    assert shapes == expected


def test_the_bits_are_fixed() -> None:
    """Literal values: another machine, numpy or torch must give the same."""
    scale = [0.375545859336853, 0.18265646696090698, 0.5713106989860535]
    assert random_tensor("layers.0.hc_attn_scale", (3,), 41).tolist() == scale
    embed = [[-0.80078125, 1.46875, 0.69921875, 1.5703125]]
    assert random_tensor("embed.weight", (1, 4), 41).tolist() == embed


def test_a_tensor_depends_on_its_name_and_the_seed_alone() -> None:
    shape = (40, 30)
    tensor = random_tensor("layers.0.attn.wkv.weight", shape, 3)
    assert torch.equal(tensor, random_tensor("layers.0.attn.wkv.weight", shape, 3))
    for name, seed in (("layers.1.attn.wkv.weight", 3), ("layers.0.attn.wkv.weight", 4)):
        other = random_tensor(name, shape, seed)
        correlation = torch.corrcoef(torch.stack([tensor.flatten(), other.flatten()]).float())
        assert abs(correlation[0, 1]) < 0.15
    prefix = random_tensor("layers.0.attn.wkv.weight", (20, 30), 3)
    assert torch.equal(prefix, tensor[:20]), "a taller tensor begins with the same rows"


@pytest.mark.parametrize(
    ("name", "shape", "mean", "deviation"),
    [
        ("embed.weight", (500, 64), 0, 1),
        ("head.weight", (500, 64), 0, GAIN / 8),
        ("layers.3.attn.wo_b.weight", (200, 100), 0, GAIN / 10),
        ("layers.3.ffn.experts.2.w2.weight", (64, 256), 0, GAIN / 16),
        ("layers.3.hc_ffn_fn", (24, 1024), 0, GAIN / 32),
        ("layers.3.hc_ffn_base", (8192,), 0, 0.5),
        ("layers.3.hc_ffn_scale", (8192,), 0.5, 0.2),
        ("layers.3.attn.attn_sink", (8192,), 0, 0.5),
        ("layers.3.ffn.gate.bias", (8192,), 0, 0.1),
        ("layers.3.attn.indexer.k_norm.weight", (8192,), 1, 0.2),
        ("norm.weight", (8192,), 1, 0.2),
        ("layers.1.engram.q_weight", (4, 2048), 1, 0.3),
    ],
)
def test_moments(name: str, shape: tuple[int, ...], mean: float, deviation: float) -> None:
    values = random_tensor(name, shape, 9).double()
    assert values.mean().item() == pytest.approx(mean, abs=5 * deviation / math.sqrt(8192))
    assert values.std().item() == pytest.approx(deviation, rel=0.03)
    assert (values - mean).abs().max().item() <= deviation * math.sqrt(3) * 1.004


def test_another_seed_changes_every_tensor() -> None:
    document = json.loads((DEMO_MODEL / "config.json").read_text())
    document["text_config"] |= {"vocab_size": 32, "hidden_size": 32, "moe_intermediate_size": 32}
    document["text_config"]["engram_compressed_vocab_size"] = 16
    one, two, again = (plain_tensors(document, seed) for seed in (1, 2, 1))
    assert [name for name in one if not torch.equal(one[name], again[name])] == []
    assert [name for name in one if torch.equal(one[name], two[name])] == []
