"""Do workers hear goodbye from whoever gives a call up, and nothing from a detached gateway?"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, cast

import pytest
from hash_requests import make_request

from ripresa.cluster.routing.handles import RayWorkerCalls
from ripresa.cluster.routing.prompt import Hold
from ripresa.workers.request import StreamTicket

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
