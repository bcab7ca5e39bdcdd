"""Does a warm append take the same time at 32,000 tokens of context as at 2,000?

    python tests/bench/append.py [--short 2000] [--long 32000] [--new 200] [--repeats 9]

One process, one engine, one thread. A random checkpoint of the bundled model's geometry with 65,536
positions; the contexts are cached, the append's window too, and appends leave nothing behind.
Measured is the time to the first token, with index scoring left out: the Full layers' scan is
linear by nature, and its share is printed.

Whole blocks are cached, so the context's tokens above its last block boundary are computed with the
new ones: 80 at 2,000 tokens and none at 32,000. The short context is therefore compared twice: with
the longest one up to `--long` that computes as many rows, and with `--long` itself. Its ratio a row
is printed too; it is higher, since a step and the decoder tail cost the same whatever the rows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))

import torch
from machine import print_header
from measurement import spread, verdict

import ripresa.workers.demo
from ripresa.workers.config import EngineConfig, Numerics
from ripresa.workers.decode_engine import DecodeEngine
from ripresa.workers.model_runner import TorchModelRunner, load_runner
from ripresa.workers.models.deepseek_v41.attention import Attention
from ripresa.workers.models.deepseek_v41.weights import Half
from ripresa.workers.models.tiny_checkpoint import WeightFormat, write_tiny_checkpoint
from ripresa.workers.replay import Recipe
from ripresa.workers.request import (
    CacheUse,
    Finished,
    GenerationRequest,
    PrefillDone,
    SamplingParams,
    Tokens,
    WorkCounters,
)

TARGET = 1.2
NUM_POSITIONS = 65_536
WINDOW = 128
DEMO = Path(ripresa.workers.demo.__file__).parent


class Scoring:
    """Seconds spent in index scoring and selection."""

    def __init__(self) -> None:
        self.seconds = 0.0
        inner = Attention._select

        def timed(attention: Attention, *args: Any) -> None:
            began = time.perf_counter()
            inner(attention, *args)
            self.seconds += time.perf_counter() - began

        Attention._select = timed  # type: ignore[method-assign]


def load(config: EngineConfig) -> TorchModelRunner:
    document = json.loads((DEMO / "config.json").read_text())
    document["text_config"]["max_position_embeddings"] = NUM_POSITIONS
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        write_tiny_checkpoint(path, document, WeightFormat.F32, seed=1, shards=1)
        shutil.copy(DEMO / "tokenizer.json", path / "tokenizer.json")
        return load_runner(
            path,
            Half.ALL,
            num_blocks=config.num_blocks,
            num_slots=config.max_num_seqs,
            numerics=config.numerics,
            kv_format=config.kv_format,
        )


class Append:
    """Tokens after a cached context."""

    def __init__(self, engine: DecodeEngine, context: tuple[int, ...], num_new: int) -> None:
        self._engine = engine
        self._context = context
        self._new = tuple((7 * n + 11) % 4000 + 3 for n in range(num_new))
        self._number = 0

    async def ask(
        self, token_ids: tuple[int, ...], *, writes: bool
    ) -> tuple[float, WorkCounters, Recipe]:
        """Seconds to the first token, the rows of the request, and the recipe that they follow."""
        self._number += 1
        request = GenerationRequest(
            request_id=f"{len(self._context)}-{self._number}",
            generation=0,
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            recipe=None,
            sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
            cache=replace(CacheUse(), writes=writes),
        )
        began = time.perf_counter()
        seconds, counters, recipe = 0.0, None, None
        async for event in self._engine.generate(request, local=True):
            if isinstance(event, Tokens):
                seconds = time.perf_counter() - began
            if isinstance(event, Finished):
                counters = event.counters
            if isinstance(event, PrefillDone):
                recipe = event.recipe
        assert counters is not None, "the request failed"
        assert recipe is not None
        return seconds, counters, recipe

    async def warm(self) -> None:
        await self.ask(self._context, writes=True)

    async def run(self) -> tuple[float, WorkCounters, Recipe]:
        return await self.ask(self._context + self._new, writes=False)


async def measure(options: argparse.Namespace) -> int:
    config = EngineConfig(
        max_num_seqs=2,
        num_blocks=(options.short + 2 * options.long) // WINDOW + 16,
        max_batched_tokens=2048,
        numerics=Numerics.FAST,
    )
    scoring = Scoring()
    engine = DecodeEngine("d", load(config), config)
    await engine.start()
    ids = torch.randint(3, 4000, (options.long,), generator=torch.Generator().manual_seed(1))
    tokens = tuple(ids.tolist())
    # Prompts that share nothing, so that each has its own blocks.
    aligned = options.long - (options.long - options.short) % WINDOW
    contexts = [tokens[::-1][: options.short], tokens[1:][:aligned], tokens[: options.long]]
    appends = [Append(engine, context, options.new) for context in contexts]
    for append in appends:
        await append.warm()
    rest: list[list[float]] = [[] for _ in contexts]
    shares: list[list[float]] = [[] for _ in contexts]
    rows: list[set[int]] = [set() for _ in contexts]
    recipes: list[Recipe] = []
    for repeat in range(options.repeats + 1):
        for index, append in enumerate(appends):
            before = scoring.seconds
            seconds, counters, recipe = await append.run()
            scored = scoring.seconds - before
            rows[index].add(counters.encoder_rows + counters.decoder_prefill_rows)
            recipes = [*recipes[-2:], recipe]
            if repeat:
                rest[index].append(seconds - scored)
                shares[index].append(scored / seconds)
    await engine.stop()
    for index, (context, recipe) in enumerate(zip(contexts, recipes, strict=True)):
        length = len(context) + options.new
        print(
            f"{len(context):>6} tokens of context, {options.new} new: {recipe.kind}, "
            f"{recipe.write_floor} reused, encoder rows {recipe.start} to {length} "
            f"({length - recipe.start}), decoder rows {length - recipe.decoder_start}, "
            f"{spread(rest[index], 1e3, ' ms')} without index scoring, "
            f"which takes {statistics.median(shares[index]):.0%} of the whole"
        )
    if any(len(counted) != 1 for counted in rows) or rows[0] != rows[1]:
        print(f"MISSED: the rows differ: {rows}")
        return 1
    num_rows = [max(counted) for counted in rows]
    times = list(zip(*rest, strict=True))
    same_rows = statistics.median(far / near for near, far, _ in times)
    raw = statistics.median(far / near for near, _, far in times)
    missed = verdict(f"ratio at {len(contexts[1])}, as many rows", same_rows, TARGET, at_most=True)
    a_row = raw * num_rows[0] / num_rows[2]
    print(
        f"{num_rows[2]} rows at {options.long}, {num_rows[0]} at {options.short}: {a_row:.3f} a row"
    )
    return verdict(f"ratio at {options.long}", raw, TARGET, at_most=True) or missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", type=int, default=2000)
    parser.add_argument("--long", type=int, default=32_000)
    parser.add_argument("--new", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print_header(__file__)
    return asyncio.run(measure(options))


if __name__ == "__main__":
    raise SystemExit(main())
