"""How do tests run a whole cluster, ask it over gRPC, and look into its workers from outside?"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

# Explicit, whatever the user's own Ray is set to; before Ray is imported.
os.environ["RAY_AUTH_MODE"] = "disabled"
# On a busy machine ten processes that import torch at once are not there in Ray's minute.
os.environ.update(RAY_worker_register_timeout_seconds="600")

import grpc
import ray
from click.testing import CliRunner
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from noise_checkpoint import noise_checkpoint
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from reference_engine import Question

from ripresa.cluster.app import APP_NAME, DECODER, ENCODER, GATEWAY, LocalCluster, local_cluster
from ripresa.cluster.cli import cli
from ripresa.cluster.config import load_config
from ripresa.cluster.directory.link import NAMESPACE
from ripresa.cluster.sessions.store import ACTOR_NAME
from ripresa.protos import ripresa_pb2 as pb
from ripresa.protos.ripresa_pb2_grpc import InferenceStub
from ripresa.workers.address import WorkerKind
from ripresa.workers.errors import RipresaError
from ripresa.workers.report import WorkerReport

T = TypeVar("T")

POLL_S = 0.05
CONTROLLER = "Controller"
LOST = (RipresaError, RayError, RayServeException, TimeoutError)
"""What a call may raise whose replica died a moment ago, or has no successor yet."""


def eventually(check: Callable[[], T], within_s: float = 120.0) -> T:
    """The check's result, as soon as it raises no AssertionError; its last one after `within_s`."""
    give_up_at = time.monotonic() + within_s
    while True:
        try:
            return check()
        except AssertionError:
            if time.monotonic() > give_up_at:
                raise
        time.sleep(POLL_S)


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on, and that the kernel gives to nobody who takes any port: the
    processes of a cluster take hundreds of those before it listens on these."""
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    outside = [port for port in range(20_000, 1 << 16) if not low <= port <= high]
    free: set[int] = set()
    while len(free) < count:
        port = random.SystemRandom().choice(outside)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            free.add(port)
    return list(free)


@dataclass
class Answer:
    """What a stream said, and how it ended; `code` is OK after `completed`."""

    started: pb.Started | None = None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finished: pb.Finished | None = None
    completed: pb.Completed | None = None
    code: grpc.StatusCode = grpc.StatusCode.UNKNOWN
    details: str = ""
    field: str = ""
    seconds: float = 0.0

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens of a stream that must have completed."""
        assert self.code is grpc.StatusCode.OK, f"{self.code}: {self.details}"
        return tuple(self.token_ids)


class Stream:
    """One open Generate call, or those that resume it."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._resume: Callable[[], Any] | None = None
        self._opened = time.monotonic()
        self._num_messages = 0
        self.answer = Answer()

    def go_on(self, resume: Callable[[], Any]) -> None:
        """Read from what `resume` calls, now and wherever the connection breaks."""
        self._resume = resume
        self._call = resume()

    def read(self, num_tokens: int = 1) -> None:
        """Read on until `started` came and `num_tokens` more tokens did, or the stream's end."""
        enough = len(self.answer.token_ids) + num_tokens
        while self.answer.started is None or len(self.answer.token_ids) < enough:
            if not self._next():
                return

    @property
    def num_messages(self) -> int:
        """Messages that were read."""
        return self._num_messages

    def end(self) -> Answer:
        """Read to the end."""
        while self._next():
            pass
        return self.answer

    def cancel(self) -> None:
        self._call.cancel()

    def _next(self) -> bool:
        answer = self.answer
        try:
            response = next(self._call, None)
        except grpc.RpcError as error:
            if self._resume is not None and _is_cut(error):
                self._call = self._resume()
                return True
            answer.code, answer.details = error.code(), error.details() or ""
            answer.field = _field(error)
            answer.seconds = time.monotonic() - self._opened
            return False
        if response is None:
            assert answer.completed is not None, "the stream ended early, with status OK"
            answer.code = grpc.StatusCode.OK
            answer.seconds = time.monotonic() - self._opened
            return False
        assert answer.completed is None, "something follows `completed`"
        if isinstance(response, pb.ResumeResponse):
            response = response.generate
        self._num_messages = response.sequence + 1
        match response.WhichOneof("event"):
            case "started":
                assert answer.started is None
                answer.started = response.started
            case "delta":
                answer.token_ids += response.delta.token_ids
                answer.text += response.delta.text
            case "finished":
                answer.finished = response.finished
            case "completed":
                answer.completed = response.completed
        return True


def generate_request(question: Question, request_id: str = "") -> pb.GenerateRequest:
    """The question as clients ask it; it reuses nothing that is cached, unless it says so."""
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=question.token_ids), return_token_ids=True
    )
    sampling = request.sampling
    sampling.max_tokens = question.max_tokens
    sampling.temperature = question.temperature
    sampling.top_p = question.top_p
    sampling.seed = question.seed
    sampling.ignore_eos = True
    if question.top_k is not None:
        sampling.top_k = question.top_k
    request.options.request_id = request_id
    request.options.cache_policy.tail = pb.TailVariant.Value(f"TAIL_VARIANT_{question.tail.name}")
    request.options.cache_policy.disable_read = not question.reads_cache
    return request


