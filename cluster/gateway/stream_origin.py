"""What must a gateway know of a stream that another one began? It travels with the stream.

A stream's id is a secret of 128 random bits and, behind a dot, the worker that keeps it: whoever
has been told it, of the same tenant, may read the stream.
"""

from __future__ import annotations

import pickle
import secrets
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ripresa.cluster.gateway.call import Call
from ripresa.cluster.gateway.said_turns import OpenTurn
from ripresa.cluster.gateway.sessions import TurnPlace
from ripresa.cluster.routing.prompt import PromptRequest
from ripresa.protos import ripresa_pb2 as pb
from ripresa.workers.errors import InvalidArgument
from ripresa.workers.kept_streams import KeptPrompt
from ripresa.workers.request import StreamTicket

Request = pb.GenerateRequest | pb.ChatRequest

MAX_ID_CHARS = 256


@dataclass(frozen=True, slots=True)
class StreamOrigin:
    """A request that was accepted, without its prompt, which the worker has anyway.

    Attributes:
        request: what its reader must know: everything but texts and tokens.
        prompts: one for each choice, of no tokens.
        request_id: as the client knows it.
        start_time: when it arrived, in seconds since the epoch.
        tenant: who alone may go on with it; empty where there are no tenants.
        open_turn: what its answer is kept by; None to keep none.
        place: where its turn will stand in a session; None for a request of no session.
    """

    request: Request
    prompts: tuple[PromptRequest, ...]
    request_id: str
    start_time: float
    tenant: str
    open_turn: OpenTurn | None = None
    place: TurnPlace | None = None

    @classmethod
    def of(
        cls,
        request: Request,
        prompts: Sequence[PromptRequest],
        call: Call,
        start_time: float,
        open_turn: OpenTurn | None = None,
        place: TurnPlace | None = None,
    ) -> StreamOrigin:
        empty = tuple(replace(prompt, token_ids=()) for prompt in prompts)
        lean = _without_texts(request)
        return cls(lean, empty, call.request_id, start_time, call.tenant, open_turn, place)

    def tickets(self) -> tuple[StreamTicket, ...]:
        """A new stream, one ticket for each choice."""
        stream_id = secrets.token_urlsafe(16)
        # The first choice is the one that is looked for.
        origins = (zlib.compress(pickle.dumps(self), 1), *(b"" for _ in self.prompts[1:]))
        return tuple(StreamTicket(stream_id, k, origin) for k, origin in enumerate(origins))


@dataclass(frozen=True, slots=True)
class ResumedRequest:
    """A request as it was accepted, wherever that was."""

    origin: StreamOrigin
    prompts: tuple[PromptRequest, ...]


def resumed_request(kept: KeptPrompt) -> ResumedRequest:
    """The request of a stream that a worker keeps."""
    origin = pickle.loads(zlib.decompress(kept.ticket.origin))
    assert isinstance(origin, StreamOrigin)
    first = kept.ticket
    prompts = tuple(
        replace(
            prompt,
            token_ids=kept.token_ids,
            stream=first if choice == 0 else StreamTicket(first.stream_id, choice, b""),
        )
        for choice, prompt in enumerate(origin.prompts)
    )
    return ResumedRequest(origin, prompts)


def public_id(stream_id: str, worker_id: str) -> str:
    """What clients call a stream."""
    return f"{stream_id}.{worker_id}"


def read_id(public: str) -> tuple[str, str]:
    """A stream's own id, and the worker that kept it first.

    Raises:
        InvalidArgument: no gateway ever made such an id.
    """
    stream_id, _, worker_id = public.partition(".")
    if not stream_id or not worker_id or len(public) > MAX_ID_CHARS:
        raise InvalidArgument("stream_id", "give `started.stream_id` of the stream to go on with")
    return stream_id, worker_id


def _without_texts(request: Request) -> Request:
    """The request with its conversation's shape, and none of what was said in it."""
    if isinstance(request, pb.GenerateRequest):
        text = pb.GenerateRequest()
        text.CopyFrom(request)
        text.ClearField("input")
        return text
    chat = pb.ChatRequest()
    chat.CopyFrom(request)
    for message in chat.full.messages:
        message.content = ""
        message.reasoning_content = ""
        for call in message.tool_calls:
            call.arguments_json = "{}"
    return chat
