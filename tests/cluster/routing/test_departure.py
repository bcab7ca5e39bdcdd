"""Does a worker leave without a lost stream, a lost session or a row computed twice?"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import aclosing
from itertools import count
from typing import Any
from unittest import mock

import pytest
from hash_requests import prompt as tokens_of
from routed_cluster import Answered, RoutedCluster, routed_cluster
from routed_turns import WINDOWS, ask, check_tokens, turn
from split_cluster import StepGate
from suspensions import cancelled_at

from ripresa.cluster.routing.execution import Execution
from ripresa.cluster.routing.planner import AllLeaving
from ripresa.cluster.routing.prompt import Hold, PromptRequest
from ripresa.cluster.routing.router import MAX_EXECUTIONS
from ripresa.workers.address import WorkerAddress, WorkerKind
from ripresa.workers.departure import DrainOrder, DrainProgress, HasOther
from ripresa.workers.errors import ErrorCode, RipresaError, Unavailable, WorkerLeaving
from ripresa.workers.replay import PlanKind
from ripresa.workers.report import WorkerState
from ripresa.workers.request import Failed, GenerationRequest, Tokens


def receivers(cluster: RoutedCluster, leaving: str) -> tuple[WorkerAddress, ...]:
    return tuple(
        worker.address
        for name, worker in cluster.workers_by_id.items()
        if name != leaving and worker.address.kind is WorkerKind.DECODE
    )


@pytest.fixture(autouse=True)
def known_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at this cluster finds newer reports."""
    monkeypatch.setattr("ripresa.workers.departure.NEWS_S", 0.0)


async def drain(
    cluster: RoutedCluster, name: str, *, grace_s: float = 30.0, gives: bool = True
) -> list[DrainProgress]:
    order = DrainOrder(grace_s, receivers(cluster, name) if gives else (), gives)
    departure = cluster.workers_by_id[name].departure
    told = [progress async for progress in departure.drain(order)]
    await cluster.told()
    return told


async def loop(
    cluster: RoutedCluster, num_turns: int, session: str
) -> tuple[Answered, tuple[int, ...]]:
    """A tool loop of so many turns; its last answer and the next turn's tokens."""
    tokens = tokens_of(sum(session.encode()), 40)
    for number in range(num_turns):
        answered = await turn(cluster, ask(tokens, f"{session} {number}", session=session))
        tokens += answered.tokens + tokens_of(300 + number, 5)
    return answered, tokens


@pytest.mark.parametrize("gives", [True, False])
@pytest.mark.parametrize("dies", [False, True])
async def test_a_session_goes_on_elsewhere(gives: bool, dies: bool) -> None:
    """With its state it computes only what is new; without, more, and says the same."""
    async with routed_cluster(0, 3, config=WINDOWS) as cluster:
        last, tokens = await loop(cluster, 3, "s")
        home = last.placed.worker_id
        told = await drain(cluster, home, gives=gives)
        assert told[-1].state is WorkerState.DRAINED
        assert (told[-1].num_running, told[-1].num_sessions) == (0, 0 if gives else 1)
        assert (told[-1].num_bytes > 0) is gives
        if dies:
            await cluster.kill(home)
            cluster.directory.lost(home, 1)
        answered = await cluster.ask(ask(tokens, "next", session="s"))
        await cluster.told()
        assert answered.placed.worker_id != home
        check_tokens(ask(tokens, "next", session="s"), answered)
        new = 5 + 1  # the tools' answers, and the last token that was said
        if gives:
            assert answered.recipe.kind is PlanKind.RESUME
            assert answered.recipe.start == len(tokens) - new
        elif dies:
            assert answered.recipe.start < len(tokens) - new


