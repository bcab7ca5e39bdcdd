"""Which processes make a cluster, and how are they wired? The only place that knows them all.

Controller ◀── DecodeWorker ◀── EncoderWorker
    ▲               ▲                ▲
    └───────────────┴──── Gateway ───┘
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import click
import ray
from pydantic import BaseModel
from ray import serve
from ray.serve import Application, Deployment
from ray.serve.config import HTTPOptions, RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from ripresa.cluster.config import ClusterConfig, check_against_model, load_config
from ripresa.cluster.controller import Controller
from ripresa.cluster.directory.index import DirectorySettings
from ripresa.cluster.directory.link import DirectoryLink
from ripresa.cluster.gateway.api_keys import KeyFile
from ripresa.cluster.gateway.deployment import AdminStart, Gateway, GatewayStart
from ripresa.cluster.gateway.grpc_server import free_port
from ripresa.cluster.gateway.proxy_headers import PROXY_CALLBACK
from ripresa.cluster.gateway.served_model import ServedModel
from ripresa.cluster.gateway.validation import ConversationBounds
from ripresa.cluster.progress import progress
from ripresa.cluster.ray_farewells import without_farewells
from ripresa.cluster.routing.handles import TargetRouter
from ripresa.cluster.sessions.store import SessionLink
from ripresa.workers.cache.cache_events import unheard
from ripresa.workers.cache.kv_layout import REWIND_TOKENS
from ripresa.workers.config import EngineConfig
from ripresa.workers.decode_worker import DecodeWorker
from ripresa.workers.encoder_worker import EncoderWorker
from ripresa.workers.errors import ErrorCode, RipresaError, Unavailable, reason_of
from ripresa.workers.model_runner import model_digest
from ripresa.workers.models.checkpoint import Checkpoint
from ripresa.workers.models.deepseek_v41.config import ModelConfig
from ripresa.workers.replay_query import ReplayGeometry
from ripresa.workers.worker_process import model_folder, transport_name
from ripresa.workers.worker_settings import WorkerSettings

APP_NAME = "ripresa"
GATEWAY, ENCODER, DECODER = "Gateway", "EncoderWorker", "DecodeWorker"

ASK_TIMEOUT_S = 120.0
"""Longest wait for a gateway that is ready to say where it listens, on a busy machine, too."""
MAX_ONGOING_CALLS = 10_000
"""Admission is the gateway's and the engines' business, not Serve's."""

_TARGETED = RequestRouterConfig(request_router_class=cast(Any, TargetRouter))


def build_app(config: ClusterConfig) -> Application:
    """The Serve application of a configuration.

    Raises:
        RipresaError: the model or a setting is wrong; nothing was started.
    """
    model = ModelConfig.from_file(config.model.config_file)
    check_against_model(config, model)
    folder = model_folder(config.model.path or "")
    with Checkpoint(folder):
        pass  # Its headers agree with its files, which need not wait for a worker's start.
    for keys in (config.gateway.api_keys_file, config.admin.api_keys_file):
        if keys is not None:
            KeyFile(Path(keys))  # It can be read, or nothing starts.
    controller = _deploy(Controller, 1).bind(config.worker_lease_s)
    link = directory_link(config, model.sliding_window)
    announcer = unheard if link is None else link.announcer
    decoders = _deploy(DecodeWorker, config.decoders.replicas, targeted=True).bind(
        _worker(config, config.decoder_engine()), controller, announcer
    )
    encoders = None
    if config.encoders.replicas:
        encoders = _deploy(EncoderWorker, config.encoders.replicas, targeted=True).bind(
            _worker(config, config.encoder_engine()), controller, decoders, announcer
        )
    gateway = config.gateway
    start = GatewayStart(
        model=ServedModel(
            name=config.model.name,
            max_model_len=model.max_position_embeddings,
            vocab_size=model.vocab_size,
            eos_token_id=model.eos_token_id,
            weights_digest=model_digest(folder, model),
            image_token_id=model.image_token_id,
        ),
        tokenizer_file=str(config.model.tokenizer_file),
        grpc_host=gateway.grpc_host,
        grpc_port=gateway.grpc_port,
        max_message_bytes=gateway.max_message_bytes,
        bounds=ConversationBounds(gateway.max_messages, gateway.max_tools),
        max_running=gateway.max_running,
        max_queue_s=gateway.max_queue_time_s,
        max_unread_s=gateway.max_unread_s,
        keep_streams_s=config.decoders.keep_streams_s,
        max_said_tokens=gateway.max_said_tokens,
        drain_grace_s=gateway.drain_grace_s,
        default_tail=config.default_tail,
        transfer_backend=transport_name(config.transfer.backend),
        shares_port=gateway.replicas > 1,
        anchor_interval=config.anchor_interval,
        geometry=ReplayGeometry(
            model.sliding_window,
            REWIND_TOKENS,
            model.split,
            model.num_hidden_layers - model.split,
        ),
        planner=config.planner,
        directory=link,
        sessions=session_link(config),
        idle_ttl_s=config.sessions.idle_ttl_s,
        max_idle_ttl_s=config.sessions.max_idle_ttl_s,
        api_keys_file=gateway.api_keys_file,
        admin=AdminStart(config.admin.host, config.admin.port, config.admin.api_keys_file),
    )
    return _deploy(Gateway, gateway.replicas, shutdown_s=gateway.drain_grace_s + 10).bind(
        start, controller, decoders, encoders
    )


