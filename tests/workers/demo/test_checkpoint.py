"""Is the demo model's folder made once, whole, and repaired when damaged?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors.torch import load_file

from ripresa.workers.demo import checkpoint
from ripresa.workers.demo.checkpoint import WEIGHTS_DIGEST, demo_checkpoint, weights_digest
from ripresa.workers.errors import CheckpointError, ConfigError

FILES = ["config.json", "model.safetensors", "tokenizer.json"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo_checkpoint(tmp_path_factory.mktemp("cache"))


def stamps(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_the_folder_is_complete(made: Path) -> None:
    assert sorted(path.name for path in made.iterdir()) == FILES
    tensors = load_file(made / "model.safetensors")
    assert weights_digest(tensors) == WEIGHTS_DIGEST
    assert sum(tensor.numel() for tensor in tensors.values()) == 12_089_904
    for name in ("config.json", "tokenizer.json"):
        assert (made / name).read_bytes() == (checkpoint.FOLDER / name).read_bytes()


def test_a_second_call_writes_nothing(made: Path) -> None:
    before = stamps(made)
    assert demo_checkpoint(made.parent) == made
    assert stamps(made) == before


@pytest.mark.parametrize("damage", ["flipped", "truncated", "header", "empty", "missing"])
def test_damaged_weights_are_made_again(made: Path, damage: str) -> None:
    weights = made / "model.safetensors"
    content = bytearray(weights.read_bytes())
    if damage == "flipped":
        content[len(content) // 2] ^= 1
    elif damage == "truncated":
        del content[-1000:]
    elif damage == "header":
        content[:8] = b"\xff" * 8
    elif damage == "empty":
        content.clear()
    weights.write_bytes(content)
    if damage == "missing":
        weights.unlink()
    demo_checkpoint(made.parent)
    assert weights_digest(load_file(weights)) == WEIGHTS_DIGEST
    assert sorted(path.name for path in made.iterdir()) == FILES


def test_another_release_s_tokenizer_is_replaced(made: Path) -> None:
    (made / "tokenizer.json").write_text("{}")
    demo_checkpoint(made.parent)
    assert "model" in json.loads((made / "tokenizer.json").read_text())


def test_callers_at_the_same_time_agree(tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        folders = set(pool.map(lambda _: demo_checkpoint(tmp_path), range(3)))
    assert len(folders) == 1
    assert sorted(path.name for path in folders.pop().iterdir()) == FILES


@pytest.mark.slow
def test_processes_at_the_same_time_agree(tmp_path: Path) -> None:
    code = "from ripresa.workers.demo.checkpoint import demo_checkpoint as d; print(d())"
    environment = os.environ | {"RIPRESA_CACHE_DIR": str(tmp_path)}
    processes = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    printed = {process.communicate()[0].decode().strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    (folder,) = (Path(line) for line in printed)
    assert folder.parent == tmp_path
    assert weights_digest(load_file(folder / "model.safetensors")) == WEIGHTS_DIGEST
    assert sorted(path.name for path in folder.iterdir()) == FILES


def test_a_directory_that_cannot_be_written_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="RIPRESA_CACHE_DIR") as caught:
        demo_checkpoint(tmp_path / "file")
    assert caught.value.field == "model.path"


def test_a_failed_write_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(ConfigError, match="No space left"):
        demo_checkpoint(tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_an_installation_that_computes_other_numbers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "SEED", checkpoint.SEED + 1)
    with pytest.raises(CheckpointError, match="reinstall the pinned"):
        demo_checkpoint(tmp_path)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("RIPRESA_CACHE_DIR", raising=False)
    assert checkpoint.default_cache_dir() == tmp_path / "xdg" / "ripresa"
    monkeypatch.setenv("RIPRESA_CACHE_DIR", str(tmp_path / "own"))
    assert checkpoint.default_cache_dir() == tmp_path / "own"
    monkeypatch.delenv("RIPRESA_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert checkpoint.default_cache_dir() == Path.home() / ".cache" / "ripresa"
