"""How do tests run engines over hash machines: one worker, or two with a loopback lane between?"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

from hash_machine import WINDOW, HashMachine, ReferenceStream

from ripresa.workers.config import EngineConfig, TransferConfig, WindowConfig, WindowPolicy
from ripresa.workers.decode_engine import DecodeEngine
from ripresa.workers.encoder_engine import EncoderEngine
from ripresa.workers.request import (
    Bringing,
    EngineEvent,
    Failed,
    Finished,
    GenerationRequest,
    PrefillDone,
    RecipeFixed,
    Reserved,
    Tokens,
    WorkCounters,
)
from ripresa.workers.scheduling.step_plan import StepPlan
from ripresa.workers.transfer.base import LaneConfig, Peer
from ripresa.workers.transfer.faults import Fault, FaultyPeer
from ripresa.workers.transfer.inbound import InboundTransfers
from ripresa.workers.transfer.loopback import LoopbackTransport
from ripresa.workers.transfer.outbound import OutboundTransfers

CONFIG = EngineConfig(
    max_batched_tokens=3 * WINDOW,
    max_num_seqs=16,
    num_blocks=64,
    transfer=TransferConfig(max_section_blocks=2, hand_over_timeout_s=30.0),
    windows=WindowConfig(WindowPolicy.ZERO),
)
IMPATIENT = LaneConfig(
    chunk_timeout_s=0.5, open_timeout_s=0.5, control_timeout_s=0.5, idle_timeout_s=1.5
)
"""For tests in which a message is lost, which nothing but a timeout can tell."""
PATIENT = LaneConfig(
    chunk_timeout_s=60.0, open_timeout_s=60.0, control_timeout_s=60.0, idle_timeout_s=60.0
)
"""For tests in which none is lost, however long a loaded machine takes."""


@dataclass(frozen=True)
class Stream:
    """What a request's events say."""

    events: tuple[EngineEvent, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(t for e in self.events if isinstance(e, Tokens) for t in e.token_ids)

    @property
    def finished(self) -> Finished:
        last = self.events[-1]
        assert isinstance(last, Finished), f"the stream ended by {last}"
        return last

    @property
    def failed(self) -> Failed:
        last = self.events[-1]
        assert isinstance(last, Failed), f"the stream ended by {last}"
        return last

    def assert_equals(self, expected: ReferenceStream) -> None:
        """Order and positions of the events, the tokens, and the reason of the end."""
        finished = self.finished
        events = list(self.events)
        if isinstance(events[0], Bringing):
            del events[0]
        reserved = events.pop(0)
        assert isinstance(reserved, Reserved)
        if reserved.recipe is None:
            fixed, done = events[0], events[1]
            assert isinstance(fixed, RecipeFixed)
            assert isinstance(done, PrefillDone)
            assert fixed.recipe == done.recipe
            del events[0]
        assert isinstance(events[0], PrefillDone)
        tokens = [event for event in events if isinstance(event, Tokens)]
        assert len(tokens) == len(events) - 2
        starts = [event.position for event in tokens]
        assert starts == list(range(starts[0], starts[0] + len(starts))) if starts else True
        assert self.tokens == expected.tokens
        assert (finished.reason, finished.stop_token_id) == (
            expected.reason,
            expected.stop_token_id,
        )


class StepGate:
    """Stops a machine's step thread before one step until the test lets it go on."""

    def __init__(self, machine: HashMachine, step: int) -> None:
        self.reached = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._step = step
        self._open = threading.Event()
        self._error: Exception | None = None
        machine.before_step = self._before_step

    def open(self, error: Exception | None = None) -> None:
        """Let the step go on, or fail by `error`."""
        self._error = self._error or error
        self._open.set()

    def _before_step(self, plan: StepPlan) -> None:
        if plan.step == self._step:
            self._loop.call_soon_threadsafe(self.reached.set)
            assert self._open.wait(timeout=30), "the test never opened the gate"
            if self._error is not None:
                raise self._error


async def collect(engine: DecodeEngine, request: GenerationRequest) -> Stream:
    """A local request's whole stream."""
    return Stream(tuple([event async for event in engine.generate(request, local=True)]))


def assert_idle(engine: DecodeEngine | EncoderEngine, machine: HashMachine) -> None:
    """No request, page, slot or transfer is left."""
    engine.check_integrity()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_blocks == stats.num_blocks
    assert machine.violations == []
    assert machine.num_live_slots == 0


class SplitCluster:
    """One encoder worker and two decode workers in one process."""

    def __init__(
        self,
        faults: Mapping[int, Fault] | None = None,
        config: EngineConfig = CONFIG,
        num_blocks: int = 64,
        lanes: LaneConfig | None = None,
        num_drafts: int = 0,
    ) -> None:
        machines = [
            HashMachine(num_blocks, config.max_num_seqs, num_drafts=num_drafts) for _ in range(3)
        ]
        self.encoder_machine = machines[0]
        self.machines = {"d0": machines[1], "d1": machines[2]}
        transport = LoopbackTransport(lanes)
        self.decoders = {
            name: DecodeEngine(name, machine, config) for name, machine in self.machines.items()
        }
        self._inbound = {
            name: InboundTransfers(engine, transport, lanes)
            for name, engine in self.decoders.items()
        }
        self.peers: dict[str, Peer] = {
            "d0": FaultyPeer(self._inbound["d0"], faults or {}),
            "d1": self._inbound["d1"],
        }
        self._outbound = OutboundTransfers(
            "e0", lambda receiver: self.peers[receiver.worker_id], transport, lanes
        )
        self.encoder = EncoderEngine("e0", self.encoder_machine, self._outbound, config)

    def revive(self, name: str) -> None:
        """The way to a decode worker works again, without faults."""
        self.peers[name] = self._inbound[name]

    @property
    def decoder(self) -> DecodeEngine:
        return self.decoders["d0"]

    async def generate(
        self,
        request: GenerationRequest,
        receiver: str = "d0",
        on_counters: Callable[[WorkCounters], None] = lambda counters: None,
    ) -> AsyncIterator[EngineEvent]:
        """Drive both workers as a router does; the prefill ends with the stream."""
        events = self.decoders[receiver].generate(request, local=False)
        prefill: asyncio.Task[WorkCounters] | None = None
        try:
            async for event in events:
                if isinstance(event, Reserved):
                    prefill = asyncio.create_task(self.encoder.prefill(request, receiver))
                    prefill.add_done_callback(partial(self._abort_without_prefill, request))
                if isinstance(event, Finished) and prefill is not None:
                    on_counters(await prefill)
                yield event
        finally:
            if prefill is not None:
                prefill.cancel()
                await asyncio.gather(prefill, return_exceptions=True)
            await events.aclose()

    def _abort_without_prefill(
        self, request: GenerationRequest, prefill: asyncio.Task[WorkCounters]
    ) -> None:
        if prefill.cancelled() or prefill.exception() is not None:
            for engine in self.decoders.values():
                engine.abort(request.request_id)

    async def collect(self, request: GenerationRequest, receiver: str = "d0") -> Stream:
        return Stream(tuple([event async for event in self.generate(request, receiver)]))

    async def assert_idle(self) -> None:
        """Nothing is left of any request on any worker or lane."""
        await self._outbound.drain()
        for name, inbound in self._inbound.items():
            await inbound.drain()
            inbound.check_integrity()
            assert_idle(self.decoders[name], self.machines[name])
        self._outbound.check_integrity()
        assert_idle(self.encoder, self.encoder_machine)

    async def start(self) -> None:
        for engine in (self.encoder, *self.decoders.values()):
            await engine.start()

    async def stop(self) -> None:
        await self.encoder.stop()
        await self._outbound.close()
        for name, engine in self.decoders.items():
            await engine.stop()
            await self._inbound[name].close()


@asynccontextmanager
async def split_cluster(
    faults: Mapping[int, Fault] | None = None,
    config: EngineConfig = CONFIG,
    num_blocks: int = 64,
    lanes: LaneConfig | None = None,
    num_drafts: int = 0,
) -> AsyncIterator[SplitCluster]:
    """A running cluster that must be idle at the end, and after 150 s at the latest."""
    cluster = SplitCluster(faults, config, num_blocks, lanes, num_drafts)
    await cluster.start()
    async with asyncio.timeout(150):
        try:
            yield cluster
            await cluster.assert_idle()
        finally:
            await cluster.stop()


@asynccontextmanager
async def local_engine(
    machine: HashMachine | None = None, config: EngineConfig = CONFIG
) -> AsyncIterator[tuple[DecodeEngine, HashMachine]]:
    """A running decode worker that must be idle at the end, and after 150 s at the latest."""
    machine = machine or HashMachine()
    engine = DecodeEngine("d0", machine, config)
    await engine.start()
    async with asyncio.timeout(150):
        try:
            yield engine, machine
            assert_idle(engine, machine)
        finally:
            await engine.stop()


def re_executed(request: GenerationRequest, tokens: tuple[int, ...] = ()) -> GenerationRequest:
    """The same request once more, after `tokens` were streamed."""
    return replace(request, generation=request.generation + 1, token_ids=request.token_ids + tokens)
