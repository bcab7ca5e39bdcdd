"""How do clients keep a conversation on the server? Opened sessions, and their turns.

A session's transcript is the truth: messages, and each answer's tokens as the model said them. What
workers keep of it is a cache. A turn is an ordinary chat whose earlier messages come from there.
"""

from __future__ import annotations

import logging
import secrets
from array import array
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from google.protobuf.duration_pb2 import Duration

from ripresa.cluster.gateway.call import Call
from ripresa.cluster.gateway.chat_messages import Paths, conversation_body
from ripresa.cluster.gateway.said_turns import Said
from ripresa.cluster.gateway.served_model import ServedModel, check_model
from ripresa.cluster.gateway.status import RequestError
from ripresa.cluster.gateway.validation import (
    BOUNDS,
    ConversationBounds,
    check_name,
    seconds_of,
    tenant_salt,
)
from ripresa.cluster.sessions.books import (
    Key,
    Refusal,
    SessionFacts,
    SessionHead,
    TurnRecord,
)
from ripresa.cluster.sessions.store import SessionStore
from ripresa.protos import ripresa_pb2 as pb
from ripresa.workers.errors import ErrorCode, InvalidArgument, RipresaError

log = logging.getLogger(__name__)

STORE_UNAVAILABLE = "SESSION_STORE_UNAVAILABLE"
"""`Finished.turn_error` where nobody knows whether the store has the turn."""


class Head(Protocol):
    """The beginning of a conversation, which is fine."""

    @property
    def num_tokens(self) -> int:
        """Of the beginning alone."""

    async def prefetch(self) -> None:
        """Compute it, so that the first turn finds it.

        Raises:
            RequestError: it is not admitted.
            RipresaError: it failed.
        """


ReadHead = Callable[[pb.FullConversation, str, Call], Awaitable[Head]]
"""Checks the beginning of a conversation, for a client's salt; raises RipresaError."""


@dataclass(frozen=True, slots=True)
class SessionSaid:
    """The answers of one transcript, and behind them those of all conversations."""

    own: Mapping[bytes, Sequence[int]]
    others: Said

    def find(self, key: bytes) -> Sequence[int] | None:
        found = self.own.get(key)
        return self.others.find(key) if found is None else found


@dataclass(frozen=True, slots=True)
class TurnPlace:
    """Where a turn will stand in its session; travels with the stream.

    Attributes:
        incarnation: of the session: one that was opened since under its id gets no turn of it.
        name: of the turn, but for the choice.
        messages: what the client added.
    """

    key: Key
    incarnation: str
    parent_id: str
    name: str
    messages: bytes


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """A turn that begins.

    Attributes:
        request: the same as a chat with its whole conversation.
        said: earlier answers by what finds them.
        paths: where the client's own request has the parts of it.
    """

    request: pb.ChatRequest
    place: TurnPlace
    said: Mapping[bytes, Sequence[int]]
    paths: Paths


@dataclass(slots=True)
class HeardAnswers:
    """What the model said in a turn, by choice.

    Attributes:
        answers: those that the model has ended itself: what each is found by, and its tokens.
        num_generated: how many tokens any has, told or not.
    """

    answers: dict[int, tuple[bytes, Sequence[int]]] = field(default_factory=dict)
    num_generated: Callable[[int], int] = lambda choice: 0


