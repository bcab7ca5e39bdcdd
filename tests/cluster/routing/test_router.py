"""Does the router place, retry and give up as it says, whatever its workers do?"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace

import pytest

from ripresa.cluster.routing.planner import AllLeaving, NoWorker
from ripresa.cluster.routing.prefix_hints import NoDirectory, PrefixHints
from ripresa.cluster.routing.prompt import Hold, Placed, PromptRequest, RouterEvent
from ripresa.cluster.routing.router import MAX_EXECUTIONS, ClusterRouter
from ripresa.cluster.routing.waiting_line import QueueTimeout
from ripresa.cluster.routing.worker_load import PlannerSettings
from ripresa.workers.address import WorkerKind
from ripresa.workers.errors import (
    ErrorCode,
    InvalidArgument,
    ResourceExhausted,
    RipresaError,
    Unavailable,
    Unreachable,
    WorkerLeaving,
)
from ripresa.workers.replay import TailVariant
from ripresa.workers.replay_query import ReplayGeometry
from ripresa.workers.report import WorkerReport, WorkerState
from ripresa.workers.request import (
    EngineEvent,
    EngineStats,
    Finished,
    FinishReason,
    GenerationRequest,
    PrefillDone,
    Reserved,
    SamplingParams,
    Tokens,
    WorkCounters,
)

GEOMETRY = ReplayGeometry(128, 6, 4, 4)
STATS = EngineStats(0, 0, 8, 8, 0, WorkCounters(), 0, 0)
PROMPT = PromptRequest(
    "request", (5, 6, 7), SamplingParams(max_tokens=4, seed=9), TailVariant.FLOORED
)
ANSWER = (10, 11, 12, 13)

Script = Callable[[GenerationRequest], AsyncGenerator[EngineEvent]]


class Cluster:
    """Workers that follow scripts; the view and the calls of one router.

    Attributes:
        decoding: what decode workers do; they answer as they should where nothing is given.
        prefilling: seconds that a prefill takes, or what it raises.
        decoded, prefilled: the requests that workers got, in order.
        ended: decode calls that were closed, by worker.
        waited_for: the router waits for a report; those that are `reporting` then send one.
        capacity: tokens that pools hold.
        full: workers that have no room now.
        leased, session_ends: what workers heard of turns and sessions; none answers while
            `is_deaf`.
    """

    def __init__(self, encoders: int = 0, decoders: int = 2) -> None:
        self.listed = [f"e{k}" for k in range(encoders)] + [f"d{k}" for k in range(decoders)]
        self.decoding: dict[str, Script] = {}
        self.prefilling: dict[str, float | RipresaError] = {}
        self.decoded: list[tuple[str, GenerationRequest]] = []
        self.prefilled: list[tuple[str, GenerationRequest]] = []
        self.ended: list[str] = []
        self.lost_workers: list[str] = []
        self.waited_for = asyncio.Event()
        self.reporting: set[str] = set()
        self.num_reports: Counter[str] = Counter()
        self.capacity: dict[str, int] = {}
        self.full: set[str] = set()
        self.leaving: set[str] = set()
        self.leased: list[tuple[str, str, tuple[str, ...]]] = []
        self.session_ends: list[tuple[str, bytes, str]] = []
        self.is_deaf = False
        self.prefill_started = asyncio.Event()
        self._changed = asyncio.Event()
        self._has_state: dict[str, asyncio.Event] = {}
        hints = PrefixHints(NoDirectory(), GEOMETRY, lambda worker_id: None)
        # Every prompt goes to an encoder if there is one.
        settings = PlannerSettings(max_local_rows=0)
        self.router = ClusterRouter(self, self, hints, settings, reserve_timeout_s=1.0)

    def workers(self) -> tuple[WorkerReport, ...]:
        return tuple(
            WorkerReport(
                name,
                kind,
                "node",
                1,
                1,
                STATS,
                capacity_tokens=self.capacity.get(name),
                state=WorkerState.DRAINING if name in self.leaving else WorkerState.READY,
                number=self.num_reports[name],
            )
            for name in self.listed
            if name not in self.lost_workers
            for kind in (WorkerKind.ENCODER if name[0] == "e" else WorkerKind.DECODE,)
        )

    def age_s(self, worker_id: str) -> float:
        return 0.0

    def was_decoder(self, worker_id: str) -> bool:
        return worker_id.startswith("d")

    async def refresh(self) -> None:
        return None

    async def changed(self) -> None:
        self.waited_for.set()
        changed = self._changed
        for worker_id in self.reporting:
            self.report(worker_id)
        await changed.wait()

    def report(self, worker_id: str) -> None:
        """The worker reports once more."""
        self.num_reports[worker_id] += 1
        self._wake()

    def lost(self, worker_id: str) -> None:
        self.lost_workers.append(worker_id)

    async def gone(self, worker_id: str) -> None:
        while worker_id in self.listed:
            await self._changed.wait()

    def stop_reports(self, worker_id: str) -> None:
        self.listed.remove(worker_id)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def generate(
        self, worker_id: str, request: GenerationRequest, local: bool, hold: Hold
    ) -> AsyncGenerator[EngineEvent]:
        self.decoded.append((worker_id, request))
        self._has_state[request.request_id] = asyncio.Event()
        script = self.decoding.get(worker_id, answering)
        try:
            if worker_id in self.full:
                raise ResourceExhausted(f"{worker_id} is full")
            yield Reserved(worker_id, local)
            if not local:
                await self._has_state[request.request_id].wait()
            yield PrefillDone(request.recipe)
            async with aclosing(script(request)) as events:
                async for event in events:
                    yield event
        finally:
            self.ended.append(worker_id)

    async def prefill(
        self, worker_id: str, request: GenerationRequest, receiver: str, hold: Hold
    ) -> WorkCounters:
        self.prefilled.append((worker_id, request))
        self.prefill_started.set()
        what = self.prefilling.get(worker_id, 0.0)
        if isinstance(what, RipresaError):
            raise what
        await asyncio.sleep(what)
        self._has_state[request.request_id].set()
        return WorkCounters(encoder_rows=request.num_tokens)

    async def abort(self, worker_id: str, request_id: str) -> bool:
        return any(name == worker_id and r.request_id == request_id for name, r in self.decoded)

    async def lease(self, worker_id: str, request_id: str, tools: tuple[str, ...]) -> bool:
        self.leased.append((worker_id, request_id, tools))
        if self.is_deaf:
            raise Unreachable(f"{worker_id} is gone")
        return True

    async def end_session(self, worker_id: str, tenant_salt: bytes, session_id: str) -> None:
        self.session_ends.append((worker_id, tenant_salt, session_id))
        if self.is_deaf:
            raise Unreachable(f"{worker_id} is gone")

    async def run(self, prompt: PromptRequest = PROMPT) -> list[RouterEvent]:
        async with asyncio.timeout(30):
            return [event async for event in self.router.generate(prompt)]


async def answering(request: GenerationRequest) -> AsyncGenerator[EngineEvent]:
    """The rest of the answer, by position, as an engine of the same recipe would give it."""
    done = request.num_tokens - request.num_prompt_tokens
    for index in range(done, len(ANSWER)):
        yield Tokens(request.num_prompt_tokens + index, (ANSWER[index],))
    yield Finished(FinishReason.LENGTH, None, len(ANSWER), WorkCounters(decoder_rows=3))


def breaking(error: RipresaError, after: int = 2) -> Script:
    async def script(request: GenerationRequest) -> AsyncGenerator[EngineEvent]:
        async with aclosing(answering(request)) as events:
            for _ in range(after):
                yield await anext(events)
        raise error

    return script


def hanging(cluster: Cluster, worker_id: str) -> Script:
    """Gives two tokens, then nothing, and reports no more."""

    async def script(request: GenerationRequest) -> AsyncGenerator[EngineEvent]:
        async with aclosing(answering(request)) as events:
            for _ in range(2):
                yield await anext(events)
        cluster.stop_reports(worker_id)
        await asyncio.Event().wait()

    return script


async def ending_early(request: GenerationRequest) -> AsyncGenerator[EngineEvent]:
    yield Tokens(request.num_tokens, (ANSWER[0],))


def check_answer(events: list[RouterEvent]) -> Finished:
    """Placed once, every token once and in order, the end last."""
    assert isinstance(events[0], Placed)
    tokens = events[1:-1]
    assert [t.position for t in tokens if isinstance(t, Tokens)] == [3, 4, 5, 6]
    assert tuple(i for t in tokens if isinstance(t, Tokens) for i in t.token_ids) == ANSWER
    assert isinstance(events[-1], Finished)
    return events[-1]


async def test_a_split_request_counts_the_work_of_both_workers() -> None:
    cluster = Cluster(encoders=1)
    finished = check_answer(await cluster.run())
    assert finished.counters == WorkCounters(encoder_rows=3, decoder_rows=3)
    (_, decoding), (_, prefilling) = cluster.decoded[0], cluster.prefilled[0]
    assert prefilling.generation > decoding.generation
    assert prefilling.recipe == decoding.recipe
    cluster.router.check_integrity()


@pytest.mark.parametrize("encoders", [0, 1])
@pytest.mark.parametrize("how", ["breaks", "hangs", "ends early"])
async def test_a_lost_decode_worker_is_replaced_by_the_same_recipe(encoders: int, how: str) -> None:
    cluster = Cluster(encoders)
    scripts = {
        "breaks": breaking(Unreachable("died")),
        "hangs": hanging(cluster, "d0"),
        "ends early": ending_early,
    }
    cluster.decoding["d0"] = scripts[how]
    check_answer(await cluster.run())
    (first, before), (second, after) = cluster.decoded
    assert (first, second) == ("d0", "d1")
    assert after.recipe == before.recipe
    assert after.generation > before.generation
    streamed = 1 if how == "ends early" else 2
    assert after.token_ids == PROMPT.token_ids + ANSWER[:streamed]
    assert cluster.ended == ["d0", "d1"]
    cluster.router.check_integrity()


async def test_a_failed_encoder_is_replaced() -> None:
    cluster = Cluster(encoders=2)
    cluster.prefilling["e0"] = Unavailable("full of faults")
    check_answer(await cluster.run())
    assert [worker for worker, _ in cluster.prefilled] == ["e0", "e1"]
    assert len(cluster.decoded) == 1


async def test_a_hanging_encoder_is_replaced() -> None:
    cluster = Cluster(encoders=2)
    cluster.prefilling["e0"] = 3600.0
    running = asyncio.create_task(cluster.run())
    await cluster.prefill_started.wait()
    cluster.stop_reports("e0")
    check_answer(await running)
    assert [worker for worker, _ in cluster.prefilled] == ["e0", "e1"]
    assert cluster.lost_workers == ["e0"]
    cluster.router.check_integrity()


async def test_without_a_working_encoder_the_decode_worker_prefills() -> None:
    cluster = Cluster(encoders=2)
    cluster.prefilling = {"e0": Unavailable("no"), "e1": Unavailable("no")}
    check_answer(await cluster.run())
    assert [worker for worker, _ in cluster.prefilled] == ["e0", "e1"]
    assert len(cluster.decoded) == 2


async def test_a_mistake_of_a_worker_is_not_repeated_elsewhere() -> None:
    cluster = Cluster()
    cluster.decoding["d0"] = breaking(RipresaError(ErrorCode.INTERNAL, "a bug"))
    with pytest.raises(RipresaError, match="a bug"):
        await cluster.run()
    assert len(cluster.decoded) == 1
    assert cluster.lost_workers == []
    cluster.router.check_integrity()


async def test_retries_end() -> None:
    cluster = Cluster(decoders=9)
    for name in cluster.listed:
        cluster.decoding[name] = breaking(Unavailable(f"{name} is closing"), after=0)
    with pytest.raises(Unavailable, match="is closing"):
        await cluster.run()
    assert len({worker for worker, _ in cluster.decoded}) == MAX_EXECUTIONS
    cluster.router.check_integrity()


@pytest.mark.parametrize("after", [0, 2], ids=["before its first token", "later"])
async def test_the_only_worker_is_lost_and_another_one_comes(after: int) -> None:
    """Whoever may wait goes on there, in line."""
    cluster = Cluster(decoders=1)
    cluster.decoding["d0"] = breaking(Unreachable("died"), after)
    max_queue_s = 0.0 if after else 30.0
    first = asyncio.create_task(cluster.run(replace(PROMPT, max_queue_s=max_queue_s)))
    await cluster.waited_for.wait()
    new = replace(PROMPT, request_id="new", max_queue_s=30.0)
    second = asyncio.create_task(cluster.run(new))
    with pytest.raises(RipresaError):
        await cluster.run(replace(PROMPT, request_id="in haste"))
    cluster.listed.append("d1")
    cluster.report("d1")
    for running in (first, second):
        check_answer(await running)
    asked = [(worker, request.request_id) for worker, request in cluster.decoded]
    assert asked == [("d0", PROMPT.request_id), ("d1", PROMPT.request_id), ("d1", "new")]
    cluster.router.check_integrity()


@pytest.mark.parametrize("leaves", [False, True])
async def test_nobody_ready_is_told_after_the_wait_as_what_it_is(leaves: bool) -> None:
    cluster = Cluster(decoders=1)
    if leaves:
        cluster.leaving = {"d0"}
    else:
        cluster.listed.clear()
    for max_queue_s in (0.0, 0.01):
        with pytest.raises(NoWorker, match="leaving" if leaves else "ready") as caught:
            await cluster.run(replace(PROMPT, max_queue_s=max_queue_s))
        assert isinstance(caught.value, AllLeaving) is leaves
    cluster.router.check_integrity()


@pytest.mark.parametrize("leaves", [False, True])
async def test_whoever_finds_a_line_is_told_what_it_waits_for(leaves: bool) -> None:
    cluster = Cluster(decoders=1)
    cluster.full = {"d0"}
    waiting = asyncio.create_task(
        cluster.run(replace(PROMPT, request_id="first", max_queue_s=30.0))
    )
    await cluster.waited_for.wait()
    in_haste = PROMPT, replace(PROMPT, max_queue_s=0.01)
    for prompt in in_haste:
        with pytest.raises(QueueTimeout):
            await cluster.run(prompt)
    if leaves:
        cluster.leaving = {"d0"}
    else:
        cluster.listed.clear()
    for prompt in in_haste:
        with pytest.raises(NoWorker) as caught:
            await cluster.run(prompt)
        assert isinstance(caught.value, AllLeaving) is leaves
        assert caught.value.retry_after_s is not None
    assert await cluster.router.abort("first")
    with pytest.raises(RipresaError, match="aborted"):
        await waiting
    cluster.router.check_integrity()


async def test_what_fits_nowhere_waits_in_a_line_like_others() -> None:
    """A worker is ready, if only not for this one: that is told when its turn comes."""
    cluster = Cluster(decoders=1)
    cluster.full, cluster.capacity = {"d0"}, {"d0": 20}
    waiting = asyncio.create_task(
        cluster.run(replace(PROMPT, request_id="first", max_queue_s=30.0))
    )
    await cluster.waited_for.wait()
    too_long = replace(PROMPT, request_id="long", token_ids=tuple(range(30)))
    for max_queue_s in (0.0, 0.01):
        with pytest.raises(QueueTimeout):
            await cluster.run(replace(too_long, max_queue_s=max_queue_s))
    cluster.full.clear()
    last = asyncio.create_task(cluster.run(replace(too_long, max_queue_s=30.0)))
    cluster.report("d0")
    check_answer(await waiting)
    with pytest.raises(InvalidArgument, match=r"decoders\.num_blocks"):
        await last


async def test_who_found_nobody_is_told_of_those_that_came_since() -> None:
    cluster = Cluster(decoders=1)
    cluster.listed.clear()
    late = asyncio.create_task(
        cluster.run(replace(PROMPT, request_id="late", priority=1, max_queue_s=0.2))
    )
    await cluster.waited_for.wait()
    first = asyncio.create_task(
        cluster.run(replace(PROMPT, request_id="first", priority=0, max_queue_s=30.0))
    )
    cluster.listed, cluster.full = ["d0"], {"d0"}
    cluster.report("d0")
    with pytest.raises(QueueTimeout):
        await late
    assert await cluster.router.abort("first")
    with pytest.raises(RipresaError, match="aborted"):
        await first
    cluster.router.check_integrity()


async def test_a_full_worker_that_left_is_not_what_is_told() -> None:
    cluster = Cluster(decoders=1)
    cluster.full = {"d0"}
    running = asyncio.create_task(cluster.run(replace(PROMPT, max_queue_s=0.2)))
    await cluster.waited_for.wait()
    cluster.leaving = {"d0"}
    cluster.report("d0")
    with pytest.raises(AllLeaving):
        await running
    cluster.router.check_integrity()


async def test_the_loss_of_the_only_worker_is_told_when_nobody_comes() -> None:
    cluster = Cluster(decoders=1)
    cluster.decoding["d0"] = breaking(Unreachable("died"), after=0)
    with pytest.raises(Unreachable, match="died"):
        await cluster.run(replace(PROMPT, max_queue_s=0.01))
    cluster.router.check_integrity()


async def test_a_worker_that_is_always_leaving_is_not_asked_for_ever() -> None:
    """Its reports say that it is ready, and it refuses."""
    cluster = Cluster(decoders=1)
    cluster.reporting = {"d0"}
    cluster.decoding["d0"] = breaking(WorkerLeaving("it leaves"), after=0)
    with pytest.raises(WorkerLeaving):
        await cluster.run()
    assert len(cluster.decoded) == MAX_EXECUTIONS + 1
    cluster.router.check_integrity()


async def test_workers_that_are_always_leaving_send_nobody_around_for_ever() -> None:
    """Each has refused the request when the other one reports that it is ready."""
    cluster = Cluster(decoders=2)
    cluster.reporting = {"d0", "d1"}
    for name in cluster.listed:
        cluster.decoding[name] = breaking(WorkerLeaving(f"{name} leaves"), after=0)
    with pytest.raises(WorkerLeaving):
        await cluster.run()
    assert len(cluster.decoded) == MAX_EXECUTIONS + 2
    cluster.router.check_integrity()


def refusing_once(cluster: Cluster, worker_id: str) -> Script:
    """UNAVAILABLE after two tokens; the next time it answers."""

    async def script(request: GenerationRequest) -> AsyncGenerator[EngineEvent]:
        cluster.decoding[worker_id] = answering
        async for event in breaking(Unavailable("its lane was lost"))(request):
            yield event

    return script


async def test_the_only_worker_is_asked_again_when_it_has_reported() -> None:
    cluster = Cluster(decoders=3)
    cluster.capacity["d1"] = 2
    cluster.leaving = {"d2"}
    cluster.decoding["d0"] = refusing_once(cluster, "d0")
    running = asyncio.create_task(cluster.run())
    await cluster.waited_for.wait()
    # It is not asked before, and those with too small a pool or about to leave never are.
    assert not running.done()
    cluster.report("d0")
    check_answer(await running)
    assert [worker for worker, _ in cluster.decoded] == ["d0", "d0"]
    cluster.router.check_integrity()


async def test_a_new_worker_is_asked_instead() -> None:
    cluster = Cluster(decoders=1)
    cluster.decoding["d0"] = breaking(Unavailable("its lane was lost"))
    running = asyncio.create_task(cluster.run())
    await cluster.waited_for.wait()
    cluster.listed.append("d1")
    cluster.report("d1")
    check_answer(await running)
    assert [worker for worker, _ in cluster.decoded] == ["d0", "d1"]


@pytest.mark.parametrize("reports", [False, True])
async def test_the_only_worker_s_own_error_is_told(reports: bool) -> None:
    """Whether it never reports again, or fails every time."""
    cluster = Cluster(decoders=1)
    cluster.reporting = {"d0"} if reports else set()
    cluster.decoding["d0"] = breaking(Unavailable("the disk is gone"), after=0)
    with pytest.raises(Unavailable, match="the disk is gone"):
        await cluster.run()
    assert len(cluster.decoded) == (MAX_EXECUTIONS if reports else 1)
    cluster.router.check_integrity()


async def test_the_wait_for_a_report_can_be_cancelled() -> None:
    cluster = Cluster(decoders=1)
    cluster.decoding["d0"] = breaking(Unavailable("its lane was lost"))
    running = asyncio.create_task(cluster.run())
    await cluster.waited_for.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert asyncio.all_tasks() == {asyncio.current_task()}
    cluster.router.check_integrity()


async def test_a_request_goes_where_it_fits() -> None:
    cluster = Cluster(encoders=2, decoders=2)
    need = len(PROMPT.token_ids) + PROMPT.sampling.max_tokens
    cluster.capacity = {"e0": 2, "e1": 3, "d0": need - 1, "d1": need}
    check_answer(await cluster.run())
    assert [worker for worker, _ in cluster.prefilled] == ["e1"]
    assert [worker for worker, _ in cluster.decoded] == ["d1"]
    told = "\n".join(cluster.router.explain(PROMPT.request_id))
    assert f"left out: d0: its KV pool holds {need - 1} tokens" in told
    assert "left out: e0: its KV pool holds 2 tokens" in told
    assert "encoders.num_blocks" in told


@pytest.mark.parametrize(
    ("capacity", "field"), [(2, "token_ids"), (6, "sampling.max_tokens")], ids=["prompt", "answer"]
)
async def test_a_request_that_fits_nowhere_is_refused_by_its_field(
    capacity: int, field: str
) -> None:
    cluster = Cluster(encoders=1, decoders=2)
    cluster.capacity = {"d0": 1, "d1": capacity}
    with pytest.raises(InvalidArgument, match=r"decoders\.num_blocks") as caught:
        await cluster.run()
    assert caught.value.field == field
    assert cluster.decoded == []


async def test_a_full_worker_s_refusal_is_told_where_no_other_one_is_large_enough() -> None:
    cluster = Cluster(decoders=2)
    cluster.capacity = {"d1": 1}
    cluster.decoding["d0"] = breaking(ResourceExhausted("no blocks are free"), after=0)
    with pytest.raises(ResourceExhausted, match="no blocks are free"):
        await cluster.run()


async def test_a_request_waits_while_all_workers_are_full() -> None:
    """More of them than a request may be executed: a refusal is none."""
    cluster = Cluster(decoders=6)
    cluster.full = set(cluster.listed)
    running = asyncio.create_task(cluster.run(replace(PROMPT, max_queue_s=30.0)))
    await cluster.waited_for.wait()
    assert {worker for worker, _ in cluster.decoded} == cluster.full
    cluster.full -= {"d3"}
    cluster.report("d3")
    check_answer(await running)
    assert cluster.decoded[-1][0] == "d3"
    cluster.router.check_integrity()


async def test_a_wait_ends_with_its_time_or_an_abort() -> None:
    cluster = Cluster()
    cluster.full = set(cluster.listed)
    with pytest.raises(QueueTimeout, match=r"gateway\.max_queue_time_s"):
        await cluster.run(replace(PROMPT, max_queue_s=0.01))
    cluster.waited_for.clear()
    running = asyncio.create_task(cluster.run(replace(PROMPT, max_queue_s=30.0)))
    await cluster.waited_for.wait()
    assert await cluster.router.abort(PROMPT.request_id)
    with pytest.raises(RipresaError, match="aborted"):
        await running
    with pytest.raises(ResourceExhausted, match="is full"):
        await cluster.run()
    cluster.router.check_integrity()


async def test_a_stream_that_lost_its_worker_waits_for_room_elsewhere() -> None:
    cluster = Cluster()
    cluster.full = {"d1"}
    cluster.decoding["d0"] = hanging(cluster, "d0")
    running = asyncio.create_task(cluster.run())
    await cluster.waited_for.wait()
    cluster.full.clear()
    cluster.report("d1")
    check_answer(await running)
    assert [worker for worker, _ in cluster.decoded][-1] == "d1"
    cluster.router.check_integrity()


async def test_closing_the_stream_ends_the_decode_call() -> None:
    cluster = Cluster()
    stream = cluster.router.generate(PROMPT)
    assert isinstance(await anext(stream), Placed)
    assert isinstance(await anext(stream), Tokens)
    await stream.aclose()
    assert cluster.ended == ["d0"]
    assert asyncio.all_tasks() == {asyncio.current_task()}
    cluster.router.check_integrity()


async def test_a_cancel_in_the_prefill_ends_both_calls() -> None:
    cluster = Cluster(encoders=1)
    cluster.prefilling["e0"] = 3600.0
    running = asyncio.create_task(cluster.run())
    await cluster.prefill_started.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert cluster.ended == ["d0"]
    assert asyncio.all_tasks() == {asyncio.current_task()}
    cluster.router.check_integrity()


async def test_a_reused_id_replaces_what_workers_still_run_of_it() -> None:
    cluster = Cluster()
    check_answer(await cluster.run())
    check_answer(await cluster.run())
    (_, first), (_, second) = cluster.decoded
    assert second.generation > first.generation
    assert second.gateway == first.gateway != ""


async def test_a_refused_id_does_not_replace_the_run_it_belongs_to() -> None:
    cluster = Cluster()
    refusal = RipresaError(ErrorCode.ALREADY_EXISTS, "request r runs here")
    cluster.decoding = dict.fromkeys(cluster.listed, breaking(refusal, after=0))
    for _ in range(2):
        with pytest.raises(RipresaError):
            await cluster.run()
    first, second = (request.generation for _, request in cluster.decoded)
    assert first == second


async def test_the_worker_that_ran_a_turn_hears_that_it_called_tools() -> None:
    cluster = Cluster()
    cluster.decoding["d0"] = breaking(Unreachable("gone"))
    await cluster.run()
    (first, _), (last, request) = cluster.decoded
    assert first != last
    cluster.router.called("unknown", ["search"])
    for _ in range(2):
        cluster.router.called(request.request_id, ["search"])
    await cluster.router.leases.drain()
    assert cluster.leased == [(last, request.request_id, ("search",))]


async def test_a_closed_session_is_told_to_every_decode_worker() -> None:
    cluster = Cluster(encoders=1)
    await cluster.router.end_session(b"salt", "s")
    assert sorted(cluster.session_ends) == [("d0", b"salt", "s"), ("d1", b"salt", "s")]


async def test_workers_that_hear_nothing_of_a_lease_harm_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = Cluster()
    cluster.is_deaf = True
    await cluster.run()
    cluster.router.called(PROMPT.request_id, ["search"])
    await cluster.router.leases.drain()
    await cluster.router.end_session(b"", "s")
    assert len(cluster.leased) == 1
    assert len(cluster.session_ends) == 2
    told = [r.getMessage() for r in caplog.records if r.name.startswith("ripresa")]
    assert sum("is gone" in line for line in told) == 3


async def test_a_wait_ends_by_an_abort_at_another_gateway() -> None:
    cluster = Cluster()
    cluster.full = set(cluster.listed)
    asked: list[str] = []

    async def abort_elsewhere(request_id: str) -> bool:
        asked.append(request_id)
        return cluster.router.abort_waiting(request_id)

    hints = PrefixHints(NoDirectory(), GEOMETRY, lambda worker_id: None)
    other = ClusterRouter(
        cluster, cluster, hints, PlannerSettings(), abort_elsewhere=abort_elsewhere
    )
    running = asyncio.create_task(cluster.run(replace(PROMPT, max_queue_s=30.0)))
    await cluster.waited_for.wait()
    assert await other.abort(PROMPT.request_id)
    with pytest.raises(RipresaError, match="aborted") as aborted:
        await running
    assert aborted.value.code is ErrorCode.CANCELLED
    assert not await other.abort("nobody's")
    assert asked == [PROMPT.request_id, "nobody's"]
    cluster.router.check_integrity()


def beside(cluster: Cluster, elsewhere: Callable[[str], Awaitable[bool]]) -> ClusterRouter:
    """Another gateway's router, and how it reaches the other ones."""
    hints = PrefixHints(NoDirectory(), GEOMETRY, lambda worker_id: None)
    return ClusterRouter(cluster, cluster, hints, PlannerSettings(), abort_elsewhere=elsewhere)


