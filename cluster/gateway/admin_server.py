"""How does the Admin service meet gRPC? On a port of its own, with keys of its own."""

from __future__ import annotations

from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ripresa.cluster.gateway.admin_service import AdminService
from ripresa.cluster.gateway.api_keys import KeyFile
from ripresa.cluster.gateway.grpc_server import (
    ADMIN,
    Authenticate,
    Streaming,
    Unary,
    bind_error,
    method_handlers,
    socket_address,
)

MAX_MESSAGE_BYTES = 1 << 16


class Operators:
    """Who may call: anybody without a key file.

    Args:
        api_keys_file: operators' keys; None for none.

    Raises:
        ConfigError: the file cannot be read or is malformed.
    """

    def __init__(self, api_keys_file: str | None) -> None:
        self._keys = None if api_keys_file is None else KeyFile(Path(api_keys_file))

    def authenticate(self, key: str | None) -> str:
        """The operator's name. Raises RequestError (UNAUTHENTICATED) for nobody's key."""
        return "" if self._keys is None else self._keys.authenticate(key)

    async def start(self) -> None:
        """Take notice of changes of the file from now on."""
        if self._keys is not None:
            await self._keys.start(lambda _: None)

    async def stop(self) -> None:
        if self._keys is not None:
            await self._keys.stop()


class AdminServer:
    """A `grpc.aio` server; made, started and stopped on one event loop.

    Args:
        host, port: where to listen; port 0 takes a free one.
        authenticate: the operator whose key it is; raises RipresaError for nobody's.
        reuse_port: let other gateways share the port.
    """

    def __init__(
        self,
        service: AdminService,
        *,
        host: str,
        port: int,
        authenticate: Authenticate,
        reuse_port: bool = False,
    ) -> None:
        self._host = host
        self._port = port
        self._health = health.aio.HealthServicer()
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", int(reuse_port))])
        unary: dict[str, Unary] = {
            "GetClusterStatus": service.get_cluster_status,
            "ResumeWorker": service.resume_worker,
            "GetPrefixStats": service.get_prefix_stats,
            "FlushPrefixCache": service.flush_prefix_cache,
        }
        streaming: dict[str, Streaming] = {"DrainWorker": service.drain_worker}
        handlers = method_handlers(ADMIN, unary, streaming, authenticate, MAX_MESSAGE_BYTES)
        self._server.add_generic_rpc_handlers((handlers,))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (ADMIN.full_name, health.SERVICE_NAME, reflection.SERVICE_NAME)
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
            raise bind_error(self._host, self._port, "admin.port") from error
        for name in (health.OVERALL_HEALTH, ADMIN.full_name):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        await self._server.start()

    async def stop(self) -> None:
        """Take no call any more, end those that run. Safe to call without a `start`."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(0)
