"""What can go wrong, in one vocabulary: a code, a place, a verdict (worth retrying or not).

Every error that crosses a process boundary is a `RipresaError`. The gateway maps `ErrorCode` to a
gRPC status and an HTTP status in one table; nothing else in the project knows either protocol.
"""

from __future__ import annotations

from enum import StrEnum


class ErrorCode(StrEnum):
    """The failure classes of the project; names follow gRPC's canonical codes."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    NOT_FOUND = "NOT_FOUND"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    UNAVAILABLE = "UNAVAILABLE"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    CANCELLED = "CANCELLED"
    DATA_LOSS = "DATA_LOSS"
    INTERNAL = "INTERNAL"


class RipresaError(Exception):
    """A failure with a verdict.

    Args:
        code: the failure class.
        message: what happened and what the user can do about it.
        field: the request or config field at fault (dotted path), if one is.
        retry_after_s: seconds after which a retry may succeed; None when retrying is no use.

    Instances survive pickling, so that they cross process boundaries unchanged.
    """

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        *,
        field: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed elsewhere or later."""
        return self.retry_after_s is not None

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.code, self.message, self.field, self.retry_after_s))

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message


def reason_of(error: BaseException) -> str:
    """An exception in words; the name of its kind if it has none, as asyncio's `TimeoutError`."""
    return str(error) or type(error).__name__


def _rebuild(
    cls: type[RipresaError],
    code: ErrorCode,
    message: str,
    field: str | None,
    retry_after_s: float | None,
) -> RipresaError:
    error = cls.__new__(cls)
    RipresaError.__init__(error, code, message, field=field, retry_after_s=retry_after_s)
    return error


class InvalidArgument(RipresaError):
    """The request or configuration is wrong; `field` names the part."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(ErrorCode.INVALID_ARGUMENT, message, field=field)


class ConfigError(InvalidArgument):
    """A configuration file or model config is wrong."""


class CheckpointError(RipresaError):
    """A checkpoint is missing, corrupt, truncated or of the wrong shape."""

    def __init__(self, message: str, *, tensor: str | None = None) -> None:
        super().__init__(ErrorCode.DATA_LOSS, message, field=tensor)


class ResourceExhausted(RipresaError):
    """A pool, queue or quota is full; the request was not started."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(ErrorCode.RESOURCE_EXHAUSTED, message, retry_after_s=retry_after_s)


class Unavailable(RipresaError):
    """A worker, peer or lane is gone; another one, or a later retry, may serve the request."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(ErrorCode.UNAVAILABLE, message, retry_after_s=retry_after_s)


class LeaderGone(Unavailable):
    """Another request's blocks, for which this one waited, will not come; nothing was computed.

    Ask the directory again: somebody, perhaps this request, computes them now.
    """


class WorkerLeaving(Unavailable):
    """The worker is leaving: it takes nothing new, or ended a request for others to go on with."""


class Unreachable(Unavailable):
    """The call did not reach the worker, or the worker died over it: it counts as lost."""
