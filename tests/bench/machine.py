"""On what did a benchmark run? The lines that every one of them prints first."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import torch


def print_header(script: str) -> None:
    """Machine, versions, commit and command of a benchmark script (its `__file__`)."""
    path = Path(script).resolve()
    repository = path.parents[2]
    answer = subprocess.run(
        ["git", "-C", str(repository), "describe", "--always", "--dirty", "--abbrev=12"],
        capture_output=True,
        text=True,
        check=False,
    )
    commit = answer.stdout.strip() or "no git repository"
    print(f"machine: {_cpu_name()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"python {platform.python_version()}, torch {torch.__version__}, commit {commit}")
    print(f"command: {Path(sys.executable).name} {path.relative_to(repository)}")


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