class Sessions:
    """The Sessions service of one gateway.

    Args:
        store: where transcripts are kept.
        read_head: called for every session that is opened.
        end_session: workers let a session's state go; takes the salt and the session's id.
        idle_ttl_s: of sessions that name none; the longest is `max_idle_ttl_s`.
        bounds: of what one turn adds; whole conversations have theirs when they are read.
    """

    def __init__(
        self,
        store: SessionStore,
        model: ServedModel,
        read_head: ReadHead,
        end_session: Callable[[bytes, str], Awaitable[None]],
        *,
        idle_ttl_s: float = 3600.0,
        max_idle_ttl_s: float = 86400.0,
        bounds: ConversationBounds = BOUNDS,
    ) -> None:
        self._bounds = bounds
        self._store = store
        self._model = model
        self._read_head = read_head
        self._end_session = end_session
        self._idle_ttl_s = idle_ttl_s
        self._max_idle_ttl_s = max_idle_ttl_s

    async def open(self, request: pb.OpenSessionRequest, call: Call) -> pb.Session:
        """Open a session and compute its head, or find the same one opened before.

        Raises:
            RipresaError: INVALID_ARGUMENT, ALREADY_EXISTS, RESOURCE_EXHAUSTED, PERMISSION_DENIED,
                UNAVAILABLE.
        """
        check_model(request.model, self._model, "model")
        check_name(request.session_id, "session_id")
        check_name(request.cache_salt, "cache_salt")
        conversation = pb.FullConversation(config=request.config, messages=request.preamble)
        read = await self._read_head(conversation, request.cache_salt, call)
        session_id = request.session_id or secrets.token_urlsafe(16)
        head = SessionHead(
            self._model.name,
            request.cache_salt,
            conversation.SerializeToString(deterministic=True),
            self._ttl(request.idle_ttl if request.HasField("idle_ttl") else None),
            read.num_tokens,
        )
        key = (call.tenant, session_id)
        known = await self._store.get(key)
        if isinstance(known, Refusal) or known.head_turn is None:
            try:
                await read.prefetch()
            except RequestError:
                raise  # Nothing is kept for whom nothing would be computed.
            except RipresaError as error:
                log.warning("the head of a session was not computed ahead: %s", error)
        facts = await self._store.open(key, head)
        if isinstance(facts, Refusal):
            raise refused(facts, session_id)
        return _session(session_id, facts)

    async def get(self, request: pb.GetSessionRequest, call: Call) -> pb.Session:
        """Raises RipresaError: NOT_FOUND, FAILED_PRECONDITION (expired), UNAVAILABLE."""
        facts = await self._store.get((call.tenant, request.session_id))
        if isinstance(facts, Refusal):
            raise refused(facts, request.session_id)
        return _session(request.session_id, facts)

    async def close(self, request: pb.CloseSessionRequest, call: Call) -> pb.CloseSessionResponse:
        """Forget a session, here and on the workers.

        Raises RipresaError: NOT_FOUND, FAILED_PRECONDITION (expired), UNAVAILABLE.
        """
        head = await self._store.close((call.tenant, request.session_id))
        if isinstance(head, Refusal):
            raise refused(head, request.session_id)
        await self._end_session(tenant_salt(call.tenant, head.cache_salt), request.session_id)
        return pb.CloseSessionResponse()

    async def turn(self, request: pb.ChatRequest, call: Call) -> SessionTurn:
        """What a turn asks, its conversation put together.

        Raises:
            RipresaError: INVALID_ARGUMENT, NOT_FOUND, FAILED_PRECONDITION, UNAVAILABLE.
        """
        options, asked = request.options, request.turn
        session_id = options.session_id
        if not session_id:
            raise InvalidArgument("options.session_id", "name the opened session of this turn")
        if not asked.messages:
            raise InvalidArgument("turn.messages", "a turn adds at least one message")
        self._bounds.check(asked.messages, field="turn.messages")
        conversation_body(pb.FullConversation(messages=asked.messages), _paths(0))
        key = (call.tenant, session_id)
        path = await self._store.path(key, asked.parent_turn_id)
        if isinstance(path, Refusal):
            raise refused(path, session_id, asked.parent_turn_id)
        for name, own in (("model", path.head.model), ("cache_salt", path.head.cache_salt)):
            if getattr(options, name) not in ("", own):
                raise _mismatch(session_id, f"options.{name}")
        whole = pb.ChatRequest()
        whole.CopyFrom(request)
        whole.options.cache_salt = path.head.cache_salt
        whole.full.CopyFrom(pb.FullConversation.FromString(path.head.conversation))
        for record in path.turns:
            whole.full.messages.extend(pb.FullConversation.FromString(record.messages).messages)
        paths = _paths(len(whole.full.messages))
        whole.full.messages.extend(asked.messages)
        said = {record.said_key: array("I", record.said) for record in path.turns if record.said}
        added = pb.FullConversation(messages=asked.messages).SerializeToString()
        name = secrets.token_urlsafe(12)
        place = TurnPlace(key, path.incarnation, asked.parent_turn_id, name, added)
        return SessionTurn(whole, place, said, paths)

    async def kept(
        self,
        messages: AsyncGenerator[pb.ChatResponse],
        place: TurnPlace,
        heard: HeardAnswers,
    ) -> AsyncGenerator[pb.ChatResponse]:
        """The messages of a turn; each answer is in the transcript before its `finished` is told.

        Where the transcript is lost, or cannot take it, or its store does not answer, `finished`
        says so: the answer is not lost. Raises as the messages do.
        """
        started = pb.Started()
        async with aclosing(messages):
            async for message in messages:
                if message.HasField("started"):
                    started = message.started
                elif message.HasField("finished"):
                    await self._keep(message.finished, started, place, heard)
                yield message

    async def _keep(
        self, finished: pb.Finished, started: pb.Started, place: TurnPlace, heard: HeardAnswers
    ) -> None:
        turn_id = f"{place.name}.{finished.choice}"
        messages = pb.FullConversation.FromString(place.messages)
        messages.messages.append(finished.message)
        said_key, said = heard.answers.get(finished.choice, (b"", ()))
        record = TurnRecord(
            turn_id,
            place.parent_id,
            messages.SerializeToString(),
            said_key,
            array("I", said).tobytes(),
            started.prompt_tokens + heard.num_generated(finished.choice),
            started.worker_id,
        )
        try:
            refusal: str | None = await self._store.append(place.key, place.incarnation, record)
        except RipresaError as error:
            log.warning("the session store was not told of a turn: %s", error)
            refusal = STORE_UNAVAILABLE
        if refusal is None:
            finished.turn_id = turn_id
        else:
            log.warning("a session did not take its turn: %s", refusal)
            finished.turn_error = refusal

    def _ttl(self, asked: Duration | None) -> float:
        if asked is None:
            return self._idle_ttl_s
        ttl_s = seconds_of(asked, "idle_ttl")
        if not 0 < ttl_s <= self._max_idle_ttl_s:
            raise InvalidArgument(
                "idle_ttl",
                f"must be above 0 and at most {self._max_idle_ttl_s:g} s (sessions.max_idle_ttl_s)",
            )
        return ttl_s


