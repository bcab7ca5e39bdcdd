"""How fast is the model itself, where does the time go, and how near is it to the matrix rate?

Prefill and decode of the demo geometry in one process and one thread. Times are process CPU time,
the best of several alternating runs; ratios compare within this run.

Run: python tests/bench/model.py
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from random import Random

import torch
import torch.nn.functional as F
from machine import print_header

from ripresa.kernels import dispatch as ops
from ripresa.workers.cache.kv_layout import KVFormat
from ripresa.workers.config import Numerics
from ripresa.workers.demo.checkpoint import DEMO_MODEL
from ripresa.workers.model_runner import TorchModelRunner, load_runner
from ripresa.workers.models.deepseek_v41.config import ModelConfig
from ripresa.workers.models.deepseek_v41.weights import Half
from ripresa.workers.scheduling.step_plan import SequenceStep, StepPlan

PROMPT, CHUNK, WINDOW, REPEATS = 4096, 512, 128, 5
BATCHES = (1, 8)
TOKENS = tuple(Random(0).choices(range(20, 4096), k=PROMPT + 64))
SELECTION = ("select_entries", "select_candidates")


def runner(kv_format: KVFormat) -> TorchModelRunner:
    return load_runner(
        DEMO_MODEL,
        Half.ALL,
        num_blocks=34 * max(BATCHES),
        num_slots=max(BATCHES),
        numerics=Numerics.FAST,
        kv_format=kv_format,
    )


def prefill(model: TorchModelRunner) -> None:
    """Encoder half for every row, decoder half for the last window."""
    tail = PROMPT - WINDOW
    for first in range(0, PROMPT, CHUNK):
        last = first + CHUNK
        step = SequenceStep(
            slot=0,
            block_table=tuple(range(34)),
            token_ids=TOKENS[first:last],
            lookback_ids=TOKENS[max(0, first - 3) : first],
            encoder_start=first,
            decoder_start=max(first, min(tail, last)),
            decoder_stop=last,
            decoder_floor=tail,
            source_floor=tail,
        )
        model.execute(StepPlan(0, (step,)))


def decode(model: TorchModelRunner, batch: int, steps: int = 8) -> None:
    for position in range(1000, 1000 + steps):
        rows = [
            SequenceStep(
                slot=slot,
                block_table=tuple(range(34 * slot, 34 * slot + 34)),
                token_ids=(TOKENS[position],),
                lookback_ids=TOKENS[position - 3 : position],
                encoder_start=position,
                decoder_start=position,
                decoder_stop=position + 1,
                return_logits=True,
            )
            for slot in range(batch)
        ]
        model.execute(StepPlan(0, tuple(rows)))


def best(*calls: Callable[[], None]) -> list[float]:
    """The best CPU time of each call; calls alternate, so that a busy machine hits all alike."""
    times = [float("inf")] * len(calls)
    for _ in range(REPEATS):
        for number, call in enumerate(calls):
            start = time.process_time()
            call()
            times[number] = min(times[number], time.process_time() - start)
    return times


@contextmanager
def timed_operations(spent: dict[str, float]) -> Iterator[None]:
    """Adds up the CPU time of every kernel operation while the body runs."""
    originals = {name: getattr(ops, name) for name in ops.operations()}

    def timed(name: str, call: Callable[..., object]) -> Callable[..., object]:
        def run(*args: object, **kwargs: object) -> object:
            start = time.process_time()
            try:
                return call(*args, **kwargs)
            finally:
                spent[name] += time.process_time() - start

        return run

    try:
        for name, call in originals.items():
            if callable(call) and not isinstance(call, type):
                setattr(ops, name, timed(name, call))
        yield
    finally:
        for name, call in originals.items():
            setattr(ops, name, call)


def matmul_flops_a_token(config: ModelConfig) -> float:
    """Matrix operations that a prompt token needs: encoder half, source, share of the tail.

    Linears, and products of queries with the window rows and entries that they attend.
    """
    c = config
    d, heads = c.hidden_size, c.num_attention_heads * c.head_dim
    group_in = heads // c.o_groups
    layer = d * (c.q_lora_rank + c.head_dim) + c.q_lora_rank * heads
    layer += c.o_groups * c.o_lora_rank * (group_in + d)
    layer += 2 * (2 + c.hc_mult) * c.hc_mult * c.hc_mult * d + d * c.n_routed_experts
    layer += 3 * d * c.moe_intermediate_size * (c.num_experts_per_tok + 1)
    engram = (c.engram.max_ngram_size - 1) * c.engram.num_heads * c.engram.head_dim
    extra = len(c.engram.layer_ids) * engram * (c.hc_mult + 1) * d
    for source in c.kv_source_layer_ids:
        extra += d * c.head_dim * c.ratio(source) + c.head_dim * c.index_head_dim / c.ratio(source)
    attended = [c.sliding_window + (c.index_topk if r else 0) for r in c.compress_ratios]
    layers = [layer + 2 * heads * keys for keys in attended[: c.num_hidden_layers]]
    encoder = sum(layers[: c.split]) + extra
    decoder = sum(layers[c.split :]) * WINDOW / PROMPT
    return 2.0 * (encoder + decoder)


def matmul_rate() -> float:
    """Float32 operations a second of a matrix product of the experts' shape."""
    x, w = torch.randn(CHUNK, 256), torch.randn(512, 256)
    calls = 400

    def run() -> None:
        for _ in range(calls):
            F.linear(x, w)

    return 2.0 * CHUNK * 256 * 512 * calls / best(run)[0]


def main() -> None:
    torch.set_num_threads(1)
    print_header(__file__)
    packed, plain = runner(KVFormat.PACKED), runner(KVFormat.FLOAT32)
    prefill(packed), prefill(plain)
    rate = matmul_rate()
    print(f"float32 matrix rate {rate / 1e9:.0f} GFLOP/s")

    packed_s, plain_s = best(lambda: prefill(packed), lambda: prefill(plain))
    print(f"prefill {PROMPT / packed_s:.0f} tokens/s with packed KV")
    ratios = {"prefill": packed_s / plain_s}
    for batch in BATCHES:
        packed_d, plain_d = best(partial(decode, packed, batch), partial(decode, plain, batch))
        print(f"decode, {batch} at once: {8 * batch / packed_d:.0f} tokens/s with packed KV")
        ratios[f"decode, {batch} at once"] = packed_d / plain_d
    for name, ratio in ratios.items():
        print(f"{name}: packed / float32 KV time {ratio:.2f} (target <= 1.25)")

    spent: dict[str, float] = defaultdict(float)
    with timed_operations(spent):
        start = time.process_time()
        prefill(packed)
        total = time.process_time() - start
    selection = sum(spent[name] for name in SELECTION)
    print("\nwhere a prefill's time goes:")
    for name, seconds in sorted(spent.items(), key=lambda item: -item[1])[:14]:
        print(f"  {name:22} {100 * seconds / total:5.1f} %")
    print(f"  {'outside operations':22} {100 * (total - sum(spent.values())) / total:5.1f} %")
    flops = matmul_flops_a_token(packed.config) * PROMPT
    share = flops / (packed_s * (1 - selection / total)) / rate
    print(f"\nshare of the matrix rate, selection apart: {share:.2f} (target >= 0.35)")


if __name__ == "__main__":
    main()
