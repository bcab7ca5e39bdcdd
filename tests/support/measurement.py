"""How does a benchmark say where a number comes from, and whether it reached its target?"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

FOLDER = Path(__file__).resolve().parent


def print_header() -> None:
    """Machine, versions, commit and command: what a number needs to be compared later."""
    print(f"machine      {os.cpu_count()} x {_processor()}, {platform.platform()}")
    print(f"load         {os.getloadavg()[0]:.1f} runnable processes in the last minute")
    print(
        f"versions     python {platform.python_version()}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} thread"
    )
    print(f"commit       {_commit()}")
    print(f"command      python {' '.join([os.path.relpath(sys.argv[0]), *sys.argv[1:]])}")
    sys.stdout.flush()


def alternate(
    first: Callable[[], float], second: Callable[[], float], repeats: int
) -> tuple[list[float], list[float]]:
    """Measure two things in turn, so that a busy moment hits both; a first pair is thrown away."""
    pairs = [(first(), second()) for _ in range(repeats + 1)][1:]
    return [one for one, _ in pairs], [other for _, other in pairs]


def spread(values: Sequence[float], scale: float = 1.0, unit: str = "") -> str:
    """Median and range in words."""
    low, middle, high = (scale * v for v in (min(values), statistics.median(values), max(values)))
    return f"{middle:.1f}{unit} (median of {len(values)}, {low:.1f} to {high:.1f})"


def verdict(name: str, value: float, target: float, *, at_most: bool, unit: str = "") -> int:
    """Print a result beside its target; 0 if it is reached, else 1, as an exit code."""
    reached = value <= target if at_most else value >= target
    sign = "<=" if at_most else ">="
    word = "reached" if reached else "MISSED"
    print(f"{name:<12} {value:.3f}{unit} (target {sign} {target}{unit}: {word})", flush=True)
    return 0 if reached else 1


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _commit() -> str:
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=FOLDER, capture_output=True, text=True
    )
    return described.stdout.strip() or "not a git checkout"
