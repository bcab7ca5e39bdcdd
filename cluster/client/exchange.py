"""What is the next call of a streaming request? First its own, then a resume while streams break.

No connection in here: blocking and asynchronous streams make the calls that this file decides on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from ripresa.cluster.client.errors import (
    CallError,
    Status,
    UnavailableError,
    call_error,
    rich_status,
)
from ripresa.cluster.client.events import Event, Finished, StreamReader
from ripresa.protos import ripresa_pb2 as pb

MAX_RESUMES = 5
"""Resumes of a stream in a row that bring nothing new."""
FIRST_PAUSE_S = 0.1
"""Before the second resume in a row; each further one waits twice as long."""

# A status of these that the server did not write itself tells of the way to it.
_BROKEN = ("UNAVAILABLE", "CANCELLED", "INTERNAL", "UNKNOWN")

Request = pb.GenerateRequest | pb.ChatRequest
Response = pb.GenerateResponse | pb.ChatResponse | pb.ResumeResponse


@dataclass(frozen=True, slots=True)
class NextCall:
    """A call to make.

    Attributes:
        pause_s: to wait before it.
        timeout_s: its deadline, from then on.
    """

    method: Literal["Generate", "Chat", "Resume"]
    request: Request | pb.ResumeRequest
    pause_s: float
    timeout_s: float


class Exchange:
    """One streaming request and what became of it.

    Args:
        timeout_s: for all calls of it together.
        on_finished: hears of the first choice's end.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        request: Request,
        timeout_s: float,
        *,
        on_finished: Callable[[Finished], None] = lambda finished: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.request = request
        self.reader = StreamReader()
        self._on_finished = on_finished
        self._clock = clock
        self._deadline = clock() + timeout_s
        self._broken_by: CallError | None = None
        self._num_resumes = 0

    def next_call(self) -> NextCall:
        """The call that brings what is missing."""
        left_s = max(0.0, self._deadline - self._clock())
        if self._broken_by is None:
            is_chat = isinstance(self.request, pb.ChatRequest)
            return NextCall("Chat" if is_chat else "Generate", self.request, 0.0, left_s)
        request = pb.ResumeRequest(
            stream_id=self.reader.stream_id, next_sequence=self.reader.next_sequence
        )
        pause_s = FIRST_PAUSE_S * 2 ** (self._num_resumes - 2) if self._num_resumes > 1 else 0.0
        pause_s = min(pause_s, left_s)
        return NextCall("Resume", request, pause_s, left_s - pause_s)

    def read(self, response: Response) -> Iterator[Event]:
        """The events of the next message.

        Raises:
            ServerError: messages before this one are missing.
        """
        for event in self.reader.read(response):
            self._num_resumes = 0
            if isinstance(event, Finished) and event.choice == 0:
                self._on_finished(event)
            yield event

    def failed(self, status: Status) -> None:
        """A call failed; returns if the next one may go on from there.

        Raises:
            CallError: none can. If a resume was refused, it is what broke the stream.
        """
        error = call_error(status, self.request.options.request_id)
        is_broken = rich_status(status) is None and status.code().name in _BROKEN
        if is_broken and self.reader.stream_id:
            self._broken(error)
        elif self._broken_by is not None and error.reason != "DEADLINE_EXCEEDED":
            raise self._broken_by from error
        else:
            raise error

    def ended(self) -> None:
        """A call ended with status OK; returns if the stream is whole or may go on.

        Raises:
            CallError: it is neither.
        """
        if not self.reader.is_complete:
            self._broken(
                UnavailableError(
                    "the stream ended before the answer was complete; send the request again",
                    reason="STREAM_BROKEN",
                    request_id=self.request.options.request_id,
                )
            )

    def _broken(self, error: CallError) -> None:
        self._num_resumes += 1
        if not self.reader.stream_id or self._num_resumes > MAX_RESUMES:
            raise error
        self._broken_by = error
