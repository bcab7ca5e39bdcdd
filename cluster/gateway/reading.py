"""Where is a request read: on the event loop, or on a thread beside it?

    short ones     on the loop, one in each of its rounds
    all others     on a few threads, in the order of their arrival

A thread keeps the interpreter from the loop while it reads, for up to 5 ms at once. What takes less
is done sooner without one: the way there and back costs a third of a millisecond, and several on a
busy machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ripresa.protos import ripresa_pb2 as pb
from ripresa.workers.errors import ErrorCode, RipresaError

T = TypeVar("T")

MAX_SHORT_BYTES = 24 << 10
MAX_SHORT_PARTS = 100
"""Messages, calls and tools: rendering takes time for each, however short."""


class Reading:
    """Reads the requests of one event loop.

    Args:
        num_threads: most that read beside it at once; further ones queue.
    """

    def __init__(self, num_threads: int) -> None:
        # Its own threads: a queue of long texts holds up nobody else in this process.
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenizer")
        self._round = asyncio.Lock()

    async def run(
        self, work: Callable[[], T], timeout_s: float | None, *, is_short: bool = False
    ) -> T:
        """What `work` returns.

        Work that still waits for its turn is dropped when the time is up or the caller is
        cancelled.

        Args:
            timeout_s: until the caller's deadline, which may have passed; None for none.
            is_short: it takes no longer than the loop can be held up.

        Raises:
            RipresaError: the deadline passed (DEADLINE_EXCEEDED), or what `work` raises.
        """
        if timeout_s is not None and timeout_s <= 0:
            raise _late()
        try:
            async with asyncio.timeout(timeout_s):
                if not is_short:
                    return await asyncio.get_running_loop().run_in_executor(self._threads, work)
                await self._round.acquire()
        except TimeoutError as error:
            raise _late() from error
        asyncio.get_running_loop().call_soon(self._round.release)
        return work()

    def close(self) -> None:
        """Give the threads back; nothing may follow."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def is_short(request: pb.GenerateRequest | pb.ChatRequest) -> bool:
    """Whether a request is read within a few milliseconds: it is small, and needs no grammar."""
    if request.ByteSize() > MAX_SHORT_BYTES or request.sampling.HasField("constraint"):
        return False
    if isinstance(request, pb.GenerateRequest):
        return True
    messages, config = request.full.messages, request.full.config
    num_parts = len(messages) + len(config.tools)
    if num_parts > MAX_SHORT_PARTS or request.HasField("tool_choice"):
        return False
    if config.HasField("response_format") or any(tool.strict for tool in config.tools):
        return False
    return num_parts + sum(len(message.tool_calls) for message in messages) <= MAX_SHORT_PARTS


def _late() -> RipresaError:
    return RipresaError(
        ErrorCode.DEADLINE_EXCEEDED,
        "the deadline passed before the text was tokenized; allow more time, or try again",
    )
