"""What does leaving out rows spare an exact hit that has to rebuild its encoder window?

    python tests/bench/rebuild.py [--cached 1920] [--repeats 9]

One process, one engine, one thread, a random checkpoint of the bundled model's geometry. The hit
reuses `--cached` tokens and computes the fewest new ones, W + R; no window is held. Once each layer
computes the rows that later ones depend on, once every layer computes all of them. The tokens must
be the same.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))

import torch
from append import load
from machine import print_header
from measurement import spread, verdict

from ripresa.workers.cache.kv_layout import REWIND_TOKENS
from ripresa.workers.config import EngineConfig, Numerics, WindowConfig, WindowPolicy
from ripresa.workers.decode_engine import DecodeEngine
from ripresa.workers.replay import PlanKind, ReplayMode
from ripresa.workers.request import CacheUse, GenerationRequest, PrefillDone, SamplingParams, Tokens

WINDOW = 128


async def ask(
    engine: DecodeEngine, name: str, token_ids: tuple[int, ...], *, writes: bool
) -> tuple[float, int, int]:
    """Seconds to the first token, row-layers of the encoder half, and the token."""
    request = GenerationRequest(
        request_id=name,
        generation=0,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        recipe=None,
        sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
        cache=CacheUse(ReplayMode.EXACT, writes=writes),
    )
    before = engine.stats().num_row_layers
    began = time.perf_counter()
    seconds, token = 0.0, -1
    async for event in engine.generate(request, local=True):
        if isinstance(event, PrefillDone) and not writes:
            assert event.recipe is not None
            assert event.recipe.kind is PlanKind.REBUILD
        if isinstance(event, Tokens):
            seconds, token = time.perf_counter() - began, event.token_ids[0]
    return seconds, engine.stats().num_row_layers - before, token


async def measure(options: argparse.Namespace) -> int:
    config = EngineConfig(
        max_num_seqs=2,
        num_blocks=options.cached // WINDOW + 16,
        max_batched_tokens=2048,
        numerics=Numerics.FAST,
        windows=WindowConfig(WindowPolicy.ZERO),
    )
    runner = load(config)
    engine = DecodeEngine("d", runner, config)
    await engine.start()
    length = options.cached + WINDOW + REWIND_TOKENS
    ids = torch.randint(3, 4000, (length,), generator=torch.Generator().manual_seed(1))
    tokens = tuple(ids.tolist())
    await ask(engine, "warm", tokens[: options.cached], writes=True)
    execute = runner.execute

    def untrimmed(plan, *more):  # type: ignore[no-untyped-def]
        steps = tuple(replace(step, exact_from=None) for step in plan.sequences)
        return execute(replace(plan, sequences=steps), *more)

    seconds: dict[bool, list[float]] = {True: [], False: []}
    row_layers: dict[bool, int] = {}
    said = set()
    for repeat in range(options.repeats + 1):
        for is_trimmed in (True, False):
            runner.execute = execute if is_trimmed else untrimmed  # type: ignore[method-assign]
            name = f"{repeat} {is_trimmed}"
            taken, row_layers[is_trimmed], token = await ask(engine, name, tokens, writes=False)
            said.add(token)
            if repeat:
                seconds[is_trimmed].append(taken)
    await engine.stop()
    for is_trimmed, what in ((True, "as few as needed"), (False, "every layer all")):
        print(
            f"{length} tokens, {options.cached} of them cached, {what} rows: "
            f"{row_layers[is_trimmed]} row-layers, {spread(seconds[is_trimmed], 1e3, ' ms')}"
        )
    if len(said) != 1:
        print(f"MISSED: the tokens differ: {said}")
        return 1
    print(f"row-layers: {row_layers[True] / row_layers[False]:.2f}")
    pairs = zip(seconds[True], seconds[False], strict=True)
    return verdict("time", statistics.median(a / b for a, b in pairs), 0.85, at_most=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cached", type=int, default=1920)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print_header(__file__)
    return asyncio.run(measure(options))


if __name__ == "__main__":
    raise SystemExit(main())
