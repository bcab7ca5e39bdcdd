"""Does `ripresa bench trace` print its table, and name what is wrong with a file?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from scripted_inference import Script, scripted_gateways

from ripresa.cluster.cli import FAILED, MISUSED, cli
from ripresa.protos import ripresa_pb2 as pb


def bench(path: Path, *options: str) -> Result:
    return CliRunner().invoke(cli, ["bench", "trace", str(path), *options])


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    lines = [
        {"timestamp": t, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, t]}
        for t in range(10, 30)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def test_every_policy_has_a_line(trace: Path) -> None:
    result = bench(trace, "--workers", "2", "--capacity", "4000")
    assert result.exit_code == 0, result.output
    first, _, header, *rows, last = result.output.splitlines()
    assert "20 prompts of 20 conversations" in first
    assert header.split() == ["policy", "hit", "ratio", "worst/mean", "pulled", "moved", "uncached"]
    # 19 of 20 prompts find 896 of 1,100 tokens, below the cap.
    assert [row.split()[-5] for row in rows[2:]] == ["0.774", "0.774"]
    assert last == "directory / one cache: 1.000"


def test_reading_may_stop_early(trace: Path) -> None:
    assert "3 prompts" in bench(trace, "--max-lines", "3").output


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--workers", "0"), "--workers"),
        (("--capacity", "100"), "--capacity"),
        (("--spread-hours", "-1"), "--spread-hours"),
        (("--max-lines", "0"), "--max-lines"),
    ],
)
def test_impossible_options_are_named(trace: Path, options: tuple[str, ...], named: str) -> None:
    result = bench(trace, *options)
    assert result.exit_code == MISUSED
    assert named in result.output


def test_bad_lines_and_missing_files_are_named(trace: Path, tmp_path: Path) -> None:
    with trace.open("a") as file:
        file.write("{\n")
    result = bench(trace)
    assert result.exit_code == MISUSED
    assert "trace.jsonl:21" in result.output
    assert bench(tmp_path / "none").exit_code in (FAILED, MISUSED)


def test_a_live_run_sends_its_key(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = [
        pb.GenerateResponse(started=pb.Started(stream_id="s")),
        pb.GenerateResponse(finished=pb.Finished(reason=pb.FINISH_REASON_LENGTH)),
        pb.GenerateResponse(completed=pb.Completed(usage=pb.Usage(prompt_tokens=9))),
    ]
    for sequence, event in enumerate(answer):
        event.sequence = sequence
    script = Script(answer)
    with scripted_gateways(script) as (address,):
        live = ("--address", address, "--max-prompts", "2")
        for options in (("--api-key", "k"), ()):
            result = bench(trace, *live, *options)
            assert result.exit_code == 0, result.output
        monkeypatch.setenv("RIPRESA_API_KEY", "e")
        assert bench(trace, *live).exit_code == 0
    sent = [told.get("authorization") for told in script.metadata]
    assert sent == [*["Bearer k"] * 2, None, None, *["Bearer e"] * 2]