class ServedCluster:
    """A running cluster with a plain client: no retries hide what the gateway answers."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.config = cluster.config
        self.address = cluster.grpc_address
        self.channel = grpc.insecure_channel(self.address)
        self.stub = InferenceStub(self.channel)

    def close(self) -> None:
        self.channel.close()

    def open(
        self,
        question: Question | pb.GenerateRequest,
        *,
        request_id: str = "",
        timeout_s: float = 600,
        stub: InferenceStub | None = None,
    ) -> Stream:
        """Send a request."""
        if isinstance(question, Question):
            question = generate_request(question, request_id)
        call = (stub or self.stub).Generate(question, timeout=timeout_s, wait_for_ready=True)
        return Stream(call)

    def ask(self, question: Question | pb.GenerateRequest, **options: Any) -> Answer:
        """Send a request and read the whole stream."""
        return self.open(question, **options).end()

    def explained(self, request_id: str) -> list[str]:
        """What `ripresa explain` prints."""
        result = CliRunner().invoke(
            cli, ["explain", request_id, "--address", self.cluster.http_address]
        )
        assert result.exit_code == 0, result.output
        return result.output.splitlines()

    def resume(self, stream: Stream, *, timeout_s: float = 600) -> Stream:
        """Go on with a stream, and again where a dying gateway took the connection."""
        assert stream.answer.started is not None
        stream_id = stream.answer.started.stream_id

        def resume() -> Any:
            request = pb.ResumeRequest(stream_id=stream_id, next_sequence=stream.num_messages)
            return self.stub.Resume(request, timeout=timeout_s, wait_for_ready=True)

        stream.go_on(resume)
        return stream

    def listed(self) -> dict[str, WorkerReport]:
        """What gateways know of workers now: each worker's last heartbeat."""

        def ask() -> dict[str, WorkerReport]:
            try:
                answer = self.cluster.handle(CONTROLLER).workers.remote().result(timeout_s=30)
            except LOST as error:
                raise AssertionError(f"the controller: {error}") from error
            return {report.worker_id: report for report in answer.workers}

        return eventually(ask)

    def workers(self, kind: WorkerKind | None = None) -> dict[str, WorkerReport]:
        """The workers' own reports, made for this question."""
        return {
            worker_id: self.report(worker)
            for worker_id, worker in self.listed().items()
            if kind in (None, worker.kind)
        }

    def report(self, worker: WorkerReport) -> WorkerReport:
        """A worker's report, now. AssertionError if it is gone."""
        report: WorkerReport = self._call(worker, "report")
        return report

    def wait_until_whole(self, within_s: float = 240.0) -> None:
        """Every replica of the configuration is there, and every worker is listed."""
        config = self.config
        wanted = (config.encoders.replicas, config.decoders.replicas, config.gateway.replicas)

        def check() -> None:
            kinds = [report.kind for report in self.workers().values()]
            num_gateways = len(self._ask_gateways("grpc_port"))
            there = (kinds.count(WorkerKind.ENCODER), kinds.count(WorkerKind.DECODE), num_gateways)
            assert there == wanted, f"{there} encoder, decode workers and gateways, not {wanted}"

        eventually(check, within_s)

    def assert_idle(self, within_s: float = 120.0) -> None:
        """Nothing is left of any request: on workers, on lanes, in the gateway."""
        eventually(self._check_idle, within_s)

    def _check_idle(self) -> None:
        workers = self.workers()
        assert workers
        for worker in workers.values():
            stats = worker.stats
            assert (stats.num_running, stats.num_waiting) == (0, 0), worker
            assert stats.num_free_blocks == stats.num_blocks, worker
            self._call(worker, "check_integrity")
        self._ask_gateways("check_integrity")
        metrics = self.metrics()
        assert metrics["ripresa_num_requests_running"] == 0
        assert metrics["ripresa_num_requests_waiting"] == 0

    def _call(self, worker: WorkerReport, method: str) -> Any:
        name = ENCODER if worker.kind is WorkerKind.ENCODER else DECODER
        bound = getattr(self.cluster.handle(name), method)
        try:
            return bound.remote(worker_id=worker.worker_id).result(timeout_s=30)
        except LOST as error:
            raise AssertionError(f"{worker.worker_id}: {error}") from error

    def _ask_gateways(self, method: str) -> list[Any]:
        """The answers of all gateways that run."""
        try:
            return list(self.cluster.handle(GATEWAY).broadcast(method).results(timeout_s=30))
        except LOST as error:
            raise AssertionError(f"gateways: {error}") from error

    def metrics(self) -> dict[str, float]:
        """One gateway's series without labels, and sums over labels, by sample name.

        AssertionError if it died a moment ago.
        """
        url = f"http://{self.cluster.http_address}/metrics"
        try:
            with urllib.request.urlopen(url, timeout=30) as response:
                text = response.read().decode()
        except OSError as error:
            raise AssertionError(f"{url}: {error}") from error
        values: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if not sample.name.endswith("_bucket"):
                    values[sample.name] = values.get(sample.name, 0.0) + sample.value
        return values

    def rows(self) -> tuple[int, int]:
        """Encoder and decoder rows that all workers together have computed so far."""
        stats = [worker.stats for worker in self.workers().values()]
        return sum(s.num_encoder_rows for s in stats), sum(s.num_decoder_rows for s in stats)

    def kill_gateway_of(self, stream: Stream) -> None:
        """End the gateway that tells a stream, as a crash would, and read to where it breaks."""
        assert stream.answer.started is not None
        request_id = stream.answer.started.request_id

        def pid_of_teller(_: object) -> int | None:
            gateway: Any = serve.get_replica_context().servable_object
            try:
                gateway.service.explain(request_id)
            except RipresaError:
                return None
            return os.getpid()

        asked = [actor.__ray_call__.remote(pid_of_teller) for actor in self._replicas(GATEWAY)]
        (pid,) = [pid for pid in ray.get(asked) if pid is not None]
        kill_processes([pid])
        code = stream.end().code
        assert code is grpc.StatusCode.UNAVAILABLE, f"{code}: the stream ended before its gateway"

    def pids(self, deployment: str) -> list[int]:
        """The processes of a deployment; those that start are waited for."""
        asked = [
            actor.__ray_call__.remote(lambda _: os.getpid()) for actor in self._replicas(deployment)
        ]
        return list(ray.get(asked))

    def kill_replicas(self, deployment: str, at_most: int | None = None) -> None:
        """End processes of a deployment as a crash would; Serve starts new ones."""
        kill_processes(self.pids(deployment)[:at_most])

    def kill_session_store(self) -> None:
        """End its process as a crash would; Ray starts an empty successor."""
        actor = ray.get_actor(ACTOR_NAME, namespace=NAMESPACE)
        kill_processes([ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))])

    def _replicas(self, deployment: str) -> list[Any]:
        prefix = f"SERVE_REPLICA::{APP_NAME}#{deployment}#"
        names = [entry["name"] for entry in ray.util.list_named_actors(all_namespaces=True)]
        replicas = [name for name in names if name.startswith(prefix)]
        assert replicas, f"no replica of {deployment} among {names}"
        return [ray.get_actor(name, namespace="serve") for name in replicas]


