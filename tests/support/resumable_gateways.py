"""How do tests run several gateways over the same workers, and let gateways and workers die?

Gateways are whole services over routers of their own; workers are hash machines whose answers are
written down. Only the network is missing.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from hash_machine import HashMachine
from routed_cluster import GatewayCalls, RoutedCluster, routed_cluster
from split_cluster import CONFIG

from ripresa.cluster.gateway.api_keys import KeyFile
from ripresa.cluster.gateway.call import Call
from ripresa.cluster.gateway.chat_encoding import ChatEncoding
from ripresa.cluster.gateway.served_model import ServedModel
from ripresa.cluster.gateway.service import InferenceService
from ripresa.cluster.gateway.tokenizer import Tokenizer
from ripresa.cluster.observability.metrics import GatewayMetrics
from ripresa.cluster.routing.prompt import PromptRequest, RouterEvent
from ripresa.cluster.sessions.store import LocalSessionStore
from ripresa.protos import ripresa_pb2 as pb
from ripresa.workers.demo.checkpoint import DEMO_MODEL
from ripresa.workers.models.base import StepOutput
from ripresa.workers.scheduling.step_plan import StepPlan

Request = pb.GenerateRequest | pb.ChatRequest
Response = pb.GenerateResponse | pb.ChatResponse


class WrittenAnswers:
    """Puts written tokens in the place of what machines sample; the next one wherever it runs.

    Args:
        answers: the tokens of each seed's answer; others are of one token, again and again.
    """

    def __init__(self, answers: Mapping[int, Sequence[int]]) -> None:
        self._answers = answers
        self._begun_at: dict[int, int] = {}

    def begin(self, prompt: PromptRequest) -> None:
        """The next answer to this seed is one to this prompt."""
        self._begun_at[prompt.sampling.seed] = len(prompt.token_ids)

    def give(self, machine: HashMachine) -> None:
        execute = machine.execute

        def written(plan: StepPlan, *more: Any) -> StepOutput:
            output = execute(plan, *more)
            for step in plan.sequences:
                if step.slot in output.sampled and step.sampling is not None:
                    seed = step.sampling.seed
                    answer = self._answers.get(seed)
                    begun_at = self._begun_at.setdefault(seed, step.decoder_stop)
                    place = step.decoder_stop - begun_at
                    output.sampled[step.slot] = 40 if answer is None else answer[place]
            return output

        machine.execute = written  # type: ignore[method-assign]


@dataclass
class TestGateway:
    """One gateway.

    Attributes:
        calls: its way to the workers.
        tenant: whose calls it gets.
    """

    __test__ = False

    service: InferenceService
    calls: GatewayCalls
    tenant: str = ""
    num_calls: int = 0

    def open(self, request: Request) -> Any:
        """A request's messages."""
        self.num_calls += 1
        request_id = request.options.request_id or f"call-{id(self)}-{self.num_calls}"
        call = Call(request_id, tenant=self.tenant)
        if isinstance(request, pb.ChatRequest):
            return self.service.chat(request, call)
        return self.service.generate(request, call)

    async def ask(self, request: Request) -> list[Response]:
        async with aclosing(self.open(request)) as messages:
            return [message async for message in messages]

    async def read(self, request: Request, num_messages: int) -> list[Response]:
        """Read so many messages, then die; workers hear nothing from it."""
        read: list[Response] = []
        stream = self.open(request)
        while len(read) < num_messages:
            read.append(await anext(stream))
        await self.die(stream)
        return read

    async def die(self, *streams: Any) -> None:
        self.calls.is_dead = True
        for stream in streams:
            await stream.aclose()

    def resumed(self, stream_id: str, next_sequence: int) -> Any:
        """A stream's further messages."""
        request = pb.ResumeRequest(stream_id=stream_id, next_sequence=next_sequence)
        return self.service.resume(request, Call("resuming", tenant=self.tenant))

    async def resume(self, stream_id: str, next_sequence: int = 0) -> list[Response]:
        async with aclosing(self.resumed(stream_id, next_sequence)) as messages:
            return [getattr(one, one.WhichOneof("event")) async for one in messages]


class Gateways:
    """Gateways over one set of workers, and one store of sessions.

    Attributes:
        asked: what routers were asked to run, in order.
    """

    def __init__(self, cluster: RoutedCluster, written: WrittenAnswers) -> None:
        self.cluster = cluster
        self.asked: list[PromptRequest] = []
        self._written = written
        self._tokenizer, self._encoding = _demo()
        self._model = ServedModel("demo", 2048, self._tokenizer.num_ids, 1, "ab12")
        self._services: list[InferenceService] = []
        self.store = LocalSessionStore()

    def another(self, keys: KeyFile | None = None, tenant: str = "") -> TestGateway:
        """A new gateway, whose calls are a tenant's."""
        calls, router = self.cluster.gateway()
        run = router.generate

        def generate(prompt: PromptRequest) -> AsyncGenerator[RouterEvent]:
            self.asked.append(prompt)
            self._written.begin(prompt)
            return run(prompt)

        router.generate = generate  # type: ignore[method-assign]
        service = InferenceService(
            router,
            self._model,
            self._tokenizer,
            GatewayMetrics(),
            encoding=self._encoding,
            window=8,
            keys=keys,
        )
        service.keep_sessions(self.store)
        self._services.append(service)
        return TestGateway(service, calls, tenant)

    async def idle(self) -> None:
        """Return once no stream runs on any worker, and no step has to do with one."""
        living = [
            worker
            for name, worker in self.cluster.workers_by_id.items()
            if name not in self.cluster.dead
        ]
        for worker in living:
            if worker.streams is not None:
                await worker.streams.quiet()
            for job in tuple(worker.engine._core._by_id.values()):
                await job.released.wait()

    def close(self) -> None:
        for service in self._services:
            assert service.num_running == 0
            service.close()


@cache
def _demo() -> tuple[Tokenizer, ChatEncoding]:
    file = DEMO_MODEL / "tokenizer.json"
    tokenizer = Tokenizer(file)
    return tokenizer, ChatEncoding(tokenizer, file, "demo")


@asynccontextmanager
async def resumable_gateways(
    answers: Mapping[int, Sequence[int]], num_encoders: int = 0, num_decoders: int = 2
) -> AsyncIterator[Gateways]:
    """A running cluster of written answers, idle at the end."""
    written = WrittenAnswers(answers)
    async with routed_cluster(
        num_encoders, num_decoders, config=CONFIG, num_blocks=512, max_model_len=2048
    ) as cluster:
        for worker in cluster.workers_by_id.values():
            written.give(worker.machine)
        gateways = Gateways(cluster, written)
        yield gateways
        await gateways.idle()
        gateways.close()
