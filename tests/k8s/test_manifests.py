"""Are the manifests right, do they fit each other, and are planted mistakes caught?"""

from __future__ import annotations

import importlib
import re
import tomllib
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ripresa.cluster.config import load_config
from ripresa.cluster.gateway.proxy_headers import PROXY_CALLBACK

Document = dict[str, Any]
MistakesOf = Callable[[Document], list[str]]
MANIFESTS = (
    "rayservice.yaml",
    "kustomization.yaml",
    "monitoring/kustomization.yaml",
    "monitoring/podmonitor.yaml",
    "monitoring/alerts/ripresa.yaml",
)


@pytest.fixture
def k8s(repository: Path) -> Path:
    return repository / "k8s"


@pytest.fixture
def service(k8s: Path) -> Document:
    return expanded(yaml.safe_load((k8s / "rayservice.yaml").read_text()))


def expanded(value: Any) -> Any:
    """`value` without the parts that the file's anchors share: a mistake stays in one place."""
    match value:
        case dict():
            return {key: expanded(item) for key, item in value.items()}
        case list():
            return [expanded(item) for item in value]
        case _:
            return value


def containers(service: Document) -> Iterator[Document]:
    cluster = service["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        yield from group["template"]["spec"]["containers"]


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifest_is_right(k8s: Path, mistakes_of: MistakesOf, name: str) -> None:
    for document in yaml.safe_load_all((k8s / name).read_text()):
        assert mistakes_of(document) == []


def test_every_manifest_is_checked(k8s: Path) -> None:
    found = {
        path.relative_to(k8s).as_posix()
        for path in k8s.rglob("*.yaml")
        if "kind" in yaml.safe_load(path.read_text())
    }
    assert found == set(MANIFESTS)


def worker(service: Document) -> Document:
    return service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]


def plant_option(service: Document) -> None:
    service["spec"]["excludeHeadPodFromServeSVC"] = True


def plant_nested_option(service: Document) -> None:
    service["spec"]["rayClusterConfig"]["enableIntreeAutoscaling"] = True


def plant_strategy(service: Document) -> None:
    service["spec"]["upgradeStrategy"]["type"] = "BlueGreen"


def plant_string_replicas(service: Document) -> None:
    worker(service)["minReplicas"] = "1"


def plant_number_as_start_parameter(service: Document) -> None:
    service["spec"]["rayClusterConfig"]["headGroupSpec"]["rayStartParams"]["num-cpus"] = 0


def plant_resources(service: Document) -> None:
    container = worker(service)["template"]["spec"]["containers"][0]
    container["resorces"] = container.pop("resources")


def plant_port(service: Document) -> None:
    worker(service)["template"]["spec"]["containers"][0]["ports"][0]["containerPort"] = "8000"


def plant_pod_option(service: Document) -> None:
    worker(service)["template"]["spec"]["terminationGraceSeconds"] = 3


def plant_serve_option(service: Document) -> None:
    edit_serve(service, lambda text: text.replace("proxy_location", "proxy_locations"))


def plant_proxy_location(service: Document) -> None:
    edit_serve(service, lambda text: text.replace("EveryNode", "EveryPod"))


def plant_application_option(service: Document) -> None:
    edit_serve(service, lambda text: text.replace("route_prefix", "route_prefixes"))


def plant_no_applications(service: Document) -> None:
    edit_serve(service, lambda text: text.split("applications:")[0])


def plant_no_import_path(service: Document) -> None:
    edit_serve(service, lambda text: text.replace("import_path", "importpath"))


def edit_serve(service: Document, edit: Callable[[str], str]) -> None:
    before = service["spec"]["serveConfigV2"]
    service["spec"]["serveConfigV2"] = edit(before)
    assert service["spec"]["serveConfigV2"] != before


@pytest.mark.parametrize(
    ("plant", "named"),
    [
        (plant_option, "excludeHeadPodFromServeSVC"),
        (plant_nested_option, "enableIntreeAutoscaling"),
        (plant_strategy, "BlueGreen"),
        (plant_string_replicas, "minReplicas"),
        (plant_number_as_start_parameter, "num-cpus"),
        (plant_resources, "resorces"),
        (plant_port, "containerPort"),
        (plant_pod_option, "terminationGraceSeconds"),
        (plant_serve_option, "proxy_locations"),
        (plant_proxy_location, "proxy_location"),
        (plant_application_option, "route_prefixes"),
        (plant_no_applications, "applications"),
        (plant_no_import_path, "import_path"),
    ],
)
def test_a_planted_mistake_is_caught(
    service: Document, mistakes_of: MistakesOf, plant: Callable[[Document], None], named: str
) -> None:
    plant(service)
    mistakes = mistakes_of(service)
    assert mistakes
    assert named in " ".join(mistakes)


