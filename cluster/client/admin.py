"""How does an operator's program talk to a cluster? The Admin service, blocking."""

from __future__ import annotations

from collections.abc import Generator
from types import TracebackType
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration

from ripresa.cluster.client import policy
from ripresa.cluster.client.errors import UnavailableError, call_error
from ripresa.protos import ripresa_pb2 as pb
from ripresa.protos import ripresa_pb2_grpc

TIMEOUT_S = 60.0


class AdminClient:
    """A connection to a gateway's Admin port. Use it in a `with` block.

    Args:
        address: `host:port`.
        api_key: an operator's; None for a port that asks for none.
    """

    def __init__(self, address: str, api_key: str | None = None) -> None:
        self._address = address
        self._metadata = policy.metadata_of(api_key)
        self._channel = grpc.insecure_channel(address)
        self._stub = ripresa_pb2_grpc.AdminStub(self._channel)

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._channel.close()

    def wait_until_connected(self, timeout_s: float) -> None:
        """Return once a gateway answers.

        Raises:
            UnavailableError: none did in time.
        """
        try:
            grpc.channel_ready_future(self._channel).result(timeout_s)
        except grpc.FutureTimeoutError as error:
            raise UnavailableError(
                f"nothing answers at {self._address}; Admin is served where the gateways are, on "
                "admin.port: name that one with --address",
                reason="NO_GATEWAY",
            ) from error

    def status(self) -> pb.ClusterStatus:
        """The workers. Raises CallError, as all of these do."""
        found: pb.ClusterStatus = self._ask(
            self._stub.GetClusterStatus, pb.GetClusterStatusRequest()
        )
        return found

    def drain(
        self, worker_id: str, *, grace_s: float | None = None, migrate: bool = True
    ) -> Generator[pb.DrainProgress]:
        """Let a worker leave; how far it is, until it is done. Closing this does not call it off.

        Args:
            grace_s: how long its streams may go on there; None for the server's default.
            migrate: its sessions go to other workers.
        """
        request = pb.DrainWorkerRequest(worker_id=worker_id, migrate_prefixes=migrate)
        if grace_s is not None:
            grace = Duration()
            grace.FromNanoseconds(round(grace_s * 1e9))
            request.grace_period.CopyFrom(grace)
        call = self._stub.DrainWorker(request, metadata=self._metadata)
        try:
            yield from call
        except grpc.RpcError as error:
            raise call_error(error) from error
        finally:
            call.cancel()

    def resume(self, worker_id: str) -> None:
        """Let a worker take requests again."""
        self._ask(self._stub.ResumeWorker, pb.ResumeWorkerRequest(worker_id=worker_id))

    def prefix_stats(self, *, tenant: str = "", top: int = 0) -> pb.PrefixStats:
        """What the prefix directory was asked for, and its most used prefixes."""
        request = pb.GetPrefixStatsRequest(tenant_id=tenant, top_prefixes=top)
        found: pb.PrefixStats = self._ask(self._stub.GetPrefixStats, request)
        return found

    def flush(self, *, tenant: str = "", worker_id: str = "") -> int:
        """Forget cached state, of one tenant or all, on one worker or all; tokens that went."""
        request = pb.FlushPrefixCacheRequest(tenant_id=tenant, worker_id=worker_id)
        return int(self._ask(self._stub.FlushPrefixCache, request).tokens_dropped)

    def _ask(self, method: Any, request: Any) -> Any:
        try:
            return method(request, timeout=TIMEOUT_S, metadata=self._metadata)
        except grpc.RpcError as error:
            raise call_error(error) from error


def state_name(state: pb.WorkerState.ValueType) -> str:
    """A worker's state in one word."""
    return pb.WorkerState.Name(state).removeprefix("WORKER_STATE_").lower()