async def test_last_copies_of_prompts_without_sessions_stay_in_the_cluster() -> None:
    async with routed_cluster(0, 2, config=WINDOWS) as cluster:
        cluster.busy = {"d1": 10_000}
        asked = [tokens_of(700 + number, 41) for number in range(4)]
        for number, tokens in enumerate(asked):
            answered = await turn(cluster, ask(tokens, f"first {number}"))
            assert answered.placed.worker_id == "d0"
        cluster.busy.clear()
        told = await drain(cluster, "d0")
        assert told[-1].num_bytes > 0
        await cluster.kill("d0")
        cluster.directory.lost("d0", 1)
        for number, tokens in enumerate(asked):
            answered = await turn(cluster, ask(tokens, f"again {number}"))
            assert answered.recipe.write_floor >= 24


async def test_many_sessions_are_spread_and_all_are_found() -> None:
    async with routed_cluster(0, 3, config=WINDOWS, num_blocks=256) as cluster:
        tokens = {}
        # All on one worker: the others are busy meanwhile.
        cluster.busy = {"d1": 10_000, "d2": 10_000}
        for number in range(9):
            last, tokens[f"s{number}"] = await loop(cluster, 1, f"s{number}")
            assert last.placed.worker_id == "d0"
        cluster.busy.clear()
        told = await drain(cluster, "d0")
        assert told[0].num_sessions == 9
        assert [p.num_sessions for p in told] == sorted(p.num_sessions for p in told)[::-1]
        assert told[-1].num_sessions == 0
        homes = {cluster.moves.find(b"", session).worker_id for session in tokens}  # type: ignore[union-attr]
        assert homes == {"d1", "d2"}
        await cluster.kill("d0")
        cluster.directory.lost("d0", 1)
        for session, asked in tokens.items():
            answered = await turn(cluster, ask(asked, f"{session} next", session=session))
            assert answered.recipe.kind is PlanKind.RESUME


async def test_streams_end_where_they_are_and_nothing_new_comes() -> None:
    async with routed_cluster(0, 2, config=WINDOWS) as cluster:
        gate = StepGate(cluster.workers_by_id["d0"].machine, 3)
        cluster.busy = {"d1": 10_000}
        asked = ask(tokens_of(1, 20), "runs", max_tokens=9, session="s")
        running = asyncio.create_task(cluster.ask(asked))
        await gate.reached.wait()
        cluster.busy.clear()
        departure = cluster.workers_by_id["d0"].departure
        async with aclosing(
            departure.drain(DrainOrder(30.0, receivers(cluster, "d0")))
        ) as draining:
            told = [await anext(draining)]
            assert told[0].num_running == 1
            other = await cluster.ask(ask(tokens_of(2, 20), "new"))
            assert other.placed.worker_id == "d1"
            late = Execution(ask(tokens_of(3, 20), "late"), 0, "claim").next_request()
            refused = await anext(cluster.calls.generate("d0", late, True, Hold()))
            assert isinstance(refused, Failed)
            assert isinstance(refused.error, WorkerLeaving)
            gate.open()
            answered = await running
            assert answered.placed.worker_id == "d0"
            check_tokens(asked, answered)
            told += [progress async for progress in draining]
        # What the stream left when it was over has moved too.
        assert told[-1] == DrainProgress(WorkerState.DRAINED, 0, 0, told[-1].num_bytes)
        assert cluster.moves.find(b"", "s") is not None


async def test_after_the_grace_streams_go_on_elsewhere() -> None:
    async with routed_cluster(0, 2, config=WINDOWS) as cluster:
        cluster.busy = {"d1": 10_000}
        asked = ask(tokens_of(1, 20), "runs", max_tokens=30)
        events = Answered()
        async with aclosing(cluster.router.generate(asked)) as stream:
            async for event in stream:
                events.events.append(event)
                if isinstance(event, Tokens) and len(events.tokens) == 3:
                    cluster.busy.clear()
                    told = await drain(cluster, "d0", grace_s=0.0)
                    assert told[-1].num_running == 0
        check_tokens(asked, events)
        assert len(events.tokens) == 30


