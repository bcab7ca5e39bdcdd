"""Where is the bundled demo model on disk? A checkpoint folder, made on first use.

Its weights are seeded random numbers, so they are generated instead of shipped. Every process of a
cluster may call `demo_checkpoint` at the same time.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from ripresa.workers.demo.random_weights import random_checkpoint
from ripresa.workers.errors import CheckpointError, ConfigError

MODEL_NAME = "deepseek-v4.1-demo"
SEED = 41
WEIGHTS_DIGEST = "dec68b0075efa5ded7cadf224fb0dd802700672efaa438093a4bc02b1b31ddea"
"""`weights_digest` of the demo model: what a generated or cached file must contain."""

FOLDER = Path(__file__).parent


def demo_checkpoint(cache_dir: Path | None = None) -> Path:
    """The demo model's folder: `config.json`, `tokenizer.json` and `model.safetensors`.

    Made, or made again if a file in it is damaged; files appear whole or not at all.

    Args:
        cache_dir: where to keep it, 23 MB; `default_cache_dir()` if None.

    Raises:
        ConfigError: the cache directory cannot be written.
        CheckpointError: this installation generates other weights than the released ones.
    """
    root = default_cache_dir() if cache_dir is None else cache_dir
    folder = root / f"{MODEL_NAME}-{WEIGHTS_DIGEST[:12]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("config.json", "tokenizer.json"):
            content = (FOLDER / name).read_bytes()
            if not (folder / name).is_file() or (folder / name).read_bytes() != content:
                _write_whole(folder / name, content)
        weights = folder / "model.safetensors"
        if not _is_intact(weights):
            _write_whole(weights, save(_generate()))
    except OSError as error:
        raise ConfigError(
            "model.path",
            f"the demo model cannot be written to {folder}: {error}; "
            "name a writable directory in RIPRESA_CACHE_DIR",
        ) from error
    return folder


def default_cache_dir() -> Path:
    """`RIPRESA_CACHE_DIR`, else `ripresa` in the user's cache directory."""
    if chosen := os.environ.get("RIPRESA_CACHE_DIR"):
        return Path(chosen)
    user_cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(user_cache) if user_cache else Path.home() / ".cache") / "ripresa"


def weights_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over names, types, shapes and bytes of tensors, whatever file they are in."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _generate() -> dict[str, torch.Tensor]:
    tensors = random_checkpoint(json.loads((FOLDER / "config.json").read_text()), SEED)
    digest = weights_digest(tensors)
    if digest != WEIGHTS_DIGEST:
        raise CheckpointError(
            f"the generated demo weights have the digest {digest}, not {WEIGHTS_DIGEST}: "
            "this installation of numpy or torch computes other numbers; reinstall the pinned "
            "versions, or serve another checkpoint by its path"
        )
    return tensors


def _is_intact(weights: Path) -> bool:
    if not weights.is_file():
        return False
    try:
        return weights_digest(load_file(weights)) == WEIGHTS_DIGEST
    except SafetensorError:
        return False


def _write_whole(path: Path, content: bytes) -> None:
    """Readers, and writers of the same content beside this one, see the old file or the new."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
