"""How does the service meet gRPC? Handlers, statuses, health, reflection, start and drain."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ripresa.cluster.gateway import status
from ripresa.cluster.gateway.api_keys import api_key
from ripresa.cluster.gateway.call import Call
from ripresa.cluster.gateway.malformed import request_decoder
from ripresa.cluster.gateway.service import InferenceService
from ripresa.cluster.gateway.status import RequestError
from ripresa.protos import ripresa_pb2 as pb
from ripresa.workers.errors import ConfigError, ErrorCode, RipresaError

log = logging.getLogger(__name__)

INFERENCE = pb.DESCRIPTOR.services_by_name["Inference"]
SESSIONS = pb.DESCRIPTOR.services_by_name["Sessions"]
ADMIN = pb.DESCRIPTOR.services_by_name["Admin"]
"""Served on another port (`admin_server.py`)."""
HEALTH_NAMES = (health.OVERALL_HEALTH, INFERENCE.full_name)

Context = grpc.aio.ServicerContext[Any, Any]
Unary = Callable[[Any, Call], Awaitable[Message]]
Streaming = Callable[[Any, Call], AsyncGenerator[Message]]
Authenticate = Callable[[str | None], str]


class GrpcServer:
    """A `grpc.aio` server of the gateway; made, started and stopped on one event loop.

    Args:
        host, port: where to listen; port 0 takes a free one.
        max_message_bytes: largest request; a larger one is refused with RESOURCE_EXHAUSTED.
        reuse_port: let another gateway process share the port (an old and a new replica).
        serve_reflection: let clients list and describe the services.
        ready_interval_s: how often health watchers hear whether the router is ready; `Check`
            asks the router at once.
        drain_notice_s: how long a stopping server goes on while health says NOT_SERVING, so that
            load balancers look elsewhere first.
    """

    def __init__(
        self,
        service: InferenceService,
        *,
        host: str,
        port: int,
        max_message_bytes: int = 4 << 20,
        reuse_port: bool = False,
        serve_reflection: bool = True,
        ready_interval_s: float = 0.5,
        drain_notice_s: float = 0.5,
    ) -> None:
        self._service = service
        self._host = host
        self._port = port
        self._drain_notice_s = drain_notice_s
        self._ready_interval_s = ready_interval_s
        self._health = _Health(service)
        self._watch: asyncio.Task[None] | None = None
        self._server = grpc.aio.server(
            options=[
                # Our decoder refuses from `max_message_bytes` on and names the setting; gRPC's
                # own limit, with its own words, only bounds what is read before that.
                ("grpc.max_receive_message_length", 2 * max_message_bytes),
                ("grpc.so_reuseport", int(reuse_port)),
                # Notice within 40 s a client that vanished without closing its connection.
                ("grpc.keepalive_time_ms", 30_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
                # Clients may look as often whether we are there, also through a long prefill.
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
            ]
        )
        for descriptor in pb.DESCRIPTOR.services_by_name.values():
            if descriptor is ADMIN:
                continue
            handlers = _service_handlers(descriptor, service, max_message_bytes)
            self._server.add_generic_rpc_handlers((handlers,))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if serve_reflection:
            names = (
                INFERENCE.full_name,
                SESSIONS.full_name,
                health.SERVICE_NAME,
                reflection.SERVICE_NAME,
            )
            reflection.enable_server_reflection(names, self._server)

    @property
    def port(self) -> int:
        """The port that is listened on; the asked one before `start`."""
        return self._port

    async def start(self) -> None:
        """Listen and serve.

        Raises:
            ConfigError: the address cannot be bound; `field` is the setting to change.
        """
        try:
            self._port = self._server.add_insecure_port(socket_address(self._host, self._port))
        except RuntimeError as error:
            raise bind_error(self._host, self._port) from error
        await self._health.refresh()
        await self._server.start()
        self._watch = asyncio.create_task(self._watch_readiness(), name="grpc-readiness")

    async def stop(self, grace_s: float, before_cut: Callable[[], None] | None = None) -> None:
        """Drain: health says NOT_SERVING, a notice later no new call is taken, running calls get
        `grace_s` seconds to finish, and then are cut. Safe to call without a `start`.

        Args:
            before_cut: called if there may be calls to cut.
        """
        self._service.start_draining()
        if self._watch is not None:
            self._watch.cancel()
            await self._health.enter_graceful_shutdown()
            await asyncio.sleep(self._drain_notice_s)
        # Its own time is up later: the cut below comes first.
        stopping = asyncio.create_task(self._server.stop(grace_s + 60.0), name="grpc-stop")
        await asyncio.wait({stopping}, timeout=grace_s)
        if not stopping.done():
            if before_cut is not None:
                before_cut()
            await self._server.stop(None)
        await stopping

    async def _watch_readiness(self) -> None:
        while True:
            await asyncio.sleep(self._ready_interval_s)
            await self._health.refresh()


def free_port(host: str, port: int, field: str) -> int:
    """The port if nothing listens on it, or a free one for 0; before anything is started.

    Raises:
        ConfigError: the address cannot be bound; `field` is the setting to change.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise bind_error(host, port, field, error.strerror) from error
        number: int = probe.getsockname()[1]
        return number


