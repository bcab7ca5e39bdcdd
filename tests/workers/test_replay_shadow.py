"""Are served answers held against exact replay, in spare time alone, and is nothing left behind?"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from suspensions import Cancelling, for_every_wait
from tiny_model import tiny_checkpoint
from tiny_tokenizer import write_tiny_tokenizer

from ripresa.workers.cache.cache_events import Unheard, tenant_digest
from ripresa.workers.config import (
    EngineConfig,
    Numerics,
    ParkConfig,
    ShadowConfig,
    WindowConfig,
    WindowPolicy,
)
from ripresa.workers.decode_engine import DecodeEngine
from ripresa.workers.encoder_engine import EncoderEngine
from ripresa.workers.errors import ErrorCode, RipresaError
from ripresa.workers.model_runner import TorchModelRunner, load_runner
from ripresa.workers.models.base import EncoderOutput, StepMasks, StepOutput
from ripresa.workers.models.deepseek_v41.tensor_specs import Half
from ripresa.workers.replay import PlanKind, ReplayMode, TailVariant
from ripresa.workers.replay_shadow import ReplayShadow
from ripresa.workers.request import (
    CacheUse,
    EngineEvent,
    Failed,
    Finished,
    GenerationRequest,
    PrefillDone,
    Reserved,
    SamplingParams,
    Tokens,
)
from ripresa.workers.scheduling.step_plan import StepPlan
from ripresa.workers.scoring import Foretold, compare_logits, score, with_given
from ripresa.workers.shadow_counters import Divergence, ShadowOutcome, ShadowReference
from ripresa.workers.shadow_samples import ServedSamples
from ripresa.workers.transfer.inbound import InboundTransfers
from ripresa.workers.transfer.loopback import LoopbackTransport
from ripresa.workers.transfer.outbound import OutboundTransfers

WINDOW, VOCAB = 8, 96
EVERYTHING = ShadowConfig(share=1.0, max_tokens=256)
CONFIG = EngineConfig(
    max_batched_tokens=32,
    max_num_seqs=4,
    num_blocks=64,
    numerics=Numerics.DETERMINISTIC,
    windows=WindowConfig(WindowPolicy.ZERO),
    shadow=EVERYTHING,
)
FIRST = tuple(Random(4).choices(range(3, VOCAB), k=61))
LONGER = FIRST + tuple(Random(5).choices(range(3, VOCAB), k=30))


@cache
def loaded(numerics: Numerics) -> TorchModelRunner:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        tiny_checkpoint(path)
        write_tiny_tokenizer(path)
        return load_runner(path, Half.ALL, num_blocks=64, num_slots=4, numerics=numerics)


class Gated:
    """A runner that tells which of its steps run, and stops before one until it may go on."""

    def __init__(self, runner: TorchModelRunner, name: str, ran: list[str]) -> None:
        self._runner = runner
        self._name = name
        self._ran = ran
        self._closed_at: int | None = None
        self._open = threading.Event()
        self._loop = asyncio.get_running_loop()
        self.reached = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def close(self, steps: int = 0) -> None:
        """Stop behind so many steps more."""
        self._closed_at = steps

    def open(self) -> None:
        self._closed_at = None
        self._open.set()

    def execute(
        self,
        plan: StepPlan,
        inbound: Mapping[int, EncoderOutput] | None = None,
        masks: StepMasks | None = None,
    ) -> StepOutput:
        self._ran.append(self._name)
        if self._closed_at is not None:
            self._closed_at -= 1
        if self._closed_at == -1:
            self._loop.call_soon_threadsafe(self.reached.set)
            assert self._open.wait(timeout=120), "the test never opened the gate"
        return self._runner.execute(plan, inbound, masks)


@dataclass
class Served:
    """A worker: an engine, and what scores its answers again."""

    engine: DecodeEngine
    samples: ServedSamples
    shadow: ReplayShadow
    gate: Gated
    ran: list[str]
    now: list[float] = field(default_factory=lambda: [1000.0])

    @property
    def outcomes(self) -> dict[ShadowOutcome, int]:
        return {k: n for k, n in self.samples.outcomes.items() if n}

    def divergence(self, reference: ShadowReference) -> Divergence:
        return dict(self.shadow.counters.divergences)[reference]

    def check(self) -> None:
        self.engine.check_integrity()
        self.shadow.check_integrity()


class Heard(Unheard):
    """Every event of a cache, by name."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def held(self, *args: Any) -> None:
        self.events.append(args)

    def dropped(self, *args: Any) -> None:
        self.events.append(args)


