"""Do the gateway's HTTP routes tell liveness, readiness, version and metrics?"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient

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


def test_the_version_is_the_package_s() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert project["version"] == VERSION
