"""How many bytes does a hand-over move? Exactly what the layout's formula says, no more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from random import Random

import pytest
from noise_checkpoint import noise_checkpoint

from ripresa.workers.cache.kv_layout import REWIND_TOKENS, KVFormat
from ripresa.workers.config import EngineConfig, WindowConfig, WindowPolicy
from ripresa.workers.decode_engine import DecodeEngine
from ripresa.workers.encoder_engine import EncoderEngine
from ripresa.workers.model_runner import TorchModelRunner, load_runner
from ripresa.workers.models.deepseek_v41.weights import Half
from ripresa.workers.replay import PlanKind, Recipe, TailVariant
from ripresa.workers.request import (
    Failed,
    Finished,
    GenerationRequest,
    PrefillDone,
    SamplingParams,
    WorkCounters,
)
from ripresa.workers.transfer.inbound import InboundTransfers
from ripresa.workers.transfer.loopback import LoopbackTransport
from ripresa.workers.transfer.outbound import OutboundTransfers

WINDOW = 128
NO_WINDOWS = WindowConfig(WindowPolicy.ZERO)


def runner(half: Half, config: EngineConfig, folder: Path) -> TorchModelRunner:
    return load_runner(
        folder,
        half,
        num_blocks=config.num_blocks,
        num_slots=config.max_num_seqs,
        numerics=config.numerics,
        kv_format=config.kv_format,
    )


@dataclass
class Moved:
    """What one hand-over did: bytes that either side counted, and the recipe it followed."""

    sent: int
    counted: int
    recipe: Recipe


class Workers:
    """An encoder worker and decode workers, d0, d1 .., with loopback lanes between them."""

    def __init__(self, config: EngineConfig, folder: Path, num_decoders: int) -> None:
        transport = LoopbackTransport()
        self.decoders = {
            f"d{number}": DecodeEngine(f"d{number}", runner(Half.ALL, config, folder), config)
            for number in range(num_decoders)
        }
        self.inbound = {
            name: InboundTransfers(decoder, transport) for name, decoder in self.decoders.items()
        }
        self.outbound = OutboundTransfers("e", lambda to: self.inbound[to.worker_id], transport)
        half = runner(Half.ENCODER, config, folder)
        self.encoder = EncoderEngine("e", half, self.outbound, config)

    async def hand_over(
        self, tokens: tuple[int, ...], tail: TailVariant, receiver: str = "d0"
    ) -> Moved:
        """Prefill on the encoder worker, one token on a decode worker."""
        decoder = self.decoders[receiver]
        request = ask(tokens, tail)
        sent: WorkCounters | None = None
        recipe: Recipe | None = None
        async with aclosing(decoder.generate(request, local=False)) as events:
            await anext(events)
            sent = await self.encoder.prefill(request, receiver)
            async for event in events:
                if isinstance(event, PrefillDone):
                    recipe = event.recipe
        assert isinstance(event, Finished)
        assert recipe is not None
        decoder.check_integrity()
        self.encoder.check_integrity()
        return Moved(sent.transfer_bytes, event.counters.transfer_bytes, recipe)

    async def append(self, tokens: tuple[int, ...]) -> None:
        """Let d0 alone compute a prompt, and so hold its blocks."""
        async for event in self.decoders["d0"].generate(
            ask(tokens, TailVariant.FLOORED), local=True
        ):
            assert not isinstance(event, Failed), event


def ask(tokens: tuple[int, ...], tail: TailVariant) -> GenerationRequest:
    return GenerationRequest(
        request_id="r",
        generation=0,
        token_ids=tokens,
        num_prompt_tokens=len(tokens),
        recipe=None,
        sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
        tail=tail,
    )


@asynccontextmanager
async def workers(config: EngineConfig, num_decoders: int = 1) -> AsyncIterator[Workers]:
    pair = Workers(config, await asyncio.to_thread(noise_checkpoint), num_decoders)
    engines = (pair.encoder, *pair.decoders.values())
    for engine in engines:
        await engine.start()
    try:
        yield pair
    finally:
        for engine in engines:
            await engine.stop()
        for transfers in (pair.outbound, *pair.inbound.values()):
            await transfers.close()


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(Random(seed).choices(range(20, 4096), k=length))


def formula(
    length: int, tail: TailVariant, kv_format: KVFormat, num_held: int = 0, start: int = 0
) -> int:
    """Written out from the demo's geometry: missing blocks + partial block + W x E window rows +
    tail rows + pair. The request itself brings the last ids, so that they cost no byte here.

    Args:
        num_held: blocks that the decode worker has.
        start: first encoder row, from which tail `full` needs every row.
    """
    packed = kv_format is KVFormat.PACKED
    window_row = 64 + 2 if packed else 4 * 64
    entry_and_key = (32 + 4) + (32 + 2) if packed else 4 * (64 + 64)
    encoder_layers, streams, hidden = 4, 4, 256
    entries = length // 2 + length - num_held * (WINDOW // 2 + WINDOW)
    first = start if tail is TailVariant.FULL else max(0, length - WINDOW)
    total = entries * entry_and_key
    total += min(WINDOW, length) * encoder_layers * window_row
    total += (length % 2) * 2 * 64 * 4
    total += (length - first) * (streams * hidden + streams) * 4
    if tail is TailVariant.LAYER_EXACT:
        total += (first - max(0, first - WINDOW + 1)) * window_row
    return total


def blocks_of(
    tokens: tuple[int, ...], recipe: Recipe
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """A prompt's whole blocks by what makes them equal: the tokens up to their end, the restarts
    below it."""
    ends = range(WINDOW, len(tokens) + 1, WINDOW)
    return [(tokens[:end], tuple(r for r in recipe.restarts if r < end)) for end in ends]


def assert_moved(
    moved: Moved, length: int, tail: TailVariant, kv_format: KVFormat, num_held: int
) -> None:
    expected = formula(length, tail, kv_format, num_held, moved.recipe.start)
    assert (moved.sent, moved.counted) == (expected, expected)


@pytest.mark.parametrize("kv_format", list(KVFormat))
async def test_bytes_of_a_4000_token_prompt_cold_and_after_hits(kv_format: KVFormat) -> None:
    """Hits of many lengths, the last at the cap, which leaves a window and R tokens to compute."""
    config = EngineConfig(num_blocks=300, max_num_seqs=2, kv_format=kv_format, windows=NO_WINDOWS)
    base = prompt(0, 4000)
    floored = TailVariant.FLOORED
    async with workers(config) as pair:
        cold = await pair.hand_over(base, floored)
        assert cold.recipe.kind is PlanKind.COLD
        assert_moved(cold, 4000, floored, kv_format, num_held=0)
        for number, (shared, length) in enumerate(((2000, 4000), (3839, 4000), (3900, 4001))):
            tokens = base[:shared] + prompt(number + 1, length - shared)
            hit = await pair.hand_over(tokens, floored)
            reused = min(shared // WINDOW, (length - WINDOW - REWIND_TOKENS) // WINDOW)
            assert hit.recipe.kind is PlanKind.BOUNDED
            assert hit.recipe.write_floor == reused * WINDOW
            assert_moved(hit, length, floored, kv_format, num_held=reused)
        assert reused == 30, "the cap: 3,867 tokens could be reused"


TAILS = [TailVariant.FLOORED, TailVariant.LAYER_EXACT, TailVariant.FULL]


@pytest.mark.parametrize("tail", TAILS)
async def test_bytes_after_hits_of_any_length_on_both_workers(tail: TailVariant) -> None:
    config = EngineConfig(num_blocks=200, max_num_seqs=2, windows=NO_WINDOWS)
    base = prompt(0, 700)
    kinds = set()
    held: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    async with workers(config) as pair:
        held.update(blocks_of(base, (await pair.hand_over(base, tail)).recipe))
        for shared in (0, 128, 255, 256, 391, 640):
            for length in (shared + 1, shared + 2, shared + 133, shared + 134, shared + 135):
                tokens = base[:shared] + prompt(7 * length + shared, length - shared)
                moved = await pair.hand_over(tokens, tail)
                reused = min(shared, max(0, length - WINDOW - REWIND_TOKENS)) // WINDOW
                assert moved.recipe.write_floor == reused * WINDOW
                blocks = blocks_of(tokens, moved.recipe)
                num_held = sum(1 for _ in takewhile(held.__contains__, blocks))
                assert num_held >= reused
                assert_moved(moved, length, tail, config.kv_format, num_held)
                held.update(blocks)
                kinds.add(moved.recipe.kind)
    assert kinds == {PlanKind.COLD, PlanKind.FROM_ZERO, PlanKind.BOUNDED}


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("length", [384, 391, 500])
async def test_bytes_where_the_receiver_alone_holds_a_prefix(
    length: int, tail: TailVariant
) -> None:
    """The encoder worker computes everything and sends what the other lacks."""
    config = EngineConfig(num_blocks=64, max_num_seqs=2)
    tokens = prompt(1, length)
    for shared in (100, 128, 300, length):
        async with workers(config) as pair:
            await pair.append(tokens[:shared])
            moved = await pair.hand_over(tokens, tail)
        assert moved.recipe.kind is PlanKind.COLD
        assert_moved(moved, length, tail, config.kv_format, num_held=shared // WINDOW)


@pytest.mark.parametrize("tail", TAILS)
async def test_bytes_where_the_sender_alone_holds_a_prefix(tail: TailVariant) -> None:
    """A hit saves rows and no byte: the other worker lacks every block."""
    config = EngineConfig(num_blocks=64, max_num_seqs=2, windows=NO_WINDOWS)
    tokens = prompt(2, 501)
    async with workers(config, num_decoders=2) as pair:
        await pair.hand_over(tokens[:400], tail, "d0")
        moved = await pair.hand_over(tokens, tail, "d1")
        assert moved.recipe.kind is PlanKind.BOUNDED
        assert_moved(moved, 501, tail, config.kv_format, num_held=0)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("length", [1, 2, 127, 128, 129, 255, 391])
async def test_bytes_of_odd_sizes(length: int, tail: TailVariant) -> None:
    config = EngineConfig(num_blocks=8, max_num_seqs=2)
    async with workers(config) as pair:
        moved = await pair.hand_over(prompt(length, length), tail)
    assert_moved(moved, length, tail, config.kv_format, num_held=0)