@asynccontextmanager
async def served(
    config: EngineConfig = CONFIG,
    *,
    listener: Unheard | None = None,
    is_started: bool = True,
) -> AsyncIterator[Served]:
    now, ran = [1000.0], list[str]()
    clock: Callable[[], float] = lambda: now[0]  # noqa: E731
    model = loaded(config.numerics)
    main: Any = Gated(model.beside(config.num_blocks, config.max_num_seqs), "served", ran)
    blocks = config.shadow.num_blocks(WINDOW, model.max_model_len)
    beside: Any = Gated(model.beside(blocks, 1), "shadow", ran)
    samples = ServedSamples(config.shadow, clock)
    engine = DecodeEngine("d0", main, config, clock, listener=listener, samples=samples)
    shadow = ReplayShadow(engine, samples, beside, config, clock)
    await engine.start()
    if is_started:
        await shadow.start()
    worker = Served(engine, samples, shadow, beside, ran, now)
    try:
        yield worker
        worker.check()
    finally:
        beside.open()
        await shadow.stop()
        await engine.stop()
    assert samples.num_bytes == 0


def ask(
    token_ids: tuple[int, ...],
    request_id: str = "r",
    *,
    mode: ReplayMode = ReplayMode.BOUNDED,
    tail: TailVariant = TailVariant.FLOORED,
    max_tokens: int = 6,
    session_id: str | None = None,
    **sampling: Any,
) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        generation=0,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        recipe=None,
        sampling=SamplingParams(max_tokens, ignore_eos=True, seed=3, **sampling),
        tail=tail,
        cache=CacheUse(mode),
        tenant_salt=b"ours",
        session_id=session_id,
    )


async def run(engine: DecodeEngine, request: GenerationRequest) -> list[EngineEvent]:
    events = [event async for event in engine.generate(request, local=True)]
    assert isinstance(events[-1], Finished), events[-1]
    return events


def next_to_go(engine: DecodeEngine) -> list[Any]:
    """All cached blocks, in the order in which they would be evicted."""
    at_risk = engine._core._prefixes.blocks.at_risk(CONFIG.num_blocks)
    return [block.record.identity for block in at_risk]


def kind(events: list[EngineEvent]) -> PlanKind:
    (done,) = (event for event in events if isinstance(event, PrefillDone))
    return done.recipe.kind


def said(events: list[EngineEvent]) -> tuple[int, ...]:
    return tuple(t for e in events if isinstance(e, Tokens) for t in e.token_ids)


async def test_what_is_served_behind_a_replay_is_scored_and_comes_out_again_bit_for_bit() -> None:
    async with served() as worker:
        assert kind(await run(worker.engine, ask(FIRST))) is PlanKind.COLD
        await worker.samples.emptied()
        assert worker.outcomes == {}, "a cold answer has nothing to be held against"
        assert kind(await run(worker.engine, ask(LONGER))) is PlanKind.BOUNDED
        await worker.samples.emptied()
        assert worker.outcomes == {ShadowOutcome.SCORED: 6}
        exact, repeat = map(worker.divergence, ShadowReference)
        assert (repeat.num_tokens, repeat.kl_sum, repeat.num_agreeing) == (6, 0.0, 6)
        assert exact.num_tokens == 6
        assert exact.kl_sum > 0
        assert worker.shadow.counters.num_rows > len(LONGER)


async def test_the_exact_arm_is_mode_exact_on_an_empty_cache() -> None:
    async with served() as worker:
        await run(worker.engine, ask(FIRST))
        request = ask(LONGER)
        rows = Foretold(len(LONGER), len(LONGER) + 6)
        answer = [e async for e in worker.engine.generate(request, local=True, on_logits=rows)]
        await worker.samples.emptied()
        found = worker.divergence(ShadowReference.EXACT)
    tokens = said(answer)
    alone = DecodeEngine("d1", loaded(Numerics.DETERMINISTIC), CONFIG)
    await alone.start()
    exact_rows = Foretold(len(LONGER), len(LONGER) + 6)
    exact = with_given(replace(request, cache=CacheUse(ReplayMode.EXACT)), tokens)
    assert (await score(alone, exact, exact_rows)).recipe.kind is PlanKind.COLD
    await alone.stop()
    expected = compare_logits(exact_rows.logits, rows.logits, tokens)
    assert found.kl_sum == pytest.approx(float(expected.kl.sum()), rel=1e-12)
    assert found.num_agreeing == int(expected.same_top.sum())


