"""The Gateway deployment: both servers, the router and the metrics in one Serve replica."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from ripresa.cluster.directory.link import DirectoryLink
from ripresa.cluster.gateway.admin_server import AdminServer, Operators
from ripresa.cluster.gateway.admin_service import AdminService
from ripresa.cluster.gateway.api_keys import KeyFile
from ripresa.cluster.gateway.chat_encoding import ChatEncoding
from ripresa.cluster.gateway.grpc_server import GrpcServer
from ripresa.cluster.gateway.http_server import http_app
from ripresa.cluster.gateway.other_gateways import ask_each, require_all
from ripresa.cluster.gateway.served_model import ServedModel
from ripresa.cluster.gateway.service import InferenceService
from ripresa.cluster.gateway.store_watch import StoreWatch
from ripresa.cluster.gateway.tokenizer import Tokenizer
from ripresa.cluster.gateway.validation import ConversationBounds
from ripresa.cluster.observability.metrics import GatewayMetrics
from ripresa.cluster.routing.handles import RayWorkerCalls, RayWorkerCare, RayWorkerView
from ripresa.cluster.routing.prefix_hints import Directory, NoDirectory, PrefixHints
from ripresa.cluster.routing.router import ClusterRouter
from ripresa.cluster.routing.worker_load import PlannerSettings
from ripresa.cluster.sessions.store import SessionLink
from ripresa.workers.collector import spare_startup
from ripresa.workers.errors import CheckpointError, ErrorCode, RipresaError
from ripresa.workers.replay import TailVariant
from ripresa.workers.replay_query import ReplayGeometry

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AdminStart:
    """Where Admin is served, and to whom: `AdminSettings`."""

    host: str
    port: int
    api_keys_file: str | None


@dataclass(frozen=True, slots=True)
class GatewayStart:
    """What a gateway process needs to know to start.

    Attributes:
        model: what is served, as the API describes it.
        tokenizer_file: its tokenizer.json.
        shares_port: several gateways listen on one port.
        geometry: the model, as the replay rules see it.
        anchor_interval: A of mode canonical.
        planner: how routes are compared.
        directory: the way to the prefix directory; None if there is none.
        api_keys_file: who the tenants are; None serves everybody.
        admin: the operators' door.
    """

    model: ServedModel
    tokenizer_file: str
    grpc_host: str
    grpc_port: int
    max_message_bytes: int
    bounds: ConversationBounds
    max_running: int
    max_queue_s: float
    max_unread_s: float
    keep_streams_s: float
    max_said_tokens: int
    drain_grace_s: float
    default_tail: TailVariant
    transfer_backend: str
    shares_port: bool
    geometry: ReplayGeometry
    anchor_interval: int
    planner: PlannerSettings
    directory: DirectoryLink | None
    sessions: SessionLink
    idle_ttl_s: float
    max_idle_ttl_s: float
    api_keys_file: str | None
    admin: AdminStart


def _http() -> FastAPI:
    """The HTTP application of this replica."""

    def service() -> InferenceService:
        gateway: Any = serve.get_replica_context().servable_object
        found: InferenceService = gateway.service
        return found

    async def explain(request_id: str) -> list[str]:
        gateway: Any = serve.get_replica_context().servable_object
        lines: list[str] = await gateway.explain_anywhere(request_id)
        return lines

    return http_app(service, explain, is_behind_serve=True)


@serve.ingress(_http)
class Gateway:
    """Takes requests by gRPC on its own port and by HTTP through Serve.

    Args:
        start: this gateway's settings.
        controller: who knows the workers.
        decoders, encoders: the workers; encoders None where there are none.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        start: GatewayStart,
        controller: DeploymentHandle[Any],
        decoders: DeploymentHandle[Any],
        encoders: DeploymentHandle[Any] | None,
    ) -> None:
        self._drain_grace_s = start.drain_grace_s
        self._view = RayWorkerView(controller)
        link = start.directory
        client = None if link is None else await link.client()
        directory: Directory = client or NoDirectory()
        hints = PrefixHints(directory, start.geometry, self._view.address, start.anchor_interval)
        self._calls = RayWorkerCalls(encoders, decoders)
        metrics = GatewayMetrics(backends=(start.transfer_backend,), workers=self._view.workers)
        self._router = ClusterRouter(
            self._view,
            self._calls,
            hints,
            start.planner,
            on_waste=metrics.wasted,
            abort_elsewhere=self._abort_elsewhere if start.shares_port else None,
        )
        tokenizer = Tokenizer(Path(start.tokenizer_file))
        keys = None if start.api_keys_file is None else KeyFile(Path(start.api_keys_file))
        self.service = InferenceService(
            self._router,
            start.model,
            tokenizer,
            metrics,
            encoding=_chat_encoding(tokenizer, start),
            window=start.geometry.window,
            default_tail=start.default_tail,
            max_message_bytes=start.max_message_bytes,
            bounds=start.bounds,
            max_running=start.max_running,
            max_queue_s=start.max_queue_s,
            max_unread_s=start.max_unread_s,
            keep_streams_s=start.keep_streams_s,
            max_said_tokens=start.max_said_tokens,
            transfer_backend=start.transfer_backend,
            keys=keys,
        )
        store = await start.sessions.store()
        self.service.keep_sessions(
            store,
            idle_ttl_s=start.idle_ttl_s,
            max_idle_ttl_s=start.max_idle_ttl_s,
        )
        if start.max_said_tokens and start.sessions.max_said_tokens:
            self.service.share_answers(store)
        self._store_watch = StoreWatch(store, metrics)
        await self.service.follow_keys()
        self._grpc = GrpcServer(
            self.service,
            host=start.grpc_host,
            port=start.grpc_port,
            max_message_bytes=start.max_message_bytes,
            reuse_port=start.shares_port,
        )
        self._operators = Operators(start.admin.api_keys_file)
        self._admin = AdminServer(
            AdminService(
                self._view.refresh,
                self._view.workers,
                RayWorkerCare(encoders, decoders),
                client,
                has_tenants=keys is not None,
                window=start.geometry.window,
            ),
            host=start.admin.host,
            port=start.admin.port,
            authenticate=self._operators.authenticate,
            reuse_port=start.shares_port,
        )
        await self._view.refresh()
        await self._view.start()
        await self._store_watch.start()
        await self._operators.start()
        await self._admin.start()
        await self._grpc.start()
        spare_startup()

    async def grpc_port(self) -> int:
        """Where gRPC is served; the question that a setting of 0 leaves open."""
        return self._grpc.port

    async def admin_port(self) -> int:
        """Where Admin is served, likewise."""
        return self._admin.port

    async def explain(self, request_id: str) -> list[str] | None:
        """How this gateway placed a request; None if it does not remember it."""
        try:
            return self.service.explain(request_id)
        except RipresaError:
            return None

    async def explain_anywhere(self, request_id: str) -> list[str]:
        """How some gateway placed a request.

        Raises:
            RipresaError: NOT_FOUND; none remembers it. UNAVAILABLE; none says so, and one does not
                answer.
        """
        found = await self.explain(request_id)
        if found is not None:
            return found
        answers = await self._ask_each("explain", request_id)
        for answer in answers:
            if isinstance(answer, list):
                return answer
        require_all(answers, "remembers the request")
        return self.service.explain(request_id)

    async def abort_waiting(self, request_id: str) -> bool:
        """See `ClusterRouter.abort_waiting`."""
        return self._router.abort_waiting(request_id)

    async def _abort_elsewhere(self, request_id: str) -> bool:
        """Whether another gateway had the request wait, and ended it.

        Raises:
            RipresaError: none says so, and one does not answer.
        """
        answers = await self._ask_each("abort_waiting", request_id)
        if True in answers:
            return True
        require_all(answers, "has the request wait")
        return False

    async def _ask_each(self, method: str, request_id: str) -> list[Any]:
        context = serve.get_replica_context()
        gateways = serve.get_deployment_handle(context.deployment, context.app_name)
        return await ask_each(gateways, method, request_id)

    async def check_integrity(self) -> None:
        """Raise RipresaError (INTERNAL) if an idle gateway still counts requests."""
        self._router.check_integrity()
        if self.service.num_running:
            raise RipresaError(
                ErrorCode.INTERNAL, f"left over: {self.service.num_running} requests"
            )

    async def __del__(self) -> None:
        await self._grpc.stop(self._drain_grace_s, before_cut=self._calls.detach)
        await self._admin.stop()
        await self._operators.stop()
        await self.service.keep_answers()
        await self._store_watch.stop()
        await self.service.forget_keys()
        self.service.close()
        await self._calls.close()
        await self._view.stop()


def _chat_encoding(tokenizer: Tokenizer, start: GatewayStart) -> ChatEncoding | None:
    """None for a tokenizer without the special tokens; such a model completes text alone."""
    try:
        return ChatEncoding(tokenizer, Path(start.tokenizer_file), start.model.name)
    except CheckpointError as error:
        log.warning("chat is not served: %s", error)
        return None
