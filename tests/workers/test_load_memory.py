"""Does loading take the planned memory, and is what cannot fit refused before it begins?"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from edit_shard import remove_tensor
from tiny_model import tiny_checkpoint

from ripresa.workers import worker_process
from ripresa.workers.cache.kv_layout import KVFormat
from ripresa.workers.config import EngineConfig
from ripresa.workers.errors import ConfigError
from ripresa.workers.host_memory import AvailableMemory
from ripresa.workers.memory_plan import plan_memory
from ripresa.workers.model_runner import kv_layout
from ripresa.workers.models.deepseek_v41.tensor_specs import Half
from ripresa.workers.models.tiny_checkpoint import WeightFormat
from ripresa.workers.transfer.base import LaneConfig
from ripresa.workers.worker_settings import WorkerSettings

LOAD = """
import ctypes
import sys
from pathlib import Path
import torch
from ripresa.kernels import dispatch as ops
from ripresa.workers.models.checkpoint import Checkpoint
from ripresa.workers.models.deepseek_v41.config import ModelConfig
from ripresa.workers.models.deepseek_v41.weights import Half, load_weights

def kilobytes(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))

folder, half = Path(sys.argv[1]), Half(sys.argv[2])
config = ModelConfig.from_file(folder / "config.json")
torch.set_num_threads(1)
ops.dequantise_f8(*ops.quantise_f8(torch.randn(512, 512)))  # loads what first calls load
# Pages of files, libraries among them, come and go as the system likes.
before, files = kilobytes("RssAnon:"), kilobytes("RssFile:")
with Checkpoint(folder) as checkpoint:
    weights = load_weights(checkpoint, config, half)
peak = kilobytes("VmHWM:") - max(files, kilobytes("RssFile:"))
ctypes.CDLL(None).malloc_trim(0)  # what is free but kept by the allocator
print(1024 * (peak - before), 1024 * (kilobytes("RssAnon:") - before))
"""


@pytest.mark.slow
@pytest.mark.parametrize("half", Half)
@pytest.mark.parametrize("weight_format", [WeightFormat.BF16, WeightFormat.RELEASED])
def test_loading_peaks_where_the_plan_says(
    tmp_path: Path, half: Half, weight_format: WeightFormat
) -> None:
    folder = tmp_path / "model"
    config = tiny_checkpoint(
        folder,
        weight_format,
        hidden_size=512,
        moe_intermediate_size=512,
        n_routed_experts=16,
        vocab_size=20_000,
        num_nextn_predict_layers=0,
    )
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(folder), half.value],
        capture_output=True,
        text=True,
        check=True,
    )
    peak, kept = map(int, done.stdout.split())
    layout = kv_layout(config, KVFormat.PACKED, "")
    plan = plan_memory(config, half, EngineConfig(), LaneConfig(), layout, 0)
    slack = (24 << 20) + plan.weights // 20  # the allocator's, and of decoding in pieces
    assert plan.weights > 100_000_000, "large beside the slack"
    assert kept == pytest.approx(plan.weights, abs=slack)
    assert peak < plan.loader_peak + slack


def test_a_worker_refuses_what_cannot_fit_before_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_checkpoint(tmp_path)
    remove_tensor(tmp_path, "norm.weight")  # an error of its own if loading began
    monkeypatch.setattr(worker_process, "available_memory", lambda: AvailableMemory(1000, "a test"))
    settings = WorkerSettings(str(tmp_path), EngineConfig())
    with pytest.raises(ConfigError, match=r"1\.0 kB are left by a test") as caught:
        asyncio.run(worker_process.start_runner(settings, Half.ALL))
    assert caught.value.field == "model.path"


def test_the_plan_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = WorkerSettings("", EngineConfig(num_blocks=16, max_num_seqs=2))
    with caplog.at_level("INFO", logger="ripresa.workers.worker_process"):
        asyncio.run(worker_process.start_runner(settings, Half.ENCODER))
    assert "memory plan: encoders: one worker with the encoder half" in caplog.text
    assert "16 blocks of" in caplog.text
    assert "available: " in caplog.text
