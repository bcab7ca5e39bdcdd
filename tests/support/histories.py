"""Random histories of requests over hash machines, each stream held against the reference.

    requests share prefixes, parks, tenants, modes and tails; some are cancelled at a random moment,
    some go on elsewhere by their recipe, some steps fail, every decode step has rejected drafts;
    some turns call tools, and some sessions are closed

A history raises at the first stream, page or window that is not what the recipe defines. All of it
follows from one seed, apart from the moments at which a step thread happens to be done.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from hash_machine import NUM_ENCODER_LAYERS, WINDOW, HashMachine, reference_stream
from hash_requests import ask, prompt, recipe_of
from split_cluster import CONFIG, PATIENT, Stream, collect, local_engine, split_cluster

from ripresa.workers.config import EngineConfig, LeaseConfig, ParkConfig, WindowConfig, WindowPolicy
from ripresa.workers.decode_engine import DecodeEngine
from ripresa.workers.engine import EngineCore
from ripresa.workers.errors import ResourceExhausted
from ripresa.workers.models.base import EncoderOutput, StepMasks, StepOutput
from ripresa.workers.replay import Recipe, ReplayMode, TailVariant
from ripresa.workers.request import CacheUse, Failed, GenerationRequest
from ripresa.workers.scheduling.step_plan import StepPlan

WINDOWS = (
    WindowConfig(WindowPolicy.ZERO),
    WindowConfig(WindowPolicy.JUNCTION),
    WindowConfig(WindowPolicy.PERIODIC, period=3 * WINDOW),
    WindowConfig(WindowPolicy.FULL),
    # Room for four windows: they are evicted all the time.
    WindowConfig(WindowPolicy.FULL, capacity_bytes=4 * 8 * WINDOW * NUM_ENCODER_LAYERS),
)
TAILS = (TailVariant.FLOORED, TailVariant.LAYER_EXACT, TailVariant.FULL)
MODES = {
    ReplayMode.BOUNDED: TAILS,
    ReplayMode.EXACT: (TailVariant.FLOORED, TailVariant.LAYER_EXACT, TailVariant.EXACT),
    ReplayMode.CANONICAL: TAILS,
}
"""The tails that may go with each mode."""
BROKEN = "the history broke this step"

Run = Callable[[GenerationRequest], Awaitable[Stream]]
"""Has a worker, or several, run a request to its end."""


Watch = Callable[[EngineCore, HashMachine], None]


def nobody(core: EngineCore, machine: HashMachine) -> None:
    """Watches nothing."""


def check(request: GenerationRequest, stream: Stream) -> Recipe:
    """The stream is what its recipe defines."""
    assert stream.finished
    recipe = recipe_of(stream)
    stream.assert_equals(reference_stream(request, recipe=recipe))
    return recipe


class FailingMachine(HashMachine):
    """A hash machine some of whose steps fail before they compute anything.

    Args:
        failures: says which.
    """

    def __init__(self, num_blocks: int, failures: random.Random, num_slots: int = 16) -> None:
        super().__init__(num_blocks, num_slots, num_drafts=2)
        self._failures = failures

    def execute(
        self,
        plan: StepPlan,
        inbound: Mapping[int, EncoderOutput] | None = None,
        masks: StepMasks | None = None,
    ) -> StepOutput:
        if self._failures.random() < 0.04:
            raise RuntimeError(BROKEN)
        return super().execute(plan, inbound, masks)


@dataclass
class History:
    """Random requests that share prefixes, and what was said so far.

    Attributes:
        engines: hear of tools and of closed sessions.
    """

    rng: random.Random
    engines: tuple[DecodeEngine, ...] = ()
    known: list[tuple[int, ...]] = field(default_factory=lambda: [prompt(s, 30) for s in range(3)])

    def next(self, number: int) -> GenerationRequest:
        base = self.rng.choice(self.known)
        first = len(base) if self.rng.random() < 0.3 else max(1, len(base) // 2)
        cut = base[: self.rng.randint(first, len(base))]
        tokens = (cut + prompt(self.rng.randrange(40), self.rng.randint(0, 40)))[:150]
        mode = self.rng.choices(tuple(MODES), (5, 2, 2))[0]
        tail = self.rng.choice(MODES[mode])
        request = ask(
            tokens,
            f"r{number}",
            max_tokens=self.rng.randint(1, 60 if self.rng.random() < 0.2 else 20),
            tail=tail,
            cache=CacheUse(mode),
            salt=self.rng.choice((b"a", b"a", b"b")),
        )
        expected_s = self.rng.choice((None, None, None, 1e-4, 60.0))
        return replace(
            request,
            session_id=self.rng.choice((None, "s", "t")),
            expect_next_within_s=expected_s,
        )

    def tell(self, request: GenerationRequest) -> None:
        """What a gateway may say of a turn: that it called tools, or that its session is closed."""
        for engine in self.engines:
            if self.rng.random() < 0.4:
                engine.lease(request.request_id, self.rng.choices(("ls", "cat"), k=2))
            if self.rng.random() < 0.1 and request.session_id is not None:
                engine.end_session(request.tenant_salt, request.session_id)

    def said(self, request: GenerationRequest, stream: Stream) -> None:
        prompt_ids = request.token_ids[: request.num_prompt_tokens]
        streamed = request.token_ids[request.num_prompt_tokens :]
        self.known.append(prompt_ids + streamed + stream.tokens)
        if len(self.known) > 8:
            del self.known[self.rng.randrange(len(self.known))]

    async def play(self, request: GenerationRequest, run: Run) -> None:
        """Run one request, to its end or not, and hold it against the reference.

        A worker may refuse it for want of pages.
        """
        with suppress(ResourceExhausted):
            if self.rng.random() < 0.25:
                await self._cancel(request, run)
            else:
                await self._read(request, run)
        self.tell(request)

    async def _read(self, request: GenerationRequest, run: Run) -> None:
        stream = await run(request)
        for attempt in range(3):
            if not _was_broken(stream):
                break
            # What the broken step was to write, others must not find.
            name = f"{request.request_id} after {attempt}"
            stream = await run(replace(request, request_id=name))
        if _was_broken(stream):
            return
        recipe = check(request, stream)
        if self.rng.random() < 0.2 and stream.tokens:
            # As if the worker had died in the middle: the same tokens by the same recipe.
            num_streamed = self.rng.randrange(len(stream.tokens))
            again = replace(
                request,
                request_id=f"{request.request_id} again",
                recipe=recipe,
                token_ids=request.token_ids + stream.tokens[:num_streamed],
            )
            taken_over = await run(again)
            if _was_broken(taken_over):
                return
            assert recipe_of(taken_over) == recipe
            assert stream.tokens[:num_streamed] + taken_over.tokens == stream.tokens
        self.said(request, stream)

    async def _cancel(self, request: GenerationRequest, run: Run) -> None:
        task = asyncio.ensure_future(run(request))
        for _ in range(self.rng.randint(0, 60)):
            await asyncio.sleep(0)
        task.cancel()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(result, Stream) and not _was_broken(result):
            check(request, result)
        elif isinstance(result, Exception) and BROKEN not in str(result):
            raise result


def _was_broken(stream: Stream) -> bool:
    last = stream.events[-1]
    return isinstance(last, Failed) and BROKEN in str(last.error)


def random_config(rng: random.Random) -> EngineConfig:
    interval = WINDOW * rng.choice((3, 4, 6))
    return replace(
        CONFIG,
        windows=rng.choice(WINDOWS),
        anchor_interval=interval,
        reserved_output_tokens=rng.choice((1, CONFIG.reserved_output_tokens)),
        parked=ParkConfig(capacity_bytes=rng.choice((0, 8_000, 1 << 20))),
        leases=LeaseConfig(max_share=rng.choice((0.0, 0.3, 1.0))),
    )


async def on_one_worker(seed: int, num_bursts: int = 12, watch: Watch = nobody) -> None:
    """A decode worker that does everything by itself.

    Args:
        watch: sees the worker before its first request.
    """
    rng = random.Random(seed)
    history = History(rng)
    # With few blocks streams outgrow the pool and are parked, some of them twice.
    machine = FailingMachine(rng.choice((30, 36, 70, 300)), random.Random(seed + 1))
    config = random_config(rng)
    async with local_engine(machine, config) as (engine, _):
        watch(engine._core, machine)
        history.engines = (engine,)

        async def run(request: GenerationRequest) -> Stream:
            return await collect(engine, request)

        for burst in range(num_bursts):
            requests = [history.next(3 * burst + k) for k in range(3)]
            await asyncio.gather(*(history.play(request, run) for request in requests))
            engine.check_integrity()
        # Once it has run, the steps of cancelled requests are over too.
        await run(ask((3,), "last"))


async def over_a_cluster(seed: int, num_bursts: int = 8, watch: Watch = nobody) -> None:
    """An encoder worker and two decode workers, which also prefill by themselves."""
    rng = random.Random(1000 + seed)
    history = History(rng)
    config = random_config(rng)
    async with split_cluster(
        config=config, num_blocks=rng.choice((80, 300)), lanes=PATIENT, num_drafts=2
    ) as cluster:
        watch(cluster.encoder._core, cluster.encoder_machine)
        for name, engine in cluster.decoders.items():
            watch(engine._core, cluster.machines[name])
        history.engines = tuple(cluster.decoders.values())

        async def run(request: GenerationRequest) -> Stream:
            name = rng.choice(("d0", "d1"))
            if rng.random() < 0.3:
                return await collect(cluster.decoders[name], request)
            return await cluster.collect(request, name)

        for burst in range(num_bursts):
            requests = [history.next(3 * burst + k) for k in range(3)]
            await asyncio.gather(*(history.play(request, run) for request in requests))
            for engine in (cluster.encoder, *cluster.decoders.values()):
                engine.check_integrity()
        for name in cluster.decoders:
            await cluster.collect(ask((3,), "last"), name)
