"""How does a finished training become the bundled model? Its weights, its log and where it ran."""

from __future__ import annotations

import json
import lzma
import os
import platform
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ripresa.cluster.training.run import CHECKPOINT, LOG, PLAN, read_options
from ripresa.cluster.training.step_log import entries
from ripresa.workers.checkpoint_files import CheckpointFiles
from ripresa.workers.demo.build_tokenizer import TOKENIZER
from ripresa.workers.demo.training.sizes import Size, config_of
from ripresa.workers.errors import ConfigError

WEIGHTS = "model.safetensors"
KEPT_LOG = "training_log.jsonl.xz"
FIGURES = "figures.json"


def bundle_training(
    folder: Path, commits: Sequence[str], echo: Callable[[str], None], target: Path | None = None
) -> Path:
    """Copy checkpoint, logs and options; figures of other weights are removed.

    Everything is read before anything is changed.

    Args:
        folder: of a training.
        commits: of the code of each training that led to the weights, the first one first.
        target: where to; None is where the bundled model of this size is.

    Returns:
        The bundled model's folder.

    Raises:
        ConfigError: the training has not ended, is of another geometry or tokenizer, led on from
            more or fewer others than there are commits, or lacks a log.
    """
    checkpoint = folder / CHECKPOINT
    if not (checkpoint / WEIGHTS).exists():
        raise ConfigError(
            "FOLDER", f"{folder} holds no finished training; give `ripresa train demo` its time"
        )
    size = Size(read_options(folder)["size"])
    expected = {"config.json": config_of(size), "tokenizer.json": json.loads(TOKENIZER.read_text())}
    for name, document in expected.items():
        if json.loads((checkpoint / name).read_text()) != document:
            raise ConfigError(
                "FOLDER", f"{name} of {checkpoint} is not that of today's code for {size.value}"
            )
    folders = _trainings(folder)
    if len(folders) != len(commits):
        raise ConfigError(
            "--commit",
            f"{len(folders)} trainings led to {folder}: {', '.join(map(str, folders))}; give a "
            f"commit for each of them, in this order, and not {len(commits)}",
        )
    trainings = [_options(f) | {"commit": c} for f, c in zip(folders, commits, strict=True)]
    log = "".join(
        json.dumps({"training": number} | entry) + "\n"
        for number, each in enumerate(folders)
        for entry in _log(each)
    )
    target = target or size.bundled
    target.mkdir(exist_ok=True)
    (target / FIGURES).unlink(missing_ok=True)
    for name in (*expected, WEIGHTS):
        temporary = target / f".{name}"
        shutil.copyfile(checkpoint / name, temporary)
        temporary.replace(target / name)
    (target / PLAN).write_text(json.dumps(trainings, indent=2) + "\n")
    (target / KEPT_LOG).write_bytes(lzma.compress(log.encode()))
    CheckpointFiles(target).check(echo, record=True)
    return target


def _trainings(folder: Path) -> list[Path]:
    """A training's folder behind those of the trainings that it went on from."""
    source = read_options(folder).get("source")
    if source is None or not (Path(source) / PLAN).exists():
        return [folder]
    return [*_trainings(Path(source)), folder]


def _log(folder: Path) -> list[dict[str, Any]]:
    """Every step and table of a training.

    Raises:
        ConfigError: there is no step.
    """
    try:
        found = entries((folder / LOG).read_text().splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "FOLDER", f"{folder / LOG} cannot be read: {error}; put a copy of it there"
        ) from error
    if not any("step" in entry for entry in found):
        raise ConfigError("FOLDER", f"{folder / LOG} tells of no step; put a whole copy there")
    return found


def _options(folder: Path) -> dict[str, object]:
    options: dict[str, object] = read_options(folder)
    if "source" in options:  # its name alone means something elsewhere
        options["source"] = Path(str(options["source"])).name
    return options | {"machine": machine()}


def machine() -> str:
    """This machine's processor, and how many of its cores are here."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"
