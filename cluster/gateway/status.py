"""How an error looks on the wire: one table from `ErrorCode` to gRPC and HTTP, and its details.

Every error carries `google.rpc.ErrorInfo` (reason, domain "ripresa") and `RequestInfo`; a bad field
adds `BadRequest`, what was not found `ResourceInfo` instead, what is full `QuotaFailure`, and an
error that a retry may cure `RetryInfo`. A field without a `BadRequest` is in `ErrorInfo.metadata`.
No stack trace, no prompt text, and every text in it is cut to a bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from google.rpc.status_pb2 import Status as RpcStatus  # type: ignore[import-untyped]
from grpc_status import rpc_status

from ripresa.cluster.routing.planner import AllLeaving, NoWorker
from ripresa.cluster.routing.waiting_line import QueueTimeout
from ripresa.workers.errors import ErrorCode, RipresaError, Unreachable, WorkerLeaving

DOMAIN = "ripresa"

# A status travels in HTTP/2 trailers, which peers cap at 8 KiB. A byte of the message can take
# three there (percent-encoded) and, with the two copies in the base64 details, nearly six; the
# bounds leave room for every detail at once.
MAX_MESSAGE_BYTES = 1000
MAX_NAME_BYTES = 128
MAX_METADATA_ENTRIES = 4
MAX_PUSHBACK_S = 10.0
"""After a longer time to wait, it is the client's user who decides whether to."""

# Codes whose `field`, where they have one, is a part of the request.
_FIELD_CODES = (ErrorCode.INVALID_ARGUMENT, ErrorCode.NOT_FOUND, ErrorCode.ALREADY_EXISTS)


@dataclass(frozen=True, slots=True)
class WireStatus:
    """What clients see of an error code.

    Attributes:
        grpc: the gRPC status.
        http: the HTTP status.
        http_type: `error.type` of an OpenAI-shaped HTTP error body.
        reason: `ErrorInfo.reason`, unless the error brings a narrower one.
    """

    grpc: grpc.StatusCode
    http: int
    http_type: str
    reason: str


_G = grpc.StatusCode
STATUS: Mapping[ErrorCode, WireStatus] = MappingProxyType(
    {
        ErrorCode.INVALID_ARGUMENT: WireStatus(
            _G.INVALID_ARGUMENT, 400, "invalid_request_error", "INVALID_REQUEST"
        ),
        ErrorCode.NOT_FOUND: WireStatus(_G.NOT_FOUND, 404, "invalid_request_error", "NOT_FOUND"),
        ErrorCode.ALREADY_EXISTS: WireStatus(
            _G.ALREADY_EXISTS, 409, "invalid_request_error", "ALREADY_EXISTS"
        ),
        ErrorCode.FAILED_PRECONDITION: WireStatus(
            _G.FAILED_PRECONDITION, 409, "invalid_request_error", "FAILED_PRECONDITION"
        ),
        ErrorCode.RESOURCE_EXHAUSTED: WireStatus(
            _G.RESOURCE_EXHAUSTED, 429, "rate_limit_error", "QUEUE_FULL"
        ),
        ErrorCode.UNAUTHENTICATED: WireStatus(
            _G.UNAUTHENTICATED, 401, "authentication_error", "BAD_KEY"
        ),
        ErrorCode.PERMISSION_DENIED: WireStatus(
            _G.PERMISSION_DENIED, 403, "permission_error", "TENANT_FORBIDDEN"
        ),
        ErrorCode.UNAVAILABLE: WireStatus(_G.UNAVAILABLE, 503, "overloaded_error", "UNAVAILABLE"),
        ErrorCode.DEADLINE_EXCEEDED: WireStatus(
            _G.DEADLINE_EXCEEDED, 504, "timeout_error", "DEADLINE_EXCEEDED"
        ),
        ErrorCode.CANCELLED: WireStatus(_G.CANCELLED, 499, "server_error", "CANCELLED"),
        ErrorCode.DATA_LOSS: WireStatus(_G.DATA_LOSS, 500, "server_error", "DATA_LOSS"),
        ErrorCode.INTERNAL: WireStatus(_G.INTERNAL, 500, "server_error", "ENGINE_ERROR"),
    }
)

