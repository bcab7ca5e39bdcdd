"""Does every error code have a wire status, with its details?"""

from __future__ import annotations

import pickle
from urllib.parse import quote

import pytest
from google.rpc import error_details_pb2

from ripresa.cluster.gateway.status import (
    MAX_MESSAGE_BYTES,
    MAX_METADATA_ENTRIES,
    STATUS,
    RequestError,
    http_error,
    to_rpc_status,
)
from ripresa.cluster.routing.waiting_line import QueueTimeout
from ripresa.workers.errors import (
    ErrorCode,
    InvalidArgument,
    ResourceExhausted,
    RipresaError,
    Unavailable,
)


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


@pytest.mark.parametrize(
    "error", [ResourceExhausted("every worker is full"), QueueTimeout("nobody left in time")]
)
def test_what_is_full_is_a_quota(error: ResourceExhausted) -> None:
    quota, hint = error_details_pb2.QuotaFailure(), error_details_pb2.RetryInfo()
    details = to_rpc_status(error, "r1").details
    assert any(detail.Unpack(quota) for detail in details)
    assert quota.violations[0].subject == "workers"
    assert any(detail.Unpack(hint) for detail in details)


def test_what_was_not_found_is_told_as_a_resource_and_over_http_by_its_field() -> None:
    error = RequestError(
        ErrorCode.NOT_FOUND, "MODEL_NOT_FOUND", "no", field="model", resource=("model", "gpt")
    )
    resource, bad = error_details_pb2.ResourceInfo(), error_details_pb2.BadRequest()
    details = to_rpc_status(error, "r1").details
    assert any(detail.Unpack(resource) for detail in details)
    assert (resource.resource_type, resource.resource_name) == ("model", "gpt")
    assert not any(detail.Unpack(bad) for detail in details)
    assert http_error(error)[2]["error"]["param"] == "model"


def test_a_long_message_is_cut() -> None:
    status = to_rpc_status(InvalidArgument("field", "界" * 10_000), "r1")
    assert MAX_MESSAGE_BYTES - 3 < len(status.message.encode()) <= MAX_MESSAGE_BYTES
    assert status.message.endswith("界 …")


@pytest.mark.parametrize("character", ["a", "%", "\x01", "é", "界", "🦊", "\ud800"])
def test_a_status_fits_into_the_trailers_whatever_it_quotes(character: str) -> None:
    text = character * 20_000
    error = RequestError(
        ErrorCode.INVALID_ARGUMENT,
        "CONTEXT_LENGTH_EXCEEDED",
        text,
        field=text,
        retry_after_s=1e6,
        metadata={f"{place}{text}": text for place in range(MAX_METADATA_ENTRIES)},
    )
    status = to_rpc_status(error, text)
    assert len(status.details) == 4
    percent_encoded = len(quote(status.message, safe=""))
    base64_encoded = -(-status.ByteSize() // 3) * 4
    other_trailers = 256
    assert percent_encoded + base64_encoded + other_trailers <= 8192


def test_metadata_has_a_bound() -> None:
    entries = {str(number): "1" for number in range(MAX_METADATA_ENTRIES + 1)}
    with pytest.raises(ValueError, match="metadata entries"):
        RequestError(ErrorCode.NOT_FOUND, "MODEL_NOT_FOUND", "no", metadata=entries)


@pytest.mark.parametrize("code", ErrorCode)
def test_the_field_at_fault_is_a_detail(code: ErrorCode) -> None:
    status = to_rpc_status(RipresaError(code, "no", field="options.model"), "r1")
    bad = error_details_pb2.BadRequest()
    has_field = any(detail.Unpack(bad) for detail in status.details)
    assert has_field == (code in {"INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS"})
    info = error_details_pb2.ErrorInfo()
    assert any(detail.Unpack(info) for detail in status.details)
    assert info.metadata.get("field") == (None if has_field else "options.model")
    if has_field:
        assert [violation.field for violation in bad.field_violations] == ["options.model"]


def test_a_gateway_error_does_not_travel() -> None:
    with pytest.raises(TypeError, match="stays in the gateway"):
        pickle.dumps(RequestError(ErrorCode.NOT_FOUND, "MODEL_NOT_FOUND", "no"))
