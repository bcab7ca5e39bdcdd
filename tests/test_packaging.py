"""Do wheel and sdist hold all of the product, nothing else, and does the wheel work by itself?"""

from __future__ import annotations

import os
import site
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

import pytest

FOLDERS = ("cluster", "workers", "kernels", "protos")


def run(arguments: list[str], *, cwd: Path, env: dict[str, str] | None = None) -> str:
    """Runs a command to its end and returns what it printed; a failure shows all of it."""
    done = subprocess.run(
        arguments,
        cwd=cwd,
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def build(source: Path, target: str, into: Path) -> Path:
    """Builds `source` with the locked build backend; nothing is downloaded."""
    run([sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(into)], cwd=source)
    (built,) = into.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(repository, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(repository, "sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, installed into a folder of its own."""
    target = tmp_path_factory.mktemp("installed")
    run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"),
            *("--target", str(target), str(wheel)),
        ],
        cwd=target,
    )
    return target


def product_files(repository: Path) -> set[str]:
    """The files of the four code folders, as paths from the root, caches left out."""
    return {
        path.relative_to(repository).as_posix()
        for folder in FOLDERS
        for path in (repository / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def names_of_sdist(sdist: Path) -> set[str]:
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    return {PurePosixPath(*PurePosixPath(m.name).parts[1:]).as_posix() for m in members}


def test_wheel_holds_the_product_under_one_root(repository: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    code = {name.removeprefix("ripresa/") for name in names if name.startswith("ripresa/")}
    metadata = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    assert code == product_files(repository)
    assert {f"ripresa/{name}" for name in code} | metadata == names
    for folder in FOLDERS:
        assert f"{folder}/py.typed" in code
        assert f"{folder}/__init__.py" not in code


def test_wheel_names_its_command_and_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        by_name = {PurePosixPath(name).name: name for name in archive.namelist()}
        commands = archive.read(by_name["entry_points.txt"]).decode()
        licence = archive.read(by_name["LICENSE"]).decode()
        metadata = archive.read(by_name["METADATA"]).decode()
    assert "ripresa = ripresa.cluster.cli:main" in commands
    assert "Apache License" in licence
    assert "Copyright The ripresa authors" in licence
    assert "License-Expression: Apache-2.0" in metadata


def test_sdist_holds_what_a_wheel_is_made_of(repository: Path, sdist: Path) -> None:
    names = names_of_sdist(sdist)
    assert product_files(repository) <= names
    assert {"pyproject.toml", "README.md", "LICENSE", "tests/conftest.py"} <= names
    assert "k8s/rayservice.yaml" in names
    leaked = {name for name in names if name.startswith((".dev/", ".venv/", ".ripresa/"))}
    assert leaked == set()


def test_sdist_builds_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    rebuilt = build(source, "wheel", tmp_path / "wheel")
    with zipfile.ZipFile(rebuilt) as new, zipfile.ZipFile(wheel) as old:
        assert {i.filename: i.CRC for i in new.infolist()} == {
            i.filename: i.CRC for i in old.infolist()
        }


def test_every_module_imports_from_the_wheel_alone(installed: Path, tmp_path: Path) -> None:
    """`-S` keeps the editable checkout out of the import path."""
    script = """
import importlib, pathlib, sys
root = pathlib.Path(sys.argv[1])
for path in sorted(root.glob("ripresa/**/*.py")):
    module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    found = importlib.import_module(module).__file__
    assert found is not None and pathlib.Path(found) == path, (module, found)
    print(module)
"""
    imported = run(
        [sys.executable, "-S", "-c", script, str(installed)],
        cwd=tmp_path,
        env={"PYTHONPATH": os.pathsep.join([str(installed), *site.getsitepackages()])},
    )
    assert "ripresa.workers.errors" in imported.split()
    assert len(imported.split()) == len(list(installed.glob("ripresa/**/*.py")))
