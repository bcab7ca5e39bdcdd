"""Does the released config give the released sizes? Shapes and bytes only, on the meta device."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from ripresa.workers.cache.kv_layout import KVFormat
from ripresa.workers.config import EngramPlacement, Numerics
from ripresa.workers.model_runner import TorchModelRunner, kv_layout
from ripresa.workers.models.checkpoint import Checkpoint
from ripresa.workers.models.deepseek_v41.config import LayerRole, ModelConfig
from ripresa.workers.models.deepseek_v41.engram_ids import engram_hashes
from ripresa.workers.models.deepseek_v41.inventory import take_inventory
from ripresa.workers.models.deepseek_v41.tensor_specs import (
    Half,
    Part,
    Storage,
    TensorSpec,
    scale_name,
    scale_shape,
    stored_shape,
    tensor_specs,
    text_specs,
)
from ripresa.workers.models.deepseek_v41.weights import load_weights
from ripresa.workers.models.row_store import RowStore
from ripresa.workers.models.shard import TensorEntry

RELEASED_TENSORS = 96_085
RELEASED_BYTES = 510_286_023_000

TYPES = {
    Storage.BF16: "BF16",
    Storage.F32: "F32",
    Storage.F8: "F8_E4M3",
    Storage.F8_ROWS: "F8_E4M3",
    Storage.FP4: "I8",
}


@pytest.fixture(scope="module")
def config(shared: Path) -> ModelConfig:
    return ModelConfig.from_file(shared / "model" / "deepseek_v41_flash_config.json")


@pytest.fixture(scope="module")
def specs(config: ModelConfig) -> dict[str, TensorSpec]:
    return {spec.name: spec for spec in tensor_specs(config)}


def entries_of(specs: dict[str, TensorSpec]) -> dict[str, TensorEntry]:
    """Headers of a checkpoint as the release stores it."""
    entries = {}
    for spec in specs.values():
        shape = stored_shape(spec.shape, spec.storage)
        entries[spec.name] = TensorEntry(spec.name, "file", TYPES[spec.storage], shape, 0, 0)
        if spec.storage.quantised:
            name, shape = scale_name(spec.name), scale_shape(spec.shape, spec.storage)
            entries[name] = TensorEntry(name, "file", "F8_E8M0", shape, 0, 0)
    return entries


class NoRows:
    def take(self, numbers: np.ndarray) -> np.ndarray:
        raise AssertionError("a test of shapes reads no row")


class ShapesOnly(Checkpoint):
    """A checkpoint of tensors without numbers."""

    def __init__(self, specs: dict[str, TensorSpec]) -> None:
        self._entries = entries_of(specs)
        self.read_names: set[str] = set()

    def expect(self, num_bytes: int) -> None:
        pass

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        self.read_names.add(name)
        return torch.empty(shape, device="meta")

    def open_rows(self, name: str, placement: EngramPlacement) -> RowStore:
        return NoRows()


def test_bytes_of_the_cache(config: ModelConfig) -> None:
    layout = kv_layout(config, KVFormat.PACKED, "")
    assert layout.window_row_bytes == 528
    assert layout.main_entry_bytes == 288
    assert layout.index_key_bytes == 68
    assert layout.block_bytes == 113_920
    assert layout.block_bytes == 890 * layout.window
    assert layout.window_bytes(layout.window, config.num_hidden_layers) == 2_703_360
    assert layout.window_bytes(layout.window, config.split) == 1_351_680
    assert layout.open_pair_bytes == 12_288


def test_roles_and_sources_of_the_layers(config: ModelConfig) -> None:
    roles = [config.role(layer) for layer in range(config.num_hidden_layers)]
    assert config.split == 20
    assert Counter(roles) == {
        LayerRole.WINDOW: 2,
        LayerRole.FULL: 4,
        LayerRole.REINDEX: 4,
        LayerRole.REUSE: 30,
    }
    assert [i for i, role in enumerate(roles) if role is LayerRole.WINDOW] == [0, 1]
    assert [i for i, role in enumerate(roles) if role is LayerRole.FULL] == [2, 8, 14, 20]
    assert [i for i, role in enumerate(roles) if role is LayerRole.REINDEX] == [24, 28, 32, 36]
    expected = [2] * 6 + [8] * 6 + [14] * 6 + [20] * 20
    assert [config.kv_source(layer) for layer in range(2, 40)] == expected
    selections = expected[:18] + [20] * 4 + [24] * 4 + [28] * 4 + [32] * 4 + [36] * 4
    assert [config.index_source(layer) for layer in range(2, 40)] == selections


SHAPES = {
    "embed.weight": ((129280, 5120), Storage.BF16),
    "head.weight": ((129280, 5120), Storage.BF16),
    "norm.weight": ((5120,), Storage.BF16),
    "layers.0.attn_norm.weight": ((5120,), Storage.BF16),
    "layers.39.ffn_norm.weight": ((5120,), Storage.BF16),
    "layers.7.hc_attn_fn": ((24, 20480), Storage.F32),
    "layers.7.hc_ffn_base": ((24,), Storage.F32),
    "layers.7.hc_ffn_scale": ((3,), Storage.F32),
    "layers.7.attn.wq_a.weight": ((1280, 5120), Storage.F8),
    "layers.7.attn.q_norm.weight": ((1280,), Storage.BF16),
    "layers.7.attn.wq_b.weight": ((32768, 1280), Storage.F8),
    "layers.7.attn.wkv.weight": ((512, 5120), Storage.F8),
    "layers.7.attn.kv_norm.weight": ((512,), Storage.BF16),
    "layers.7.attn.attn_sink": ((64,), Storage.F32),
    "layers.7.attn.wo_a.weight": ((8192, 4096), Storage.F8),
    "layers.7.attn.wo_b.weight": ((5120, 8192), Storage.F8),
    "layers.2.attn.compressor.wkv.weight": ((512, 5120), Storage.BF16),
    "layers.14.attn.compressor.wgate.weight": ((512, 5120), Storage.BF16),
    "layers.20.attn.compressor.norm.weight": ((512,), Storage.BF16),
    "layers.36.attn.indexer.wq_b.weight": ((4096, 1280), Storage.F8),
    "layers.36.attn.indexer.weights_proj.weight": ((32, 5120), Storage.BF16),
    "layers.20.attn.indexer.wk.weight": ((128, 512), Storage.BF16),
    "layers.20.attn.indexer.k_norm.weight": ((128,), Storage.BF16),
    "layers.7.ffn.gate.weight": ((384, 5120), Storage.BF16),
    "layers.7.ffn.gate.bias": ((384,), Storage.F32),
    "layers.7.ffn.experts.383.w1.weight": ((2304, 5120), Storage.FP4),
    "layers.7.ffn.experts.0.w2.weight": ((5120, 2304), Storage.FP4),
    "layers.7.ffn.experts.0.w3.weight": ((2304, 5120), Storage.FP4),
    "layers.7.ffn.shared_experts.w2.weight": ((5120, 2304), Storage.F8),
    "layers.1.engram.embed.weight": ((384006168, 256), Storage.F8_ROWS),
    "layers.14.engram.embed.weight": ((384016682, 256), Storage.F8_ROWS),
    "layers.14.engram.wkv.weight": ((25600, 6144), Storage.F8),
    "layers.1.engram.q_weight": ((4, 5120), Storage.BF16),
    "layers.1.engram.k_weight": ((4, 5120), Storage.BF16),
    "mtp.2.ffn.experts.127.w1.weight": ((2304, 5120), Storage.FP4),
    "mtp.1.ffn.gate.bias": ((128,), Storage.F32),
    "mtp.0.main_proj.weight": ((5120, 15360), Storage.F8),
    "mtp.0.main_norm.weight": ((5120,), Storage.BF16),
    "mtp.2.norm.weight": ((5120,), Storage.BF16),
    "mtp.2.markov_head.embed.weight": ((129280, 256), Storage.BF16),
    "mtp.2.markov_head.head.weight": ((129280, 256), Storage.BF16),
    "mtp.2.confidence_head.proj.weight": ((1, 5376), Storage.BF16),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shape_and_storage(specs: dict[str, TensorSpec], name: str) -> None:
    assert (specs[name].shape, specs[name].storage) == SHAPES[name]


def test_names_that_only_some_layers_have(specs: dict[str, TensorSpec]) -> None:
    def layers(suffix: str) -> list[int]:
        return [n for n in range(40) if f"layers.{n}.{suffix}" in specs]

    assert layers("attn.compressor.wkv.weight") == [2, 8, 14, 20]
    assert layers("attn.compressor.wgate.weight") == [2, 8, 14]
    assert layers("attn.indexer.wk.weight") == [2, 8, 14, 20]
    assert layers("attn.indexer.wq_b.weight") == [2, 8, 14, 20, 24, 28, 32, 36]
    assert layers("engram.wkv.weight") == [1, 14]
    assert layers("ffn.experts.383.w3.weight") == list(range(40))


def test_every_kind_of_tensor_is_listed_above(specs: dict[str, TensorSpec]) -> None:
    """So that a name without a literal shape cannot slip in: kinds, with the numbers taken out."""

    def kind(name: str) -> str:
        parts = ["N" if part.isdigit() else part for part in name.split(".")]
        text = ".".join(parts).replace("mtp.N.", "layers.N.")
        for old, new in (("hc_attn_", "hc_"), ("hc_ffn_", "hc_"), ("ffn_norm", "attn_norm")):
            text = text.replace(old, new)
        return text.replace(".w1.", ".w3.").replace("experts.w3", "experts.w2")

    assert {kind(name) for name in specs} == {kind(name) for name in SHAPES}


def test_names_and_bytes_add_up_to_the_release(
    config: ModelConfig, specs: dict[str, TensorSpec]
) -> None:
    """What is left over is the vision tower: so many tensors, and a plausible number of bytes."""
    names = sum(2 if spec.storage.quantised else 1 for spec in specs.values())
    num_bytes = sum(spec.released_bytes for spec in specs.values())
    assert names == 95_776
    assert num_bytes == 509_315_423_064
    text = sum(spec.released_bytes for spec in text_specs(config))
    assert text == 501_382_549_968
    image_biases = config.num_hidden_layers * config.n_routed_experts * 4
    image_biases += config.draft.num_stages * config.draft.n_routed_experts * 4
    left = RELEASED_TENSORS - names - config.num_hidden_layers - config.draft.num_stages
    assert left == 266
    assert 0.9e9 < RELEASED_BYTES - num_bytes - image_biases < 1.0e9


def test_the_id_that_stands_for_images_is_known(config: ModelConfig) -> None:
    assert config.image_token_id == 129264


def test_table_rows_are_the_sums_of_their_primes(config: ModelConfig) -> None:
    hashes = engram_hashes(config.engram)
    assert [hashes[layer].num_rows for layer in (1, 14)] == [384006168, 384016682]


def test_an_encoder_worker_reads_about_half(config: ModelConfig) -> None:
    num_bytes = Counter[Part]()
    for spec in text_specs(config):
        num_bytes[spec.part] += spec.released_bytes
    encoder = num_bytes[Part.ENCODER] + num_bytes[Part.SOURCE]
    both = encoder + num_bytes[Part.DECODER]
    assert encoder == 149_485_449_952
    assert both == 298_624_517_568
    assert encoder / both == pytest.approx(0.5, abs=0.005)
    assert num_bytes[Part.TABLE] == 202_758_032_400
    assert num_bytes[Part.TABLE] == (384006168 + 384016682) * (256 + 8)


@pytest.mark.parametrize("half", Half)
def test_the_model_builds_on_the_meta_device(
    config: ModelConfig, specs: dict[str, TensorSpec], half: Half
) -> None:
    checkpoint = ShapesOnly(specs)
    with torch.device("meta"):
        weights = load_weights(checkpoint, config, half)
    runner = TorchModelRunner(
        config,
        weights,
        num_blocks=10,
        num_slots=2,
        numerics=Numerics.FAST,
        compressed_ids=np.zeros(config.vocab_size, dtype=np.int64),
    )
    assert runner.device.type == "meta"
    inventory = take_inventory(checkpoint.entries, config)
    assert checkpoint.read_names == {t.spec.name for t in inventory.read_by(half)}
    layers = 20 if half is Half.ENCODER else 40
    assert len(weights.layers) == layers
    assert weights.layers[7].w13.shape == (384, 4608, 5120)
    assert weights.layers[7].w2.shape == (384, 5120, 2304)
    assert weights.layers[7].wo_a.shape == (8, 1024, 4096)
    assert weights.engram[14].table.num_rows == 384016682
    assert (weights.head is None) == (half is Half.ENCODER)
    expected = sum(t.spec.num_parameters for t in inventory.read_by(half))
    assert weights.num_parameters == expected
    rings = 2 * (128 + 6) * 528 * (21 if half is Half.ENCODER else 40)
    assert runner.cache.num_bytes == 10 * 113_920 + rings + 2 * 12_288
