"""Does a fine-tuning begin with what a training ended with, and leave a checkpoint to compare?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from ripresa.cluster.cli import cli
from ripresa.cluster.training.finished import finished_parameters, read_parameters
from ripresa.cluster.training.replay_aware import ReplayTraining
from ripresa.cluster.training.run import CHECKPOINT, STATE, Training, make_trainer, open_training
from ripresa.workers.checkpoint_report import report_checkpoint
from ripresa.workers.demo.training.export import export
from ripresa.workers.demo.training.initial import initial_parameters
from ripresa.workers.demo.training.sizes import Size, config_of
from ripresa.workers.errors import CheckpointError, ConfigError
from ripresa.workers.models.deepseek_v41.config import ModelConfig

DOCUMENT = config_of(Size.TINY)
CONFIG = ModelConfig.from_dict(DOCUMENT)
PARAMETERS = initial_parameters(CONFIG, 9)


def fine_tuning(source: Path, share: float = 0.5) -> ReplayTraining:
    return ReplayTraining(Size.TINY, 4096, 3, 1, False, str(source), share)


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """The folder of a training whose state and checkpoint differ."""
    folder = tmp_path / "training"
    trainer = make_trainer(Training(Size.TINY, 4096, 0, 1, False))
    trainer.number = trainer.plan.num_steps
    with torch.no_grad():
        for name, values in PARAMETERS.items():
            trainer.parameters[name].copy_(values)
    export(folder / CHECKPOINT, DOCUMENT, initial_parameters(CONFIG, 2))
    trainer.save(folder / STATE)
    return folder


def test_it_begins_with_the_state_and_else_with_the_checkpoint(finished: Path) -> None:
    found = finished_parameters(finished, CONFIG)
    assert found.keys() == PARAMETERS.keys()
    assert all(torch.equal(found[name], values) for name, values in PARAMETERS.items())
    trainer = make_trainer(fine_tuning(finished))
    assert all(torch.equal(trainer.parameters[n], values) for n, values in PARAMETERS.items())
    (finished / STATE).unlink()
    stored = initial_parameters(CONFIG, 2)
    for folder in (finished, finished / CHECKPOINT):
        found = finished_parameters(folder, CONFIG)
        for name, values in stored.items():
            assert torch.allclose(found[name], values, rtol=2**-8, atol=0)
    assert read_parameters(finished)[0] == CONFIG


def test_other_sources_are_refused(finished: Path, tmp_path: Path) -> None:
    demo = ModelConfig.from_dict(config_of(Size.DEMO))
    for folder in (finished, finished / CHECKPOINT):
        with pytest.raises(ConfigError, match="another size; name its --size"):
            finished_parameters(folder, demo)
    state = torch.load(finished / STATE, weights_only=True)
    torch.save(state | {"number": 0}, finished / STATE)
    with pytest.raises(ConfigError, match=r"at step 0 of \d+; let that training end"):
        finished_parameters(finished, CONFIG)
    (finished / STATE).write_bytes(b"torn")
    with pytest.raises(ConfigError, match=r"cannot be read.*name the training's checkpoint"):
        finished_parameters(finished, CONFIG)
    with pytest.raises(ConfigError, match="does not exist"):
        finished_parameters(tmp_path, CONFIG)
    (finished / CHECKPOINT / "model.safetensors").unlink()
    with pytest.raises(CheckpointError):
        finished_parameters(finished / CHECKPOINT, CONFIG)


def test_its_samples_are_no_other_trainings_and_half_of_them_are_cut(tmp_path: Path) -> None:
    training = fine_tuning(tmp_path)
    step = training.plan.step(0)
    mine = training.batches.batch(0, step, 0)
    other = Training(Size.TINY, 4096, 3, 1, False).batches.batch(0, step, 0)
    assert not torch.equal(mine.token_ids, other.token_ids)
    assert mine.cuts is not None
    assert other.cuts is None
    uncut = fine_tuning(tmp_path, 0.0).batches.batch(0, step, 0)
    assert torch.equal(uncut.token_ids, mine.token_ids)
    assert uncut.cuts is not None
    assert not uncut.cuts.decoder.any()


def test_a_folder_is_of_one_training(tmp_path: Path) -> None:
    begun = fine_tuning(tmp_path / "source")
    assert open_training(tmp_path / "tuned", begun, None) == begun
    assert open_training(tmp_path / "tuned", begun, minutes=5.0) == begun
    for other in (
        fine_tuning(tmp_path / "other"),
        fine_tuning(tmp_path / "source", 0.0),
        Training(Size.TINY, 4096, 3, 1, False),
    ):
        with pytest.raises(ConfigError, match="go on with the same options"):
            open_training(tmp_path / "tuned", other, None)


def test_a_length_is_needed(tmp_path: Path) -> None:
    command = ["train", "replay", "--from", str(tmp_path), "--folder", str(tmp_path / "tuned")]
    result = CliRunner().invoke(cli, command)
    assert result.exit_code == 2
    assert "give one of --minutes and --tokens" in result.output


@pytest.mark.slow
def test_the_commands_leave_a_checkpoint_and_a_comparison(finished: Path, tmp_path: Path) -> None:
    tuned = tmp_path / "tuned"
    command = ["train", "replay", "--size", "tiny", "--from", str(finished), "--tokens", "4096"]
    for _ in range(2):  # the second time it is finished already
        result = CliRunner().invoke(cli, [*command, "--folder", str(tuned)], catch_exceptions=False)
        assert result.exit_code == 0
        assert f"wrote {tuned / CHECKPOINT}" in result.output
    assert list(report_checkpoint(tuned / CHECKPOINT))
    compare = ["train", "cells", str(finished), str(tuned), "--conversations", "3"]
    found = tmp_path / "cells.json"
    result = CliRunner().invoke(
        cli, [*compare, "--processes", "2", "--json", str(found)], catch_exceptions=False
    )
    assert result.exit_code == 0
    assert len(result.output.splitlines()) >= 11
    entries = json.loads(found.read_text())
    assert {entry["model"] for entry in entries} == {str(finished), str(tuned)}
    assert all(entry["nll"] > 0 for entry in entries)
