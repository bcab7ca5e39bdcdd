"""Do `model.w8a8` and `model.engram_placement` reach a worker, and part those that must differ?"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from tiny_model import tiny_checkpoint
from tiny_tokenizer import write_tiny_tokenizer

from ripresa.workers.cache.block_hash import hash_blocks, worker_context
from ripresa.workers.config import EngineConfig, EngramPlacement, Numerics
from ripresa.workers.decode_engine import DecodeEngine
from ripresa.workers.encoder_engine import EncoderEngine
from ripresa.workers.errors import ErrorCode, RipresaError, Unavailable
from ripresa.workers.model_runner import TorchModelRunner, load_runner
from ripresa.workers.models.deepseek_v41.tensor_specs import Half
from ripresa.workers.request import (
    CacheUse,
    EngineEvent,
    Failed,
    GenerationRequest,
    Reserved,
    SamplingParams,
    Tokens,
)
from ripresa.workers.scheduling.step_plan import SequenceStep, StepPlan
from ripresa.workers.transfer.inbound import InboundTransfers
from ripresa.workers.transfer.loopback import LoopbackTransport
from ripresa.workers.transfer.outbound import OutboundTransfers
from ripresa.workers.worker_process import start_runner
from ripresa.workers.worker_settings import WorkerSettings

CONFIG = EngineConfig(
    max_batched_tokens=32, max_num_seqs=4, num_blocks=32, numerics=Numerics.DETERMINISTIC
)
PROMPT = tuple(Random(4).choices(range(96), k=37))
TABLE = "layers.1.engram.embed.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("settings") / "model"
    tiny_checkpoint(folder)
    write_tiny_tokenizer(folder)
    return folder


async def started(model: Path, config: EngineConfig, half: Half = Half.ALL) -> TorchModelRunner:
    """As a worker process does it."""
    return await start_runner(WorkerSettings(str(model), config), half)


def request(
    tokens: tuple[int, ...] = PROMPT, name: str = "r", max_tokens: int = 6
) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        generation=0,
        token_ids=tokens,
        num_prompt_tokens=len(tokens),
        recipe=None,
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        cache=CacheUse(reads=False),
    )


@asynccontextmanager
async def running(runner: TorchModelRunner, config: EngineConfig) -> AsyncIterator[DecodeEngine]:
    engine = DecodeEngine("d0", runner, config)
    await engine.start()
    try:
        yield engine
        engine.check_integrity()
    finally:
        await engine.stop()


async def collect(engine: DecodeEngine, asked: GenerationRequest) -> list[EngineEvent]:
    return [event async for event in engine.generate(asked, local=True)]


def tokens_of(events: list[EngineEvent]) -> list[int]:
    return [token for event in events if isinstance(event, Tokens) for token in event.token_ids]


def logits_of(runner: TorchModelRunner) -> torch.Tensor:
    step = SequenceStep(
        slot=0,
        block_table=tuple(range(5)),
        token_ids=PROMPT,
        encoder_start=0,
        decoder_start=0,
        decoder_stop=len(PROMPT),
        return_logits=True,
    )
    logits = runner.execute(StepPlan(0, (step,))).logits[0]
    runner.release_slot(0)
    return logits


async def test_every_placement_gives_the_same_numbers_and_tokens(model: Path) -> None:
    seen = []
    for placement in EngramPlacement:
        config = replace(CONFIG, engram_placement=placement)
        runner = await started(model, config)
        logits = logits_of(runner)
        async with running(runner, config) as engine:
            seen.append((runner.layout_digest, logits, tokens_of(await collect(engine, request()))))
    for digest, logits, tokens in seen[1:]:
        assert digest == seen[0][0], "a placement changes no number, so workers may differ in it"
        assert torch.equal(logits, seen[0][1])
        assert tokens == seen[0][2]
    assert len(seen[0][2]) == 6


@pytest.mark.parametrize("placement", EngramPlacement)
async def test_rows_come_in_one_gather_a_step(
    model: Path, placement: EngramPlacement, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of values and of scales, whatever sequences share the step."""
    config = replace(CONFIG, engram_placement=placement)
    runner = await started(model, config)
    table = runner.weights.engram[1].table
    asked: list[int] = []
    for store in (table._rows, table._scales):
        take = store.take

        def watch(numbers: np.ndarray, take=take) -> np.ndarray:  # type: ignore[no-untyped-def]
            asked.append(len(numbers))
            return take(numbers)

        monkeypatch.setattr(store, "take", watch)
    gathers: list[list[int]] = []
    rows: list[int] = []
    execute = runner.execute

    def count(plan: StepPlan, *more):  # type: ignore[no-untyped-def]
        asked.clear()
        output = execute(plan, *more)
        gathers.append(list(asked))
        rows.append(output.num_encoder_rows)
        return output

    monkeypatch.setattr(runner, "execute", count)
    async with running(runner, config) as engine:
        asks = [request(PROMPT[n:], f"r{n}") for n in range(3)]
        await asyncio.gather(*(collect(engine, one) for one in asks))
    columns = 3 * 2  # n-gram sizes and heads
    assert gathers == [[columns * count, columns * count] for count in rows]
    assert max(rows) > 3, "several sequences, or many rows, in one step"


