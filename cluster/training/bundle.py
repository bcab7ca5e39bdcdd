"""How does a finished training become the bundled model? Its weights, its log and where it ran."""

from __future__ import annotations

import json
import lzma
import os
import platform
import shutil
from collections.abc import Callable
from pathlib import Path

from ripresa.cluster.training.run import CHECKPOINT, LOG, PLAN
from ripresa.workers.checkpoint_files import CheckpointFiles
from ripresa.workers.demo.checkpoint import DEMO_MODEL
from ripresa.workers.errors import ConfigError

WEIGHTS = "model.safetensors"
KEPT_LOG = "training_log.jsonl.xz"
FIGURES = "figures.json"
_SAME = ("config.json", "tokenizer.json")


def bundle_training(
    source: Path, commit: str, echo: Callable[[str], None], target: Path = DEMO_MODEL
) -> None:
    """Copy weights, log and options; figures of other weights are removed.

    Args:
        source: folder of a training of the bundled model's geometry.
        commit: of the code that trained it.
        target: the bundled model's folder.

    Raises:
        ConfigError: the training has not ended, or is of another geometry or tokenizer.
    """
    checkpoint = source / CHECKPOINT
    if not (checkpoint / WEIGHTS).exists():
        raise ConfigError(
            "FOLDER", f"{source} holds no finished training; give `ripresa train demo` its time"
        )
    for name in _SAME:
        if json.loads((checkpoint / name).read_text()) != json.loads((target / name).read_text()):
            raise ConfigError("FOLDER", f"{name} of {checkpoint} is not the bundled model's")
    options = json.loads((source / PLAN).read_text())
    options |= {"commit": commit, "machine": machine()}
    if "source" in options:  # of a fine-tuning: its name alone means something elsewhere
        options["source"] = Path(options["source"]).name
    (target / FIGURES).unlink(missing_ok=True)
    temporary = target / f".{WEIGHTS}"
    shutil.copyfile(checkpoint / WEIGHTS, temporary)
    temporary.replace(target / WEIGHTS)
    (target / PLAN).write_text(json.dumps(options, indent=2) + "\n")
    (target / KEPT_LOG).write_bytes(lzma.compress((source / LOG).read_bytes()))
    CheckpointFiles(target).check(echo, record=True)


def machine() -> str:
    """This machine's processor, and how many of its cores are here."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"
