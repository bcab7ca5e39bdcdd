"""How does a real HTTP client meet a gateway with an engine behind it, all in this process?"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from engine_router import EngineRouter
from http_gateway import http_gateway
from noise_checkpoint import noise_checkpoint

from ripresa.cluster.gateway.chat_encoding import ChatEncoding
from ripresa.cluster.gateway.served_model import ServedModel
from ripresa.cluster.gateway.service import InferenceService
from ripresa.cluster.gateway.tokenizer import Tokenizer
from ripresa.cluster.observability.metrics import GatewayMetrics
from ripresa.workers.config import EngineConfig, Numerics
from ripresa.workers.decode_engine import DecodeEngine
from ripresa.workers.model_runner import TorchModelRunner, load_runner
from ripresa.workers.models.deepseek_v41.tensor_specs import Half

MODEL = "deepseek-demo"
CONFIG = EngineConfig(max_num_seqs=8, num_blocks=64, numerics=Numerics.DETERMINISTIC)


def noise_runner() -> TorchModelRunner:
    """All layers of a model of noise, for one engine at a time."""
    return load_runner(
        noise_checkpoint(),
        Half.ALL,
        num_blocks=CONFIG.num_blocks,
        num_slots=CONFIG.max_num_seqs,
        numerics=CONFIG.numerics,
    )


@asynccontextmanager
async def engine_gateway(
    runner: TorchModelRunner, tokenizer: Tokenizer, encoding: ChatEncoding
) -> AsyncIterator[str]:
    """Serve while the body runs; gives `http://host:port`. Nothing may be left behind."""
    engine = DecodeEngine("d0", runner, CONFIG)
    await engine.start()
    eos = runner.eos_token_id
    model = ServedModel(MODEL, runner.max_model_len, tokenizer.num_ids, eos, "ab12")
    service = InferenceService(
        EngineRouter(engine),
        model,
        tokenizer,
        GatewayMetrics(),
        encoding=encoding,
        window=runner.window,
    )
    async with http_gateway(service) as url:
        yield url
    assert service.num_running == 0
    engine.check_integrity()
    await engine.stop()
    service.close()
