"""Does `ripresa train demo` begin, go on, refuse another training, and end in a checkpoint?"""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from ripresa.cluster.cli import cli
from ripresa.cluster.training.run import (
    CHECKPOINT,
    LOG,
    PLAN,
    STATE,
    Training,
    open_training,
    run_training,
)
from ripresa.workers.checkpoint_report import report_checkpoint
from ripresa.workers.demo.training.sizes import Size
from ripresa.workers.errors import ConfigError, RipresaError

ASKED = Training(Size.TINY, 4096, seed=0, num_processes=1, is_narrow=False)


def test_a_begun_training_goes_on_with_its_own_tokens(tmp_path: Path) -> None:
    folder = tmp_path / "training"
    assert open_training(folder, ASKED, None) == ASKED
    assert open_training(folder, ASKED, None) == ASKED
    longer = replace(ASKED, num_tokens=10**6)
    assert open_training(folder, longer, minutes=75.0) == ASKED


@pytest.mark.parametrize("text", ["", "{", "[1]", "{}"])
def test_torn_options_are_refused_in_words(tmp_path: Path, text: str) -> None:
    (tmp_path / PLAN).write_text(text)
    with pytest.raises(ConfigError, match=r"where there is no state\.pt beside it, remove it"):
        open_training(tmp_path, ASKED, None)


def test_a_kill_while_the_options_are_written_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        open_training(tmp_path, ASKED, None)
    monkeypatch.undo()
    assert not (tmp_path / PLAN).exists()
    assert open_training(tmp_path, ASKED, None) == ASKED


@pytest.mark.parametrize(
    "changes",
    [
        {"num_tokens": 2048},
        {"size": Size.DEMO},
        {"seed": 1},
        {"num_processes": 2},
        {"is_narrow": True},
    ],
)
def test_other_options_are_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    open_training(tmp_path, ASKED, None)
    with pytest.raises(ConfigError, match="go on with the same options"):
        open_training(tmp_path, replace(ASKED, **changes), None)  # type: ignore[arg-type]


def test_one_process_trains_in_a_folder(tmp_path: Path) -> None:
    open_training(tmp_path, ASKED, None)
    holder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    with pytest.raises(RipresaError, match=f"another process trains in {tmp_path}"):
        run_training(tmp_path, ASKED, print)
    os.close(holder)
    assert not (tmp_path / LOG).exists()


@pytest.mark.parametrize("options", [[], ["--tokens", "1", "--minutes", "1"]])
def test_a_length_is_needed(options: list[str], tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["train", "demo", "--folder", str(tmp_path), *options])
    assert result.exit_code == 2
    assert "give one of --minutes and --tokens" in result.output


@pytest.mark.slow
def test_the_command_leaves_a_checkpoint(tmp_path: Path) -> None:
    command = ["train", "demo", "--size", "tiny", "--tokens", "2048", "--folder", str(tmp_path)]
    for _ in range(2):  # the second time it is finished already
        result = CliRunner().invoke(cli, command, catch_exceptions=False)
        assert result.exit_code == 0
        assert f"wrote {tmp_path / CHECKPOINT}" in result.output
    assert (tmp_path / STATE).exists()
    (line,) = (tmp_path / LOG).read_text().splitlines()
    assert json.loads(line)["tokens"] == 2048
    assert list(report_checkpoint(tmp_path / CHECKPOINT))  # raises if it is none