def kill(worker: WorkerReport) -> None:
    """End a worker's process as a crash would."""
    kill_processes([worker.pid])


def kill_processes(pids: Iterable[int]) -> None:
    """SIGKILL; returns once none of them runs and their sockets are closed."""
    pids = tuple(pids)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)

    def check() -> None:
        for pid in pids:
            status = Path(f"/proc/{pid}/status")
            # It may go between the two looks.
            with suppress(FileNotFoundError, ProcessLookupError):
                assert "State:\tZ" in status.read_text(), f"{pid} runs on"

    eventually(check)


@contextmanager
def stopped(worker: WorkerReport) -> Iterator[None]:
    """A worker's process makes no progress and does not die; the way a stuck machine looks."""
    os.kill(worker.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        try:
            os.kill(worker.pid, signal.SIGCONT)
        except ProcessLookupError:
            return  # Serve has replaced it


@contextmanager
def served_cluster(*settings: str) -> Iterator[ServedCluster]:
    """A cluster of its own: folder, ports and processes; `settings` as for `--set`.

    It serves noise; `model.path=null` is the bundled model.
    """
    temp_dir = tempfile.mkdtemp(prefix="rip-", dir="/tmp")
    grpc_port, http_port, dashboard_port, metrics_port = free_ports(4)
    config = load_config(
        None,
        [
            f"model.path={noise_checkpoint()}",
            "admin.port=0",
            f"gateway.grpc_port={grpc_port}",
            f"gateway.http_port={http_port}",
            f"ray.dashboard_port={dashboard_port}",
            f"ray.metrics_export_port={metrics_port}",
            f"ray.temp_dir={temp_dir}",
            f"ray.object_store_memory={80 << 20}",
            "ray.num_cpus=8",
            *settings,
        ],
    )
    try:
        with local_cluster(config) as cluster:
            served = ServedCluster(cluster)
            try:
                served.wait_until_whole()
                yield served
            finally:
                served.close()
    finally:
        shutil.rmtree(temp_dir, ignore_errors=True)


def _is_cut(error: grpc.RpcError) -> bool:
    """Whether no gateway ended the call: each of its errors has details."""
    is_unavailable: bool = error.code() is grpc.StatusCode.UNAVAILABLE
    return is_unavailable and rpc_status.from_call(error) is None


def _field(error: grpc.RpcError) -> str:
    """The field that a rich status names."""
    status = rpc_status.from_call(error)
    for packed in status.details if status is not None else ():
        bad = error_details_pb2.BadRequest()
        if packed.Unpack(bad) and bad.field_violations:
            return str(bad.field_violations[0].field)
    return ""
