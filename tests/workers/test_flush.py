"""Is what is flushed gone everywhere, of the right tenant alone, and under no running request?"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from hash_machine import WINDOW, HashMachine, reference_stream
from hash_requests import ask, prompt
from split_cluster import CONFIG, StepGate, Stream, assert_idle, collect

from ripresa.workers.cache.cache_events import TENANT_BYTES, tenant_digest
from ripresa.workers.config import DiskConfig, WindowConfig, WindowPolicy
from ripresa.workers.decode_engine import DecodeEngine
from ripresa.workers.replay import Recipe
from ripresa.workers.request import GenerationRequest, PrefillDone

RED, BLUE = b"r" * TENANT_BYTES, b"b" * TENANT_BYTES
NARROW = RED + b"n" * 16
TOKENS = prompt(1, 5 * WINDOW)


def of(salt: bytes, name: str, session: str | None = None) -> GenerationRequest:
    return replace(ask(TOKENS, name), tenant_salt=salt, session_id=session)


@pytest.fixture
def machine() -> HashMachine:
    return HashMachine(CONFIG.num_blocks, CONFIG.max_num_seqs)


@pytest.fixture(params=[False, True], ids=["memory", "disk"])
async def engine(
    request: pytest.FixtureRequest, machine: HashMachine, tmp_path: Path
) -> AsyncIterator[DecodeEngine]:
    disk = DiskConfig(path=str(tmp_path / "blocks")) if request.param else DiskConfig()
    config = replace(CONFIG, disk=disk, windows=WindowConfig(WindowPolicy.JUNCTION))
    engine = DecodeEngine("d0", machine, config)
    await engine.start()
    yield engine
    assert_idle(engine, machine)
    await engine.stop()


async def start_of(engine: DecodeEngine, request: GenerationRequest) -> int:
    """The first row that the request computes."""
    return recipe_of(await collect(engine, request)).start


def recipe_of(stream: Stream) -> Recipe:
    return next(event.recipe for event in stream.events if isinstance(event, PrefillDone))


async def test_a_tenant_is_flushed_with_all_that_he_narrows_to(engine: DecodeEngine) -> None:
    for number, salt in enumerate((RED, NARROW, BLUE)):
        await collect(engine, of(salt, f"first {number}", "s"))
    dropped = await engine.flush(tenant_digest(RED))
    assert dropped > 0
    assert dropped % WINDOW == 0
    assert engine.stats().num_sessions == 1
    assert await start_of(engine, of(BLUE, "blue")) > 0
    assert await start_of(engine, of(RED, "red")) == 0
    assert await start_of(engine, of(NARROW, "narrow")) == 0


async def test_everybody_is_flushed(engine: DecodeEngine) -> None:
    for number, salt in enumerate((b"", RED)):
        await collect(engine, of(salt, f"first {number}", "s"))
    assert await engine.flush(None) > 0
    assert engine.stats().num_sessions == 0
    for number, salt in enumerate((b"", RED)):
        assert await start_of(engine, of(salt, f"again {number}")) == 0
    assert await engine.flush(None) > 0
    assert await engine.flush(None) == 0


async def test_a_running_request_keeps_what_it_uses(
    engine: DecodeEngine, machine: HashMachine
) -> None:
    await collect(engine, of(RED, "first"))
    request = of(RED, "runs")
    gate = StepGate(machine, engine.stats().num_steps + 1)
    running = asyncio.create_task(collect(engine, request))
    await gate.reached.wait()
    flushing = asyncio.create_task(engine.flush(None))
    gate.open()
    stream = await running
    assert await flushing > 0
    assert recipe_of(stream).start > 0
    follows = replace(request, recipe=recipe_of(stream))
    assert stream.tokens == reference_stream(follows).tokens
