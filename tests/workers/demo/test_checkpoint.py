"""Is the bundled model a whole checkpoint, and the one that its record and card speak of?"""

from __future__ import annotations

import json

from ripresa.cluster.training.bundle import FIGURES, WEIGHTS
from ripresa.cluster.training.card import BEGIN, CARD, END, generated
from ripresa.cluster.training.figures import Figures
from ripresa.workers.checkpoint_files import CheckpointFiles
from ripresa.workers.demo.checkpoint import DEMO_MODEL
from ripresa.workers.model_runner import model_digest
from ripresa.workers.models.checkpoint import Checkpoint
from ripresa.workers.models.deepseek_v41.config import ModelConfig
from ripresa.workers.models.deepseek_v41.inventory import take_inventory
from ripresa.workers.worker_process import model_folder

MAX_BYTES = 30_000_000


def test_the_default_is_a_whole_checkpoint_of_the_released_form() -> None:
    assert model_folder("") == DEMO_MODEL
    with Checkpoint(DEMO_MODEL) as checkpoint:
        config = ModelConfig.from_file(DEMO_MODEL / "config.json")
        inventory = take_inventory(checkpoint.entries, config)
        kinds = {entry.dtype for entry in checkpoint.entries.values()}
    assert len(inventory.stored) == len(checkpoint.entries)
    assert kinds == {"BF16", "F32"}
    assert (DEMO_MODEL / WEIGHTS).stat().st_size < MAX_BYTES


def test_the_files_are_those_of_the_record() -> None:
    lines: list[str] = []
    assert CheckpointFiles(DEMO_MODEL).check(lines.append)
    verdicts = [line for line in lines if "sha256" in line]
    assert len(verdicts) == 3
    assert all(line.endswith("as in SHA256SUMS") for line in verdicts)


def test_the_figures_are_of_these_weights_and_the_card_is_made_of_them() -> None:
    figures = Figures.load(DEMO_MODEL / FIGURES)
    config = ModelConfig.from_file(DEMO_MODEL / "config.json")
    assert figures.weights == model_digest(DEMO_MODEL, config)
    part = (DEMO_MODEL / CARD).read_text().partition(BEGIN)[2].partition(END)[0]
    assert part.strip() == "\n".join(generated())


def test_what_was_trained_is_told() -> None:
    options = json.loads((DEMO_MODEL / "training.json").read_text())
    assert options["size"] == "demo"
    assert {"seed", "num_tokens", "commit", "machine"} <= options.keys()
