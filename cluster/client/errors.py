"""What can go wrong for a client? One exception a kind of failure, made from a status."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import grpc
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from google.rpc.status_pb2 import Status as RpcStatus  # type: ignore[import-untyped]

from ripresa.workers.errors import ErrorCode, RipresaError

DETAILS_KEY = "grpc-status-details-bin"


class CallError(RipresaError):
    """A call failed.

    Attributes:
        reason: the narrowest name of the cause, in UPPER_SNAKE_CASE, to branch on.
        request_id: names the call in the gateway's log and for `ripresa explain`.
        metadata: numbers that belong to the reason, as text.
        advice: what to do about it.
    """

    code_of_kind = ErrorCode.INTERNAL
    advice = "report it with the request id"

    def __init__(
        self,
        message: str,
        *,
        code: ErrorCode | None = None,
        reason: str = "",
        request_id: str = "",
        field: str | None = None,
        retry_after_s: float | None = None,
        metadata: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        code = code or self.code_of_kind
        super().__init__(code, message, field=field, retry_after_s=retry_after_s)
        self.reason = reason or code.name
        self.request_id = request_id
        self.metadata = dict(metadata)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.__dict__))


def _rebuild(cls: type[CallError], message: str, attributes: dict[str, object]) -> CallError:
    error = cls(message)
    error.__dict__.update(attributes)
    return error


class InvalidRequestError(CallError):
    """The request is wrong; `field` names the part."""

    code_of_kind = ErrorCode.INVALID_ARGUMENT
    advice = "correct the named field; the same request fails again"


class NotFoundError(CallError):
    """There is no such model, session, turn or stream."""

    code_of_kind = ErrorCode.NOT_FOUND
    advice = "check the name; a session may have been closed, a stream be too old"


class ConflictError(CallError):
    """The id is in use."""

    code_of_kind = ErrorCode.ALREADY_EXISTS
    advice = "take another id, or none, or wait until the other one is over"


class PreconditionError(CallError):
    """What is there does not allow the request; `reason` says why."""

    code_of_kind = ErrorCode.FAILED_PRECONDITION
    advice = "after SESSION_EXPIRED open a new session, or send the conversation whole"


class NotAuthenticatedError(CallError):
    """The API key is missing or wrong."""

    code_of_kind = ErrorCode.UNAUTHENTICATED
    advice = "give the client an `api_key` that the cluster knows"


class NotPermittedError(CallError):
    """The API key may not do this."""

    code_of_kind = ErrorCode.PERMISSION_DENIED
    advice = "use a key that may, or ask who gave out the key"


class OverloadedError(CallError):
    """The cluster is full, or a quota is; nothing was computed."""

    code_of_kind = ErrorCode.RESOURCE_EXHAUSTED
    advice = "wait `retry_after_s` and send the same request again, or send less at once"


class UnavailableError(CallError):
    """No gateway or worker could serve the request, or a stream broke and could not go on."""

    code_of_kind = ErrorCode.UNAVAILABLE
    advice = "send the same request again"


class DeadlineError(CallError):
    """`timeout_s` passed; what was streamed until then is valid."""

    code_of_kind = ErrorCode.DEADLINE_EXCEEDED
    advice = "allow more time with `timeout_s`, or ask for fewer tokens"


class CancelledError(CallError):
    """The request was aborted, here or by another client."""

    code_of_kind = ErrorCode.CANCELLED
    advice = "send it again if it was not meant to end"


class ServerError(CallError):
    """The server failed in a way that it did not foresee."""


_KINDS: Mapping[str, type[CallError]] = MappingProxyType(
    {
        "INVALID_ARGUMENT": InvalidRequestError,
        "OUT_OF_RANGE": InvalidRequestError,
        "NOT_FOUND": NotFoundError,
        "ALREADY_EXISTS": ConflictError,
        "FAILED_PRECONDITION": PreconditionError,
        "UNAUTHENTICATED": NotAuthenticatedError,
        "PERMISSION_DENIED": NotPermittedError,
        "RESOURCE_EXHAUSTED": OverloadedError,
        "UNAVAILABLE": UnavailableError,
        "DEADLINE_EXCEEDED": DeadlineError,
        "CANCELLED": CancelledError,
    }
)
"""By the names of gRPC's codes, which `ErrorCode` follows."""


class Status(Protocol):
    """What a failed call says, blocking or not."""

    def code(self) -> grpc.StatusCode: ...
    def details(self) -> str | None: ...
    def trailing_metadata(self) -> object: ...


def call_error(status: Status, request_id: str = "") -> CallError:
    """The exception of a status.

    Args:
        request_id: used where the status does not tell it.
    """
    name, details = status.code().name, rich_status(status)
    message, field, retry_after_s = status.details() or name, None, None
    info = error_details_pb2.ErrorInfo()
    for packed in details.details if details is not None else ():
        bad, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        asked = error_details_pb2.RequestInfo()
        if packed.Unpack(bad) and bad.field_violations:
            field = bad.field_violations[0].field
            message = bad.field_violations[0].description
        elif packed.Unpack(retry):
            retry_after_s = retry.retry_delay.ToTimedelta().total_seconds()
        elif packed.Unpack(asked):
            request_id = asked.request_id
        else:
            packed.Unpack(info)
    metadata = dict(info.metadata)
    if field is None and (field := metadata.pop("field", None)) is not None:
        message = message.removeprefix(f"{field}: ")
    return _KINDS.get(name, ServerError)(
        message,
        code=ErrorCode.__members__.get(name),
        reason=info.reason or name,
        request_id=request_id,
        field=field,
        retry_after_s=retry_after_s,
        metadata=metadata,
    )


def rich_status(status: Status) -> RpcStatus | None:
    """What the server itself says of a failure; None if the status is not the server's own.

    A connection that breaks has a status, too; gRPC makes it up, without details.
    """
    metadata = status.trailing_metadata()
    for key, value in metadata if metadata is not None else ():  # type: ignore[attr-defined]
        if key == DETAILS_KEY:
            return RpcStatus.FromString(value)
    return None
