"""What does each gateway answer to one question? A silent one hides nothing that others know."""

from __future__ import annotations

import asyncio
from typing import Any

from ray.serve.handle import DeploymentHandle

from ripresa.workers.errors import RipresaError, Unavailable
from ripresa.workers.remote_worker import failures

TIMEOUT_S = 5.0
"""Longest wait for a gateway's answer."""


async def ask_each(
    gateways: DeploymentHandle[Any], method: str, *arguments: Any, timeout_s: float = TIMEOUT_S
) -> list[Any]:
    """What every gateway answers; a RipresaError for one that fails, ends or stays silent.

    Raises:
        Unreachable: Serve does not say who they are.
    """
    async with failures("the list of gateways"), asyncio.timeout(timeout_s):
        # Serve's own way to the results waits for all of them, or drops all.
        asked = await gateways.broadcast(method, *arguments)._fetch_replica_results_async()
    return await asyncio.gather(*(_answer(one, timeout_s) for one in asked))


async def _answer(asked: Any, timeout_s: float) -> Any:
    try:
        async with failures("a gateway"), asyncio.timeout(timeout_s):
            return await asked.get_async()
    except RipresaError as error:
        return error


def require_all(answers: list[Any], what: str) -> None:
    """Refuse to conclude from answers of which some are missing.

    Args:
        what: that none of the answers says, as in "has the request wait".

    Raises:
        Unavailable: some are.
    """
    missing = [answer for answer in answers if isinstance(answer, RipresaError)]
    if missing:
        raise Unavailable(
            f"no gateway says that it {what}, but {len(missing)} of {len(answers)} did not answer "
            f"({missing[0]}); try again"
        )