async def test_a_gateway_that_does_not_answer_hides_nothing_that_runs_on_a_worker() -> None:
    cluster = Cluster()

    async def silent(request_id: str) -> bool:
        await asyncio.Event().wait()
        return False

    async def away(request_id: str) -> bool:
        raise Unavailable("a gateway is out of reach")

    stream = cluster.router.generate(PROMPT)
    await anext(stream)
    async with asyncio.timeout(30):
        for elsewhere in (silent, away):
            assert await beside(cluster, elsewhere).abort(PROMPT.request_id)
        with pytest.raises(Unavailable, match="out of reach"):
            await beside(cluster, away).abort("nobody's")
    await stream.aclose()


async def test_an_abort_finds_who_leaves_another_gateways_line_meanwhile() -> None:
    cluster = Cluster()

    async def elsewhere(request_id: str) -> bool:
        # Workers have been asked; now the request goes to one.
        await cluster.run()
        return False

    assert await beside(cluster, elsewhere).abort(PROMPT.request_id)


async def test_a_worker_that_does_not_answer_hides_nothing_that_another_one_runs() -> None:
    cluster = Cluster()
    await cluster.run()
    abort = cluster.abort

    async def from_one(worker_id: str, request_id: str) -> bool:
        if worker_id == "d1":
            raise Unreachable("d1 is gone")
        return await abort(worker_id, request_id)

    cluster.abort = from_one  # type: ignore[method-assign]
    assert await cluster.router.abort(PROMPT.request_id)
    with pytest.raises(Unreachable):
        await cluster.router.abort("nobody's")
