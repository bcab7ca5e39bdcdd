"""What does a channel cost to encode, decode and round? Nanoseconds of one thread, by batch size.

Run: python tests/bench/codecs.py
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable

import torch

from ripresa.kernels import dispatch as ops

MEASUREMENTS = 15
CHANNELS_A_MEASUREMENT = 1 << 19


def nanoseconds_a_channel(call: Callable[[], object], channels: int) -> float:
    """The best of several measurements of process time, which a busy machine disturbs least."""
    repeats = max(1, CHANNELS_A_MEASUREMENT // channels)
    call()
    best = float("inf")
    for _ in range(MEASUREMENTS):
        start = time.process_time()
        for _ in range(repeats):
            call()
        best = min(best, time.process_time() - start)
    return best / repeats / channels * 1e9


def main() -> None:
    torch.set_num_threads(1)
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, one thread")
    print(f"{'ns a channel, rows of 512':28}" + "".join(f"{rows:>8} rows" for rows in SIZES))
    for name, prepare in CALLS.items():
        costs = []
        for rows in SIZES:
            x = torch.randn(rows, 512, generator=torch.Generator().manual_seed(0))
            costs.append(nanoseconds_a_channel(prepare(x), x.numel()))
        print(f"{name:28}" + "".join(f"{cost:13.2f}" for cost in costs))


SIZES = (1, 16, 128, 512)
CALLS: dict[str, Callable[[torch.Tensor], Callable[[], object]]] = {
    "copy, for comparison": lambda x: lambda: x.clone(),
}


def add_grid(name: str, grid: ops.Grid) -> None:
    """The three verbs of a grid."""

    def decode(x: torch.Tensor) -> Callable[[], object]:
        records = grid.encode(x)
        return lambda: grid.decode(records)

    CALLS[f"{name} encode"] = lambda x: lambda: grid.encode(x)
    CALLS[f"{name} decode"] = decode
    CALLS[f"{name} round_trip"] = lambda x: lambda: grid.round_trip(x)


add_grid("window", ops.window_grid(512))
add_grid("entry", ops.entry_grid(512))
add_grid("index", ops.index_grid(512))
CALLS["linear input"] = lambda x: lambda: ops.round_linear_input(x)
CALLS["weight f8 dequantise"] = lambda x: dequantise(ops.quantise_f8(x), ops.dequantise_f8)
CALLS["weight fp4 dequantise"] = lambda x: dequantise(ops.quantise_fp4(x), ops.dequantise_fp4)


def dequantise(
    stored: tuple[torch.Tensor, torch.Tensor],
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> Callable[[], object]:
    return lambda: function(*stored)


if __name__ == "__main__":
    main()