def directory_link(config: ClusterConfig, window: int) -> DirectoryLink | None:
    """The way to the prefix directory; None if there is to be none."""
    settings = config.directory
    if not settings.enabled:
        return None
    limits = DirectorySettings(
        window=window,
        capacity_blocks=settings.capacity_blocks,
        late_s=settings.late_s,
        lease_s=settings.lease_s,
        claim_s=settings.claim_s,
    )
    return DirectoryLink(limits, settings.shards, settings.lookup_timeout_s)


def session_link(config: ClusterConfig) -> SessionLink:
    """The way to the session store."""
    return SessionLink(config.sessions.max_bytes, config.sessions.max_said_tokens)


class BuildArgs(BaseModel, extra="forbid"):
    """Arguments of the Serve application builder.

    Attributes:
        config: path of the configuration file, on every node; empty for all defaults.
        overrides: `a.b=value` settings on top of it.
    """

    config: str = ""
    overrides: list[str] = []


def build(args: BuildArgs) -> Application:
    """The builder that a Serve config names (`import_path: ripresa.cluster.app:build`)."""
    return build_app(load_config(Path(args.config) if args.config else None, args.overrides))


class LocalCluster:
    """A running cluster, seen from the process that started it.

    Attributes:
        config: what it was started with.
        grpc_address: where the first gateway serves gRPC.
        http_address: where HTTP is served.
        admin_address: where the first gateway serves Admin.
    """

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config
        port = self.handle(GATEWAY).grpc_port.remote().result(timeout_s=ASK_TIMEOUT_S)
        self.grpc_address = f"{config.gateway.grpc_host}:{port}"
        admin_port = self.handle(GATEWAY).admin_port.remote().result(timeout_s=ASK_TIMEOUT_S)
        self.admin_address = f"{config.admin.host}:{admin_port}"
        self.http_address = f"{config.gateway.http_host}:{config.gateway.http_port}"

    def handle(self, deployment: str) -> DeploymentHandle[Any]:
        """A handle to one of the deployments."""
        return serve.get_deployment_handle(deployment, APP_NAME)


