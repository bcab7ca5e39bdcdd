"""How is one chosen worker called through Ray Serve, and what do its failures mean?

The target travels as the keyword argument `worker_id`; a request router picks that replica. If it
is gone, another replica gets the call and refuses it (`require_target`), so that callers hear at
once instead of waiting for a worker that will not come back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from contextvars import Context
from typing import Any, ParamSpec, TypeVar

import ray
import ray.exceptions
from ray import serve
from ray.serve.handle import DeploymentHandle

from ripresa.workers.errors import ErrorCode, RipresaError, Unreachable, reason_of
from ripresa.workers.report import SessionMove, WorkerReport

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

TARGET = "worker_id"


def direct(handle: DeploymentHandle[Any]) -> DeploymentHandle[Any]:
    """The handle with messages by gRPC between replicas: faster, and cancels always arrive."""
    return handle.options(_by_reference=False)


def apart(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Make a call that Serve takes for a request of its own.

    What is called while Serve handles an HTTP request inherits that request's internal id, and of
    calls that are under way at once with one id Serve's router loses all but one.
    """
    return Context().run(call, *args, **kwargs)


def require_target(own_id: str, worker_id: str) -> None:
    """Refuse a call that was meant for another replica.

    Raises:
        Unreachable: that replica is gone.
    """
    if worker_id != own_id:
        raise Unreachable(f"worker {worker_id} is gone; another worker can serve the request")


@asynccontextmanager
async def failures(what: str) -> AsyncGenerator[None]:
    """Turns whatever a remote call raises into a RipresaError.

    A RipresaError of the remote side is raised unchanged. Another exception of the remote code is
    its mistake and would come again elsewhere. Whatever else a call raises means that the worker,
    or the way to it, is lost. A time limit belongs inside of the block.

    Raises:
        RipresaError: the remote side's own error; INTERNAL for another exception of it.
        Unreachable: the call did not reach the worker, or the worker died over it.
    """
    try:
        yield
    except RipresaError as error:
        raise getattr(error, "cause", error) from None
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, RipresaError):
            raise cause from None
        raise RipresaError(ErrorCode.INTERNAL, f"{what} failed: {cause!r}") from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # Nobody cancelled this side: the remote process ended the call with itself.
        raise Unreachable(f"{what} dropped the call") from None
    except TimeoutError as error:
        logger.warning("%s did not answer in time", what)
        raise Unreachable(f"{what} did not answer in time; try again") from error
    except Exception as error:
        # Ray's own words are for whoever operates the cluster; below the first line they repeat it.
        logger.warning("%s is out of reach: %s", what, reason_of(error).partition("\n")[0])
        raise Unreachable(f"{what} is out of reach; try again") from error


def report_to(controller: DeploymentHandle[Any]) -> Callable[[WorkerReport], Awaitable[None]]:
    """Delivers a worker's reports to the controller."""

    async def send(report: WorkerReport) -> None:
        async with failures("the controller"):
            await controller.report.remote(report)

    return send


def tell_moves_to(
    controller: DeploymentHandle[Any],
) -> Callable[[Sequence[SessionMove]], Awaitable[None]]:
    """Tells the controller where sessions are that a leaving worker gave away."""

    async def tell(moves: Sequence[SessionMove]) -> None:
        async with failures("the controller"):
            await controller.sessions_moved.remote(moves)

    return tell


def ask_for_other(controller: DeploymentHandle[Any], own_id: str) -> Callable[[], Awaitable[bool]]:
    """Asks the controller whether another decode worker than this one takes requests."""

    async def ask() -> bool:
        async with failures("the controller"):
            is_there: bool = await apart(controller.has_ready_decoder.remote, own_id)
            return is_there

    return ask


def own_identity() -> tuple[str, str]:
    """This replica's worker id, new with every start of a process, and its node's id."""
    replica_id = serve.get_replica_context().replica_id
    return replica_id.unique_id, ray.get_runtime_context().get_node_id()