async def test_a_stream_outlives_any_number_of_drains() -> None:
    """Its worker leaves after every second token, and comes back."""
    async with routed_cluster(0, 2, config=WINDOWS) as cluster:
        asked = ask(tokens_of(1, 20), "runs", max_tokens=30)
        events = Answered()
        left: list[str] = []
        async with aclosing(cluster.router.generate(asked)) as stream:
            async for event in stream:
                events.events.append(event)
                if isinstance(event, Tokens) and len(events.tokens) % 2 == 0:
                    (busy,) = cluster.router._running.values()
                    told = await drain(cluster, busy, grace_s=0.0, gives=False)
                    assert told[-1].num_running == 0
                    await cluster.workers_by_id[busy].departure.stay()
                    left.append(busy)
        check_tokens(asked, events)
        assert len(left) > 2 * MAX_EXECUTIONS
        assert set(left) == {"d0", "d1"}


async def test_streams_that_nobody_could_take_end_where_they_are() -> None:
    async with routed_cluster(0, 2, config=WINDOWS) as cluster:
        await drain(cluster, "d1")
        gate = StepGate(cluster.workers_by_id["d0"].machine, 4)
        asked = ask(tokens_of(1, 20), "runs", max_tokens=30)
        running = asyncio.create_task(cluster.ask(asked))
        await gate.reached.wait()
        draining = asyncio.create_task(drain(cluster, "d0", grace_s=0.0))
        await cluster.sought.wait()
        gate.open()
        answered = await running
        check_tokens(asked, answered)
        assert len(answered.tokens) == 30
        assert cluster.workers_by_id["d1"].engine.stats().num_decoder_rows == 0
        told = await draining
        assert told[0].num_running == 1
        assert (told[-1].state, told[-1].num_running) == (WorkerState.DRAINED, 0)


