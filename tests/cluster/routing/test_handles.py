"""Do workers hear goodbye from whoever gives a call up, and nothing from a detached gateway? Is a
drain that is called off told, and not logged as a failed request?"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, cast

import pytest
from hash_requests import make_request
from hash_requests import prompt as tokens_of
from routed_cluster import routed_cluster
from routed_turns import ask
from split_cluster import StepGate

from ripresa.cluster.routing.handles import RayWorkerCalls, RayWorkerCare
from ripresa.cluster.routing.prompt import Hold
from ripresa.workers.address import WorkerAddress, WorkerKind
from ripresa.workers.decode_engine import DecodeEngine
from ripresa.workers.departure import Departure, DrainOrder
from ripresa.workers.errors import Unavailable
from ripresa.workers.report import WorkerState
from ripresa.workers.request import StreamTicket
from ripresa.workers.served_worker import ServedWorker

REQUEST = replace(make_request(), stream=StreamTicket("id", 0, b""))


class Stream:
    """What a worker streams, without an end."""

    def __init__(self) -> None:
        self.is_cancelled = False

    async def __aiter__(self) -> AsyncGenerator[tuple[()]]:
        while True:
            yield ()

    def cancel(self) -> None:
        self.is_cancelled = True


class Decoders:
    """A handle to one decode worker.

    Attributes:
        streams: by the caller that opened it.
        gone: callers that have said goodbye.
    """

    def __init__(self) -> None:
        self.streams: dict[str, Stream] = {}
        self.gone: list[str] = []
        self.generate = self.resume = _Method(self._open)
        self.let_go = _Method(self._let_go)

    def options(self, **_: Any) -> Decoders:
        return self

    def _open(self, *arguments: Any, worker_id: str) -> Stream:
        return self.streams.setdefault(arguments[-1], Stream())

    async def _let_go(self, caller: str, worker_id: str) -> None:
        self.gone.append(caller)


class _Method:
    def __init__(self, remote: Any) -> None:
        self.remote = remote


@pytest.mark.parametrize("is_resumed", [False, True], ids=["generate", "resume"])
async def test_a_call_that_is_given_up_says_goodbye_unless_the_gateway_is_detached(
    is_resumed: bool,
) -> None:
    decoders = Decoders()
    calls = RayWorkerCalls(None, cast(Any, decoders))
    for is_detached in (False, True):
        decoders.streams.clear()
        decoders.gone.clear()
        events: AsyncGenerator[Any] = (
            calls.resume("d0", "id", 0, Hold())
            if is_resumed
            else calls.generate("d0", REQUEST, True, Hold())
        )
        async with aclosing(events):
            await anext(events)
            if is_detached:
                calls.detach()
        await calls.close()
        ((caller, stream),) = decoders.streams.items()
        assert stream.is_cancelled
        assert decoders.gone == ([] if is_detached else [caller])


class Replica(ServedWorker[DecodeEngine]):
    """A worker that is asked to leave."""

    def __init__(self, departure: Departure) -> None:
        self._worker_id = "d0"
        self._departure = departure


class Handle:
    """The way to it through Serve.

    Attributes:
        raised: by the replica; Serve logs it with its traceback.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self.raised: list[BaseException] = []
        self.drain = _Method(self._drain)

    def options(self, **_: Any) -> Handle:
        return self

    def _drain(self, order: DrainOrder, worker_id: str) -> _Answers:
        return _Answers(self._replica.drain(order, worker_id=worker_id), self.raised)


class _Answers:
    def __init__(self, answers: AsyncGenerator[Any], raised: list[BaseException]) -> None:
        self._answers = answers
        self._raised = raised

    async def __aiter__(self) -> AsyncGenerator[Any]:
        try:
            async with aclosing(self._answers) as answers:
                async for answer in answers:
                    yield pickle.loads(pickle.dumps(answer))
        except Exception as error:
            self._raised.append(error)
            raise

    def cancel(self) -> None:
        return None


@pytest.mark.parametrize("name", ["d0", "gone"])
async def test_a_drain_that_ends_without_success_is_told_and_not_raised_in_the_replica(
    name: str,
) -> None:
    async with routed_cluster(0, 1) as cluster:
        departure = cluster.workers_by_id["d0"].departure
        handle = Handle(Replica(departure))
        care = RayWorkerCare(None, cast(Any, handle))
        # Its stream keeps it from being drained at once.
        gate = StepGate(cluster.workers_by_id["d0"].machine, 3)
        running = asyncio.create_task(cluster.ask(ask(tokens_of(1, 20), "runs")))
        await gate.reached.wait()
        told = care.drain(WorkerAddress(name, WorkerKind.DECODE), DrainOrder(30.0))
        async with aclosing(told):
            if name == "d0":
                assert (await anext(told)).state is WorkerState.DRAINING
                await departure.stay()
            with pytest.raises(Unavailable, match="called off" if name == "d0" else "is gone"):
                await anext(told)
        assert handle.raised == []
        gate.open()
        await running
