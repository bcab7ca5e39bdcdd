"""How does a benchmark compare two things, and say whether it reached its target?"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence


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
