"""How much time does a gateway add to a chat, and how many messages a second does it stream?

    python tests/bench/gateway.py [--concurrent 16] [--tokens 4000] [--rounds 12]

A gateway process of its own: gRPC, rendering, encoding, splicing, hashing, a prefix directory in
the same process and the planner over eight workers. The workers are stand-ins that answer at a
given pace, so that everything measured is the gateway. Clients are another process.

Added latency: from the client's send to the first call of a worker, and back from a worker's token
to the client, while the asked number of streams runs. `new` conversations are seen for the first
time; `next` ones are the next turn of an agent loop, whose earlier parts the gateway has seen. By
the clock, so on a machine with nothing else to do; the gateway's CPU time is printed beside it.
Messages: as many as come when workers have no pace.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))

import grpc
from machine import print_header
from measurement import verdict

from ripresa.cluster.directory.events import Answer, Receipt
from ripresa.cluster.directory.index import DirectorySettings, PrefixIndex
from ripresa.cluster.gateway.chat_encoding import ChatEncoding
from ripresa.cluster.gateway.grpc_server import GrpcServer
from ripresa.cluster.gateway.served_model import ServedModel
from ripresa.cluster.gateway.service import InferenceService
from ripresa.cluster.gateway.tokenizer import Tokenizer
from ripresa.cluster.observability.metrics import GatewayMetrics
from ripresa.cluster.routing.prefix_hints import PrefixHints
from ripresa.cluster.routing.prompt import Hold
from ripresa.cluster.routing.router import ClusterRouter
from ripresa.cluster.routing.worker_load import PlannerSettings
from ripresa.protos import ripresa_pb2 as pb
from ripresa.protos import ripresa_pb2_grpc
from ripresa.workers.address import WorkerKind
from ripresa.workers.collector import spare_startup
from ripresa.workers.demo.checkpoint import DEMO_MODEL
from ripresa.workers.replay import ReplayMode, cold_recipe
from ripresa.workers.replay_query import ReplayGeometry
from ripresa.workers.report import WorkerReport
from ripresa.workers.request import (
    EngineEvent,
    EngineStats,
    Finished,
    FinishReason,
    GenerationRequest,
    PrefillDone,
    Reserved,
    Tokens,
    WorkCounters,
)

TARGET_ADDED_MS = 5.0
TARGET_MESSAGES = 3_000
MODEL = "deepseek-v4.1-demo"
GEOMETRY = ReplayGeometry(128, 6, 20, 20)
NUM_WORKERS = 8
STEP_S = 0.02
"""A decode worker's step, in the latency measurement."""
ANSWER = 40
WORDS = ("a", "file", "of", "the", "build", "was", "not", "found", "so", "look", "at", "its", "log")