_REASONS: Mapping[type[RipresaError], str] = MappingProxyType(
    {
        QueueTimeout: "QUEUE_TIMEOUT",
        AllLeaving: "DRAINING",
        NoWorker: "NO_READY_WORKER",
        WorkerLeaving: "DRAINING",
        Unreachable: "WORKER_LOST",
    }
)
"""Errors of other layers that say more than their code."""

_HTTP: Mapping[str, int] = MappingProxyType({"MESSAGE_TOO_LARGE": 413, "UNSUPPORTED_ENCODING": 415})
"""Reasons for which HTTP has a status of their own."""
HTTP_STATUSES = frozenset((*(wire.http for wire in STATUS.values()), *_HTTP.values()))

_QUOTAS: Mapping[ErrorCode, str] = MappingProxyType({ErrorCode.RESOURCE_EXHAUSTED: "workers"})
"""Whose quota is used up where an error of another layer says that one is."""


class RequestError(RipresaError):
    """An error that the gateway itself raises about a request, with a narrower reason.

    Args:
        reason: `ErrorInfo.reason`, in UPPER_SNAKE_CASE.
        metadata: `ErrorInfo.metadata`: at most `MAX_METADATA_ENTRIES` numbers that a client may
            act on.
        quota_subject: whose quota is used up; None where it is no quota.
        resource: type and name of what was not found; of the two details it is told rather than
            `field`, which HTTP tells.
        precondition: whose state is not as the request needs it.
        is_final: the same call fails again, and `retry_after_s` is about another one.
    """

    def __init__(
        self,
        code: ErrorCode,
        reason: str,
        message: str,
        *,
        field: str | None = None,
        retry_after_s: float | None = None,
        metadata: Mapping[str, str] = MappingProxyType({}),
        quota_subject: str | None = None,
        resource: tuple[str, str] | None = None,
        precondition: str | None = None,
        is_final: bool = False,
    ) -> None:
        if len(metadata) > MAX_METADATA_ENTRIES:
            raise ValueError(f"a status has room for {MAX_METADATA_ENTRIES} metadata entries")
        super().__init__(code, message, field=field, retry_after_s=retry_after_s)
        self.reason = reason
        self.metadata = metadata
        self.quota_subject = quota_subject
        self.resource = resource
        self.precondition = precondition
        self.is_final = is_final

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("a RequestError stays in the gateway process")


def to_rpc_status(error: RipresaError, request_id: str) -> RpcStatus:
    """The `google.rpc.Status` of an error, its details included; it fits into 8 KiB of trailers."""
    wire = STATUS[error.code]
    text = shorten(str(error))
    info = error_details_pb2.ErrorInfo(reason=_reason(error), domain=DOMAIN)
    if isinstance(error, RequestError):
        for key, value in error.metadata.items():
            info.metadata[shorten(key, 32)] = shorten(value, 32)
    request_info = error_details_pb2.RequestInfo(request_id=shorten(request_id, MAX_NAME_BYTES))
    details: list[Message] = [info, request_info]
    resource = error.resource if isinstance(error, RequestError) else None
    if error.field is not None and (error.code not in _FIELD_CODES or resource is not None):
        info.metadata["field"] = shorten(error.field, MAX_NAME_BYTES)
    elif error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=shorten(error.field, MAX_NAME_BYTES), description=shorten(error.message)
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    subject = error.quota_subject if isinstance(error, RequestError) else _QUOTAS.get(error.code)
    if subject is not None:
        quota = error_details_pb2.QuotaFailure.Violation(
            subject=shorten(subject, MAX_NAME_BYTES), description=shorten(error.message)
        )
        details.append(error_details_pb2.QuotaFailure(violations=[quota]))
    if resource is not None:
        kind, name = resource
        details.append(
            error_details_pb2.ResourceInfo(
                resource_type=kind, resource_name=shorten(name, MAX_NAME_BYTES)
            )
        )
    if isinstance(error, RequestError) and error.precondition is not None:
        failed = error_details_pb2.PreconditionFailure.Violation(
            type=error.reason,
            subject=shorten(error.precondition, MAX_NAME_BYTES),
            description=shorten(error.message),
        )
        details.append(error_details_pb2.PreconditionFailure(violations=[failed]))
    if error.retry_after_s is not None:
        delay = Duration()
        delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    number: int = wire.grpc.value[0]
    status = RpcStatus(code=number, message=text)
    for detail in details:
        status.details.add().Pack(detail)
    return status


