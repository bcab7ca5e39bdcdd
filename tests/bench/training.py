"""How fast does a model learn? Tokens a second of one core's CPU time, a whole step each time.

    python tests/bench/training.py [--sizes tiny demo] [--length 512] [--steps 3]

A step draws its conversations, goes both ways, and moves the parameters. CPU time, so that other
work costs only what it takes of caches and of the core's other thread. The products' types are
measured in turn in one run; there is no target.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from machine import print_header
from tokenizers import Tokenizer

from ripresa.cluster.training.samples import LedgerBatches
from ripresa.workers.demo.build_tokenizer import TOKENIZER
from ripresa.workers.demo.training.plan import Plan
from ripresa.workers.demo.training.sizes import Size, config_of
from ripresa.workers.demo.training.trainer import Trainer
from ripresa.workers.models.deepseek_v41.config import ModelConfig
from ripresa.workers.models.deepseek_v41.engram_ids import compressed_ids

NUM_STEPS = 10_000


def make_trainer(size: Size, length: int, is_dense: bool, dtype: torch.dtype) -> Trainer:
    plan = Plan(NUM_STEPS, ((1.0, length),), warm_up=0.0, dense=float(is_dense))
    return Trainer(
        ModelConfig.from_dict(config_of(size)),
        compressed_ids(Tokenizer.from_file(str(TOKENIZER))),
        LedgerBatches(TOKENIZER, 0),
        plan,
        seed=0,
        dtype=dtype,
    )


def tokens_per_s(trainer: Trainer) -> float:
    before, begun = trainer.num_tokens, time.process_time()
    trainer.step()
    return (trainer.num_tokens - before) / (time.process_time() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="*", choices=list(Size), default=list(Size))
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    print_header(__file__)
    torch.set_num_threads(1)
    for size in map(Size, arguments.sizes):
        for is_dense in (True, False):
            trainers = {
                dtype: make_trainer(size, arguments.length, is_dense, dtype)
                for dtype in (torch.float32, torch.bfloat16)
            }
            speeds: dict[torch.dtype, list[float]] = {dtype: [] for dtype in trainers}
            for _ in range(arguments.steps + 1):  # the first is thrown away
                for dtype, trainer in trainers.items():
                    speeds[dtype].append(tokens_per_s(trainer))
            for dtype, values in speeds.items():
                name = "every entry" if is_dense else "chosen entries"
                print(
                    f"{size:5} {str(dtype).removeprefix('torch.'):9} {name:14} "
                    f"{statistics.median(values[1:]):7.0f} tokens/core-s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
