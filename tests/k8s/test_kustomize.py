"""What would `kubectl apply -k` send? Built by kubectl itself, without a cluster.

Needs Debian's kubectl: `make test-long` unpacks it, on the PATH it does as well.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.long

Document = dict[str, Any]


def build(repository: Path, folder: str) -> dict[str, Document]:
    """kind -> object, of a folder with one object a kind."""
    unpacked = repository / ".ripresa/debian/usr/bin/kubectl"
    kubectl = str(unpacked) if unpacked.is_file() else shutil.which("kubectl")
    if kubectl is None:
        pytest.fail("kubectl is not here: run `make kubectl` (Debian's package) first")
    built = subprocess.run(
        [kubectl, "kustomize", folder], cwd=repository, capture_output=True, text=True, timeout=60
    )
    assert built.returncode == 0, built.stderr
    documents = list(yaml.safe_load_all(built.stdout))
    by_kind = {document["kind"]: document for document in documents}
    assert len(by_kind) == len(documents)
    return by_kind


def test_service_mounts_the_generated_map(
    repository: Path, mistakes_of: Callable[[Document], list[str]]
) -> None:
    built = build(repository, "k8s")
    assert built.keys() == {"ConfigMap", "RayService"}
    for document in built.values():
        assert mistakes_of(document) == []
    name = built["ConfigMap"]["metadata"]["name"]
    assert name.startswith("ripresa-config-")
    cluster = built["RayService"]["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        settings, keys = group["template"]["spec"]["volumes"]
        assert settings["configMap"]["name"] == name
        # An operator makes it; its name has no hash.
        assert keys["secret"]["secretName"] == "ripresa-api-keys"


def test_monitoring_carries_the_dashboard(
    repository: Path, mistakes_of: Callable[[Document], list[str]]
) -> None:
    built = build(repository, "k8s/monitoring")
    assert built.keys() == {"ConfigMap", "PodMonitor", "PrometheusRule"}
    for document in built.values():
        assert mistakes_of(document) == []
    config_map = built["ConfigMap"]
    assert config_map["metadata"]["labels"] == {"grafana_dashboard": "1"}
    dashboard = repository / "k8s/monitoring/dashboards/ripresa.json"
    assert config_map["data"] == {"ripresa.json": dashboard.read_text()}
