"""How much memory may encoder output take that waits to be sent, or for its tail to be computed?

The rows of tail floored are one window a request; those of tails exact and full are many more.
"""

from __future__ import annotations

from ripresa.workers.errors import InvalidArgument, ResourceExhausted
from ripresa.workers.replay import decoder_start
from ripresa.workers.replay_query import ReplayGeometry
from ripresa.workers.request import GenerationRequest


class TailBudget:
    """Bytes of all requests whose encoder output leaves, or has come to, a worker.

    Args:
        capacity_bytes: most bytes at once.
        row_bytes: of one row.
        geometry: the model, as the replay rules see it.
    """

    def __init__(self, capacity_bytes: int, row_bytes: int, geometry: ReplayGeometry) -> None:
        self._capacity_bytes = capacity_bytes
        self._row_bytes = row_bytes
        self._geometry = geometry
        self._held_bytes = 0

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    def take(self, request: GenerationRequest) -> int:
        """Set aside what the request's rows can take; returns the bytes.

        Raises:
            InvalidArgument: they would never fit.
            ResourceExhausted: they do not fit beside those of others.
        """
        num_bytes = self._num_rows(request) * self._row_bytes
        if num_bytes > self._capacity_bytes:
            raise InvalidArgument(
                "tail",
                f"handing over {self._num_rows(request)} rows takes {num_bytes} bytes and "
                f"transfer.max_tail_bytes is {self._capacity_bytes}; raise it, or ask for "
                "tail floored",
            )
        if self._held_bytes + num_bytes > self._capacity_bytes:
            raise ResourceExhausted(
                f"{num_bytes} bytes for tail rows are needed beside {self._held_bytes} of "
                f"{self._capacity_bytes}; retry when other prompts are handed over, or raise "
                "transfer.max_tail_bytes"
            )
        self._held_bytes += num_bytes
        return num_bytes

    def give_back(self, num_bytes: int) -> None:
        """The rows are gone."""
        self._held_bytes -= num_bytes

    def _num_rows(self, request: GenerationRequest) -> int:
        if request.recipe is not None:
            return request.num_tokens - request.recipe.decoder_start
        geometry = self._geometry
        # Tail full begins with the first encoder row, which is not known yet.
        first = decoder_start(
            request.num_tokens, geometry.window, request.tail, 0, geometry.num_decoder_layers
        )
        return request.num_tokens - first