def _paths(num_earlier: int) -> Paths:
    """Of a turn; the head of its conversation is a part of `OpenSessionRequest`."""
    return Paths("turn.messages", "config", num_earlier)


def refused(refusal: Refusal, session_id: str, turn_id: str = "") -> RequestError:
    """What a client is told."""
    match refusal:
        case Refusal.SESSION_NOT_FOUND:
            return RequestError(
                ErrorCode.NOT_FOUND,
                refusal,
                "no such session is open; open it, or send the whole conversation as `full`",
                resource=("session", session_id),
            )
        case Refusal.TURN_NOT_FOUND:
            return RequestError(
                ErrorCode.NOT_FOUND,
                refusal,
                "the session has no such turn; give the `turn_id` of one of its answers, or none "
                "for its root",
                resource=("turn", turn_id),
            )
        case Refusal.SESSION_EXPIRED:
            return RequestError(
                ErrorCode.FAILED_PRECONDITION,
                refusal,
                "the session was idle for too long, or had to make room; open it anew, or send the "
                "whole conversation as `full`",
                precondition=session_id,
            )
        case Refusal.SESSION_EXISTS:
            return RequestError(
                ErrorCode.ALREADY_EXISTS,
                refusal,
                "a session with this id and another configuration is open; close it, or take "
                "another id",
                field="session_id",
            )
        case Refusal.SESSION_TOO_LARGE:
            return RequestError(
                ErrorCode.RESOURCE_EXHAUSTED,
                refusal,
                "the session takes more than there is room for beside those of others "
                "(sessions.max_bytes); close it and open a shorter one",
            )


def _mismatch(session_id: str, name: str) -> RequestError:
    return RequestError(
        ErrorCode.FAILED_PRECONDITION,
        "SESSION_CONFIG_MISMATCH",
        f"`{name}` differs from what the session was opened with; leave it out, or open another "
        "session",
        precondition=session_id,
    )


def _session(session_id: str, facts: SessionFacts) -> pb.Session:
    session = pb.Session(session_id=session_id, model=facts.head.model)
    session.create_time.FromNanoseconds(round(facts.created * 1e9))
    session.expire_time.FromNanoseconds(round(facts.expires * 1e9))
    session.total_tokens = facts.head.num_tokens
    newest = facts.head_turn
    if newest is not None:
        session.head_turn_id = newest.turn_id
        session.total_tokens = newest.num_tokens
        session.home_worker_id = newest.worker_id
    return session
