"""What does a real model compute while it serves an engine? Its decoder logits, row by row."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from ripresa.workers.cache.kv_layout import KVFormat
from ripresa.workers.config import EngineConfig, Numerics, WindowConfig, WindowPolicy
from ripresa.workers.decode_engine import DecodeEngine
from ripresa.workers.encoder_engine import EncoderEngine
from ripresa.workers.model_runner import load_runner
from ripresa.workers.models.base import EncoderOutput, StepMasks, StepOutput
from ripresa.workers.models.deepseek_v41.engram_ids import Ids
from ripresa.workers.models.deepseek_v41.weights import Half
from ripresa.workers.replay import Recipe, ReplayMode, TailVariant
from ripresa.workers.request import (
    CacheUse,
    Failed,
    GenerationRequest,
    PrefillDone,
    Reserved,
    SamplingParams,
)
from ripresa.workers.scheduling.step_plan import StepPlan
from ripresa.workers.transfer.inbound import InboundTransfers
from ripresa.workers.transfer.loopback import LoopbackTransport
from ripresa.workers.transfer.outbound import OutboundTransfers

CASE = Path(__file__).resolve().parents[1] / "data" / "golden" / "case_g_plain_replay"
WINDOW = 8
CONFIG = EngineConfig(
    max_batched_tokens=3 * WINDOW,
    max_num_seqs=4,
    num_blocks=64,
    windows=WindowConfig(WindowPolicy.ZERO),
)


class Observed:
    """A runner's decoder logits, row by row, while it serves an engine."""

    def __init__(
        self,
        half: Half = Half.ALL,
        checkpoint: Path = CASE / "checkpoint",
        num_blocks: int = 64,
        kv_format: KVFormat = KVFormat.FLOAT32,
        compressed_ids: Ids | None = None,
    ) -> None:
        self.runner = load_runner(
            checkpoint,
            half,
            num_blocks=num_blocks,
            num_slots=CONFIG.max_num_seqs,
            numerics=Numerics.DETERMINISTIC,
            kv_format=kv_format,
            compressed_ids=compressed_ids,
            poison=True,
        )
        self.logits: dict[int, torch.Tensor] = {}
        self._execute = self.runner.execute
        self.runner.execute = self._observe  # type: ignore[method-assign]

    def _observe(
        self,
        plan: StepPlan,
        inbound: Mapping[int, EncoderOutput] | None = None,
        masks: StepMasks | None = None,
    ) -> StepOutput:
        steps = tuple(replace(s, return_logits=s.num_decoder_rows > 0) for s in plan.sequences)
        output = self._execute(StepPlan(plan.step, steps), inbound, masks)
        for step in steps:
            if step.return_logits:
                rows = range(step.decoder_start, step.decoder_stop)
                self.logits.update(zip(rows, output.logits[step.slot], strict=True))
        return output

    @contextmanager
    def watched(self) -> Iterator[dict[int, torch.Tensor]]:
        self.logits = {}
        yield self.logits


def ask(
    token_ids: Sequence[int],
    *,
    tail: TailVariant = TailVariant.FLOORED,
    mode: ReplayMode = ReplayMode.BOUNDED,
    max_tokens: int = 1,
) -> GenerationRequest:
    return GenerationRequest(
        request_id="r",
        generation=0,
        token_ids=tuple(token_ids),
        num_prompt_tokens=len(token_ids),
        recipe=None,
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        tail=tail,
        cache=CacheUse(mode),
    )


async def run(engine: DecodeEngine, request: GenerationRequest) -> Recipe:
    recipe: Recipe | None = None
    async for event in engine.generate(request, local=True):
        assert not isinstance(event, Failed), event
        if isinstance(event, PrefillDone):
            recipe = event.recipe
    assert recipe is not None
    engine.check_integrity()
    return recipe


async def run_split(
    encoder: EncoderEngine, decoder: DecodeEngine, request: GenerationRequest
) -> Recipe:
    recipe: Recipe | None = None
    async for event in decoder.generate(request, local=False):
        assert not isinstance(event, Failed), event
        if isinstance(event, Reserved):
            await encoder.prefill(request, "d0")
        if isinstance(event, PrefillDone):
            recipe = event.recipe
    assert recipe is not None
    return recipe


def stacked(logits: Mapping[int, torch.Tensor]) -> torch.Tensor:
    return torch.stack([logits[position] for position in sorted(logits)])


@asynccontextmanager
async def split_engines(
    config: EngineConfig = CONFIG,
    make: Callable[[Half], Observed] = Observed,
) -> AsyncIterator[tuple[EncoderEngine, DecodeEngine, Observed]]:
    """An encoder and a decode worker with a lane between them, and what the latter computes."""
    model, half = make(Half.ALL), make(Half.ENCODER)
    transport = LoopbackTransport()
    decoder = DecodeEngine("d0", model.runner, config)
    inbound = InboundTransfers(decoder, transport)
    outbound = OutboundTransfers("e0", lambda _: inbound, transport)
    encoder = EncoderEngine("e0", half.runner, outbound, config)
    await encoder.start()
    await decoder.start()
    yield encoder, decoder, model
    await encoder.stop()
    await outbound.close()
    await decoder.stop()
    await inbound.close()