async def test_streams_of_all_workers_that_leave_at_once_end_where_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of them asks before it is known that the other one leaves, too."""
    monkeypatch.setattr("ripresa.workers.departure.NEWS_S", 0.01)
    monkeypatch.setattr("ripresa.workers.departure.ASK_INTERVAL_S", 0.01)
    async with routed_cluster(0, 2, config=WINDOWS) as cluster:
        asked: list[PromptRequest] = []
        running: list[asyncio.Task[Answered]] = []
        gates = []
        for busy, name in (("d1", "d0"), ("d0", "d1")):
            cluster.busy = {busy: 10_000}
            gates.append(StepGate(cluster.workers_by_id[name].machine, 4))
            asked.append(ask(tokens_of(len(asked), 20), f"on {name}", max_tokens=30))
            running.append(asyncio.create_task(cluster.ask(asked[-1])))
            await gates[-1].reached.wait()
        knows = asyncio.Event()
        num_asked = 0
        for worker in cluster.workers_by_id.values():
            has_other = worker.departure._has_other

            async def old_report(has_other: HasOther = has_other) -> bool:
                nonlocal num_asked
                num_asked += 1
                if num_asked > 2:
                    knows.set()
                return num_asked <= 2 or await has_other()

            worker.departure._has_other = old_report
        draining = [asyncio.create_task(drain(cluster, name, grace_s=0.0)) for name in ("d0", "d1")]
        async with asyncio.timeout(30):
            await knows.wait()
        for gate in gates:
            gate.open()
        for prompt, task, name in zip(asked, running, ("d0", "d1"), strict=True):
            answered = await task
            check_tokens(prompt, answered)
            assert answered.placed.worker_id == name
        for told in draining:
            assert (await told)[-1].state is WorkerState.DRAINED
        assert cluster.wasted == []


async def test_streams_that_nobody_could_take_go_on_once_somebody_can() -> None:
    async with routed_cluster(0, 2, config=WINDOWS) as cluster:
        await drain(cluster, "d1")
        # Held there: it ends elsewhere or not at all.
        gate = StepGate(cluster.workers_by_id["d0"].machine, 4)
        asked = ask(tokens_of(1, 20), "runs", max_tokens=30)
        running = asyncio.create_task(cluster.ask(asked))
        await gate.reached.wait()
        draining = asyncio.create_task(drain(cluster, "d0", grace_s=0.0))
        await cluster.sought.wait()
        await cluster.workers_by_id["d1"].departure.stay()
        answered = await running
        check_tokens(asked, answered)
        assert answered.placed.worker_id == "d0"
        assert cluster.workers_by_id["d1"].engine.stats().num_decoder_rows > 0
        gate.open()
        assert (await draining)[-1].state is WorkerState.DRAINED


async def test_a_worker_comes_back() -> None:
    async with routed_cluster(0, 2, config=WINDOWS) as cluster:
        last, tokens = await loop(cluster, 2, "s")
        home = last.placed.worker_id
        await drain(cluster, home)
        departure = cluster.workers_by_id[home].departure
        await departure.stay()
        assert departure.state is WorkerState.READY
        answered = await turn(cluster, ask(tokens, "next", session="s"))
        # Both have the state; its own gateway knows the old home.
        assert answered.placed.worker_id == home
        assert answered.recipe.kind is PlanKind.RESUME
        # A second time, what the other one has in an older state moves again.
        told = await drain(cluster, home)
        assert told[0].num_sessions == 1
        assert told[-1].num_sessions == 0


async def test_a_drain_that_is_called_off_says_so() -> None:
    async with routed_cluster(0, 2, config=WINDOWS) as cluster:
        gate = StepGate(cluster.workers_by_id["d0"].machine, 3)
        cluster.busy = {"d1": 10_000}
        running = asyncio.create_task(cluster.ask(ask(tokens_of(1, 20), "runs")))
        await gate.reached.wait()
        departure = cluster.workers_by_id["d0"].departure
        order = DrainOrder(30.0, receivers(cluster, "d0"))
        async with aclosing(departure.drain(order)) as told:
            assert (await anext(told)).state is WorkerState.DRAINING
        # Nobody listens: the drain goes on all the same.
        assert departure.state is WorkerState.DRAINING
        async with aclosing(departure.drain(order)) as told:
            await anext(told)
            await departure.stay()
            with pytest.raises(Unavailable, match="called off"):
                await anext(told)
        gate.open()
        await running


async def test_nobody_left_to_take_requests() -> None:
    async with routed_cluster(0, 1, config=WINDOWS) as cluster:
        _, tokens = await loop(cluster, 1, "s")
        told = await drain(cluster, "d0")
        assert told[-1].state is WorkerState.DRAINED
        assert told[-1].num_sessions == 1  # told truly: nobody took it
        assert isinstance(await cluster.router.why_not_ready(), AllLeaving)
        with pytest.raises(RipresaError, match="leaving") as refused:
            await cluster.ask(ask(tokens, "next", session="s"))
        assert refused.value.code is ErrorCode.UNAVAILABLE
        await cluster.workers_by_id["d0"].departure.stay()
        answered = await turn(cluster, ask(tokens, "next", session="s"))
        assert answered.recipe.kind is PlanKind.RESUME


async def test_a_receiver_that_cannot_take_it_is_passed_over() -> None:
    async with routed_cluster(0, 3, config=WINDOWS) as cluster:
        last, tokens = await loop(cluster, 2, "s")
        home = last.placed.worker_id
        dead, _ = (address.worker_id for address in receivers(cluster, home))
        order = DrainOrder(30.0, receivers(cluster, home))
        await cluster.kill(dead)
        departure = cluster.workers_by_id[home].departure
        told = [progress async for progress in departure.drain(order)]
        await cluster.told()
        assert told[-1].num_sessions == 0
        answered = await turn(cluster, ask(tokens, "next", session="s"))
        assert answered.placed.worker_id not in (home, dead)
        assert answered.recipe.kind is PlanKind.RESUME


async def test_an_adoption_may_be_given_up_anywhere() -> None:
    """Nothing is left of it, and the session can still move."""
    async with routed_cluster(0, 2, config=WINDOWS) as cluster:
        last, tokens = await loop(cluster, 2, "s")
        home = last.placed.worker_id
        (receiver,) = receivers(cluster, home)
        departure = cluster.workers_by_id[home].departure
        request = departure._request(departure._left()[0], 0)
        for wait in count(1):
            is_taken = await cancelled_at(wait, lambda: cluster._adopt(receiver, request))
            await cluster.settle()
            if is_taken is not None:
                break
        assert is_taken
        assert wait > 2
        assert (await drain(cluster, home))[-1].num_sessions == 0
        answered = await turn(cluster, ask(tokens, "next", session="s"))
        assert answered.placed.worker_id == receiver.worker_id
        assert answered.recipe.kind is PlanKind.RESUME


async def test_a_drain_may_be_called_off_anywhere() -> None:
    async with routed_cluster(0, 2, config=WINDOWS) as cluster:
        last, tokens = await loop(cluster, 2, "s")
        home = last.placed.worker_id
        departure = cluster.workers_by_id[home].departure
        order = DrainOrder(30.0, receivers(cluster, home), gives_blocks=True)
        for wait in count(1):
            # As the task of a drain that is called off at its n-th wait.
            is_over = await cancelled_at(wait, lambda: _finished(departure._run(order)))
            await departure.stay()
            answered = await turn(cluster, ask(tokens, f"after {wait}", session="s"))
            tokens += answered.tokens + tokens_of(400 + wait, 3)
            assert answered.recipe.kind is PlanKind.RESUME
            if is_over:
                break
        assert wait > 2


async def test_moves_that_nobody_heard_of_cost_no_answer() -> None:
    async with routed_cluster(0, 2, config=WINDOWS) as cluster:
        last, tokens = await loop(cluster, 2, "s")
        home = last.placed.worker_id

        async def deaf(moves: object) -> None:
            raise Unavailable("the controller is gone")

        departure = cluster.workers_by_id[home].departure
        departure._tell = deaf
        told = await drain(cluster, home)
        assert told[-1].num_sessions == 0
        # The receiver has the state, and the gateway names its old home: it is found all the same.
        answered = await turn(cluster, ask(tokens, "next", session="s"))
        assert answered.placed.worker_id != home
        assert answered.recipe.kind is PlanKind.RESUME


async def test_one_session_s_failure_holds_up_no_other() -> None:
    """And it stays where it is: told truly."""
    async with routed_cluster(0, 2, config=WINDOWS) as cluster:
        cluster.busy = {"d1": 10_000}
        for number in range(3):
            last, _ = await loop(cluster, 1, f"s{number}")
            assert last.placed.worker_id == "d0"
        cluster.busy.clear()
        departure = cluster.workers_by_id["d0"].departure
        adopt = departure._adopt

        async def broken(receiver: WorkerAddress, request: GenerationRequest) -> bool:
            if request.session_id == "s1":
                raise ZeroDivisionError
            return await adopt(receiver, request)

        departure._adopt = broken
        told = await drain(cluster, "d0")
        assert told[-1].state is WorkerState.DRAINED
        assert told[-1].num_sessions == 1


async def test_a_drain_that_fails_says_so_and_may_be_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with routed_cluster(0, 2, config=WINDOWS) as cluster:
        last, tokens = await loop(cluster, 2, "s")
        home = last.placed.worker_id
        worker = cluster.workers_by_id[home]
        with monkeypatch.context() as broken:
            broken.setattr(worker.departure, "_give_away", mock.AsyncMock(side_effect=KeyError))
            with pytest.raises(RipresaError, match="drain the worker again") as failed:
                await drain(cluster, home)
        assert failed.value.code is ErrorCode.INTERNAL
        assert worker.departure.state is WorkerState.DRAINING
        assert (await drain(cluster, home))[-1].num_sessions == 0
        answered = await turn(cluster, ask(tokens, "next", session="s"))
        assert answered.placed.worker_id != home
        assert answered.recipe.kind is PlanKind.RESUME


async def _finished(running: Coroutine[Any, Any, None]) -> bool:
    await running
    return True
