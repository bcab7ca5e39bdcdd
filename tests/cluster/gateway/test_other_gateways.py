"""Are the answers of some gateways kept while another one is silent, fails or ends?"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
from ray.exceptions import ActorUnavailableError
from ray.serve.handle import DeploymentHandle

from ripresa.cluster.gateway.other_gateways import ask_each, require_all
from ripresa.workers.errors import ErrorCode, RipresaError, Unavailable, Unreachable

Answer = Callable[[], Awaitable[Any]]


class Gateways:
    """A handle to gateways that answer so."""

    def __init__(self, *answers: Answer) -> None:
        self._answers = answers

    def broadcast(self, method: str, *arguments: Any) -> Gateways:
        assert (method, arguments) == ("explain", ("r",))
        return self

    async def _fetch_replica_results_async(self) -> list[_Asked]:
        return [_Asked(answer) for answer in self._answers]


class _Asked:
    def __init__(self, answer: Answer) -> None:
        self.get_async = answer


async def knows() -> list[str]:
    return ["placed"]


async def silent() -> None:
    await asyncio.get_running_loop().create_future()


async def ends() -> None:
    raise ActorUnavailableError("it restarts", b"0" * 16)


async def ask(*answers: Answer) -> list[Any]:
    handle = cast(DeploymentHandle[Any], Gateways(*answers))
    return await ask_each(handle, "explain", "r", timeout_s=0.05)


async def test_what_came_is_kept_and_what_did_not_is_named() -> None:
    first, answer, last = await ask(silent, knows, ends)
    assert answer == ["placed"]
    assert isinstance(first, Unreachable)
    assert str(first) == "a gateway did not answer in time; try again"
    assert isinstance(last, Unreachable)
    assert "out of reach" in str(last)


async def test_nothing_is_concluded_from_answers_that_are_missing() -> None:
    with pytest.raises(Unavailable, match="1 of 2 did not answer") as refused:
        require_all([None, Unreachable("a gateway is gone")], "remembers the request")
    assert refused.value.code is ErrorCode.UNAVAILABLE
    require_all([None, None], "remembers the request")


async def test_no_list_of_gateways_is_a_failure_of_all() -> None:
    class Away:
        def broadcast(self, *_: Any) -> None:
            raise ConnectionError("Serve is away")

    with pytest.raises(RipresaError, match="the list of gateways is out of reach"):
        await ask_each(cast(DeploymentHandle[Any], Away()), "explain", "r")
