"""Is a Kubernetes object right, as far as that can be said without a cluster?

Core kinds are checked against Kubernetes' own schemas, custom ones against reduced schemas beside
this file, and what a custom object carries inside (pod templates, Serve's configuration) against
the schemas of those. Nothing is downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from jsonschema import Draft7Validator
from pydantic import BaseModel, ValidationError
from ray.serve.schema import DeploymentSchema, ServeApplicationSchema, ServeDeploySchema

SCHEMAS = Path(__file__).parent / "schemas"
CUSTOM_KINDS = ("RayService", "PodMonitor", "PrometheusRule", "Kustomization")

Document = dict[str, Any]


@pytest.fixture(scope="session")
def mistakes_of() -> Callable[[Document], list[str]]:
    """What is wrong with a parsed Kubernetes object, one line a mistake; empty if nothing is."""
    return _mistakes_of


def _mistakes_of(document: Document) -> list[str]:
    kind = document["kind"]
    if kind not in CUSTOM_KINDS:
        return list(_core_mistakes(document))
    mistakes = list(_schema_mistakes(document, kind))
    if kind == "RayService" and not mistakes:
        for path, template in _pod_templates(document):
            mistakes += [f"{path}.{mistake}" for mistake in _core_mistakes(_as_pod(template))]
        mistakes += _serve_mistakes(document["spec"]["serveConfigV2"])
    return mistakes


def _schema_mistakes(document: Document, kind: str) -> Iterator[str]:
    validator = Draft7Validator(json.loads((SCHEMAS / f"{kind.lower()}.json").read_text()))
    for error in validator.iter_errors(document):
        yield f"{'.'.join(map(str, error.path))}: {error.message}"


def _core_mistakes(document: Document) -> Iterator[str]:
    version = kubernetes_validate.latest_version()
    try:
        kubernetes_validate.validate(document, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        yield f"{'.'.join(map(str, error.path))}: {error.message}"


def _pod_templates(service: Document) -> Iterator[tuple[str, Document]]:
    cluster = service["spec"]["rayClusterConfig"]
    yield "headGroupSpec.template", cluster["headGroupSpec"]["template"]
    for group in cluster["workerGroupSpecs"]:
        yield f"workerGroupSpecs.{group['groupName']}.template", group["template"]


def _as_pod(template: Document) -> Document:
    metadata = {"name": "template", **template.get("metadata", {})}
    return {"apiVersion": "v1", "kind": "Pod", **template, "metadata": metadata}


def _serve_mistakes(text: str) -> Iterator[str]:
    try:
        config = yaml.safe_load(text)
        ServeDeploySchema.model_validate(config)
    except (yaml.YAMLError, ValidationError) as error:
        yield f"serveConfigV2: {error}"
        return
    # Serve ignores what it does not know, so a misspelt option would silently do nothing.
    yield from _unknown_keys("serveConfigV2", config, ServeDeploySchema)
    for application in config["applications"]:
        path = f"serveConfigV2.applications.{application['name']}"
        yield from _unknown_keys(path, application, ServeApplicationSchema)
        for deployment in application.get("deployments", []):
            yield from _unknown_keys(
                f"{path}.deployments.{deployment['name']}", deployment, DeploymentSchema
            )


def _unknown_keys(path: str, values: Mapping[str, object], model: type[BaseModel]) -> Iterator[str]:
    for key in sorted(values.keys() - model.model_fields.keys()):
        yield f"{path}.{key}: Serve knows no such option"
