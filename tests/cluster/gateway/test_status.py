"""Does every error code have a wire status, with its details?"""

from __future__ import annotations

import pickle

import pytest
from google.rpc import error_details_pb2

from ripresa.cluster.gateway.status import (
    MAX_MESSAGE_CHARS,
    STATUS,
    RequestError,
    http_error,
    to_rpc_status,
)
from ripresa.workers.errors import ErrorCode, InvalidArgument, RipresaError, Unavailable


@pytest.mark.parametrize("code", ErrorCode)
def test_every_code_is_mapped_to_its_namesake(code: ErrorCode) -> None:
    assert STATUS[code].grpc.name == code
    assert 400 <= STATUS[code].http < 600
    status = to_rpc_status(RipresaError(code, "what happened"), "r1")
    assert status.code == STATUS[code].grpc.value[0]
    assert status.message == "what happened"


def test_retry_hint() -> None:
    status = to_rpc_status(Unavailable("gone", retry_after_s=1.5), "r1")
    hint = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(hint) for detail in status.details)
    assert hint.retry_delay.ToTimedelta().total_seconds() == 1.5
    code, headers, body = http_error(Unavailable("gone", retry_after_s=1.5))
    assert (code, headers) == (503, {"Retry-After": "2"})
    assert body["error"] == {
        "message": "gone",
        "type": "overloaded_error",
        "param": None,
        "code": "unavailable",
    }


def test_a_long_message_is_cut() -> None:
    status = to_rpc_status(InvalidArgument("field", "界" * 10_000), "r1")
    assert len(status.message) == MAX_MESSAGE_CHARS
    assert status.message.endswith("…")


def test_a_gateway_error_does_not_travel() -> None:
    with pytest.raises(TypeError, match="stays in the gateway"):
        pickle.dumps(RequestError(ErrorCode.NOT_FOUND, "MODEL_NOT_FOUND", "no"))
