"""How many of the in-process engine's tokens a second come through the cluster?

    python tests/bench/throughput.py [--streams 8] [--tokens 128] [--answer 64] [--repeats 5]

The same concurrent streams, once in one engine of this process and once through gRPC, Ray, an
encoder worker, a transfer and a decode worker. Measured from the first request to the last token.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))

import torch
from machine import print_header
from measurement import alternate, spread, verdict
from reference_engine import Question, ReferenceEngine
from served_cluster import served_cluster

from ripresa.workers.config import Numerics

TARGET = 0.8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128, help="of each prompt")
    parser.add_argument("--answer", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--encoders", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print_header(__file__)
    engine = ReferenceEngine(Numerics.FAST)
    questions = [
        Question(tuple(range(100 + 7 * k, 100 + 7 * k + options.tokens)), max_tokens=options.answer)
        for k in range(options.streams)
    ]
    num_tokens = options.streams * options.answer

    def in_process() -> float:
        began = time.perf_counter()
        runs = asyncio.run(engine.run(*questions))
        assert sum(map(len, runs.answers)) == num_tokens
        return num_tokens / (time.perf_counter() - began)

    with (
        served_cluster(
            "numerics=fast", f"encoders.replicas={options.encoders}", "planner.max_local_rows=0"
        ) as cluster,
        ThreadPoolExecutor(options.streams) as threads,
    ):

        def through_cluster() -> float:
            began = time.perf_counter()
            answers = list(threads.map(cluster.ask, questions))
            assert sum(len(answer.tokens) for answer in answers) == num_tokens
            return num_tokens / (time.perf_counter() - began)

        served, direct = alternate(through_cluster, in_process, options.repeats)
    print(
        f"workers      {options.encoders} encoder, 1 decode; {options.streams} streams of "
        f"{options.tokens} + {options.answer} tokens"
    )
    print(f"cluster      {spread(served, unit=' tokens/s')}")
    print(f"in process   {spread(direct, unit=' tokens/s')}")
    ratio = statistics.median(s / d for s, d in zip(served, direct, strict=True))
    return verdict("ratio", ratio, TARGET, at_most=False)


if __name__ == "__main__":
    raise SystemExit(main())