def end(context: grpc.aio.ServicerContext[Any, Any], error: RipresaError, request_id: str) -> None:
    """Give a call the error's status and details; it ends with them when its handler returns.

    `context.abort` would raise, and gRPC keep what it raised with the call: a cycle through every
    frame that handled the request, so that a refused prompt stayed until the collector came.

    The retry hint is also given in gRPC's own terms, so that a client's retry policy, which sees
    codes alone, neither repeats a request that was aborted nor comes back too early, nor waits
    for minutes without a word.
    """
    status = rpc_status.to_status(to_rpc_status(error, request_id))
    pause_s = error.retry_after_s
    if isinstance(error, RequestError) and error.is_final:
        pause_s = None
    pushback_ms = -1 if pause_s is None or pause_s > MAX_PUSHBACK_S else round(1000 * pause_s)
    pushback = (("grpc-retry-pushback-ms", str(pushback_ms)),)
    context.set_code(status.code)
    context.set_details(status.details)
    context.set_trailing_metadata((*status.trailing_metadata, *pushback))


def http_error(error: RipresaError) -> tuple[int, dict[str, str], dict[str, dict[str, object]]]:
    """HTTP status, headers and an OpenAI-shaped body."""
    wire = STATUS[error.code]
    headers = {}
    if error.code is ErrorCode.UNAUTHENTICATED:
        headers["WWW-Authenticate"] = "Bearer"
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    body: dict[str, object] = {
        "message": shorten(str(error)),
        "type": wire.http_type,
        "param": None if error.field is None else shorten(error.field, MAX_NAME_BYTES),
        "code": _reason(error).lower(),
    }
    return _HTTP.get(_reason(error), wire.http), headers, {"error": body}


def _reason(error: RipresaError) -> str:
    """Why, in UPPER_SNAKE_CASE."""
    if isinstance(error, RequestError):
        return error.reason
    narrower = (reason for kind, reason in _REASONS.items() if isinstance(error, kind))
    return next(narrower, STATUS[error.code].reason)


ANTHROPIC_TYPES: Mapping[int, str] = MappingProxyType(
    {
        400: "invalid_request_error",
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        409: "invalid_request_error",
        405: "invalid_request_error",
        413: "request_too_large",
        415: "invalid_request_error",
        429: "rate_limit_error",
        503: "overloaded_error",
        504: "timeout_error",
    }
)


def anthropic_error(
    error: RipresaError, request_id: str, status: int | None = None
) -> tuple[int, dict[str, str], dict[str, object]]:
    """HTTP status, headers and a body in the shape of Anthropic's API.

    Args:
        status: told instead of the error's own.
    """
    code, headers, _ = http_error(error)
    code = status or code
    told = {"type": ANTHROPIC_TYPES.get(code, "api_error"), "message": shorten(str(error))}
    return code, headers, {"type": "error", "error": told, "request_id": request_id}


def shorten(text: str, max_bytes: int = MAX_MESSAGE_BYTES) -> str:
    """A text cut to `max_bytes` of UTF-8; what UTF-8 cannot hold becomes a question mark."""
    raw = text.encode("utf-8", errors="replace")
    if len(raw) > max_bytes:
        mark = " …".encode()
        raw = raw[: max_bytes - len(mark)].decode("utf-8", errors="ignore").encode() + mark
    return raw.decode("utf-8")


def unexpected_failure(request_id: str) -> str:
    """What a client is told of a failure that nobody foresaw."""
    return f"unexpected failure; the gateway's log has it under request {request_id}"
