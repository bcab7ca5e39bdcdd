"""Does each test run in exactly one tier, and does the Makefile say what it can do?"""

from __future__ import annotations

import os
import re
import subprocess
from itertools import product
from pathlib import Path

import pytest

INHERITED = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")
MARKERS = ("cluster", "slow", "long")
KERNEL_FOLDERS = ("tests/kernels_interp", "tests/kernels_compile")


def run_make(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run make; the flags of a make that runs these tests do not reach it."""
    environment = {name: value for name, value in os.environ.items() if name not in INHERITED}
    return subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=repository,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def make(repository: Path, *arguments: str) -> str:
    """What a make that succeeds prints."""
    done = run_make(repository, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def dry_run(repository: Path, target: str) -> str:
    """The commands that a target would run, its installation taken as done."""
    return make(repository, "--dry-run", "--assume-old=.venv/.installed", target)


def expressions(repository: Path, target: str) -> set[str]:
    return set(re.findall(r'pytest .*?-m "([^"]+)"', dry_run(repository, target)))


@pytest.mark.parametrize("marked", [*product([False, True], repeat=len(MARKERS))])
def test_tiers_neither_overlap_nor_leave_a_gap(repository: Path, marked: tuple[bool, ...]) -> None:
    chosen = []
    for target in ("test", "test-ci", "test-long"):
        for expression in expressions(repository, target):
            if eval(expression, {}, dict(zip(MARKERS, marked, strict=True))):
                chosen.append(target)
    assert len(chosen) == 1


@pytest.mark.parametrize("folder", KERNEL_FOLDERS)
def test_kernel_folders_run_in_processes_of_their_own(repository: Path, folder: str) -> None:
    """A folder without slow tests is left out of test-ci, where pytest would find no test."""
    has_slow = any("mark.slow" in path.read_text() for path in (repository / folder).glob("*.py"))
    for target, wanted in (("test", True), ("test-ci", has_slow)):
        commands = [line for line in dry_run(repository, target).splitlines() if "pytest" in line]
        own = [line for line in commands if line.endswith(f" {folder}")]
        assert len(own) == int(wanted), (target, folder)
        for line in own:
            interprets = "TRITON_INTERPRET=1" in line
            assert interprets == (folder == "tests/kernels_interp")
        for line in commands:
            assert line in own or f"--ignore={folder}" in line or folder not in line


def test_a_missed_target_does_not_hide_the_benchmarks_after_it(
    repository: Path, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ncase "$1" in *append.py | *lane.py) exit 1 ;; esac\n')
    python.chmod(0o755)
    done = run_make(repository, "--assume-old=.venv/.installed", f"BIN={tmp_path}", "bench")
    scripts = sorted(path.name for path in (repository / "tests" / "bench").glob("*.py"))
    assert [Path(line).name for line in done.stdout.splitlines()] == scripts
    assert "missed or failed: tests/bench/append.py tests/bench/lane.py\n" in done.stderr
    assert done.returncode != 0


def test_help_lists_every_target(repository: Path) -> None:
    makefile = (repository / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    shown = make(repository, "help")
    assert {line.split()[0] for line in shown.splitlines()} == set(phony.split())
