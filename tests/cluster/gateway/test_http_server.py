"""Do the gateway's HTTP routes tell liveness, readiness, version and metrics?"""

from __future__ import annotations

import gzip
import tomllib
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from ray._common.utils import import_attr
from ray.serve._private import constants
from ray.serve._private.http_util import RequestIdMiddleware
from starlette.types import Receive, Scope, Send

from ripresa.cluster.gateway.http_server import http_app
from ripresa.cluster.gateway.proxy_headers import PROXY_CALLBACK, ReadableHeaders, middlewares
from ripresa.cluster.version import VERSION


def test_routes(service: Any, router: Any) -> None:
    client = TestClient(http_app(lambda: service))
    assert (client.get("/health").status_code, client.get("/health").content) == (200, b"")
    assert client.get("/ready").status_code == 200
    assert client.get("/version").json() == {"version": VERSION}
    metrics = client.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    assert "ripresa_num_requests_running 0.0" in metrics.text


def test_not_ready(service: Any, router: Any) -> None:
    client = TestClient(http_app(lambda: service))
    router.is_ready = False
    answer = client.get("/ready")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["type"] == "overloaded_error"
    router.is_ready = True
    service.start_draining()
    assert client.get("/ready").status_code == 503
    assert client.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("path", "status"),
    [("/version", 200), ("/tomatoes", 404), ("/v1/models/x", 404), ("/ready", 500)],
)
def test_one_id_behind_serve_s_proxy(service: Any, path: str, status: int) -> None:
    def found() -> Any:
        if status == 500:
            raise ValueError
        return service

    app = RequestIdMiddleware(http_app(found, is_behind_serve=True))
    client = TestClient(app, raise_server_exceptions=False)
    for asked in ({}, {"x-request-id": "mine"}):
        answer = client.get(path, headers=asked)
        (told,) = answer.headers.get_list("x-request-id")
        assert answer.status_code == status
        assert told == asked.get("x-request-id", told)
        assert status != 500 or told in answer.json()["error"]["message"]
    bad = client.get(path, headers={"x-request-id": "a b"})
    assert bad.json()["error"]["param"] == "x-request-id"
    assert len(bad.headers.get_list("x-request-id")) == 1


def test_the_version_is_the_package_s() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert project["version"] == VERSION


@pytest.mark.parametrize("name", [b"x-request-id", b"x-session-id", b"x-other", b"\xe9"])
def test_headers_that_serve_s_proxy_could_not_read_are_refused_before_it(
    service: Any, name: bytes
) -> None:
    app = ReadableHeaders(RequestIdMiddleware(http_app(lambda: service, is_behind_serve=True)))

    async def given(scope: Scope, receive: Receive, send: Send) -> None:
        """A client's bytes, which no client library would send."""
        await app({**scope, "headers": [*scope["headers"], (name, b"\xff\xfe")]}, receive, send)

    client = TestClient(given)
    for path, shape in (("/v1/models", "param"), ("/v1/messages", "type")):
        answer = client.get(path)
        assert answer.status_code == 400
        assert answer.json()["error"][shape]
        assert len(answer.headers.get_list("x-request-id")) == 1


def test_an_empty_id_counts_as_none(service: Any) -> None:
    proxied = ReadableHeaders(RequestIdMiddleware(http_app(lambda: service, is_behind_serve=True)))
    for app in (proxied, http_app(lambda: service)):
        answer = TestClient(app).get("/v1/models", headers={"x-request-id": ""})
        (told,) = answer.headers.get_list("x-request-id")
        assert told


def test_the_proxy_finds_what_stands_before_it() -> None:
    (path,) = PROXY_CALLBACK.values()
    assert import_attr(path) is middlewares
    assert [one.cls for one in middlewares()] == [ReadableHeaders]
    assert set(PROXY_CALLBACK) == {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"}
    assert hasattr(constants, "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH")


@pytest.mark.parametrize("encoding", ["gzip", "br", "gzip, identity"])
def test_compressed_bodies_are_refused_as_such(service: Any, encoding: str) -> None:
    client = TestClient(http_app(lambda: service))
    headers = {"content-encoding": encoding}
    answer = client.post("/v1/completions", content=gzip.compress(b"{}"), headers=headers)
    assert answer.status_code == 415
    assert answer.json()["error"]["param"] == "content-encoding"
    anthropic = client.post("/v1/messages", content=b"x", headers=headers)
    assert anthropic.status_code == 415
    assert anthropic.json()["error"]["type"] == "invalid_request_error"
    plain = client.post(
        "/detokenize", json={"tokens": [40]}, headers={"content-encoding": "identity"}
    )
    assert plain.status_code == 200


@pytest.mark.parametrize("path", ["/v1/tomatoes", "/v1/messages/tomatoes", "/v1/models/x"])
@pytest.mark.parametrize("client_headers", [{}, {"anthropic-version": "2023-06-01"}])
def test_what_is_not_there_is_told_in_the_caller_s_words(
    service: Any, path: str, client_headers: dict[str, str]
) -> None:
    answer = TestClient(http_app(lambda: service)).get(path, headers=client_headers)
    assert answer.status_code == 404
    body = answer.json()
    if client_headers or path.startswith("/v1/messages"):
        assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")
        assert body["request_id"] == answer.headers["x-request-id"]
    else:
        assert body["error"]["type"] == "invalid_request_error"
        assert body["error"]["code"] in ("not_found", "model_not_found")


def test_another_method_is_the_caller_s_fault(service: Any) -> None:
    answer = TestClient(http_app(lambda: service)).get("/v1/messages")
    assert answer.status_code == 405
    assert answer.json()["error"]["type"] == "invalid_request_error"
