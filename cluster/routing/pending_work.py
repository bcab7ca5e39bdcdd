"""What has this gateway sent to workers that their reports may not show yet?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class PendingWork:
    """Requests and prompt rows under way, by worker.

    Attributes:
        requests: that are not over.
        rows: of their prompts, as planned, that are not known to be computed.
    """

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.rows: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"{dict(self.requests)} requests, {dict(self.rows)} rows"

    @property
    def is_empty(self) -> bool:
        return not self.requests and not self.rows

    @contextmanager
    def counted(self, worker_id: str, num_rows: int) -> Iterator[Callable[[], None]]:
        """A request is on a worker; calling what it gives says that its prompt is computed."""
        left = num_rows
        self.requests[worker_id] += 1
        self.rows[worker_id] += left

        def computed() -> None:
            nonlocal left
            _take(self.rows, worker_id, left)
            left = 0

        try:
            yield computed
        finally:
            computed()
            _take(self.requests, worker_id, 1)


def _take(counts: Counter[str], worker_id: str, number: int) -> None:
    counts[worker_id] -= number
    if counts[worker_id] <= 0:
        del counts[worker_id]
