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

from ripresa.cluster.training.finished import finished_parameters, read_parameters
from ripresa.cluster.training.run import CHECKPOINT, LOG, PLAN, STATE, read_options
from ripresa.cluster.training.step_log import entries
from ripresa.workers.checkpoint_files import CheckpointFiles
from ripresa.workers.demo.build_tokenizer import TOKENIZER
from ripresa.workers.demo.training.plan import TOKENS_PER_STEP
from ripresa.workers.demo.training.sizes import Size, config_of
from ripresa.workers.errors import ConfigError
from ripresa.workers.models.deepseek_v41.config import ModelConfig

WEIGHTS = "model.safetensors"
KEPT_LOG = "training_log.jsonl.xz"
FIGURES = "figures.json"
_KINDS = {"size": str, "num_tokens": int, "seed": int, "num_processes": int, "is_narrow": bool}
"""Options that every training has."""


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
            more or fewer others than there are commits, or lacks a part of its log.
        CheckpointError: its weights cannot be read, are of another geometry, or not finite.
    """
    checkpoint = folder / CHECKPOINT
    if not (checkpoint / WEIGHTS).exists():
        raise ConfigError(
            "FOLDER", f"{folder} holds no finished training; give `ripresa train demo` its time"
        )
    size = Size(_options(folder)["size"])
    expected = {"config.json": config_of(size), "tokenizer.json": json.loads(TOKENIZER.read_text())}
    for name, document in expected.items():
        if _json(checkpoint / name) != document:
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
    _check_weights(folder, size)
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


def _check_weights(folder: Path, size: Size) -> None:
    """See that the checkpoint is whole and finite, and that a state beside it has ended."""
    read_parameters(folder)
    if (folder / STATE).exists():
        try:
            finished_parameters(folder, ModelConfig.from_dict(config_of(size)))
        except ConfigError as error:
            raise ConfigError("FOLDER", error.message) from error


def _json(path: Path) -> object:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            "FOLDER", f"{path} cannot be read: {error}; put a copy of it there"
        ) from error


def _log(folder: Path) -> list[dict[str, Any]]:
    """Every step and table of a training.

    Raises:
        ConfigError: it lacks steps.
    """
    try:
        found = entries((folder / LOG).read_text().splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "FOLDER", f"{folder / LOG} cannot be read: {error}; put a copy of it there"
        ) from error
    options = _options(folder)
    per_step = TOKENS_PER_STEP * options["num_processes"]
    num_steps = max(options["num_tokens"] // per_step, 1)
    steps = [entry["step"] for entry in found if "step" in entry]
    if steps != list(range(1, num_steps + 1)):
        raise ConfigError(
            "FOLDER",
            f"{folder / LOG} tells of {len(steps)} steps, the training has {num_steps}; put a "
            "whole copy there, or let the training end",
        )
    return found


def _options(folder: Path) -> dict[str, Any]:
    """All that a card tells of a training; raises ConfigError."""
    options = read_options(folder)
    for name, kind in _KINDS.items():
        if type(options.get(name)) is not kind:
            raise ConfigError(
                "FOLDER",
                f"{name} in {folder / PLAN} is {options.get(name)!r}, and must be a "
                f"{kind.__name__}; put a copy of the training's options there",
            )
    if options["size"] not in set(Size) or options["num_processes"] < 1:
        raise ConfigError(
            "FOLDER", f"{folder / PLAN} holds no options of a training; put a copy of them there"
        )
    if "source" in options:  # its name alone means something elsewhere
        options["source"] = Path(str(options["source"])).name
    return options | {"machine": machine()}


def machine() -> str:
    """This machine's processor, and how many of its cores are here."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"
