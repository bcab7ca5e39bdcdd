"""How do blocks reach a store without anyone waiting for it?

    event loop   offer, used ──▶ bounded queue ──▶ one thread ──▶ store
                                    └ full, or the store is out of order: dropped and counted

A store that refuses a write is left alone for a while; requests notice nothing, and reads go on.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Condition, Thread

from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.cache.block_store import BlockStore, StoredBlock, StoreStats
from ripresa.workers.errors import RipresaError

logger = logging.getLogger(__name__)

MAX_QUEUE_BYTES = 64 << 20
RETRY_S = 10.0
"""How long a store that failed is left alone."""
TOUCH_INTERVAL_S = 60.0
"""A block's use is noted at most this often."""
MAINTAIN_INTERVAL_S = 300.0
CLOSE_TIMEOUT_S = 10.0

_MAX_TOUCHES = 1 << 16


class WriteBehind:
    """A store's only writer in this process. Only `flush` and `close` wait.

    Args:
        store: where blocks go.
        clock: monotonic seconds.
        max_queue_bytes: most bytes of blocks that wait.
    """

    def __init__(
        self,
        store: BlockStore,
        clock: Callable[[], float],
        max_queue_bytes: int = MAX_QUEUE_BYTES,
    ) -> None:
        self._store = store
        self._clock = clock
        self._max_queue_bytes = max_queue_bytes
        self._blocks: deque[tuple[StoredBlock, float]] = deque()
        self._touches: deque[tuple[BlockIdentity, float]] = deque()
        self._num_bytes = 0
        self._num_dropped = 0
        self._touched: set[BlockIdentity] = set()
        self._touched_since = clock()
        self._quiet_until: float | None = None
        self._changed = Condition()
        self._is_busy = False
        self._is_closing = False
        self._thread = Thread(target=self._run, name="store-writer", daemon=True)
        self._thread.start()

    @property
    def has_room(self) -> bool:
        """Whether a block that is offered now would be taken; what is not need not be copied."""
        with self._changed:
            return self._has_room()

    def offer(self, blocks: Sequence[tuple[StoredBlock, float]]) -> None:
        """Take blocks with the times of their use, as far as the queue has room."""
        with self._changed:
            for block, used_at in blocks:
                if not self._has_room():
                    self._num_dropped += 1
                    continue
                self._blocks.append((block, used_at))
                self._num_bytes += len(block.payload)
            self._changed.notify_all()

    def drop(self, num_blocks: int) -> None:
        """Count blocks that were not copied for want of room."""
        with self._changed:
            self._num_dropped += num_blocks

    def used(self, uses: Sequence[tuple[BlockIdentity, float]]) -> None:
        """Note uses of blocks that the store may hold."""
        with self._changed:
            now = self._clock()
            if now - self._touched_since >= TOUCH_INTERVAL_S:
                self._touched.clear()
                self._touched_since = now
            for identity, used_at in uses:
                if identity not in self._touched and len(self._touches) < _MAX_TOUCHES:
                    self._touched.add(identity)
                    self._touches.append((identity, used_at))
            self._changed.notify_all()

    def stats(self) -> StoreStats:
        stats = self._store.stats()
        with self._changed:
            return replace(stats, dropped=stats.dropped + self._num_dropped)

    def flush(self) -> None:
        """Wait until everything offered so far is written or dropped."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._blocks or self._touches or self._is_busy))

    def close(self) -> None:
        """Write what waits, for at most `CLOSE_TIMEOUT_S`, and end the thread. Idempotent."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning("the store is stuck; what waited for it is lost")

    def _has_room(self) -> bool:
        is_quiet = self._quiet_until is not None and self._clock() < self._quiet_until
        return not (is_quiet or self._is_closing) and self._num_bytes < self._max_queue_bytes

    def _run(self) -> None:
        maintained_at: float | None = None
        while True:
            now = self._clock()
            if maintained_at is None or now - maintained_at >= MAINTAIN_INTERVAL_S:
                maintained_at = now
                self._attempt(self._store.maintain)
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                self._changed.wait_for(
                    lambda: self._blocks or self._touches or self._is_closing, MAINTAIN_INTERVAL_S
                )
                if not (self._blocks or self._touches):
                    if self._is_closing:
                        return
                    continue
                self._is_busy = True
                touches, self._touches = self._touches, deque()
                block = self._blocks.popleft() if self._blocks else None
            for identity, used_at in touches:
                self._store.touch(identity, used_at)
            if block is not None:
                self._write(*block)

    def _write(self, block: StoredBlock, used_at: float) -> None:
        is_written = self._attempt(lambda: self._store.put(block, used_at))
        with self._changed:
            self._num_bytes -= len(block.payload)
            if not is_written:
                # What waits would fail one by one, each after a time-out perhaps.
                self._num_dropped += 1 + len(self._blocks)
                self._blocks.clear()
                self._num_bytes = 0

    def _attempt(self, work: Callable[[], None]) -> bool:
        try:
            work()
            return True
        except RipresaError as error:
            logger.warning("%s; nothing is kept for %g s", error, RETRY_S)
        except Exception:
            logger.exception("the store failed; nothing is kept for %g s", RETRY_S)
        with self._changed:
            self._quiet_until = self._clock() + RETRY_S
        return False
