"""How much of a full prefill's time does the encoder half with its tail take?

    python tests/bench/prefill.py [--tokens 4096] [--repeats 5]

One process, one engine, one thread, the same prompt: once with the default tail, which runs the
upper layers over the last window only, and once with every row through every layer. Measured is
the time to the first token. By rows of the bundled model's layers it is 0.516.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))

import torch
from machine import print_header
from measurement import alternate, spread, verdict
from reference_engine import Question, ReferenceEngine

from ripresa.workers.config import Numerics
from ripresa.workers.replay import TailVariant

TARGET = 0.58


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print_header(__file__)
    engine = ReferenceEngine(Numerics.FAST)
    vocabulary = engine.runner.config.vocab_size
    prompt = torch.randint(0, vocabulary, (options.tokens,), generator=torch.Generator())

    def prefill(tail: TailVariant) -> float:
        question = Question(tuple(prompt.tolist()), max_tokens=1, tail=tail)
        began = time.perf_counter()
        asyncio.run(engine.run(question))
        return time.perf_counter() - began

    halves, wholes = alternate(
        lambda: prefill(TailVariant.FLOORED), lambda: prefill(TailVariant.FULL), options.repeats
    )
    print(f"encoder+tail {spread(halves, unit=' s')}, {options.tokens} tokens")
    print(f"every layer  {spread(wholes, unit=' s')}")
    ratio = statistics.median(h / w for h, w in zip(halves, wholes, strict=True))
    return verdict("ratio", ratio, TARGET, at_most=True)


if __name__ == "__main__":
    raise SystemExit(main())