async def test_w8a8_is_what_the_runner_s_option_computes(model: Path) -> None:
    logits = {}
    for w8a8 in (False, True):
        runner = await started(model, replace(CONFIG, w8a8=w8a8))
        direct = load_runner(
            model,
            Half.ALL,
            num_blocks=8,
            num_slots=1,
            numerics=Numerics.DETERMINISTIC,
            round_inputs=w8a8,
        )
        logits[w8a8] = logits_of(runner)
        assert torch.equal(logits[w8a8], logits_of(direct))
        assert runner.layout_digest == direct.layout_digest
    assert not torch.equal(logits[False], logits[True])


async def test_w8a8_gives_one_stream_whatever_the_batch_and_the_half(model: Path) -> None:
    config = replace(CONFIG, w8a8=True)
    async with running(await started(model, config), config) as engine:
        alone = tokens_of(await collect(engine, request()))
        asks = [request(name="again"), request(PROMPT[5:], "other")]
        again, _ = await asyncio.gather(*(collect(engine, one) for one in asks))
    assert tokens_of(again) == alone
    split = await split_stream(model, config, config)
    assert tokens_of(split) == alone


async def split_stream(
    model: Path, encoder: EngineConfig, decoder: EngineConfig
) -> list[EngineEvent]:
    """A request's events over an encoder worker and a decode worker."""
    events: list[EngineEvent] = []
    transport = LoopbackTransport()
    async with running(await started(model, decoder), decoder) as decodes:
        inbound = InboundTransfers(decodes, transport)
        outbound = OutboundTransfers("e0", lambda _: inbound, transport)
        half = await started(model, encoder, Half.ENCODER)
        encodes = EncoderEngine("e0", half, outbound, encoder)
        await encodes.start()
        stream = decodes.generate(request(), local=False)
        try:
            async for event in stream:
                events.append(event)
                if isinstance(event, Reserved):
                    await encodes.prefill(request(), "d0")
        finally:
            await stream.aclose()
            await encodes.stop()
            await outbound.close()
            await inbound.close()
    return events


async def test_workers_that_differ_in_w8a8_share_nothing(model: Path) -> None:
    with pytest.raises(RipresaError, match="its KV layout differs") as caught:
        await split_stream(model, replace(CONFIG, w8a8=True), CONFIG)
    assert caught.value.code is ErrorCode.FAILED_PRECONDITION
    names = set()
    for w8a8 in (False, True):
        runner = await started(model, replace(CONFIG, w8a8=w8a8))
        context = worker_context(runner.layout_digest, runner.window, b"")
        names.update(hash_blocks(context, PROMPT))
    assert len(names) == 2 * (len(PROMPT) // 8), "no block of one has the name of the other's"


@pytest.mark.parametrize("placement", [EngramPlacement.HOST_SHARED, EngramPlacement.NVME])
async def test_a_table_cut_under_a_worker_ends_it_and_says_why(
    model: Path, tmp_path: Path, placement: EngramPlacement
) -> None:
    folder = tmp_path / "model"
    tiny_checkpoint(folder)
    write_tiny_tokenizer(folder)
    config = replace(CONFIG, engram_placement=placement)
    async with running(await started(folder, config), config) as engine:
        assert len(tokens_of(await collect(engine, request()))) == 6
        for path in folder.glob("*.safetensors"):
            os.truncate(path, 100)
        last = (await collect(engine, request(name="after")))[-1]
        assert isinstance(last, Failed)
        assert isinstance(last.error, Unavailable), "another worker may serve it"
        assert f"{TABLE}: model-" in last.error.message
        assert "was changed or cut while it is served" in last.error.message
        with pytest.raises(Unavailable, match="was changed or cut"):
            await collect(engine, request(name="refused"))
