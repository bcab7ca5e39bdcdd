"""How does a worker in a Serve replica reach the transfers of another one?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from ripresa.workers.address import WorkerAddress, WorkerKind
from ripresa.workers.remote_worker import TARGET, apart, direct, failures
from ripresa.workers.request import GenerationRequest
from ripresa.workers.transfer.base import Accept, ControlMessage, Peer

DEPLOYMENTS = {WorkerKind.ENCODER: "EncoderWorker", WorkerKind.DECODE: "DecodeWorker"}
"""Kind -> the Serve deployment of its workers."""


class RemotePeers:
    """The control ways to the other workers of this replica's application.

    Other handles are made at run time, so that the graph of deployments has no cycle.

    Args:
        handles: those that the replica was given.
    """

    def __init__(self, handles: Mapping[WorkerKind, DeploymentHandle[Any]] | None = None) -> None:
        self._app_name = serve.get_replica_context().app_name
        self._handles = {kind: direct(handle) for kind, handle in (handles or {}).items()}

    def resolve(self, address: WorkerAddress) -> Peer:
        """The way to a worker; whether it is there shows when it is used."""
        return _RemotePeer(self._handle(address.kind), address)

    async def adopt(self, address: WorkerAddress, request: GenerationRequest) -> bool:
        """Have a decode worker take a session; see `Departure`."""
        handle = self._handle(address.kind)
        async with failures(f"{address.kind} worker {address.worker_id}"):
            is_taken: bool = await apart(
                handle.adopt.remote, request, **{TARGET: address.worker_id}
            )
            return is_taken

    def _handle(self, kind: WorkerKind) -> DeploymentHandle[Any]:
        handle = self._handles.get(kind)
        if handle is None:
            named = serve.get_deployment_handle(DEPLOYMENTS[kind], self._app_name)
            handle = self._handles[kind] = direct(named)
        return handle


class _RemotePeer:
    """The control way to one worker's transfers; implements `Peer`."""

    def __init__(self, handle: DeploymentHandle[Any], address: WorkerAddress) -> None:
        self._handle = handle
        self._address = address

    async def deliver(self, message: ControlMessage) -> Accept | None:
        worker_id = self._address.worker_id
        async with failures(f"{self._address.kind} worker {worker_id}"):
            answer: Accept | None = await apart(
                self._handle.deliver.remote, message, **{TARGET: worker_id}
            )
            return answer
