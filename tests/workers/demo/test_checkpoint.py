"""Is the bundled model a whole checkpoint, and the one that its record and card speak of?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ripresa.cluster.training.bundle import FIGURES, WEIGHTS
from ripresa.cluster.training.card import BEGIN, CARD, END, generated
from ripresa.cluster.training.figures import Figures
from ripresa.workers.checkpoint_files import CheckpointFiles
from ripresa.workers.demo.checkpoint import DEMO_MODEL
from ripresa.workers.demo.training.sizes import Size, config_of
from ripresa.workers.model_runner import model_digest
from ripresa.workers.models.checkpoint import Checkpoint
from ripresa.workers.models.deepseek_v41.config import ModelConfig
from ripresa.workers.models.deepseek_v41.inventory import take_inventory
from ripresa.workers.worker_process import model_folder

MAX_BYTES = 40_000_000


SIZES = list(Size)
FOLDERS = [size.bundled for size in SIZES]


def test_the_default_is_the_bundled_model() -> None:
    assert model_folder("") == DEMO_MODEL


@pytest.mark.parametrize("size", SIZES)
def test_it_is_a_whole_checkpoint_of_the_released_form(size: Size) -> None:
    with Checkpoint(size.bundled) as checkpoint:
        config = ModelConfig.from_file(size.bundled / "config.json")
        inventory = take_inventory(checkpoint.entries, config)
        kinds = {entry.dtype for entry in checkpoint.entries.values()}
    assert config == ModelConfig.from_dict(config_of(size))
    assert len(inventory.stored) == len(checkpoint.entries)
    assert kinds == {"BF16", "F32"}
    tokenizer = (size.bundled / "tokenizer.json").read_bytes()
    assert tokenizer == (DEMO_MODEL / "tokenizer.json").read_bytes()


def test_both_are_small() -> None:
    assert sum((folder / WEIGHTS).stat().st_size for folder in FOLDERS) < MAX_BYTES


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_files_are_those_of_the_record(folder: Path) -> None:
    lines: list[str] = []
    assert CheckpointFiles(folder).check(lines.append)
    verdicts = [line for line in lines if "sha256" in line]
    assert len(verdicts) == 3
    assert all(line.endswith("as in SHA256SUMS") for line in verdicts)


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_figures_are_of_these_weights_and_the_card_is_made_of_them(folder: Path) -> None:
    figures = Figures.load(folder / FIGURES)
    config = ModelConfig.from_file(folder / "config.json")
    assert figures.weights == model_digest(folder, config)
    part = (folder / CARD).read_text().partition(BEGIN)[2].partition(END)[0]
    assert part.strip() == "\n".join(generated(folder))


@pytest.mark.parametrize("size", SIZES)
def test_what_was_trained_is_told(size: Size) -> None:
    trainings = json.loads((size.bundled / "training.json").read_text())
    for options in trainings:
        assert options["size"] == size
        assert {"seed", "num_tokens", "commit", "machine"} <= options.keys()
