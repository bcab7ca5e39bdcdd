"""Do dashboard and alerts ask for series that exist, and is the dashboard well formed?"""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from ripresa.cluster.observability.metrics import SERIES, Kind, Series

# What a query may ask of a series, by its kind.
SUFFIXES = {
    Kind.COUNTER: ("",),
    Kind.GAUGE: ("",),
    Kind.HISTOGRAM: ("_bucket", "_sum", "_count"),
}
QUERYABLE = {
    f"{series.name}{suffix}": series for series in SERIES for suffix in SUFFIXES[series.kind]
}
GRID_WIDTH = 24


@pytest.fixture
def dashboard(repository: Path) -> dict[str, Any]:
    path = repository / "k8s/monitoring/dashboards/ripresa.json"
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


@pytest.fixture
def rules(repository: Path) -> list[dict[str, Any]]:
    path = repository / "k8s/monitoring/alerts/ripresa.yaml"
    return [
        rule
        for group in yaml.safe_load(path.read_text())["spec"]["groups"]
        for rule in group["rules"]
    ]


def queries(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def unknown_names(query: str) -> set[str]:
    return set(re.findall(r"ripresa_\w+", query)) - QUERYABLE.keys()


def unknown_labels(query: str) -> set[str]:
    """Labels that a query groups or selects by and that none of its series has."""
    known = {"le"} | {
        label for name in re.findall(r"ripresa_\w+", query) for label, _ in QUERYABLE[name].labels
    }
    grouped = [
        label.strip()
        for group in re.findall(r"by \(([^)]*)\)", query)
        for label in group.split(",")
    ]
    selected = re.findall(r"[{,]\s*(\w+)\s*[=!]", query)
    return {*grouped, *selected} - known


def test_dashboard_asks_for_series_that_exist(dashboard: dict[str, Any]) -> None:
    for query in queries(dashboard):
        assert unknown_names(query) == set(), query
        assert unknown_labels(query) == set(), query


def test_alerts_ask_for_series_that_exist(rules: list[dict[str, Any]]) -> None:
    for rule in rules:
        assert unknown_names(rule["expr"]) == set(), rule["alert"]
        assert unknown_labels(rule["expr"]) == set(), rule["alert"]


def test_alerts_select_values_that_exist(rules: list[dict[str, Any]]) -> None:
    for rule in rules:
        for name, label, values in re.findall(r'(ripresa_\w+)\{(\w+)=~?"([^"]+)"\}', rule["expr"]):
            assert set(values.split("|")) <= set(dict(QUERYABLE[name].labels)[label])


@pytest.mark.parametrize("series", SERIES, ids=lambda series: series.name)
def test_every_series_is_on_the_dashboard(dashboard: dict[str, Any], series: Series) -> None:
    assert any(series.name in query for query in queries(dashboard))


@pytest.mark.parametrize(
    "query",
    [
        "rate(ripresa_prompt_token_total[5m])",
        "sum(ripresa_time_to_first_token_seconds)",
        "ripresa_num_requests_running_total",
    ],
)
def test_a_misspelt_series_is_noticed(query: str) -> None:
    assert unknown_names(query)


@pytest.mark.parametrize(
    "query",
    [
        "sum by (reason) (ripresa_request_success_total)",
        'ripresa_transfer_bytes_total{backends="gloo"}',
    ],
)
def test_a_misspelt_label_is_noticed(query: str) -> None:
    assert unknown_labels(query)


def test_dashboard_is_well_formed(dashboard: dict[str, Any]) -> None:
    assert dashboard["uid"] == "ripresa"
    assert dashboard["schemaVersion"] >= 36
    (variable,) = dashboard["templating"]["list"]
    assert variable["type"] == "datasource"
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in dashboard["panels"]:
        assert panel["title"]
        assert panel["description"]
        assert panel["datasource"] == {"type": "prometheus", "uid": f"${{{variable['name']}}}"}
        assert panel["fieldConfig"]["defaults"]["unit"]
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references)
        for target in panel["targets"]:
            assert target["legendFormat"]
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert re.search(rf"by \([^)]*\b{label}\b", target["expr"])


def test_panels_do_not_overlap(dashboard: dict[str, Any]) -> None:
    boxes = [panel["gridPos"] for panel in dashboard["panels"]]
    for box in boxes:
        assert box["x"] >= 0
        assert box["x"] + box["w"] <= GRID_WIDTH
    for one, other in combinations(boxes, 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y


def test_alerts_say_what_to_do(rules: list[dict[str, Any]]) -> None:
    names = [rule["alert"] for rule in rules]
    assert len(set(names)) == len(names)
    for rule in rules:
        assert rule["alert"].startswith("Ripresa")
        assert len(rule["annotations"]["description"].split(". ")) >= 2
