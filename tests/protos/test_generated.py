"""Does the committed generated code come from the committed proto by the README's command?"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GENERATED = ("ripresa_pb2.py", "ripresa_pb2.pyi", "ripresa_pb2_grpc.py", "ripresa_pb2_grpc.pyi")


def readme_command(out: Path) -> list[str]:
    """The one indented `python -m grpc_tools.protoc` line, with its outputs sent elsewhere."""
    (line,) = re.findall(
        r"^    python (-m grpc_tools\.protoc .*)$", (ROOT / "protos/README.md").read_text(), re.M
    )
    return [sys.executable, *shlex.split(line.replace("_out=.dev", f"_out={out}"))]


@pytest.fixture(scope="module")
def regenerated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("protoc")
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"  # protoc finds its mypy plug-ins there
    subprocess.run(readme_command(out), cwd=ROOT, check=True, env={"PATH": path}, timeout=120)
    return out / "ripresa/protos"


@pytest.mark.parametrize("name", GENERATED)
def test_generated_code_is_current(regenerated: Path, name: str) -> None:
    assert (regenerated / name).read_text() == (ROOT / "protos" / name).read_text(), (
        f"protos/{name} is stale: run the command of protos/README.md"
    )