def test_planted_mistakes_of_monitoring_are_caught(k8s: Path, mistakes_of: MistakesOf) -> None:
    monitor = yaml.safe_load((k8s / "monitoring/podmonitor.yaml").read_text())
    monitor["spec"]["podMetricsEndpoints"][0]["interval"] = 15
    monitor["spec"]["podMetricEndpoints"] = []
    assert len(mistakes_of(monitor)) == 2
    rule = yaml.safe_load((k8s / "monitoring/alerts/ripresa.yaml").read_text())
    rule["spec"]["groups"][0]["rules"][0]["labels"]["severity"] = "criticle"
    assert "criticle" in " ".join(mistakes_of(rule))


def test_core_kinds_are_checked_strictly(mistakes_of: MistakesOf) -> None:
    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": {}}
    assert mistakes_of(config_map) == []
    assert "dat" in " ".join(mistakes_of({**config_map, "dat": {}}))


def test_ray_is_the_locked_one(repository: Path, service: Document) -> None:
    version = service["spec"]["rayClusterConfig"]["rayVersion"]
    assert f"ray=={version}" in (repository / "requirements.lock").read_text().splitlines()


def test_image_is_of_this_version(repository: Path, service: Document) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    assert {container["image"] for container in containers(service)} == {
        f"ripresa:{project['version']}"
    }


def test_every_proxy_refuses_what_it_cannot_read(service: Document) -> None:
    for container in containers(service):
        given = {entry["name"]: entry["value"] for entry in container["env"]}
        assert given == PROXY_CALLBACK


def test_clients_reach_http_and_grpc(k8s: Path, service: Document) -> None:
    """The operator adds only ports called serve or serve-* to the service for clients."""
    (container,) = worker(service)["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {name for name in ports if re.fullmatch("serve|serve-.*", name)} == {
        "serve",
        "serve-grpc",
    }
    serve = yaml.safe_load(service["spec"]["serveConfigV2"])
    assert ports["serve"] == serve["http_options"]["port"]
    gateway = load_config(k8s / "config.yaml").gateway
    assert ports["serve-grpc"] == gateway.grpc_port
    assert gateway.grpc_host == serve["http_options"]["host"] == "0.0.0.0"


def test_the_settings_speak_of_a_key_file_that_is_mounted(k8s: Path, service: Document) -> None:
    (named,) = re.findall(r"api_keys_file: (\S+)", (k8s / "config.yaml").read_text())
    (container,) = worker(service)["template"]["spec"]["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert Path(named).parent == Path(mounts["api-keys"])
    admin = load_config(k8s / "config.yaml").admin
    assert (admin.host, admin.port) == ("127.0.0.1", 9001)


def test_streams_may_end_before_the_pod_does(k8s: Path, service: Document) -> None:
    gateway = load_config(k8s / "config.yaml").gateway
    assert (
        gateway.drain_grace_s < worker(service)["template"]["spec"]["terminationGracePeriodSeconds"]
    )


def test_serve_can_build_the_application(service: Document) -> None:
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    module, name = application["import_path"].split(":")
    builder = getattr(importlib.import_module(module), name)
    (arguments,) = typing.get_type_hints(builder).keys() - {"return"}
    typing.get_type_hints(builder)[arguments].model_validate(application["args"])


def test_scraped_ports_and_labels_exist(k8s: Path, service: Document) -> None:
    monitor = yaml.safe_load((k8s / "monitoring/podmonitor.yaml").read_text())["spec"]
    template = worker(service)["template"]
    names = {port["name"] for port in template["spec"]["containers"][0]["ports"]}
    assert {endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]} <= names
    wanted = monitor["selector"]["matchLabels"]
    assert wanted.items() <= template["metadata"]["labels"].items()


def test_configuration_is_mounted_where_serve_reads_it(k8s: Path, service: Document) -> None:
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    path = Path(application["args"]["config"])
    kustomization = yaml.safe_load((k8s / "kustomization.yaml").read_text())
    (config_map,) = kustomization["configMapGenerator"]
    assert path.name in config_map["files"]
    cluster = service["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        spec = group["template"]["spec"]
        volume, keys = spec["volumes"]
        assert keys["secret"]["optional"]
        assert volume["configMap"]["name"] == config_map["name"]
        for container in spec["containers"]:
            assert {"name": volume["name"], "mountPath": str(path.parent), "readOnly": True} in (
                container["volumeMounts"]
            )


@pytest.mark.parametrize("folder", [".", "monitoring"])
def test_kustomization_names_files_that_exist(k8s: Path, folder: str) -> None:
    kustomization = yaml.safe_load((k8s / folder / "kustomization.yaml").read_text())
    names = [*kustomization["resources"], *kustomization.get("configurations", [])]
    names += [name for each in kustomization["configMapGenerator"] for name in each["files"]]
    for name in names:
        assert (k8s / folder / name).is_file(), name


def test_image_is_made_of_files_that_exist(repository: Path) -> None:
    dockerfile = (repository / "k8s/Dockerfile").read_text()
    copied = [
        name
        for line in re.findall(r"^COPY (?!--)(.*)$", dockerfile, re.MULTILINE)
        for name in line.split()[:-1]
    ]
    assert copied
    allowed = (repository / "k8s/Dockerfile.dockerignore").read_text().splitlines()
    for name in copied:
        assert (repository / name).exists(), name
        assert f"!{name}" in allowed
