"""Does a worker take what its plan says, and is what does not fit refused with a way out?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_model import tiny_checkpoint

from ripresa.workers.cache.kv_layout import KVFormat
from ripresa.workers.config import EngineConfig, EngramPlacement, Numerics, ShadowConfig
from ripresa.workers.errors import ConfigError
from ripresa.workers.host_memory import AvailableMemory
from ripresa.workers.memory_plan import MemoryPlan, plan_memory, size
from ripresa.workers.model_runner import TorchModelRunner, kv_layout
from ripresa.workers.models.checkpoint import Checkpoint
from ripresa.workers.models.deepseek_v41.config import ModelConfig
from ripresa.workers.models.deepseek_v41.tensor_specs import Half
from ripresa.workers.models.deepseek_v41.weights import load_weights
from ripresa.workers.transfer.base import LaneConfig

ENGINE = EngineConfig(num_blocks=7, max_num_seqs=3, max_batched_tokens=16)
WORKSPACE = 1 << 20


def plan_of(config: ModelConfig, half: Half, engine: EngineConfig = ENGINE) -> MemoryPlan:
    layout = kv_layout(config, KVFormat.PACKED, "")
    return plan_memory(config, half, engine, LaneConfig(), layout, WORKSPACE)


def tensors_of(value: object) -> list[torch.Tensor]:
    """Every tensor in a tree of dataclasses, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for part in value.values() for tensor in tensors_of(part)]
    if isinstance(value, tuple):
        return [tensor for part in value for tensor in tensors_of(part)]
    fields = getattr(value, "__dataclass_fields__", {})
    return [tensor for name in fields for tensor in tensors_of(getattr(value, name))]


@pytest.mark.parametrize("half", Half)
def test_a_worker_takes_what_was_planned(tmp_path: Path, half: Half) -> None:
    config = tiny_checkpoint(tmp_path / "model")
    read: list[int] = []
    with Checkpoint(tmp_path / "model", lambda done, total: read.append(done)) as checkpoint:
        weights = load_weights(checkpoint, config, half)
    runner = TorchModelRunner(
        config,
        weights,
        num_blocks=ENGINE.num_blocks,
        num_slots=ENGINE.max_num_seqs,
        numerics=Numerics.FAST,
        compressed_ids=np.arange(config.vocab_size) // 2,
    )
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors_of(weights)}
    plan = plan_of(config, half)
    assert plan.weights == sum(storage.nbytes() for storage in storages.values())
    assert plan.kv_pool + plan.rings == runner.cache.num_bytes
    beside = runner.beside(ENGINE.shadow.num_blocks(runner.window, runner.max_model_len), 1)
    is_scored = half is Half.ALL
    assert plan.shadow == is_scored * (beside.cache.num_bytes + ENGINE.shadow.capacity_bytes)
    num_read = read[-1] - plan.engram_tables
    assert plan.weights_stored <= num_read, "of Full layers some tensors are read twice"
    assert num_read < 1.05 * plan.weights_stored


def test_the_encoder_half_is_about_half(tmp_path: Path) -> None:
    config = tiny_checkpoint(tmp_path / "model")
    encoder, both = plan_of(config, Half.ENCODER), plan_of(config, Half.ALL)
    assert 0.4 < encoder.weights / both.weights < 0.65
    assert encoder.engram_tables == both.engram_tables == 384 * (32 + 1)


def test_nothing_is_set_aside_where_nothing_is_scored_again(tmp_path: Path) -> None:
    engine = replace(ENGINE, shadow=ShadowConfig(share=0))
    assert plan_of(tiny_checkpoint(tmp_path / "model"), Half.ALL, engine).shadow == 0


def test_every_item_is_printed(tmp_path: Path) -> None:
    plan = plan_of(tiny_checkpoint(tmp_path / "model"), Half.ALL)
    text = "\n".join(plan.lines())
    for words in (
        "weights",
        "KV pool",
        "rings",
        "shadow",
        "index workspace",
        "lane buffers",
        "loader peak",
    ):
        assert words in text
    assert "Engram tables        12.7 kB  host_shared: page cache, one copy a machine" in text


def test_tables_take_memory_where_they_are_placed(tmp_path: Path) -> None:
    config = tiny_checkpoint(tmp_path / "model")
    tables = 384 * (32 + 1)
    plans = {
        placement: plan_of(config, Half.ALL, replace(ENGINE, engram_placement=placement))
        for placement in EngramPlacement
    }
    nvme = plans[EngramPlacement.NVME]
    shared, own = plans[EngramPlacement.HOST_SHARED], plans[EngramPlacement.HOST_NUMA]
    assert nvme.needed == nvme.peak == shared.peak
    assert (shared.shared_tables, shared.own_tables, shared.needed) == (
        tables,
        0,
        nvme.peak + tables,
    )
    assert (own.shared_tables, own.own_tables) == (0, tables)
    for mine, less in ((own.loader_peak, nvme.loader_peak), (own.serving, nvme.serving)):
        assert mine == less + tables
    for placement in (EngramPlacement.HOST_SHARED, EngramPlacement.HOST_NUMA):
        plan = plans[placement]
        plan.require_fit(AvailableMemory(plan.needed, "a test"))
        with pytest.raises(ConfigError, match=r"12\.7 kB, in memory; .* set it to nvme") as caught:
            plan.require_fit(AvailableMemory(plan.needed - 1, "a test"))
        assert caught.value.field == "model.engram_placement"
    nvme.require_fit(AvailableMemory(nvme.peak, "a test"))
    assert f"{tables / 1000:.1f} kB  nvme: in their files, no memory" in "\n".join(nvme.lines())


def test_what_does_not_fit_names_the_setting_and_a_value_that_does(tmp_path: Path) -> None:
    config = tiny_checkpoint(tmp_path / "model")
    engine = replace(
        ENGINE, num_blocks=10_000, max_num_seqs=5000, engram_placement=EngramPlacement.NVME
    )
    plan = plan_of(config, Half.ALL, engine)
    plan.require_fit(AvailableMemory(plan.peak, "a test"))

    def refusal(num_bytes: int) -> ConfigError:
        with pytest.raises(ConfigError) as caught:
            plan.require_fit(AvailableMemory(num_bytes, "a test"))
        return caught.value

    lack = plan.kv_pool // 3
    error = refusal(plan.peak - lack)
    assert error.field == "decoders.num_blocks"
    blocks = int(error.message.rpartition(" ")[2])
    smaller = plan_of(config, Half.ALL, replace(engine, num_blocks=blocks))
    smaller.require_fit(AvailableMemory(plan.peak - lack, "a test"))
    with pytest.raises(ConfigError):
        replace(smaller, num_blocks=blocks + 1).require_fit(
            AvailableMemory(plan.peak - lack, "a test")
        )
    assert refusal(plan.peak - plan.kv_pool - 1000).field == "decoders.max_num_seqs"
    assert refusal(plan.loader_peak - 1).field == "model.path"
    assert "left by a test" in refusal(0).message


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (2_550_000_000, "2.5 GB")]
)
def test_sizes(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text
