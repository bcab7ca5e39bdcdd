"""How much later than in one process does the first token come through gRPC, Ray and a transfer?

    python tests/bench/latency.py [--tokens 16] [--repeats 30] [--encoders 1]

Client, gateway, encoder worker and decode worker are processes of one machine. Both sides answer
the same prompts in turn, one at a time.
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
from served_cluster import served_cluster

from ripresa.workers.config import Numerics

TARGET_MS = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--encoders", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print_header(__file__)
    engine = ReferenceEngine(Numerics.FAST)
    question = Question(tuple(range(100, 100 + options.tokens)), max_tokens=1)

    def in_process() -> float:
        return asyncio.run(engine.run(question)).first_token_s

    with served_cluster(
        "numerics=fast", f"encoders.replicas={options.encoders}", "planner.max_local_rows=0"
    ) as cluster:

        def through_cluster() -> float:
            stream = cluster.open(question)
            began = time.perf_counter()
            stream.read(1)
            first_token_s = time.perf_counter() - began
            stream.end()
            return first_token_s

        served, direct = alternate(through_cluster, in_process, options.repeats)
    print(f"workers      {options.encoders} encoder, 1 decode; {options.tokens} prompt tokens")
    print(f"cluster      {spread(served, 1000, ' ms')}")
    print(f"in process   {spread(direct, 1000, ' ms')}")
    above_ms = 1000 * (statistics.median(served) - statistics.median(direct))
    return verdict("above", above_ms, TARGET_MS, at_most=True, unit=" ms")


if __name__ == "__main__":
    raise SystemExit(main())
