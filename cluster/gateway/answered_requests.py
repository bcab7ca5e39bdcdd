"""Was this request answered a moment ago? Then its stream is told again, and nothing runs twice."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeVar

from ripresa.cluster.gateway.call import Call
from ripresa.cluster.gateway.status import RequestError
from ripresa.protos import ripresa_pb2 as pb
from ripresa.workers.errors import ErrorCode

MAX_REQUESTS = 20_000
"""Each takes a few hundred bytes."""

Request = pb.GenerateRequest | pb.ChatRequest
R = TypeVar("R", pb.GenerateResponse, pb.ChatResponse)


@dataclass(frozen=True, slots=True)
class _Answered:
    """A request whose stream is complete."""

    content: bytes
    incarnation: str
    stream_id: str
    until: float


class AnsweredRequests:
    """The requests that clients named and this gateway answered; the oldest go first.

    Used on one event loop.

    Args:
        keep_s: how long workers keep a stream after its end.
        clock: monotonic seconds.
    """

    def __init__(self, keep_s: float, clock: Callable[[], float]) -> None:
        self._keep_s = keep_s
        self._clock = clock
        self._answered: OrderedDict[str, _Answered] = OrderedDict()

    def find(self, request: Request, call: Call, incarnation: str = "") -> str | None:
        """The stream that answered the request before; None if it is new here.

        Args:
            incarnation: of the session that it is a turn of. The same turn of a session that was
                opened since is a new one: the answer stands in the transcript of the one before.

        Raises:
            RequestError: ALREADY_EXISTS; the id named another request.
        """
        self._forget()
        found = self._answered.get(call.scoped_id)
        if not request.options.request_id or found is None:
            return None
        if found.content != _content(request):
            raise RequestError(
                ErrorCode.ALREADY_EXISTS,
                "REQUEST_ID_IN_USE",
                "a request of other content had this id, and its answer is still kept "
                "(decoders.keep_streams_s); use another id or none",
                field=call.id_field,
            )
        return found.stream_id if found.incarnation == incarnation else None

    async def noting(
        self, messages: AsyncGenerator[R], request: Request, call: Call, incarnation: str = ""
    ) -> AsyncGenerator[R]:
        """The messages of a request's stream, which is remembered once it is complete.

        Args:
            incarnation: as in `find`.
        """
        stream_id = ""
        async with aclosing(messages):
            async for message in messages:
                match message.WhichOneof("event"):
                    case "started":
                        stream_id = message.started.stream_id
                    case "completed" if stream_id and request.options.request_id:
                        # Before it is sent: a client that does not get it asks again.
                        self._note(request, call, incarnation, stream_id)
                yield message

    def _note(self, request: Request, call: Call, incarnation: str, stream_id: str) -> None:
        until = self._clock() + self._keep_s
        self._answered.pop(call.scoped_id, None)
        self._answered[call.scoped_id] = _Answered(_content(request), incarnation, stream_id, until)
        self._forget()

    def _forget(self) -> None:
        now = self._clock()
        while self._answered:
            oldest = next(iter(self._answered.values()))
            if oldest.until > now and len(self._answered) <= MAX_REQUESTS:
                return
            self._answered.popitem(last=False)


def _content(request: Request) -> bytes:
    return blake2b(request.SerializeToString(deterministic=True), digest_size=16).digest()