@pytest.mark.parametrize(
    "tail",
    [
        TailVariant.FLOORED,
        pytest.param(TailVariant.LAYER_EXACT, marks=pytest.mark.slow),
        pytest.param(TailVariant.FULL, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("session_id", [None, "s"])
async def test_every_turn_of_a_conversation_comes_out_again(
    tail: TailVariant, session_id: str | None
) -> None:
    """Stacked restarts, windows behind them, and sessions that go on, with every tail."""
    kinds = set()
    config = replace(CONFIG, windows=WindowConfig(WindowPolicy.JUNCTION))
    async with served(config) as worker:
        tokens, num_sampled = FIRST, 0
        for turn in range(5):
            request = ask(tokens, tail=tail, session_id=session_id)
            if turn == 1:
                # Nothing is left but blocks, so this turn replays; later ones go on from it.
                worker.engine._core._prefixes.windows.clear()
                worker.engine._core._prefixes.parked.drop(b"ours", "s")
            events = await run(worker.engine, request)
            (done,) = (event for event in events if isinstance(event, PrefillDone))
            kinds.add(done.recipe.kind)
            num_sampled += 6 * bool(done.recipe.restarts)
            tokens += said(events) + tuple(Random(turn).choices(range(3, VOCAB), k=17))
        await worker.samples.emptied()
        assert num_sampled == 24
        assert worker.outcomes == {ShadowOutcome.SCORED: num_sampled}
        repeat = worker.divergence(ShadowReference.REPEAT)
        assert (repeat.kl_sum, repeat.num_agreeing) == (0.0, num_sampled)
        assert worker.divergence(ShadowReference.EXACT).kl_sum > 0
    assert kinds == {
        PlanKind.COLD,
        PlanKind.BOUNDED,
        PlanKind.WINDOW if session_id is None else PlanKind.RESUME,
    }


async def test_a_damaged_cache_shows_as_noise() -> None:
    """The arms are computed from the tokens alone, so they do not repeat what the cache says."""
    async with served() as worker:
        await run(worker.engine, ask(FIRST))
        runner = worker.engine._runner
        blocks = range(len(FIRST) // WINDOW)
        payload = runner.export_blocks(blocks)
        runner.import_blocks(blocks, torch.zeros_like(payload))
        await run(worker.engine, ask(LONGER))
        await worker.samples.emptied()
        repeat = worker.divergence(ShadowReference.REPEAT)
        assert repeat.num_tokens == 6
        assert repeat.kl_sum > 0


async def test_modes_without_replay_are_not_scored() -> None:
    async with served(replace(CONFIG, anchor_interval=32)) as worker:
        for mode in (ReplayMode.EXACT, ReplayMode.CANONICAL):
            for tokens in (FIRST, LONGER):
                await run(worker.engine, ask(tokens, mode=mode))
        assert worker.outcomes == {}
        assert worker.samples.num_waiting == 0


async def test_sampling_parameters_do_not_change_what_is_compared() -> None:
    async with served() as worker:
        await run(worker.engine, ask(FIRST))
        events = await run(
            worker.engine,
            ask(
                LONGER,
                temperature=0.7,
                top_k=5,
                logit_bias=((40, 30.0),),
                banned_token_ids=(41,),
                frequency_penalty=0.5,
            ),
        )
        assert 40 in said(events)
        await worker.samples.emptied()
        assert worker.divergence(ShadowReference.REPEAT).kl_sum == 0


async def test_a_stream_that_had_to_give_up_its_pages_comes_out_again() -> None:
    config = replace(
        CONFIG, num_blocks=24, reserved_output_tokens=1, parked=ParkConfig(capacity_bytes=0)
    )
    async with served(config) as worker:
        await run(worker.engine, ask(FIRST))
        await asyncio.gather(
            *(run(worker.engine, ask((*LONGER, 5 + n), str(n), max_tokens=36)) for n in range(2))
        )
        assert worker.engine.stats().num_preemptions > 0
        await worker.samples.emptied()
        assert worker.outcomes == {ShadowOutcome.SCORED: 72}
        assert worker.divergence(ShadowReference.REPEAT).kl_sum == 0


async def test_a_handed_over_prompt_comes_out_again() -> None:
    transport = LoopbackTransport()
    model = loaded(Numerics.DETERMINISTIC)
    async with served() as worker:
        inbound = InboundTransfers(worker.engine, transport)
        outbound = OutboundTransfers("e0", lambda _: inbound, transport)
        encoder = EncoderEngine("e0", model.beside(64, 4), outbound, CONFIG)
        await encoder.start()
        for tokens in (FIRST, LONGER):
            request = ask(tokens)
            async for event in worker.engine.generate(request, local=False):
                assert not isinstance(event, Failed), event
                if isinstance(event, Reserved):
                    await encoder.prefill(request, "d0")
        await encoder.stop()
        await outbound.close()
        await worker.samples.emptied()
        assert worker.outcomes == {ShadowOutcome.SCORED: 6}
        assert worker.divergence(ShadowReference.REPEAT).kl_sum == 0
        await inbound.close()


async def test_rounding_alone_is_small_beside_replay() -> None:
    async with served(replace(CONFIG, numerics=Numerics.FAST)) as worker:
        await run(worker.engine, ask(FIRST))
        await asyncio.gather(
            *(run(worker.engine, ask((*LONGER, 5 + n), str(n), max_tokens=12)) for n in range(3))
        )
        await worker.samples.emptied()
        exact, repeat = map(worker.divergence, ShadowReference)
        assert exact.num_tokens == repeat.num_tokens == 36
        assert repeat.kl_sum < 0.01 * exact.kl_sum


async def test_scoring_leaves_no_trace_in_what_is_served() -> None:
    listener = Heard()
    async with served(listener=listener, is_started=False) as worker:
        await run(worker.engine, ask(FIRST))
        await run(worker.engine, ask(LONGER, session_id="s"))
        before, events = worker.engine.stats(), list(listener.events)
        order = next_to_go(worker.engine)
        await worker.shadow.start()
        await worker.samples.emptied()
        assert worker.outcomes == {ShadowOutcome.SCORED: 6}
        assert worker.engine.stats() == before
        assert listener.events == events
        assert next_to_go(worker.engine) == order
        assert not worker.shadow._engine._core._prefixes.blocks._index
        shadow = worker.shadow._engine.stats()
        assert (shadow.num_free_blocks, shadow.num_sessions) == (shadow.num_blocks, 0)


async def test_it_steps_only_while_nothing_is_served() -> None:
    async with served() as worker:
        await run(worker.engine, ask(FIRST))
        worker.gate.close()
        await run(worker.engine, ask(LONGER))
        await worker.gate.reached.wait()
        # A request comes while a step of the shadow runs: it waits for that one alone.
        num_before = len(worker.ran)
        request = ask((7, *FIRST), "next", max_tokens=12)
        async with aclosing(worker.engine.generate(request, local=True)) as events:
            await anext(events)
            worker.gate.open()
            rest = [event async for event in events]
        assert isinstance(rest[-1], Finished)
        during = worker.ran[num_before:]
        assert "served" in during
        assert set(during[: len(during) - during[::-1].index("served")]) == {"served"}
        await worker.samples.emptied()
        assert worker.outcomes == {ShadowOutcome.SCORED: 6}
        assert worker.ran[-1] == "shadow"


@pytest.mark.parametrize("seed", range(2))
async def test_every_sampled_token_has_one_end_whatever_comes_and_goes(seed: int) -> None:
    random = Random(seed)
    num_finished = 0

    async def client(worker: Served, number: int) -> None:
        nonlocal num_finished
        cut = random.randrange(30, len(LONGER))
        request = ask((*LONGER[:cut], 3 + number, 4), str(number), max_tokens=8)
        given_up = random.choice([None, None, random.randrange(7)])
        stream = worker.engine.generate(request, local=True)
        is_behind, num_tokens = False, 0
        async with aclosing(stream) as events:
            async for event in events:
                if isinstance(event, PrefillDone):
                    is_behind = bool(event.recipe.restarts)
                if isinstance(event, Tokens):
                    num_tokens += len(event.token_ids)
                if given_up is not None and num_tokens > given_up:
                    return
        num_finished += 8 * is_behind

    async with served() as worker:
        await run(worker.engine, ask(FIRST))
        for first in range(0, 9, 3):
            await asyncio.gather(*(client(worker, first + n) for n in range(3)))
        await worker.samples.emptied()
        outcomes = worker.outcomes
        # Whoever goes away at the end may have had the whole answer.
        num_scored = outcomes.pop(ShadowOutcome.SCORED)
        assert num_scored >= num_finished > 0
        assert num_scored % 8 == 0
        assert outcomes.keys() <= {ShadowOutcome.UNFINISHED}
        repeat = worker.divergence(ShadowReference.REPEAT)
        assert (repeat.num_tokens, repeat.kl_sum) == (num_scored, 0.0)


async def test_a_request_that_waits_for_its_prefill_holds_it_up_as_well() -> None:
    async with served(is_started=False) as worker:
        await run(worker.engine, ask(FIRST))
        await run(worker.engine, ask(LONGER))
        num_before = len(worker.ran)
        stream = worker.engine.generate(ask(FIRST, "waits"), local=False)
        await anext(stream)
        await worker.shadow.start()
        # What runs on the event loop meanwhile has its turns.
        await run(worker.engine, ask(FIRST, "runs"))
        assert set(worker.ran[num_before:]) == {"served"}
        await stream.aclose()
        await worker.samples.emptied()
        assert worker.outcomes == {ShadowOutcome.SCORED: 12}


async def test_what_finds_no_idle_moment_in_time_is_dropped() -> None:
    config = replace(CONFIG, shadow=replace(EVERYTHING, max_wait_s=5.0))
    async with served(config, is_started=False) as worker:
        await run(worker.engine, ask(FIRST))
        await run(worker.engine, ask(LONGER))
        await run(worker.engine, ask((9, *LONGER[:-1]), "cold"))
        worker.now[0] += 5.0
        await run(worker.engine, ask(LONGER[:-1], max_tokens=4))
        await worker.shadow.start()
        await worker.samples.emptied()
        assert worker.outcomes == {ShadowOutcome.BUSY: 6, ShadowOutcome.SCORED: 4}


async def test_what_grows_too_old_between_two_steps_is_dropped() -> None:
    config = replace(CONFIG, shadow=replace(EVERYTHING, max_wait_s=5.0))
    async with served(config) as worker:
        await run(worker.engine, ask(FIRST))
        worker.gate.close()
        await run(worker.engine, ask(LONGER))
        await worker.gate.reached.wait()
        worker.now[0] += 5.0
        worker.gate.open()
        await worker.samples.emptied()
        assert worker.outcomes == {ShadowOutcome.BUSY: 6}
        assert worker.divergence(ShadowReference.EXACT).num_tokens == 0


async def test_what_does_not_fit_is_counted() -> None:
    row_bytes = 4 * VOCAB
    tight = replace(EVERYTHING, capacity_bytes=4 * row_bytes, max_tokens=len(LONGER) + 8)
    async with served(replace(CONFIG, shadow=tight), is_started=False) as worker:
        await run(worker.engine, ask(FIRST))
        await run(worker.engine, ask(LONGER, max_tokens=10))
        assert worker.outcomes == {ShadowOutcome.NO_ROOM: 4, ShadowOutcome.TOO_LONG: 2}
        assert worker.samples.num_bytes == 4 * row_bytes
        await worker.shadow.start()
        await worker.samples.emptied()
        assert worker.outcomes[ShadowOutcome.SCORED] == 4
        assert worker.divergence(ShadowReference.REPEAT).kl_sum == 0


async def test_an_answer_that_nobody_reads_to_its_end_is_dropped() -> None:
    async with served() as worker:
        await run(worker.engine, ask(FIRST))
        stream = worker.engine.generate(ask(LONGER, max_tokens=50), local=True)
        async for event in stream:
            if isinstance(event, Tokens) and event.position == len(LONGER) + 3:
                break
        await stream.aclose()
        await worker.samples.emptied()
        assert worker.outcomes.keys() == {ShadowOutcome.UNFINISHED}
        assert worker.outcomes[ShadowOutcome.UNFINISHED] >= 4


async def test_a_flush_drops_what_waits_of_its_tenant() -> None:
    async with served(is_started=False) as worker:
        for salt in (b"ours", b"theirs"):
            for tokens in (FIRST, LONGER):
                await run(worker.engine, replace(ask(tokens), tenant_salt=salt))
        await worker.engine.flush(tenant_digest(b"ours"))
        assert worker.outcomes == {ShadowOutcome.FLUSHED: 6}
        await worker.engine.flush(None)
        assert worker.outcomes == {ShadowOutcome.FLUSHED: 12}


async def test_a_failing_step_costs_one_sample() -> None:
    async with served() as worker:
        await run(worker.engine, ask(FIRST))
        execute = worker.gate._runner.execute

        def broken(*args: Any) -> StepOutput:
            worker.gate._runner.execute = execute  # type: ignore[method-assign]
            raise RipresaError(ErrorCode.INTERNAL, "a planted fault")

        worker.gate._runner.execute = broken  # type: ignore[method-assign,assignment]
        await run(worker.engine, ask(LONGER))
        await worker.samples.emptied()
        assert worker.outcomes == {ShadowOutcome.FAILED: 6}
        await run(worker.engine, ask(LONGER[:-1]))
        await worker.samples.emptied()
        assert worker.outcomes == {ShadowOutcome.FAILED: 6, ShadowOutcome.SCORED: 6}


@pytest.mark.parametrize("distance", [float("nan"), float("inf"), float("-inf")])
def test_a_distance_that_is_none_is_in_no_sum(distance: float) -> None:
    with pytest.raises(ValueError, match="nats apart: one of the two is no distribution"):
        Divergence.of([0.0, distance], [True, True])


async def test_logits_that_are_no_numbers_cost_a_sample_and_poison_nothing() -> None:
    async with served() as worker:
        await run(worker.engine, ask(FIRST))
        execute = worker.gate._runner.execute

        def broken(*args: Any) -> StepOutput:
            output = execute(*args)
            for rows in output.logits.values():
                rows.fill_(float("nan"))
            return output

        worker.gate._runner.execute = broken  # type: ignore[method-assign]
        await run(worker.engine, ask(LONGER))
        await worker.samples.emptied()
        assert worker.outcomes == {ShadowOutcome.FAILED: 6}
        worker.gate._runner.execute = execute  # type: ignore[method-assign]
        await run(worker.engine, ask(LONGER[:-1]))
        await worker.samples.emptied()
        assert worker.outcomes == {ShadowOutcome.FAILED: 6, ShadowOutcome.SCORED: 6}
        assert worker.divergence(ShadowReference.REPEAT).kl_sum == 0.0


async def test_a_stop_in_the_middle_of_any_step_leaves_nothing() -> None:
    for number in count():
        async with served(is_started=False) as worker:
            await run(worker.engine, ask(FIRST[:27]))
            await run(worker.engine, ask(FIRST[:45]))
            worker.gate.close(number)
            await worker.shadow.start()
            waits = [
                asyncio.create_task(worker.gate.reached.wait()),
                asyncio.create_task(worker.samples.emptied()),
            ]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for task in waits:
                task.cancel()
            stopping = asyncio.create_task(worker.shadow.stop())
            worker.gate.open()
            await stopping
            worker.check()
            shadow = worker.shadow._engine.stats()
            assert shadow.num_free_blocks == shadow.num_blocks
            # What is served goes on.
            await run(worker.engine, ask((9, *FIRST), "after"))
            if worker.outcomes == {ShadowOutcome.SCORED: 6}:
                break
            assert worker.outcomes == {ShadowOutcome.STOPPED: 6}
    assert number >= 6


async def test_scoring_may_be_cancelled_at_every_await() -> None:
    async def scenario(cancelling: Cancelling[ShadowOutcome]) -> bool:
        async with served(is_started=False) as worker:
            await run(worker.engine, ask(FIRST))
            for tokens in (LONGER, LONGER[:-1]):
                await run(worker.engine, ask(tokens, max_tokens=2))
            await worker.shadow._engine.start()
            sample = await worker.samples.next()
            outcome = await cancelling(lambda: worker.shadow._score(sample))
            worker.samples.done(outcome or ShadowOutcome.STOPPED)
            sample = await worker.samples.next()
            assert await worker.shadow._score(sample) is ShadowOutcome.SCORED
            worker.samples.done(ShadowOutcome.SCORED)
            worker.check()
            shadow = worker.shadow._engine.stats()
            assert shadow.num_free_blocks == shadow.num_blocks
            assert worker.divergence(ShadowReference.REPEAT).kl_sum == 0
        return outcome is not None

    # Both arms wait for an engine, and for the comparison.
    assert await for_every_wait(scenario) >= 4


def test_nothing_is_set_aside_without_a_share() -> None:
    assert ShadowConfig(share=0).num_blocks(WINDOW, 4096) == 0
    assert ShadowConfig(max_tokens=17).num_blocks(WINDOW, 4096) == 3
    assert ShadowConfig().num_blocks(WINDOW, 40) == 5
