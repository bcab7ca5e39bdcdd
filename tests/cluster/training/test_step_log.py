"""Does a log tell each step once, whatever was killed?"""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from ripresa.cluster.training.step_log import StepLog, entries
from ripresa.workers.errors import RipresaError


def step(number: int, loss: float) -> dict[str, object]:
    return {"step": number, "tokens": 10 * number, "loss": loss}


def test_going_on_drops_what_lies_behind_the_state(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with StepLog(path, 0) as log:
        for number in (1, 2, 3, 4):
            log.write(step(number, 1.0))
            log.write({"tokens": 10 * number, "table": "T1"})
    with open(path, "a") as torn:
        torn.write('{"step": 5, "tok')
    with StepLog(path, 20) as log:  # the state was that of step 2
        log.write(step(3, 2.0))
    told = [json.loads(line) for line in path.read_text().splitlines()]
    assert [e.get("step", e.get("table")) for e in told] == [1, "T1", 2, "T1", 3]
    assert told[-1]["loss"] == 2.0
    assert [p.name for p in tmp_path.iterdir()] == ["log.jsonl"]


def test_a_log_with_steps_told_twice_is_read_as_what_led_to_its_end() -> None:
    lines = [step(1, 1.0), step(2, 1.0), {"tokens": 20, "table": "T1"}, step(3, 1.0), step(2, 2.0)]
    assert entries([*map(json.dumps, lines), "torn", "3"]) == [step(1, 1.0), step(2, 2.0)]


def test_a_log_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(RipresaError, match="make room, and run the same command again"):
        StepLog(tmp_path, 0)


def test_a_disk_that_is_full_is_told_and_what_was_written_stays(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with StepLog(path, 0) as log:
            log.write(step(1, 1.0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, hard))
            with pytest.raises(RipresaError, match="make room"):
                log.write(step(2, 1.0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert entries(path.read_text().splitlines()) == [step(1, 1.0)]
