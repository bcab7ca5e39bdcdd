"""How does an asynchronous program talk to a cluster? As `client.py`, with `await`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import grpc

from ripresa.cluster.client import policy
from ripresa.cluster.client.calls import SessionTurns, StreamingCalls
from ripresa.cluster.client.errors import call_error
from ripresa.cluster.client.exchange import Exchange, NextCall
from ripresa.cluster.client.requests import Effort, conversation_of, open_session_request
from ripresa.cluster.client.streams import AsyncStream
from ripresa.protos import ripresa_pb2 as pb
from ripresa.protos import ripresa_pb2_grpc


class AsyncClient(StreamingCalls[AsyncStream]):
    """A `Client` for one event loop: make it on that loop, and use it in an `async with` block.

    Args:
        addresses, api_key, credentials, timeout_s, connect_timeout_s: as of `Client`.

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
            self._channel = grpc.aio.insecure_channel(target, options=options)
        else:
            self._channel = grpc.aio.secure_channel(target, credentials, options=options)
        self._inference = ripresa_pb2_grpc.InferenceStub(self._channel)
        self._sessions = ripresa_pb2_grpc.SessionsStub(self._channel)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End all calls and the connection."""
        await self._channel.close()

    async def wait_until_connected(self, timeout_s: float) -> None:
        """Return once a gateway answers.

        Raises:
            UnavailableError: none did in time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._channel.channel_ready()
        except TimeoutError as error:
            raise policy.nobody_answers(self._addresses) from error
        self._is_connected = True

    async def open_session(
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
    ) -> AsyncSession:
        """As `Client.open_session`."""
        head = conversation_of(preamble, tools, effort, json_schema)
        request = open_session_request(head, session_id, model, cache_salt, idle_ttl_s)
        opened: pb.Session = await self._ask(self._sessions.OpenSession, request)
        return AsyncSession(self, opened, opened.head_turn_id)

    async def session(self, session_id: str) -> AsyncSession:
        """As `Client.session`."""
        request = pb.GetSessionRequest(session_id=session_id)
        found: pb.Session = await self._ask(self._sessions.GetSession, request)
        return AsyncSession(self, found, found.head_turn_id)

    async def close_session(self, session_id: str) -> None:
        """As `Client.close_session`."""
        request = pb.CloseSessionRequest(session_id=session_id)
        await self._ask(self._sessions.CloseSession, request)

    async def abort(self, request_id: str) -> bool:
        """As `Client.abort`."""
        answer = await self._ask(self._inference.Abort, pb.AbortRequest(request_id=request_id))
        return bool(answer.found)

    async def tokenize(self, text: str) -> tuple[int, ...]:
        """As `Client.tokenize`."""
        answer = await self._ask(self._inference.Tokenize, pb.TokenizeRequest(text=text))
        return tuple(answer.token_ids)

    async def tokenize_chat(
        self,
        messages: Iterable[pb.Message],
        *,
        tools: Iterable[pb.ToolDefinition] = (),
        effort: Effort | None = None,
        cache_salt: str = "",
    ) -> pb.TokenizeResponse:
        """As `Client.tokenize_chat`."""
        conversation = conversation_of(messages, tools, effort)
        request = pb.TokenizeRequest(conversation=conversation, cache_salt=cache_salt)
        rendered: pb.TokenizeResponse = await self._ask(self._inference.Tokenize, request)
        return rendered

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """As `Client.detokenize`."""
        request = pb.DetokenizeRequest(token_ids=token_ids)
        return str((await self._ask(self._inference.Detokenize, request)).text)

    async def models(self) -> tuple[pb.Model, ...]:
        """As `Client.models`."""
        answer = await self._ask(self._inference.ListModels, pb.ListModelsRequest())
        return tuple(answer.models)

    def stream(self, exchange: Exchange) -> AsyncStream:
        return AsyncStream(exchange, self._open)

    async def _open(self, call: NextCall) -> Any:
        await self._connect()
        method = getattr(self._inference, call.method)
        return method(call.request, timeout=call.timeout_s, metadata=self._metadata)

    async def _ask(self, method: Any, request: Any) -> Any:
        await self._connect()
        try:
            return await method(request, timeout=self.timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise call_error(error) from error

    async def _connect(self) -> None:
        if not self._is_connected:
            await self.wait_until_connected(self._connect_timeout_s)


class AsyncSession(SessionTurns[AsyncStream]):
    """A conversation that the server keeps. Its `async with` block closes it."""

    def __init__(self, client: AsyncClient, info: pb.Session, head_turn_id: str) -> None:
        super().__init__(client, info, head_turn_id)
        self._client = client

    def branch(self, turn_id: str) -> AsyncSession:
        """The same conversation at another of its turns; both go on apart."""
        return AsyncSession(self._client, self.info, turn_id)

    async def close(self) -> None:
        """Let the server forget it.

        Raises:
            CallError: the server refuses it.
        """
        await self._client.close_session(self.session_id)

    async def __aenter__(self) -> AsyncSession:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()