class _Health(health.aio.HealthServicer):
    """SERVING while the service is ready; a `Check` looks afresh."""

    def __init__(self, service: InferenceService) -> None:
        super().__init__()
        self._service = service

    async def refresh(self) -> None:
        try:
            ready = await self._service.ready()
        except RipresaError as error:
            log.warning("the router does not say whether it is ready: %s", error)
            ready = False
        answers = health_pb2.HealthCheckResponse
        for name in HEALTH_NAMES:
            await self.set(name, answers.SERVING if ready else answers.NOT_SERVING)

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> Any:
        await self.refresh()
        return await super().Check(request, context)


def _service_handlers(
    descriptor: ServiceDescriptor, service: InferenceService, max_message_bytes: int
) -> grpc.GenericRpcHandler:
    unary: dict[str, Unary] = {}
    streaming: dict[str, Streaming] = {}
    if descriptor is INFERENCE:
        unary["Abort"] = service.abort
        unary["Tokenize"] = service.tokenize
        unary["Detokenize"] = service.detokenize
        unary["ListModels"] = service.list_models
        streaming["Generate"] = service.generate
        streaming["Chat"] = service.chat
        streaming["Resume"] = service.resume
    if descriptor is SESSIONS and service.sessions is not None:
        unary["OpenSession"] = service.sessions.open
        unary["GetSession"] = service.sessions.get
        unary["CloseSession"] = service.sessions.close
    return method_handlers(
        descriptor,
        unary,
        streaming,
        service.authenticate,
        max_message_bytes,
        max_unread_s=service.max_unread_s,
    )


