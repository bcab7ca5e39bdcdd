"""Does a running Prometheus read the gateway's series, answer the dashboard and take the alerts?

Needs Debian's prometheus and promtool: `make test-long` unpacks them, on the PATH they do as well.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from ripresa.cluster.observability.metrics import (
    CONTENT_TYPE,
    TENANT_REFUSALS,
    TENANT_RUNNING,
    TENANT_TOKENS,
    BilledTokens,
    GatewayMetrics,
    TenantRefusal,
)
from ripresa.workers.errors import ErrorCode
from ripresa.workers.report import WorkerKind, WorkerReport
from ripresa.workers.request import EngineStats, FinishReason, WorkCounters
from ripresa.workers.shadow_counters import Divergence, ShadowCounters

pytestmark = pytest.mark.long

SCRAPE_INTERVAL_S = 1
# A rate needs two samples; Grafana's own variable also covers four scrape intervals.
RATE_INTERVAL = "4s"
READY_TIMEOUT_S = 60.0
POLL_INTERVAL_S = 0.25


def tool(repository: Path, name: str) -> str:
    unpacked = repository / ".ripresa/debian/usr/bin" / name
    found = str(unpacked) if unpacked.is_file() else shutil.which(name)
    if found is None:
        pytest.fail(f"{name} is not here: run `make prometheus` (Debian's package) first")
    return found


def dashboard_queries(repository: Path) -> list[tuple[str, str]]:
    """(panel title, query) with Grafana's variables filled in."""
    path = repository / "k8s/monitoring/dashboards/ripresa.json"
    return [
        (panel["title"], target["expr"].replace("$__rate_interval", RATE_INTERVAL))
        for panel in json.loads(path.read_text())["panels"]
        for target in panel["targets"]
    ]


class Traffic:
    """Requests that move a gateway's series on by the same amount at every scrape."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._lock = threading.Lock()
        self._scored = Divergence()
        self.metrics = GatewayMetrics(
            backends=("gloo",), clock=lambda: self._now_s, workers=lambda: [self._report()]
        )

    def scrape(self) -> bytes:
        with self._lock:
            self._bill("acme")
            self.metrics.continued(None, gap_s=2.0)
            self._scored += Divergence.of([0.02, 0.0], [True, False])
            for reason in FinishReason:
                self._finish(reason)
            for code in ErrorCode:
                self.metrics.request_started(num_prompt_tokens=3).failed(code)
            return self.metrics.render()

    def _bill(self, tenant: str) -> None:
        self.metrics.gauge(TENANT_RUNNING).labels(tenant).set(1)
        for kind in BilledTokens:
            self.metrics.counter(TENANT_TOKENS).labels(tenant, kind).inc(40)
        for reason in TenantRefusal:
            self.metrics.counter(TENANT_REFUSALS).labels(tenant, reason).inc()

    def _report(self) -> WorkerReport:
        shadow = ShadowCounters(divergences=(("exact", self._scored), ("repeat", self._scored)))
        stats = EngineStats(0, 0, 1, 1, 0, WorkCounters(), 0, 0, shadow=shadow)
        return WorkerReport("w", WorkerKind.DECODE, "n", 1, 1, stats)

    def _finish(self, reason: FinishReason) -> None:
        request = self.metrics.request_started(num_prompt_tokens=40)
        request.running()
        for _ in range(4):
            self._now_s += 0.02
            request.delta(num_tokens=2)
        counters = WorkCounters(
            encoder_rows=200, decoder_prefill_rows=60, decoder_rows=40, transfer_bytes=9_000
        )
        request.finished(reason, counters, backend="gloo")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[int]:
    """The port of a loopback server whose /metrics is a gateway's."""
    traffic = Traffic()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = traffic.scrape()
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing: a line a scrape helps nobody."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def prometheus(
    repository: Path, endpoint: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The address of a Prometheus that scrapes the endpoint and evaluates the alerts."""
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "alerts.yaml").write_text(alert_groups(repository))
    config = {
        "global": {"scrape_interval": f"{SCRAPE_INTERVAL_S}s", "evaluation_interval": "1s"},
        "rule_files": ["alerts.yaml"],
        "scrape_configs": [
            {
                "job_name": "ripresa",
                "static_configs": [{"targets": [f"127.0.0.1:{endpoint}"]}],
            }
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with held_port() as port, (folder / "log").open("w") as log:
        address = f"127.0.0.1:{port}"
        process = subprocess.Popen(
            [
                tool(repository, "prometheus"),
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            wait_for_samples(process, address, folder / "log")
            yield address
        finally:
            process.terminate()
            process.wait(timeout=30)


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """A free port that nobody else is given meanwhile, though a server may listen on it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def alert_groups(repository: Path) -> str:
    """The groups inside the PrometheusRule object, as Prometheus itself reads them."""
    rule = yaml.safe_load((repository / "k8s/monitoring/alerts/ripresa.yaml").read_text())
    groups: str = yaml.safe_dump(rule["spec"])
    return groups


