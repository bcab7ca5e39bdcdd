"""Does a training that goes on begin where the other ended, with samples that it did not read?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from ripresa.cluster.cli import cli
from ripresa.cluster.training.continued import ContinuedTraining
from ripresa.cluster.training.run import make_trainer
from ripresa.cluster.training.samples import DIETS, LedgerBatches
from ripresa.workers.demo.build_tokenizer import TOKENIZER
from ripresa.workers.demo.ledger.conversation import Task
from ripresa.workers.demo.ledger.draws import Draws, Split
from ripresa.workers.demo.ledger.filler import paragraphs
from ripresa.workers.demo.ledger.scripts import draw_script
from ripresa.workers.demo.training.export import export
from ripresa.workers.demo.training.initial import initial_parameters
from ripresa.workers.demo.training.plan import Phase, Step
from ripresa.workers.demo.training.sizes import Size, config_of
from ripresa.workers.models.deepseek_v41.config import ModelConfig

CONFIG = ModelConfig.from_dict(config_of(Size.TINY))


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    export(tmp_path / "finished", config_of(Size.TINY), initial_parameters(CONFIG, 5))
    return tmp_path / "finished"


def test_it_begins_with_what_the_other_ended_with_and_reads_other_samples(finished: Path) -> None:
    trainer = make_trainer(ContinuedTraining(Size.TINY, 8192, 3, 1, False, str(finished)))
    for name, values in initial_parameters(CONFIG, 5).items():
        assert torch.allclose(trainer.parameters[name], values, rtol=2**-8, atol=0)
    step = Step(Phase.DISTANT, 512, 2, False, 1.0)
    batches = ContinuedTraining(Size.TINY, 8192, 3, 1, False, str(finished)).batches
    others = LedgerBatches(TOKENIZER, 3)
    assert not torch.equal(batches.batch(0, step, 0).token_ids, others.batch(0, step, 0).token_ids)


def test_most_of_its_questions_are_about_what_was_read_before() -> None:
    far = {Task.FAR, Task.NEEDLE, Task.UPDATE, Task.CALC}
    shares = {}
    for phase in (Phase.FULL, Phase.DISTANT):
        turns = [
            turn
            for index in range(40)
            for turn in draw_script(
                Draws(Split.TRAINING, index), DIETS[phase].mix, paragraphs(Split.TRAINING), 2400
            ).turns
        ]
        shares[phase] = sum(turn.task in far for turn in turns) / len(turns)
    assert shares[Phase.DISTANT] > max(shares[Phase.FULL], 0.5)


@pytest.mark.slow
def test_the_command_leaves_a_checkpoint_and_goes_on_with_the_same_options(
    finished: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "longer"
    command = ["train", "continue", "--size", "tiny", "--tokens", "2048", "--folder", str(folder)]
    run = CliRunner().invoke(cli, [*command, "--from", str(finished)])
    assert run.exit_code == 0, run.output
    assert (folder / "checkpoint" / "model.safetensors").exists()
    assert json.loads((folder / "training.json").read_text())["source"] == str(finished)
    again = CliRunner().invoke(cli, [*command, "--from", str(tmp_path)])
    assert again.exit_code != 0
    assert "holds a training of" in again.output
