"""Do the gateway's HTTP routes tell liveness, readiness, version and metrics?"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from ray.serve._private.http_util import RequestIdMiddleware

from ripresa.cluster.gateway.http_server import http_app
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
