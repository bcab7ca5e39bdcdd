"""Do the imports keep to the layers, and does a planted violation of each rule get caught?"""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

FOLDERS = ("cluster", "workers", "kernels", "protos")

# (contract, file, line that breaks it); the files need not exist.
VIOLATIONS = [
    ("Cluster above workers above kernels", "workers/replay.py", "import ripresa.cluster.version"),
    ("Cluster above workers above kernels", "kernels/dispatch.py", "import ripresa.workers.errors"),
    ("Kernels: tensors in, tensors out", "kernels/dispatch.py", "import ray"),
    ("Protos stand alone", "protos/planted.py", "import ripresa.workers.errors"),
    ("Triton only in a kernel's triton.py", "kernels/dispatch.py", "import triton"),
    (
        "Triton only in a kernel's triton.py",
        "kernels/window_attention/reference.py",
        "import triton.language",
    ),
    (
        "Kernels only through the dispatcher, from models, runner, sampler and KV memory",
        "workers/models/base.py",
        "import ripresa.kernels.window_attention.reference",
    ),
    (
        "Kernels only through the dispatcher, from models, runner, sampler and KV memory",
        "workers/request.py",
        "import ripresa.kernels.dispatch",
    ),
    ("Workers speak no wire protocol", "workers/transfer/base.py", "import ripresa.protos"),
    ("Workers speak no wire protocol", "workers/transfer/base.py", "import grpc"),
    (
        "Workers meet Ray in deployments and object store alone",
        "workers/transfer/base.py",
        "import ray",
    ),
    (
        "Pools, block tables, scheduling and replay decide in plain Python",
        "workers/scheduling/planted.py",
        "import torch",
    ),
    (
        "Pools, block tables, scheduling and replay decide in plain Python",
        "workers/replay.py",
        "from ripresa.workers.models import base",
    ),
    (
        "Pools and block tables do not know who holds the tensors",
        "workers/cache/block_pool.py",
        "import ripresa.workers.cache.kv_cache",
    ),
    (
        "Transfer knows layout, recipe and errors, nothing else of a worker",
        "workers/transfer/base.py",
        "import ripresa.workers.models.base",
    ),
    (
        "Planner, index, autoscaler and placement decide in plain Python",
        "cluster/routing/planner.py",
        "import ray",
    ),
    (
        "Planner, index, autoscaler and placement decide in plain Python",
        "cluster/placement.py",
        "from ripresa.workers.models import base",
    ),
    (
        "The demo model's tasks are plain Python",
        "workers/demo/ledger/planted.py",
        "import torch",
    ),
    ("One file encodes by the fast library", "workers/sampler.py", "import fastokens"),
    ("One file compiles grammars", "workers/sampler.py", "import llguidance"),
    (
        "The client stands on wire and errors, and is light",
        "cluster/client/planted.py",
        "from ripresa.cluster import config",
    ),
    ("The gateway handles no tensors", "cluster/gateway/planted.py", "import torch"),
    (
        "One file renders prompts and parses answers",
        "cluster/gateway/planted.py",
        "import deepseek_recipe",
    ),
    (
        "Wire protocols live in gateway and client alone",
        "cluster/routing/planted.py",
        "import grpc",
    ),
    (
        "Wire protocols live in gateway and client alone",
        "cluster/observability/planted.py",
        "from ripresa.protos import ripresa_pb2",
    ),
]


def check_contracts(root: Path) -> subprocess.CompletedProcess[str]:
    """Runs the import contracts of the checkout at `root` over its own code.

    `-S` keeps an installed ripresa, which is another checkout, out of the import path.
    """
    path = [str(root / ".dev"), *site.getsitepackages()]
    return subprocess.run(
        [
            sys.executable,
            *("-S", "-c", "from importlinter.cli import lint_imports_command as main; main()"),
            "--no-cache",
        ],
        cwd=root,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path),
            "PYTHONIOENCODING": "utf-8",
            "COLUMNS": "200",
        },
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
    )


@pytest.fixture
def copy(repository: Path, tmp_path: Path) -> Path:
    """A copy of the code and of its configuration that a test may spoil."""
    (tmp_path / ".dev" / "ripresa").mkdir(parents=True)
    shutil.copy(repository / "pyproject.toml", tmp_path)
    for folder in FOLDERS:
        shutil.copytree(
            repository / folder,
            tmp_path / folder,
            ignore=shutil.ignore_patterns("__pycache__", "*.safetensors", "*.json"),
        )
        (tmp_path / ".dev" / "ripresa" / folder).symlink_to(Path("..", "..", folder))
    return tmp_path


def test_contracts_hold(repository: Path) -> None:
    checked = check_contracts(repository)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_contract_has_a_violation_here(repository: Path) -> None:
    configured = tomllib.loads((repository / "pyproject.toml").read_text())["tool"]["importlinter"]
    assert {contract["name"] for contract in configured["contracts"]} == {
        contract for contract, _, _ in VIOLATIONS
    }


@pytest.mark.parametrize(
    ("contract", "file", "line"),
    VIOLATIONS,
    ids=[f"{file}: {line}" for _, file, line in VIOLATIONS],
)
def test_a_planted_import_is_caught(copy: Path, contract: str, file: str, line: str) -> None:
    with (copy / file).open("a") as planted:
        planted.write(f"\n\n{line}\n")
    checked = check_contracts(copy)
    assert checked.returncode != 0, checked.stdout
    assert f"{contract} BROKEN" in checked.stdout, checked.stdout + checked.stderr
    module = "ripresa." + file.removesuffix(".py").replace("/", ".")
    imported = line.split()[1]
    if not imported.startswith("ripresa."):
        imported = imported.split(".")[0]  # other packages are one module each to the linter
    assert f"{module} -> {imported}" in checked.stdout, checked.stdout


@pytest.mark.parametrize("folder", FOLDERS)
def test_folders_are_typed_namespaces(repository: Path, folder: str) -> None:
    """An `__init__.py` would let a checkout on the import path shadow others' packages."""
    assert (repository / folder / "py.typed").is_file()
    assert not (repository / folder / "__init__.py").exists()
    for sub_folder in {path.parent for path in (repository / folder).rglob("*.py")}:
        if sub_folder != repository / folder:
            assert (sub_folder / "__init__.py").is_file(), sub_folder


@pytest.mark.parametrize("folder", FOLDERS)
def test_editable_root_links_to_the_folders(repository: Path, folder: str) -> None:
    link = repository / ".dev" / "ripresa" / folder
    assert link.is_symlink()
    assert link.resolve() == (repository / folder).resolve()


def test_every_file_says_its_question(repository: Path) -> None:
    silent = [
        str(path.relative_to(repository))
        for folder in (*FOLDERS, "tests")
        for path in (repository / folder).rglob("*.py")
        if path.name != "__init__.py" and not path.stem.endswith(("_pb2", "_pb2_grpc"))
        if not path.read_text().startswith(('"""', 'r"""', "#!"))
    ]
    assert silent == []
