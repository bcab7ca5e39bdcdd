"""How does a program talk to a cluster? A blocking client and its sessions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import grpc

from ripresa.cluster.client import policy
from ripresa.cluster.client.calls import SessionTurns, StreamingCalls
from ripresa.cluster.client.errors import call_error
from ripresa.cluster.client.exchange import Exchange, NextCall
from ripresa.cluster.client.requests import Effort, conversation_of, open_session_request
from ripresa.cluster.client.streams import Stream
from ripresa.protos import ripresa_pb2 as pb
from ripresa.protos import ripresa_pb2_grpc


class Client(StreamingCalls[Stream]):
    """A connection to a cluster's gateways; threads may share it. Use it in a `with` block.

    Args:
        addresses: `host:port` of a gateway, of several by their IP addresses, or a name that DNS
            has for all of them.
        api_key: sent with every call, in the clear unless there are `credentials`.
        credentials: of a TLS channel; None for a plain one.
        timeout_s: deadline of calls that name none.
        connect_timeout_s: longest wait of the first call for a gateway.

    Raises:
        InvalidArgument: the addresses are none.
    """

    def __init__(
        self,
        *addresses: str,
        api_key: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        timeout_s: float = policy.TIMEOUT_S,
        connect_timeout_s: float = policy.CONNECT_TIMEOUT_S,
    ) -> None:
        super().__init__(timeout_s)
        self._addresses = addresses
        self._metadata = policy.metadata_of(api_key)
        self._connect_timeout_s = connect_timeout_s
        self._is_connected = False
        target, options = policy.target_of(addresses), policy.CHANNEL_OPTIONS
        if credentials is None:
            self._channel = grpc.insecure_channel(target, options=options)
        else:
            self._channel = grpc.secure_channel(target, credentials, options=options)
        self._inference = ripresa_pb2_grpc.InferenceStub(self._channel)
        self._sessions = ripresa_pb2_grpc.SessionsStub(self._channel)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all calls and the connection."""
        self._channel.close()

    def wait_until_connected(self, timeout_s: float) -> None:
        """Return once a gateway answers.

        Raises:
            UnavailableError: none did in time.
        """
        try:
            grpc.channel_ready_future(self._channel).result(timeout_s)
        except grpc.FutureTimeoutError as error:
            raise policy.nobody_answers(self._addresses) from error
        self._is_connected = True

    def open_session(
        self,
        preamble: Iterable[pb.Message] = (),
        *,
        tools: Iterable[pb.ToolDefinition] = (),
        effort: Effort | None = None,
        json_schema: Mapping[str, Any] | None = None,
        session_id: str = "",
        model: str = "",
        cache_salt: str = "",
        idle_ttl_s: float | None = None,
    ) -> Session:
        """Open a conversation that the server keeps: only what is new travels with each turn.

        Args:
            preamble: system and example messages that every turn begins with.
            session_id: chosen here, so that opening can be repeated; made there if empty.
            idle_ttl_s: seconds without a turn after which it may expire.

        Raises:
            CallError: the server refuses it.
        """
        head = conversation_of(preamble, tools, effort, json_schema)
        request = open_session_request(head, session_id, model, cache_salt, idle_ttl_s)
        opened: pb.Session = self._ask(self._sessions.OpenSession, request)
        return Session(self, opened, opened.head_turn_id)

    def session(self, session_id: str) -> Session:
        """A session that was opened before, at its newest turn.

        Raises:
            CallError: it is unknown or expired.
        """
        request = pb.GetSessionRequest(session_id=session_id)
        found: pb.Session = self._ask(self._sessions.GetSession, request)
        return Session(self, found, found.head_turn_id)

    def close_session(self, session_id: str) -> None:
        """Let the server forget a session.

        Raises:
            CallError: the server refuses it.
        """
        self._ask(self._sessions.CloseSession, pb.CloseSessionRequest(session_id=session_id))

    def abort(self, request_id: str) -> bool:
        """End a running request from elsewhere; whether there was one.

        Raises:
            CallError: the server refuses it.
        """
        answer = self._ask(self._inference.Abort, pb.AbortRequest(request_id=request_id))
        return bool(answer.found)

    def tokenize(self, text: str) -> tuple[int, ...]:
        """The token ids that the server makes of a plain text.

        Raises:
            CallError: the server refuses it.
        """
        answer = self._ask(self._inference.Tokenize, pb.TokenizeRequest(text=text))
        return tuple(answer.token_ids)

    def tokenize_chat(
        self,
        messages: Iterable[pb.Message],
        *,
        tools: Iterable[pb.ToolDefinition] = (),
        effort: Effort | None = None,
        cache_salt: str = "",
    ) -> pb.TokenizeResponse:
        """The prompt of a conversation, its token ids, and how many of them the cluster holds.

        Raises:
            CallError: the server refuses it.
        """
        conversation = conversation_of(messages, tools, effort)
        request = pb.TokenizeRequest(conversation=conversation, cache_salt=cache_salt)
        rendered: pb.TokenizeResponse = self._ask(self._inference.Tokenize, request)
        return rendered

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of some token ids.

        Raises:
            CallError: the server refuses them.
        """
        request = pb.DetokenizeRequest(token_ids=token_ids)
        return str(self._ask(self._inference.Detokenize, request).text)

    def models(self) -> tuple[pb.Model, ...]:
        """What is served.

        Raises:
            CallError: the server refuses to say.
        """
        return tuple(self._ask(self._inference.ListModels, pb.ListModelsRequest()).models)

    def stream(self, exchange: Exchange) -> Stream:
        return Stream(exchange, self._open)

    def _open(self, call: NextCall) -> Any:
        self._connect()
        method = getattr(self._inference, call.method)
        return method(call.request, timeout=call.timeout_s, metadata=self._metadata)

    def _ask(self, method: Any, request: Any) -> Any:
        self._connect()
        try:
            return method(request, timeout=self.timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise call_error(error) from error

    def _connect(self) -> None:
        if not self._is_connected:
            self.wait_until_connected(self._connect_timeout_s)


class Session(SessionTurns[Stream]):
    """A conversation that the server keeps, at one of its turns. Its `with` block closes it."""

    def __init__(self, client: Client, info: pb.Session, head_turn_id: str) -> None:
        super().__init__(client, info, head_turn_id)
        self._client = client

    def branch(self, turn_id: str) -> Session:
        """The same conversation at another of its turns; both go on apart."""
        return Session(self._client, self.info, turn_id)

    def close(self) -> None:
        """Let the server forget it.

        Raises:
            CallError: the server refuses it.
        """
        self._client.close_session(self.session_id)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
