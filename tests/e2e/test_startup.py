"""Does a start that cannot work end by one clear line and an exit code?"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from served_cluster import free_ports

from ripresa.workers.demo.checkpoint import DEMO_MODEL

RIPRESA = Path(sys.executable).parent / "ripresa"
FAILED, MISUSED = 1, 2


def ripresa(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the installed command as a user does."""
    environment = os.environ | {"RAY_AUTH_MODE": "disabled"}
    return subprocess.run(
        [RIPRESA, *arguments], capture_output=True, text=True, timeout=600, env=environment
    )


def error_line(done: subprocess.CompletedProcess[str]) -> str:
    """The only line beside the progress; no traceback anywhere."""
    lines = done.stderr.splitlines()
    assert "Traceback" not in done.stderr + done.stdout
    told = [line for line in lines if not line.endswith(" s so far")]
    assert len(told) == 1, done.stderr
    assert told[0].startswith("Error: ")
    return told[0]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy of the demo model, to be damaged."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        shutil.copy(DEMO_MODEL / name, folder)
    return folder


def serve(checkpoint: Path) -> subprocess.CompletedProcess[str]:
    grpc_port, http_port, dashboard_port = free_ports(3)
    return ripresa(
        "serve",
        *("--set", f"model.path={checkpoint}"),
        *("--set", "admin.port=0"),
        *("--set", f"gateway.grpc_port={grpc_port}"),
        *("--set", f"gateway.http_port={http_port}"),
        *("--set", f"ray.dashboard_port={dashboard_port}"),
    )


def test_truncated_checkpoint(checkpoint: Path) -> None:
    weights = checkpoint / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1000)
    done = serve(checkpoint)
    assert done.returncode == FAILED
    assert "model.safetensors is corrupt or truncated" in error_line(done)


def test_corrupt_checkpoint(checkpoint: Path) -> None:
    with (checkpoint / "model.safetensors").open("r+b") as weights:
        weights.seek(8)
        weights.write(b"\xff" * 64)
    done = serve(checkpoint)
    assert done.returncode == FAILED
    assert "model.safetensors is corrupt" in error_line(done)


def test_missing_weights(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    done = serve(checkpoint)
    assert done.returncode == FAILED
    assert "holds neither model.safetensors nor" in error_line(done)


def test_weights_of_another_geometry(checkpoint: Path) -> None:
    """What only a worker notices is told in the same way, and nothing stays running."""
    path = checkpoint / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["moe_intermediate_size"] //= 2
    path.write_text(json.dumps(config))
    done = serve(checkpoint)
    assert done.returncode == FAILED
    line = error_line(done)
    assert "layers.0.ffn.experts.0.w1.weight" in line
    assert "config.json implies" in line


@pytest.mark.parametrize("command", [("check", "config"), ("serve",)], ids=" ".join)
def test_wrong_config_key(tmp_path: Path, command: tuple[str, ...]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("decoders: {replcas: 2}")
    done = ripresa(*command, str(path))
    assert done.returncode == MISUSED
    assert "decoders.replcas: is no setting; did you mean `replicas`?" in error_line(done)


@pytest.mark.parametrize(
    ("name", "other"),
    [("gateway.grpc_port", "gateway.http_port"), ("gateway.http_port", "gateway.grpc_port")],
)
def test_port_in_use(name: str, other: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = ripresa("serve", "--set", f"{name}={port}", "--set", f"{other}={free_ports(1)[0]}")
    assert done.returncode == MISUSED
    assert f"{name}: cannot listen on 127.0.0.1:{port}" in error_line(done)
