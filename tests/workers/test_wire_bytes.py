"""How many bytes does a hand-over move? Exactly what the layout's formula says, no more."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from random import Random

import pytest

from ripresa.workers.cache.kv_layout import KVFormat
from ripresa.workers.config import EngineConfig
from ripresa.workers.decode_engine import DecodeEngine
from ripresa.workers.demo.checkpoint import demo_checkpoint
from ripresa.workers.encoder_engine import EncoderEngine
from ripresa.workers.model_runner import TorchModelRunner, load_runner
from ripresa.workers.models.deepseek_v41.weights import Half
from ripresa.workers.replay import TailVariant, cold_recipe
from ripresa.workers.request import Finished, GenerationRequest, SamplingParams, WorkCounters
from ripresa.workers.transfer.inbound import InboundTransfers
from ripresa.workers.transfer.loopback import LoopbackTransport
from ripresa.workers.transfer.outbound import OutboundTransfers

WINDOW = 128


def runner(half: Half, config: EngineConfig, folder: Path) -> TorchModelRunner:
    return load_runner(
        folder,
        half,
        num_blocks=config.num_blocks,
        num_slots=config.max_num_seqs,
        numerics=config.numerics,
        kv_format=config.kv_format,
    )


async def hand_over(length: int, tail: TailVariant, config: EngineConfig) -> tuple[int, int]:
    """Bytes that the encoder sent and that the decode worker counted for a prompt."""
    folder = await asyncio.to_thread(demo_checkpoint)
    decoder = DecodeEngine("d", runner(Half.ALL, config, folder), config)
    transport = LoopbackTransport()
    inbound = InboundTransfers(decoder, transport)
    outbound = OutboundTransfers("e", lambda _: inbound, transport)
    encoder = EncoderEngine("e", runner(Half.ENCODER, config, folder), outbound, config)
    await decoder.start()
    await encoder.start()
    request = GenerationRequest(
        request_id="r",
        generation=0,
        token_ids=tuple(Random(length).choices(range(20, 4096), k=length)),
        num_prompt_tokens=length,
        recipe=cold_recipe(length, WINDOW, tail, 0),
        sampling=SamplingParams(max_tokens=1, temperature=0.0),
    )
    sent: WorkCounters | None = None
    async with aclosing(decoder.generate(request, local=False)) as events:
        await anext(events)
        sent = await encoder.prefill(request, "d")
        last = [event async for event in events][-1]
    assert isinstance(last, Finished)
    decoder.check_integrity()
    encoder.check_integrity()
    await encoder.stop()
    await decoder.stop()
    await outbound.close()
    await inbound.close()
    return sent.transfer_bytes, last.counters.transfer_bytes


def formula(length: int, tail: TailVariant, kv_format: KVFormat) -> int:
    """Written out from the demo's geometry: blocks, partial block, windows, pairs, tail rows."""
    packed = kv_format is KVFormat.PACKED
    window_row = 64 + 2 if packed else 4 * 64
    entry_and_key = (32 + 4) + (32 + 2) if packed else 4 * (64 + 64)
    encoder_layers, streams, hidden = 4, 4, 256
    entries = length // 2 + length
    start = 0 if tail is TailVariant.FULL else max(0, length - WINDOW)
    total = entries * entry_and_key
    total += min(WINDOW, length) * encoder_layers * window_row
    total += (length % 2) * 2 * 64 * 4
    total += (length - start) * (streams * hidden + streams) * 4
    if tail is TailVariant.LAYER_EXACT:
        total += (start - max(0, start - WINDOW + 1)) * window_row
    return total


@pytest.mark.parametrize("kv_format", list(KVFormat))
async def test_bytes_of_a_4000_token_prompt(kv_format: KVFormat) -> None:
    config = EngineConfig(num_blocks=40, max_num_seqs=2, kv_format=kv_format)
    moved = await hand_over(4000, TailVariant.FLOORED, config)
    expected = formula(4000, TailVariant.FLOORED, kv_format)
    assert moved == (expected, expected)


@pytest.mark.parametrize("tail", [TailVariant.FLOORED, TailVariant.LAYER_EXACT, TailVariant.FULL])
@pytest.mark.parametrize("length", [1, 2, 127, 128, 129, 255, 391])
async def test_bytes_of_odd_sizes(length: int, tail: TailVariant) -> None:
    config = EngineConfig(num_blocks=8, max_num_seqs=2)
    moved = await hand_over(length, tail, config)
    expected = formula(length, tail, config.kv_format)
    assert moved == (expected, expected)
