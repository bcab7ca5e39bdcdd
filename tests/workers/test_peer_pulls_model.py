"""Does the real model say the same after a prefix from a peer as after its own, and as cold?

Rows are bitwise independent of their batch (`numerics: deterministic`), so logits are compared bit
for bit.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import torch
from observed_model import CASE, CONFIG, WINDOW, Observed, ask, run, stacked
from safetensors.torch import load_file

from ripresa.workers.address import WorkerAddress, WorkerKind
from ripresa.workers.config import WindowConfig, WindowPolicy
from ripresa.workers.decode_engine import DecodeEngine
from ripresa.workers.encoder_engine import EncoderEngine
from ripresa.workers.models.deepseek_v41.weights import Half
from ripresa.workers.prefix_sources import BlockSource, ImageSource, PrefixSources, WindowSource
from ripresa.workers.replay import PlanKind, ReplayMode
from ripresa.workers.transfer.base import Peer
from ripresa.workers.transfer.loopback import LoopbackTransport
from ripresa.workers.worker_transfers import WorkerTransfers

FULL = replace(CONFIG, windows=WindowConfig(WindowPolicy.FULL))
HOLDERS = {
    "d0": WorkerAddress("d0", WorkerKind.DECODE),
    "d1": WorkerAddress("d1", WorkerKind.DECODE),
    "e0": WorkerAddress("e0", WorkerKind.ENCODER),
}


@pytest.fixture(scope="module")
def prompt() -> tuple[int, ...]:
    tokens = tuple(load_file(CASE / "golden.safetensors")["token_ids"].tolist())
    return (tokens * 3)[:118]


@asynccontextmanager
async def three_workers() -> AsyncIterator[
    tuple[DecodeEngine, DecodeEngine, EncoderEngine, Observed]
]:
    """Two decode workers and an encoder whose caches reach each other; the second's model."""
    transport = LoopbackTransport()
    ways: dict[str, Peer] = {}
    engines: dict[str, DecodeEngine | EncoderEngine] = {}
    models = {name: Observed(Half.ENCODER if name == "e0" else Half.ALL) for name in HOLDERS}
    for name, address in HOLDERS.items():
        transfers = WorkerTransfers(address, lambda peer: ways[peer.worker_id], transport)
        runner = models[name].runner
        if address.kind is WorkerKind.DECODE:
            decoder = DecodeEngine(name, runner, FULL, peers=transfers.peers)
            transfers.receive(decoder.exchange, decoder)
            engines[name] = decoder
        else:
            encoder = EncoderEngine(name, runner, transfers.outbound, FULL, peers=transfers.peers)
            transfers.receive(encoder.exchange)
            engines[name] = encoder
        ways[name] = transfers
        await engines[name].start()
    first, second, third = engines.values()
    assert isinstance(first, DecodeEngine)
    assert isinstance(second, DecodeEngine)
    assert isinstance(third, EncoderEngine)
    try:
        yield first, second, third, models["d1"]
    finally:
        for engine in engines.values():
            engine.check_integrity()
            await engine.stop()


async def cold(prompt: tuple[int, ...], mode: ReplayMode) -> torch.Tensor:
    model = Observed()
    engine = DecodeEngine("cold", model.runner, FULL)
    await engine.start()
    with model.watched() as logits:
        await run(engine, ask(prompt, mode=mode, max_tokens=12))
    await engine.stop()
    return stacked(logits)


@pytest.mark.parametrize("cached", [24, 40, 96])
@pytest.mark.parametrize("with_window", [False, True])
async def test_pulled_blocks_and_windows_equal_local_ones_and_a_cold_run(
    prompt: tuple[int, ...], cached: int, with_window: bool
) -> None:
    mode = ReplayMode.EXACT
    request = ask(prompt, mode=mode, max_tokens=12)
    num_blocks = cached // WINDOW
    async with three_workers() as (holder, puller, _, model):
        await run(holder, ask(prompt[: cached + 3], mode=mode))
        blocks = (BlockSource(HOLDERS["d0"], (), 0, num_blocks),)
        windows = (WindowSource(HOLDERS["d0"], (), cached),) if with_window else ()
        before = puller.stats().counters.encoder_rows
        with model.watched() as pulled:
            recipe = await run(puller, replace(request, sources=PrefixSources(blocks, windows)))
        assert recipe.write_floor == cached
        assert (recipe.kind is PlanKind.WINDOW) is with_window
        assert puller.stats().counters.encoder_rows - before == len(prompt) - recipe.start
        pulls = puller.stats().pulls
        assert pulls.ends == (("complete", 1),)
        runner = model.runner
        assert pulls.received_bytes == (
            runner.block_bytes(num_blocks) + with_window * runner.window_bytes
        )
    assert torch.equal(stacked(pulled), await cold(prompt, mode))


async def test_an_encoder_s_blocks_serve_a_decode_worker_bit_for_bit(
    prompt: tuple[int, ...],
) -> None:
    """The encoder half writes the same block KV as the whole model."""
    async with three_workers() as (holder, puller, encoder, model):
        handed = ask(prompt[:75], mode=ReplayMode.EXACT)
        stream = holder.generate(handed, local=False)
        await anext(stream)
        await encoder.prefill(handed, "d0")
        assert [event async for event in stream]
        sources = PrefixSources((BlockSource(HOLDERS["e0"], (), 0, 9),))
        request = ask(prompt, mode=ReplayMode.EXACT, max_tokens=12)
        with model.watched() as pulled:
            recipe = await run(puller, replace(request, sources=sources))
        assert recipe.write_floor == 72
    assert torch.equal(stacked(pulled), await cold(prompt, ReplayMode.EXACT))


@pytest.mark.parametrize("parked", [64, 75, 86])
async def test_a_session_goes_on_elsewhere_bit_for_bit(
    prompt: tuple[int, ...], parked: int
) -> None:
    """Whole blocks alone, an odd length with its open pair, and a half block; little is new."""
    first = replace(ask(prompt[:parked]), session_id="s")
    second = replace(ask(prompt[: parked + 5], max_tokens=12), session_id="s")
    async with three_workers() as (holder, puller, _, model):
        await run(holder, first)
        blocks = (BlockSource(HOLDERS["d0"], (), 0, parked // WINDOW),)
        sources = PrefixSources(blocks, image=ImageSource(HOLDERS["d0"], parked))
        with model.watched() as moved:
            recipe = await run(puller, replace(second, sources=sources))
        assert (recipe.kind, recipe.start) == (PlanKind.RESUME, parked)
        runner = model.runner
        assert puller.stats().pulls.received_bytes == (
            runner.image_bytes(parked) + runner.block_bytes(parked // WINDOW)
        )
    home = Observed()
    engine = DecodeEngine("home", home.runner, FULL)
    await engine.start()
    await run(engine, first)
    with home.watched() as stayed:
        assert await run(engine, second) == recipe
    await engine.stop()
    assert torch.equal(stacked(moved), stacked(stayed))
