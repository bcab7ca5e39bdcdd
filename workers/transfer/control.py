"""How does a control message reach a peer in bounded time, and what if nobody waits for it?"""

from __future__ import annotations

import asyncio
import logging

from ripresa.workers.errors import RipresaError, Unavailable
from ripresa.workers.transfer.base import Accept, ControlMessage, Peer

_log = logging.getLogger(__name__)


async def deliver(peer: Peer, message: ControlMessage, timeout_s: float | None) -> Accept | None:
    """Deliver one message.

    Raises:
        RipresaError: the receiver's refusal, unchanged.
        Unavailable: no answer within `timeout_s` (None: no limit), or the peer cannot be reached.
    """
    what = type(message).__name__
    try:
        async with asyncio.timeout(timeout_s):
            return await peer.deliver(message)
    except RipresaError:
        raise
    except TimeoutError as error:
        raise Unavailable(f"no answer to {what} within {timeout_s} s") from error
    # Whatever carries the messages has its own error types; all mean that the peer is out of reach.
    except Exception as error:
        raise Unavailable(f"{what} did not reach the receiver: {error!r}") from error


class Notices:
    """Messages whose sender has already moved on: delivered in the background, at most once."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def post(self, peer: Peer, message: ControlMessage) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._deliver(peer, message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def drain(self) -> None:
        """Wait until every notice was delivered or given up."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _deliver(self, peer: Peer, message: ControlMessage) -> None:
        try:
            await deliver(peer, message, self._timeout_s)
        except RipresaError as error:
            # The receiver ends by its idle timeout what this notice would have ended at once.
            _log.info("notice %s was not taken: %s", type(message).__name__, error)
