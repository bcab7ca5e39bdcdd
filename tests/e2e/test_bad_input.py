"""Does every bad request get its own status and field name, and does the cluster serve on?"""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from reference_engine import Question
from served_cluster import ServedCluster, Stream, generate_request

from ripresa.protos import ripresa_pb2 as pb

GENERATE = "/ripresa.v1.Inference/Generate"
INVALID = grpc.StatusCode.INVALID_ARGUMENT
MISSING = grpc.StatusCode.NOT_FOUND


def request(**sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="a", sampling=pb.SamplingParams(**sampling))


def tokens(*ids: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids))


def two_inputs() -> bytes:
    """What no generated class would send: both members of the oneof."""
    return pb.GenerateRequest(text="a").SerializeToString() + tokens(40).SerializeToString()


def not_utf8() -> bytes:
    """A text field of two bytes that are no character."""
    return b"\x12\x02\xc3\x28"


def truncated() -> bytes:
    return pb.GenerateRequest(text="a" * 100).SerializeToString()[:-1]


BAD: dict[str, tuple[Callable[[], bytes], grpc.StatusCode, str, str]] = {
    "no input": (pb.GenerateRequest().SerializeToString, INVALID, "input", "give the prompt"),
    "empty text": (pb.GenerateRequest(text="").SerializeToString, INVALID, "text", "empty"),
    "empty ids": (tokens().SerializeToString, INVALID, "token_ids.ids", "empty"),
    "long ids": (tokens(*[40] * 8192).SerializeToString, INVALID, "token_ids.ids", "8192"),
    "long text": (
        pb.GenerateRequest(text="ten words " * 60000).SerializeToString,
        INVALID,
        "text",
        "context",
    ),
    "unknown id": (tokens(40, 4096).SerializeToString, INVALID, "token_ids.ids[1]", "4096"),
    "negative temperature": (
        request(temperature=-0.1).SerializeToString,
        INVALID,
        "sampling.temperature",
        "at least 0",
    ),
    "no tokens": (request(max_tokens=0).SerializeToString, INVALID, "sampling.max_tokens", "1"),
    "two inputs": (two_inputs, INVALID, "input", "not both"),
    "not UTF-8": (not_utf8, INVALID, "text", "UTF-8"),
    "truncated": (truncated, INVALID, "request", "not a valid"),
    "unknown model": (
        pb.GenerateRequest(text="a", options=pb.RequestOptions(model="other")).SerializeToString,
        MISSING,
        "options.model",
        "'other' is not served",
    ),
}


@pytest.mark.parametrize(("payload", "code", "field", "words"), BAD.values(), ids=BAD.keys())
def test_bad_request(
    split: ServedCluster,
    payload: Callable[[], bytes],
    code: grpc.StatusCode,
    field: str,
    words: str,
) -> None:
    before = split.rows()
    send = split.channel.unary_stream(
        GENERATE,
        request_serializer=bytes,
        response_deserializer=pb.GenerateResponse.FromString,
    )
    answer = Stream(send(payload(), timeout=60)).end()
    assert answer.code is code, answer.details
    assert answer.details.startswith(f"{field}: ")
    if code is INVALID:
        assert answer.field == field
    assert words in answer.details
    assert "Traceback" not in answer.details
    assert answer.started is None
    assert split.rows() == before


def raw_http(cluster: ServedCluster, *headers: bytes) -> tuple[int, dict[str, str], Any]:
    """What a GET with these header lines is answered: status, headers, JSON body."""
    host, port = cluster.cluster.http_address.split(":")
    lines = b"\r\n".join((b"GET /v1/models HTTP/1.1", b"Host: x", b"Connection: close", *headers))
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(lines + b"\r\n\r\n")
        response = http.client.HTTPResponse(connection)
        response.begin()
        told = {name.lower(): value for name, value in response.getheaders()}
        return response.status, told, json.loads(response.read())


@pytest.mark.parametrize("name", [b"x-request-id", b"x-session-id", b"x-other"])
def test_headers_that_are_no_text_are_the_client_s_fault(split: ServedCluster, name: bytes) -> None:
    status, headers, body = raw_http(split, name + b": \xff\xfe")
    assert status == 400
    assert body["error"]["param"] == name.decode()
    assert headers["x-request-id"]


def test_an_empty_id_is_none(split: ServedCluster) -> None:
    status, headers, _ = raw_http(split, b"x-request-id:")
    assert status == 200
    assert headers["x-request-id"]


def test_bad_requests_are_told_apart_from_failures(split: ServedCluster) -> None:
    """Good requests work afterwards, and each refusal was counted by its code."""
    before = split.metrics()
    assert split.ask(pb.GenerateRequest(text="")).code is INVALID
    after = split.metrics()
    failures = "ripresa_request_failure_total"
    assert after[failures] == before[failures] + 1
    assert len(split.ask(generate_request(Question((40, 41), max_tokens=2))).tokens) == 2
    split.assert_idle()


def test_the_longest_prompt_is_served(split: ServedCluster, agent_tokens: tuple[int, ...]) -> None:
    question = Question((agent_tokens * 3)[:8191], max_tokens=1)
    assert len(split.ask(question).tokens) == 1