def method_handlers(
    descriptor: ServiceDescriptor,
    unary: Mapping[str, Unary],
    streaming: Mapping[str, Streaming],
    authenticate: Authenticate,
    max_message_bytes: int,
    max_unread_s: float | None = None,
) -> grpc.GenericRpcHandler:
    """A service's methods by name; those that are not given answer UNIMPLEMENTED.

    Args:
        max_unread_s: how long a stream waits for a client that takes nothing of it; None for ever.
    """
    handlers: dict[str, Any] = {}
    for method in descriptor.methods:
        if method.name in unary:
            answer: Any = _unary_handler(unary[method.name], authenticate)
        elif method.name in streaming:
            answer = _streaming_handler(streaming[method.name], authenticate, max_unread_s)
        else:
            answer = _unimplemented_handler(method, authenticate)
        make = (
            grpc.unary_stream_rpc_method_handler
            if method.server_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        message = message_factory.GetMessageClass(method.input_type)
        handlers[method.name] = make(
            answer,
            request_deserializer=request_decoder(message, max_message_bytes),
            response_serializer=lambda response: response.SerializeToString(),
        )
    return grpc.method_handlers_generic_handler(descriptor.full_name, handlers)


def _unary_handler(
    answer: Unary, authenticate: Authenticate
) -> Callable[[Message | RipresaError, Context], Any]:
    async def handle(request: Message | RipresaError, context: Context) -> Message | None:
        async with _call(request, context) as opened:
            return await answer(request, _admitted(opened, request, context, authenticate))
        return None

    return handle


def _streaming_handler(
    answer: Streaming, authenticate: Authenticate, max_unread_s: float | None
) -> Callable[[Message | RipresaError, Context], Any]:
    async def handle(request: Message | RipresaError, context: Context) -> None:
        async with _call(request, context) as opened:
            call = _admitted(opened, request, context, authenticate)
            async with aclosing(answer(request, call)) as responses:
                async for response in responses:
                    try:
                        async with asyncio.timeout(max_unread_s):
                            await context.write(response)
                    except grpc.aio.InternalError:
                        return  # the client has just left, and gRPC has yet to cancel this call
                    except TimeoutError:
                        call.hold.ends_work = False
                        raise _unread(max_unread_s) from None

    return handle


def _unimplemented_handler(
    method: MethodDescriptor, authenticate: Authenticate
) -> Callable[[Message | RipresaError, Context], Any]:
    async def handle(request: Message | RipresaError, context: Context) -> None:
        async with _call(request, context) as opened:
            _admitted(opened, request, context, authenticate)
            # A request that no version could serve is refused as such.
            context.set_code(grpc.StatusCode.UNIMPLEMENTED)
            context.set_details(f"{method.full_name} is not served by this version yet")

    return handle


@asynccontextmanager
async def _call(request: Message | RipresaError, context: Context) -> AsyncGenerator[Call]:
    """Runs the body of a call that is nobody's yet.

    Whatever it raises becomes a status, logged where it is our fault.

    gRPC itself cancels the body when the client cancels or vanishes and when the deadline passes.
    """
    remaining_s: float | None = context.time_remaining()
    deadline = None if remaining_s is None else time.time() + remaining_s
    # The decoder has checked it.
    own_id = ""
    if isinstance(request, pb.GenerateRequest | pb.ChatRequest):
        own_id = request.options.request_id
    call = Call(own_id or uuid.uuid4().hex, deadline)
    try:
        yield call
    except RipresaError as error:
        if error.code is ErrorCode.INTERNAL:
            log.error("request %s failed", call.request_id, exc_info=error)
        status.end(context, error, call.request_id)
    except Exception as error:
        log.error("request %s failed unexpectedly", call.request_id, exc_info=error)
        told = RipresaError(ErrorCode.INTERNAL, status.unexpected_failure(call.request_id))
        status.end(context, told, call.request_id)


def _admitted(
    call: Call, request: Message | RipresaError, context: Context, authenticate: Authenticate
) -> Call:
    """The call as its tenant's.

    Raises:
        RipresaError: the key is not known, or the request could not be read.
    """
    admitted = replace(call, tenant=authenticate(_api_key(context)))
    if isinstance(request, RipresaError):
        raise request
    return admitted


def _unread(max_unread_s: float | None) -> RequestError:
    """What a client hears when it reads again; until then gRPC keeps it for it."""
    return RequestError(
        ErrorCode.UNAVAILABLE,
        "STREAM_UNREAD",
        f"nothing of the stream was read for {max_unread_s:g} s (gateway.max_unread_s), and it "
        "gave its place to others; its tokens stay for a while: go on with Resume",
        retry_after_s=1.0,
        is_final=True,
    )


def _api_key(context: Context) -> str | None:
    told: dict[str, str | None] = {}
    for name, value in context.invocation_metadata() or ():
        told[name] = value if isinstance(value, str) else None
    return api_key(told.get("authorization"), told.get("x-api-key"))


def socket_address(host: str, port: int) -> str:
    """As gRPC takes it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bind_error(
    host: str, port: int, field: str = "gateway.grpc_port", reason: str | None = None
) -> ConfigError:
    """An address cannot be listened on."""
    return ConfigError(
        field,
        f"cannot listen on {socket_address(host, port)}: "
        f"{reason or 'the address is taken or not ours'}; "
        f"stop what uses it, or choose another port with --set {field}=PORT",
    )