class StandIns:
    """Workers that answer every request with the same token; the view and the calls of a router.

    Attributes:
        step_s: seconds between two tokens; 0 for as fast as they are taken.
        called: when a request's worker was called, by request id; monotonic seconds.
        told: when its first token was, likewise.
    """

    def __init__(self) -> None:
        self.step_s = STEP_S
        self.called: dict[str, float] = {}
        self.told: dict[str, float] = {}
        stats = EngineStats(0, 0, 100_000, 100_000, 0, WorkCounters(), 0, 0)
        self._reports = tuple(
            WorkerReport(f"{kind.value}-{n}", kind, "node", 1, 1, stats, b"layout", number=1)
            for kind in (WorkerKind.ENCODER, WorkerKind.DECODE)
            for n in range(NUM_WORKERS // 2)
        )

    def workers(self) -> tuple[WorkerReport, ...]:
        return self._reports

    def age_s(self, worker_id: str) -> float:
        return 0.0

    def was_decoder(self, worker_id: str) -> bool:
        return any(report.worker_id == worker_id for report in self._reports)

    async def refresh(self) -> None:
        return None

    async def gone(self, worker_id: str) -> None:
        await asyncio.Event().wait()

    async def changed(self) -> None:
        await asyncio.Event().wait()

    def lost(self, worker_id: str) -> None:
        raise AssertionError(f"{worker_id} was lost")

    async def generate(
        self, worker_id: str, request: GenerationRequest, local: bool, hold: Hold
    ) -> AsyncGenerator[EngineEvent]:
        request_id = request.request_id
        self.called[request_id] = time.monotonic()
        first, sampling = request.num_prompt_tokens, request.sampling
        recipe = cold_recipe(request.num_tokens, GEOMETRY.window, request.tail, sampling.seed, 1)
        yield Reserved(worker_id, local, recipe)
        yield PrefillDone(recipe)
        for done in range(sampling.max_tokens):
            await asyncio.sleep(self.step_s)
            self.told.setdefault(request_id, time.monotonic())
            yield Tokens(first + done, (WORD_ID,))
        yield Finished(FinishReason.LENGTH, None, sampling.max_tokens)

    async def prefill(
        self, worker_id: str, request: GenerationRequest, receiver: str, hold: Hold
    ) -> WorkCounters:
        return WorkCounters()

    async def abort(self, worker_id: str, request_id: str) -> bool:
        return False


WORD_ID = 400
"""Any token of plain text."""


class Index:
    """The prefix directory without its actor."""

    def __init__(self) -> None:
        self._index = PrefixIndex(DirectorySettings(window=GEOMETRY.window), "bench")

    async def lookup_or_claim(
        self,
        hashes: Sequence[bytes],
        request: str,
        mode: ReplayMode = ReplayMode.BOUNDED,
        interval: int | None = None,
        gone: str | None = None,
    ) -> Answer:
        return self._index.lookup_or_claim(hashes, request, time.monotonic(), mode, interval, gone)

    async def leader(self, hashes: Sequence[bytes], request: str) -> tuple[str, int] | None:
        return None

    def release(self, hashes: Sequence[bytes], request: str) -> None:
        self._index.release(request)

    def receipt(self, receipt: Receipt) -> None:
        return None

    def lost(self, worker: str, incarnation: int) -> None:
        return None


def serve(pipe: Connection) -> None:
    """The gateway's process: says its port, then answers questions until there are none."""
    asyncio.run(_serve(pipe))


async def _serve(pipe: Connection) -> None:
    tokenizer = Tokenizer(DEMO_MODEL / "tokenizer.json")
    workers = StandIns()
    hints = PrefixHints(Index(), GEOMETRY, lambda worker_id: None)
    router = ClusterRouter(workers, workers, hints, PlannerSettings())
    model = ServedModel(MODEL, 65_536, tokenizer.num_ids, eos_token_id=1, weights_digest="bench")
    service = InferenceService(
        router,
        model,
        tokenizer,
        GatewayMetrics(),
        encoding=ChatEncoding(tokenizer, DEMO_MODEL / "tokenizer.json", MODEL),
    )
    server = GrpcServer(service, host="127.0.0.1", port=0, drain_notice_s=0)
    await server.start()
    # As a gateway's replica does.
    spare_startup()
    pipe.send(server.port)
    while (asked := await asyncio.to_thread(pipe.recv)) is not None:
        workers.step_s = asked
        pipe.send((workers.called.copy(), workers.told.copy(), time.process_time()))
    after_start = full_collection()
    gc.unfreeze()
    pipe.send((after_start, full_collection()))
    await server.stop(0)
    service.close()


def full_collection() -> float:
    """CPU seconds in which no stream goes on."""
    began = time.thread_time()
    gc.collect()
    return time.thread_time() - began


def text(rng: random.Random, num_tokens: int) -> str:
    """Text of about so many of the demo tokenizer's tokens."""
    return " ".join(f"{rng.choice(WORDS)} {rng.randrange(100)}" for _ in range(num_tokens // 5))


@dataclass
class Conversation:
    """An agent's loop: system text, tools, and turns of calls and their results."""

    rng: random.Random
    num_tokens: int
    messages: list[pb.Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        system = text(self.rng, self.num_tokens // 4)
        self.messages.append(pb.Message(role=pb.ROLE_SYSTEM, content=system))
        self.messages.append(pb.Message(role=pb.ROLE_USER, content="Mend the build."))
        for _ in range(6):
            self.go_on(self.num_tokens // 8)

    def go_on(self, num_tokens: int) -> None:
        """A call and its result."""
        number = f"call-{len(self.messages)}"
        arguments = '{"path": "' + text(self.rng, 24) + '"}'
        call = pb.ToolCall(id=number, name="read_file", arguments_json=arguments)
        self.messages.append(
            pb.Message(role=pb.ROLE_ASSISTANT, reasoning_content="Look.", tool_calls=[call])
        )
        result = text(self.rng, num_tokens)
        self.messages.append(pb.Message(role=pb.ROLE_TOOL, content=result, tool_call_id=number))

    def request(self, request_id: str, max_tokens: int) -> pb.ChatRequest:
        schema = '{"type": "object", "properties": {"path": {"type": "string"}}}'
        tool = pb.ToolDefinition(
            name="read_file", description="Reads a file.", parameters_json=schema
        )
        return pb.ChatRequest(
            options=pb.RequestOptions(request_id=request_id, session_id=request_id.split("/")[0]),
            full=pb.FullConversation(
                config=pb.ConversationConfig(tools=[tool]), messages=self.messages
            ),
            sampling=pb.SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        )


@dataclass
class Seen:
    """What a client saw of one request; monotonic seconds."""

    sent: float
    first: float = 0.0
    num_messages: int = 0
    num_prompt_tokens: int = 0


async def ask(stub: ripresa_pb2_grpc.InferenceAsyncStub, request: pb.ChatRequest) -> Seen:
    seen = Seen(time.monotonic())
    async for response in stub.Chat(request):
        seen.num_messages += 1
        match response.WhichOneof("event"):
            case "started":
                seen.num_prompt_tokens = response.started.prompt_tokens
            case "delta" if not seen.first:
                seen.first = time.monotonic()
    return seen


async def latency(address: str, concurrent: int, num_tokens: int, rounds: int) -> dict[str, Seen]:
    """Every client begins a conversation in the first of its rounds and goes on in the others,
    then begins anew; they are out of step."""
    seen: dict[str, Seen] = {}

    async def client(number: int, stub: ripresa_pb2_grpc.InferenceAsyncStub) -> None:
        rng = random.Random(number)
        await asyncio.sleep(rng.random() * ANSWER * STEP_S)
        for begun in range(rounds // 2):
            talk = Conversation(rng, num_tokens)
            for kind in ("new", "next"):
                request_id = f"{number}-{begun}/{kind}"
                seen[request_id] = await ask(stub, talk.request(request_id, ANSWER))
                talk.go_on(200)
                # A tool runs.
                await asyncio.sleep(rng.random() * 0.2)

    async with grpc.aio.insecure_channel(address) as channel:
        stub = ripresa_pb2_grpc.InferenceStub(channel)
        await asyncio.gather(*(client(number, stub) for number in range(concurrent)))
    return seen


async def messages_per_s(address: str, concurrent: int) -> float:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = ripresa_pb2_grpc.InferenceStub(channel)
        talks = [Conversation(random.Random(n), 400) for n in range(concurrent)]
        began = time.monotonic()
        seen = await asyncio.gather(
            *(ask(stub, talk.request(f"fast-{n}", 1_000)) for n, talk in enumerate(talks))
        )
        return sum(one.num_messages for one in seen) / (time.monotonic() - began)


def milliseconds(values: Sequence[float]) -> str:
    ordered = sorted(1e3 * value for value in values)
    middle, late = statistics.median(ordered), ordered[len(ordered) * 99 // 100]
    return f"p50 {middle:.1f} ms, p99 {late:.1f} ms"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--concurrent", type=int, default=16, help="streams at once")
    parser.add_argument("--tokens", type=int, default=4_000, help="of a conversation")
    parser.add_argument("--rounds", type=int, default=12, help="requests of each client, half new")
    options = parser.parse_args()
    print_header(__file__)
    spawn = multiprocessing.get_context("spawn")
    pipe, theirs = spawn.Pipe()
    process = spawn.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    address = f"127.0.0.1:{pipe.recv()}"
    pipe.send(STEP_S)
    _, _, began_s = pipe.recv()
    seen = asyncio.run(latency(address, options.concurrent, options.tokens, options.rounds))
    pipe.send(0.0)
    called, told, cpu_s = pipe.recv()
    cpu_ms = 1e3 * (cpu_s - began_s) / len(seen)
    there = {name: called[name] - one.sent for name, one in seen.items()}
    back = {name: one.first - told[name] for name, one in seen.items()}
    prompt = statistics.median(one.num_prompt_tokens for one in seen.values())
    print(f"load         {options.concurrent} streams, prompts of {prompt:,.0f} tokens (median)")
    for kind in ("new", "next"):
        names = [name for name in seen if name.endswith(kind)]
        print(f"{kind:<12} to the worker {milliseconds([there[name] for name in names])}")
    print(f"back         a worker's first token {milliseconds(list(back.values()))}")
    print(f"CPU time     {cpu_ms:.1f} ms a request of {ANSWER} tokens, new and next ones")
    rate = asyncio.run(messages_per_s(address, options.concurrent))
    pipe.send(None)
    after_start, whole = pipe.recv()
    process.join()
    print(
        f"collector    {1e3 * after_start:.0f} ms of CPU time a full collection, "
        f"{1e3 * whole:.0f} ms with what start-up left"
    )
    new = [1e3 * there[name] for name in seen if name.endswith("new")]
    missed = verdict("added", statistics.median(new), TARGET_ADDED_MS, at_most=True, unit=" ms")
    missed |= verdict("messages", rate, TARGET_MESSAGES, at_most=False, unit="/s")
    return missed


if __name__ == "__main__":
    raise SystemExit(main())
