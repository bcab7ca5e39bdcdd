"""What do encoder windows that travel on the way cost, and what do they spare a takeover?

    python tests/bench/takeover.py [--config FILE] [--chunk 512]

Arithmetic, no timing: the bytes of the KV layout, and the rows that a recipe lets another encoder
worker compute again when the first one dies after some chunk, each chunk as likely. What the dead
worker had in flight is lost whatever travels.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))

from machine import print_header

import ripresa.workers.demo
from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.cache.kv_layout import KVFormat, KVLayout
from ripresa.workers.config import TransferConfig
from ripresa.workers.model_runner import kv_layout
from ripresa.workers.models.deepseek_v41.config import ModelConfig
from ripresa.workers.prompt_plan import re_execution
from ripresa.workers.replay import TailVariant, cold_recipe

DEMO = Path(ripresa.workers.demo.__file__).parent / "config.json"
PERIODS = (4, 8, 16, 32, 64)
LENGTHS = (2_000, 4_000, 8_000, 32_000, 128_000)


def recomputed_rows(length: int, period: int, chunk: int, window: int) -> float:
    """Rows below the last chunk's end that are computed again, on average over the chunks."""
    recipe = cold_recipe(length, window, TailVariant.FLOORED, 0)
    names = [BlockIdentity(b"%d" % number, ()) for number in range(length // window)]
    hashes = [name.hash for name in names]
    rows = []
    for position in range(chunk, length, chunk):
        held = names[: position // window]
        newest = position // (period * window) * period
        windows = {names[newest - 1]} if newest else set()
        plan = re_execution(recipe, length, window, hashes, set(held), windows)
        rows.append(position - plan.passes[0].start)
    return sum(rows) / len(rows) if rows else 0.0


def added_share(length: int, period: int, layout: KVLayout) -> float:
    """Bytes of the windows over those of a hand-over without them."""
    window = layout.window
    blocks = length // window * layout.block_bytes
    state = layout.state_bytes(length, max(0, length - window), source_window=False)
    num_windows = length // (period * window)
    return num_windows * layout.window_bytes(window, layout.split) / (blocks + state)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=DEMO, help="a model's config.json")
    parser.add_argument("--chunk", type=int, default=512)
    options = parser.parse_args()
    print_header(__file__)
    layout = kv_layout(ModelConfig.from_file(options.config), KVFormat.PACKED, "")
    default = TransferConfig().hand_over_window_blocks
    print(
        f"{options.config.name}: a window has {layout.window_bytes(layout.window, layout.split)} "
        f"bytes, a block {layout.block_bytes}; a cell is bytes added / rows computed again"
    )
    print("prompt   " + "".join(f"{f'every {p} blocks':>20}" for p in PERIODS))
    for length in LENGTHS:
        cells = (
            f"{added_share(length, p, layout):.0%} / "
            f"{recomputed_rows(length, p, options.chunk, layout.window):.0f}"
            for p in PERIODS
        )
        print(f"{length:>7}  " + "".join(f"{cell:>20}" for cell in cells))
    print(f"default: every {default} blocks")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
