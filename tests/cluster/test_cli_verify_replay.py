"""Does `ripresa verify replay` agree with correct files, and tell what is wrong with others?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ripresa.cluster.cli import FAILED, MISUSED, cli


def verify(path: Path) -> Result:
    return CliRunner().invoke(cli, ["verify", "replay", str(path)])


def case() -> dict[str, Any]:
    """Window 8, rewind 2: 40 tokens, four blocks cached, no window: [16, 24) is replayed."""
    return {
        "name": "replayed",
        "note": "",
        "num_tokens": 41,
        "cached_blocks": 3,
        "swa_windows_at": [8],
        "parked_image": None,
        "expected": {
            "kind": "bounded",
            "hit_tokens": 16,
            "block_kv_reused_tokens": 24,
            "replay": [16, 24],
            "encoder_rows": [16, 41],
            "swa_read_floor": 16,
            "block_kv_write_floor": 24,
            "decoder_rows": [33, 41],
            "decoder_read_floor": 33,
            "ratio1_entries_written": [24, 41],
            "ratio2_entries_written": [12, 20],
            "open_pair_token": 40,
            "blocks_completed": [3, 4],
            "encoder_state_exact": False,
        },
    }


def file() -> dict[str, Any]:
    resumed = case()
    resumed["name"] = "resumed"
    resumed["parked_image"] = {"num_tokens": 37, "swa_floor": 9, "decoder_start": 20}
    resumed["expected"] |= {
        "kind": "resume",
        "hit_tokens": 37,
        "block_kv_reused_tokens": 37,
        "replay": None,
        "encoder_rows": [37, 41],
        "swa_read_floor": 9,
        "block_kv_write_floor": 37,
        "decoder_rows": [37, 41],
        "decoder_read_floor": 20,
        "ratio1_entries_written": [37, 41],
        "ratio2_entries_written": [18, 20],
        "blocks_completed": [4],
        "encoder_state_exact": True,
    }
    return {"window": 8, "block": 8, "rewind": 2, "cases": [case(), resumed]}


def written(tmp_path: Path, content: Any) -> Path:
    path = tmp_path / "cases.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_the_worked_cases_agree(shared: Path) -> None:
    result = verify(shared / "cases" / "replay_cases.json")
    assert result.exit_code == 0
    assert result.stdout.count("agrees") == 68
    assert result.stdout.endswith("68 cases agree\n")


def test_a_file_of_other_sizes_agrees(tmp_path: Path) -> None:
    result = verify(written(tmp_path, file()))
    assert result.exit_code == 0
    assert result.stdout == "replayed: agrees\nresumed: agrees\n2 cases agree\n"


@pytest.mark.parametrize("name", list(case()["expected"]))
def test_every_expected_number_is_compared(tmp_path: Path, name: str) -> None:
    wrong = file()
    expected = wrong["cases"][0]["expected"]
    others = {"kind": "cold", "replay": None, "encoder_state_exact": True, "open_pair_token": None}
    value = expected[name]
    expected[name] = others.get(name, value + 1 if isinstance(value, int) else [0, 1])
    result = verify(written(tmp_path, wrong))
    assert result.exit_code == FAILED
    first, second, last = result.stdout.splitlines()
    assert first == (
        f"replayed: {name} is {json.dumps(value)} and DIFFERS from "
        f"the expected {json.dumps(expected[name])}"
    )
    assert (second, last) == ("resumed: agrees", "1 of 2 cases DIFFER")


def change(path: str, value: Any) -> dict[str, Any]:
    changed: Any = file()
    *parents, name = path.split(".")
    parent = changed
    for step in parents:
        parent = parent[int(step) if step.isdigit() else step]
    if value is None:
        del parent[name]
    else:
        parent[name] = value
    return dict(changed)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[]", "file: must be an object"),
        ('{"window": 8, "window": 8}', "window: is given twice"),
        (change("extra", 1), "extra: is no field; known are window, block, rewind, cases"),
        (change("window", "8"), 'window: cannot be "8"'),
        (change("block", 16), "block: must be the window 8, got 16"),
        (change("rewind", None), "rewind: is missing"),
        (change("cases", []), "cases: the file has no case"),
        (change("cases.1.expcted", {}), "cases[1].expcted: is no field"),
        (change("cases.1.num_tokens", 0), "cases[1].num_tokens: cannot be 0"),
        (change("cases.0.swa_windows_at", [12]), "cases[0].swa_windows_at: 12 is no boundary"),
        (change("cases.0.expected.kind", None), "cases[0].expected.kind: is missing"),
        (change("cases.0.expected.hit_tokens", True), "cases[0].expected.hit_tokens: cannot be"),
        (change("cases.1.parked_image.mode", "x"), "cases[1].parked_image.mode: is no field"),
        (change("window", 7) | {"block": 7}, "window: must be even"),
    ],
    ids=str,
)
def test_another_layout_is_refused(tmp_path: Path, content: Any, words: str) -> None:
    result = verify(written(tmp_path, content))
    assert result.exit_code == MISUSED
    assert words in result.stderr
    assert result.stdout == ""


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    result = verify(tmp_path / "none.json")
    assert result.exit_code == MISUSED
    assert "none.json cannot be read" in result.stderr


def test_help_shows_an_example() -> None:
    result = CliRunner().invoke(cli, ["verify", "replay", "--help"])
    assert "  ripresa verify replay cases/replay_cases.json" in result.output
