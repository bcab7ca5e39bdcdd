"""How many payload bytes may be under way at once?"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class ByteBudget:
    """A first-come, first-served semaphore that counts bytes.

    Args:
        capacity_bytes: most bytes held at once. A larger request waits until it is alone.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes
        self._held = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def held_bytes(self) -> int:
        return self._held

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def hold(self, num_bytes: int) -> AsyncIterator[None]:
        """Hold `num_bytes` inside the block."""
        share = min(num_bytes, self._capacity)
        await self._take(share)
        try:
            yield
        finally:
            self._give_back(share)

    async def _take(self, share: int) -> None:
        if not self._waiting and self._held + share <= self._capacity:
            self._held += share
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (share, granted)
        self._waiting.append(entry)
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self._give_back(share)
            else:
                self._waiting.remove(entry)
                self._grant()
            raise

    def _give_back(self, share: int) -> None:
        self._held -= share
        self._grant()

    def _grant(self) -> None:
        while self._waiting and self._held + self._waiting[0][0] <= self._capacity:
            share, granted = self._waiting.popleft()
            self._held += share
            granted.set_result(None)