@contextmanager
def local_cluster(config: ClusterConfig) -> Generator[LocalCluster]:
    """Start Ray (or join `ray.address`), run the application, and stop what was started.

    Raises:
        RipresaError: the model or a setting is wrong, or Ray does not start.
    """
    config = _with_http_port(config)
    application = build_app(config)
    window = ModelConfig.from_file(config.model.config_file).sliding_window
    link = directory_link(config, window)
    ray_settings = config.ray
    # Ray tells at every start that its own ports ask for a token, which is as it should be.
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    if not ray_settings.address:
        os.environ.update(PROXY_CALLBACK)  # for the processes that Ray starts
    try:
        ray.init(
            address=ray_settings.address or "local",
            include_dashboard=None if ray_settings.address else ray_settings.dashboard,
            log_to_driver=False,
            configure_logging=True,
            logging_level=logging.WARNING,
            **_local_options(config),
        )
    except Exception as error:  # Ray raises bare ones
        what = (
            f"{ray_settings.address} cannot be joined" if ray_settings.address else "did not start"
        )
        raise Unavailable(
            f"Ray {what}: {reason_of(error)}; try again when less else runs here, or look into "
            f"{ray_settings.temp_dir or '/tmp/ray'}/session_latest/logs"
        ) from error
    # Serve's own progress in the starting process; warnings stay.
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        serve.start(
            proxy_location="EveryNode" if ray_settings.address else "HeadOnly",
            http_options=HTTPOptions(host=config.gateway.http_host, port=config.gateway.http_port),
            logging_config={"log_level": "WARNING"},
        )
        try:
            if link is not None:
                link.start()
            session_link(config).start()
            _run(application)
            yield LocalCluster(config)
            serve.delete(APP_NAME)
        finally:
            if link is not None:
                link.stop()
            session_link(config).stop()
    finally:
        with without_farewells():
            if not ray_settings.address:
                serve.shutdown()
            ray.shutdown()


def _with_http_port(config: ClusterConfig) -> ClusterConfig:
    """The settings with a free port for HTTP instead of 0; Serve does not tell which it took."""
    gateway = config.gateway
    if gateway.http_port:
        return config
    port = free_port(gateway.http_host, 0, "gateway.http_port")
    return replace(config, gateway=replace(gateway, http_port=port))


def _run(application: Application) -> None:
    """Deploy and wait until every replica is ready.

    Raises:
        RipresaError: a replica could not start; the message is the replica's own.
    """
    try:
        serve.run(application, name=APP_NAME, route_prefix="/")
    except RuntimeError as error:
        deployments = serve.status().applications[APP_NAME].deployments
        failed = [f"{n}: {_last_line(d.message)}" for n, d in deployments.items() if d.message]
        raise RipresaError(
            ErrorCode.FAILED_PRECONDITION, "; ".join(failed) or str(error)
        ) from error


def _last_line(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[-1] if lines else message


def serve_forever(config: ClusterConfig) -> None:
    """Serve until SIGINT or SIGTERM, then drain and stop.

    Raises:
        RipresaError: the model or a setting is wrong.
    """
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with ExitStack() as stack:
        with progress("starting the cluster"):
            cluster = stack.enter_context(local_cluster(config))
        click.echo(
            f"gRPC on {cluster.grpc_address}, HTTP on http://{cluster.http_address}, "
            f"Admin on {cluster.admin_address}"
        )
        click.echo(f'Try: ripresa generate --address {cluster.grpc_address} --prompt "Hello"')
        click.echo("Ctrl-C drains and stops.")
        stop.wait()
        click.echo(f"draining for at most {config.gateway.drain_grace_s:.0f} s")


def _deploy(
    cls: Any, replicas: int, *, targeted: bool = False, shutdown_s: float = 20.0
) -> Deployment:
    return serve.deployment(
        name=cls.__name__,
        num_replicas=replicas,
        max_ongoing_requests=MAX_ONGOING_CALLS,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=shutdown_s,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=2,
        health_check_timeout_s=10,
        request_router_config=_TARGETED if targeted else RequestRouterConfig(),
    )(cls)


def _worker(config: ClusterConfig, engine: EngineConfig) -> WorkerSettings:
    return WorkerSettings(
        model_path=config.model.path or "",
        engine=engine,
        transport=config.transfer.backend,
        lanes=config.lanes(),
        torch_threads=config.torch_threads,
        keep_streams_s=config.decoders.keep_streams_s,
        kept_streams_bytes=config.decoders.kept_streams_bytes,
    )


def _local_options(config: ClusterConfig) -> dict[str, Any]:
    """What only a cluster that is started here takes."""
    settings = config.ray
    if settings.address:
        return {}
    options: dict[str, Any] = {
        "object_store_memory": settings.object_store_memory,
        "dashboard_port": settings.dashboard_port,
        "_node_ip_address": "127.0.0.1",
    }
    if settings.num_cpus is not None:
        options["num_cpus"] = settings.num_cpus
    if settings.temp_dir is not None:
        options["_temp_dir"] = settings.temp_dir
    if settings.metrics_export_port is not None:
        options["_metrics_export_port"] = settings.metrics_export_port
    return options
