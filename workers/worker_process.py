"""What do both kinds of worker do at their start? Load a half, warm it up, prepare a transport."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import torch

from ripresa.workers.demo.checkpoint import DEMO_MODEL
from ripresa.workers.host_memory import available_memory
from ripresa.workers.memory_plan import HELD, plan_memory, size
from ripresa.workers.model_runner import (
    DEFAULT_WORKSPACE_BYTES,
    TorchModelRunner,
    kv_layout,
    load_runner,
)
from ripresa.workers.models.checkpoint import ProgressLines
from ripresa.workers.models.deepseek_v41.config import ModelConfig
from ripresa.workers.models.deepseek_v41.weights import Half
from ripresa.workers.scheduling.step_plan import SequenceStep, StepPlan
from ripresa.workers.transfer.base import Transport
from ripresa.workers.transfer.registry import choose_transport, create_transport
from ripresa.workers.worker_settings import WorkerSettings

logger = logging.getLogger(__name__)

DEVICE = torch.device("cpu")
"""Where weights and KV live."""


def model_folder(path: str) -> Path:
    """The checkpoint folder that a `model.path` setting names; empty is the demo model."""
    return Path(path) if path else DEMO_MODEL


async def start_runner(settings: WorkerSettings, half: Half) -> TorchModelRunner:
    """Load one half of the model and run one step of it, without blocking the event loop.

    Raises:
        RipresaError: the checkpoint or its config is wrong.
    """
    _show_log()
    torch.set_num_threads(settings.torch_threads)
    return await asyncio.to_thread(_load, settings, half)


def _show_log() -> None:
    """Write this package's log to stderr, which Ray keeps as the worker's `.err` file.

    Without a handler only warnings would reach it.
    """
    package = logging.getLogger("ripresa")
    if not package.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
        package.addHandler(handler)
        package.setLevel(logging.INFO)


def _load(settings: WorkerSettings, half: Half) -> TorchModelRunner:
    # The number of threads is a property of the calling thread's pool.
    torch.set_num_threads(settings.torch_threads)
    engine = settings.engine
    folder = model_folder(settings.model_path)
    _check_memory(settings, folder, half)
    runner = load_runner(
        folder,
        half,
        num_blocks=engine.num_blocks,
        num_slots=engine.max_num_seqs,
        numerics=engine.numerics,
        kv_format=engine.kv_format,
        round_inputs=engine.w8a8,
        engram_placement=engine.engram_placement,
        progress=ProgressLines(f"reading {HELD[half]}", logger.info),
    )
    _warm_up(runner, half)
    logger.info(
        "%s half: %d parameters, %.1f MB of KV memory",
        half,
        runner.weights.num_parameters,
        runner.cache.num_bytes / 1e6,
    )
    return runner


def _check_memory(settings: WorkerSettings, folder: Path, half: Half) -> None:
    """Log what this worker will take, and refuse what cannot fit before anything is read."""
    config = ModelConfig.from_file(folder / "config.json")
    plan = plan_memory(
        config,
        half,
        settings.engine,
        settings.lanes,
        kv_layout(config, settings.engine.kv_format, ""),
        DEFAULT_WORKSPACE_BYTES,
    )
    available = available_memory()
    left = "unknown" if available is None else f"{size(available.num_bytes)}, {available.source}"
    logger.info("memory plan: %s\navailable: %s", "\n".join(plan.lines()), left)
    if available is not None:
        plan.require_fit(available)


def _warm_up(runner: TorchModelRunner, half: Half) -> None:
    """Run a prompt of one window and one more row, so that no request pays for first calls."""
    window = runner.window
    for start, stop in ((0, window), (window, window + 1)):
        step = SequenceStep(
            slot=0,
            block_table=(0, min(1, runner.num_blocks - 1)),
            token_ids=(0,) * (stop - start),
            lookback_ids=(0,) * min(3, start),
            encoder_start=start,
            decoder_start=start if half is Half.ALL else stop,
            decoder_stop=stop,
            return_logits=half is Half.ALL,
        )
        runner.execute(StepPlan(0, (step,)))
    runner.release_slot(0)


def transport_name(setting: str) -> str:
    """The transport that a setting means between two workers of this build, which run on CPUs.

    Raises:
        ConfigError: the setting names no transport.
    """
    return choose_transport(setting, DEVICE, DEVICE)


def start_transport(settings: WorkerSettings) -> Transport:
    """This worker's transport.

    Raises:
        ConfigError: the setting names no transport, or it cannot work here.
    """
    name = transport_name(settings.transport)
    return create_transport(name, settings.host, DEVICE, settings.lanes)