def ask(address: str, path: str, **arguments: str) -> Any:
    query = urllib.parse.urlencode(arguments)
    with urllib.request.urlopen(f"http://{address}/api/v1/{path}?{query}", timeout=10) as answer:
        body = json.load(answer)
    assert body["status"] == "success", body
    return body["data"]


def wait_for_samples(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    """Returns when enough scrapes lie within one rate interval; fails with Prometheus's log."""
    needed = "min(count_over_time(ripresa_num_requests_running[4s])) >= 3"
    end_s = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < end_s:
        if process.poll() is not None:
            break
        # Until it listens and has opened its storage, it refuses.
        with contextlib.suppress(urllib.error.URLError):
            if ask(address, "query", query=needed)["result"]:
                return
        time.sleep(POLL_INTERVAL_S)
    pytest.fail(f"no samples after {READY_TIMEOUT_S} s; Prometheus says:\n{log.read_text()}")


def test_target_is_up(prometheus: str) -> None:
    (target,) = ask(prometheus, "targets")["activeTargets"]
    assert target["health"] == "up", target["lastError"]


def test_every_dashboard_query_has_data(repository: Path, prometheus: str) -> None:
    for title, query in dashboard_queries(repository):
        result = ask(prometheus, "query", query=query)["result"]
        assert result, f"{title}: no data for {query}"
        for series in result:
            value = float(series["value"][1])
            assert math.isfinite(value), f"{title}: {query} is {value}"


def test_values_are_what_the_traffic_makes_of_them(prometheus: str) -> None:
    def value(query: str) -> float:
        (series,) = ask(prometheus, "query", query=query)["result"]
        return float(series["value"][1])

    # Ratios between series, because how many scrapes there were is Prometheus's affair.
    finished = "sum(ripresa_request_success_total)"
    assert value(f"sum(ripresa_generation_tokens_total) / {finished}") == 8
    assert value(f"sum(ripresa_transfer_bytes_total) / {finished}") == 9_000
    assert value(f"sum(ripresa_decoder_rows_total) / {finished}") == 100
    assert value("ripresa_num_requests_running") == 0
    kl = "ripresa_replay_shadow_kl"
    assert value(f'{kl}_sum{{reference="exact"}} / {kl}_count') == pytest.approx(0.01)
    agreement = "ripresa_replay_shadow_top1_agreement"
    assert value(f'{agreement}_sum{{reference="repeat"}} / {agreement}_count') == 0.5
    median = "histogram_quantile(0.5, rate(ripresa_inter_token_latency_seconds_bucket[4s]))"
    assert 0.015 <= value(median) <= 0.03


def test_alerts_are_loaded_and_healthy(repository: Path, prometheus: str) -> None:
    wanted = {
        rule["alert"]
        for group in yaml.safe_load(alert_groups(repository))["groups"]
        for rule in group["rules"]
    }
    end_s = time.monotonic() + READY_TIMEOUT_S
    while True:
        rules = [rule for group in ask(prometheus, "rules")["groups"] for rule in group["rules"]]
        if all(rule["health"] != "unknown" for rule in rules) or time.monotonic() > end_s:
            break
        time.sleep(POLL_INTERVAL_S)
    assert {rule["name"]: rule["health"] for rule in rules} == dict.fromkeys(wanted, "ok")


def test_promtool_accepts_endpoint_and_alerts(repository: Path, tmp_path: Path) -> None:
    promtool = tool(repository, "promtool")
    (tmp_path / "alerts.yaml").write_text(alert_groups(repository))
    for arguments, text in (
        (["check", "metrics"], Traffic().scrape().decode()),
        (["check", "rules", "--lint-fatal", "alerts.yaml"], None),
    ):
        checked = subprocess.run(
            [promtool, *arguments],
            cwd=tmp_path,
            input=text,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert checked.returncode == 0, checked.stdout + checked.stderr


def test_alerts_fire_when_they_should(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "alerts.yaml").write_text(alert_groups(repository))
    cases = Path(__file__).parent / "alerts_test.yaml"
    shutil.copy(cases, tmp_path)
    checked = subprocess.run(
        [tool(repository, "promtool"), "test", "rules", cases.name],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_alert_has_a_case_that_fires(repository: Path) -> None:
    cases = yaml.safe_load((Path(__file__).parent / "alerts_test.yaml").read_text())["tests"]
    fired = {
        check["alertname"]
        for case in cases
        for check in case["alert_rule_test"]
        if check.get("exp_alerts")
    }
    assert fired == {
        rule["alert"]
        for group in yaml.safe_load(alert_groups(repository))["groups"]
        for rule in group["rules"]
    }
