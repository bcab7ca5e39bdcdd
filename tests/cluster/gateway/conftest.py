"""A gateway over real loopback channels, with a small in-process router behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from tokenizers import Tokenizer as TokenizerModel
from tokenizers import decoders, models, pre_tokenizers, trainers

from ripresa.cluster.gateway.grpc_server import GrpcServer
from ripresa.cluster.gateway.service import InferenceService
from ripresa.cluster.gateway.tokenizer import Tokenizer
from ripresa.cluster.gateway.validation import ServedModel
from ripresa.cluster.observability.metrics import GatewayMetrics
from ripresa.cluster.routing.prompt import Placed, PromptRequest, RouterEvent
from ripresa.protos import ripresa_pb2_grpc
from ripresa.workers.errors import ErrorCode, RipresaError
from ripresa.workers.replay import cold_recipe
from ripresa.workers.request import Finished, FinishReason, Tokens, WorkCounters

SPECIALS = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<think>")
CORPUS = ("the quick brown fox jumps over the lazy dog", "héllo wörld, 日本語 ok?", "0 1 2 3 4")
MAX_MESSAGE_BYTES = 1 << 16


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = TokenizerModel(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    model.train_from_iterator(CORPUS, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    model.save(str(path))
    return path


@pytest.fixture(scope="session")
def tokenizer(tokenizer_path: Path) -> Tokenizer:
    return Tokenizer(tokenizer_path)


@pytest.fixture(scope="session")
def model(tokenizer: Tokenizer) -> ServedModel:
    return ServedModel(
        name="tiny",
        max_model_len=64,
        vocab_size=tokenizer.num_ids,
        eos_token_id=1,
        weights_digest="ab12",
    )


@dataclass
class InProcessRouter:
    """Answers from a script: token k of the answer is `script[k % len(script)]`.

    Attributes:
        script: the ids that are repeated until `max_tokens`, a stop id or the end of sentence.
        batch: tokens an event.
        hold: while it is clear, a stream waits before each event after the first token.
        failure: raised once one token was streamed.
        seen: prompts that arrived; open: requests that are not closed yet.
    """

    script: tuple[int, ...] = (40, 41, 42, 43)
    batch: int = 1
    hold: asyncio.Event = field(default_factory=asyncio.Event)
    failure: Exception | None = None
    is_ready: bool = True
    encoder_id: str | None = "encoder-0"
    seen: list[PromptRequest] = field(default_factory=list)
    open: set[str] = field(default_factory=set)
    aborted: set[str] = field(default_factory=set)
    all_closed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.hold.set()
        self.all_closed.set()

    async def generate(self, prompt: PromptRequest) -> AsyncGenerator[RouterEvent]:
        self.seen.append(prompt)
        self.open.add(prompt.request_id)
        self.all_closed.clear()
        try:
            async for event in self._events(prompt):
                yield event
        finally:
            self.open.discard(prompt.request_id)
            if not self.open:
                self.all_closed.set()

    async def _events(self, prompt: PromptRequest) -> AsyncGenerator[RouterEvent]:
        num_prompt, sampling = len(prompt.token_ids), prompt.sampling
        recipe = cold_recipe(num_prompt, 8, prompt.tail, sampling.seed)
        yield Placed("decode-0", self.encoder_id, recipe, "the only one")
        stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else {1})
        done, stop = 0, None
        while done < sampling.max_tokens and stop is None:
            size = min(self.batch, sampling.max_tokens - done)
            ids = tuple(self.script[(done + k) % len(self.script)] for k in range(size))
            for place, token_id in enumerate(ids):
                if token_id in stops:
                    ids, stop = ids[: place + 1], token_id
                    break
            yield Tokens(num_prompt + done, ids)
            done += len(ids)
            if self.failure is not None:
                raise self.failure
            await self.hold.wait()
            if prompt.request_id in self.aborted:
                raise RipresaError(ErrorCode.CANCELLED, "the request was aborted")
        reason = FinishReason.LENGTH if stop is None else FinishReason.STOP
        yield Finished(reason, stop, done, WorkCounters(4 * num_prompt, 4, 4 * done, 1000))

    async def abort(self, request_id: str) -> bool:
        if request_id not in self.open:
            return False
        self.aborted.add(request_id)
        self.hold.set()
        return True

    async def ready(self) -> bool:
        return self.is_ready


@pytest.fixture
async def router() -> InProcessRouter:
    return InProcessRouter()


@pytest.fixture
async def service(
    router: InProcessRouter, model: ServedModel, tokenizer: Tokenizer
) -> InferenceService:
    metrics = GatewayMetrics(backends=("gloo",))
    return InferenceService(router, model, tokenizer, metrics, max_running=3)


@pytest.fixture
async def server(service: InferenceService) -> AsyncIterator[GrpcServer]:
    server = GrpcServer(
        service,
        host="127.0.0.1",
        port=0,
        max_message_bytes=MAX_MESSAGE_BYTES,
        ready_interval_s=0.02,
        drain_notice_s=0.05,
    )
    await server.start()
    yield server
    await server.stop(0)


@pytest.fixture
async def channel(server: GrpcServer) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        yield channel


@pytest.fixture
async def stub(channel: grpc.aio.Channel) -> ripresa_pb2_grpc.InferenceAsyncStub:
    return ripresa_pb2_grpc.InferenceStub(channel)
