"""Is a checkpoint's tokenizer.json read safely, whatever somebody has made of it?"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_model import tiny_checkpoint

import ripresa.workers.demo
from ripresa.workers import doctor
from ripresa.workers.config import Numerics
from ripresa.workers.errors import CheckpointError, ConfigError
from ripresa.workers.model_runner import load_runner
from ripresa.workers.models.checkpoint_tokenizer import (
    checkpoint_tokenizer,
    read_tokenizer_file,
    usable_tokenizer,
)
from ripresa.workers.models.deepseek_v41.engram_ids import compressed_ids, pad_ids
from ripresa.workers.models.deepseek_v41.weights import Half

DEMO = Path(ripresa.workers.demo.__file__).parent / "tokenizer.json"
PANICS: dict[str, Any] = {"type": "Strip", "content": "a", "start": 5, "stop": 5}


def write(folder: Path, **changes: object) -> Path:
    document = json.loads(DEMO.read_text(encoding="utf-8")) | changes
    (folder / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    return folder


def load(folder: Path) -> None:
    load_runner(folder, Half.ENCODER, num_blocks=4, num_slots=1, numerics=Numerics.FAST)


def test_none_is_none_and_a_good_one_is_read(tmp_path: Path) -> None:
    assert checkpoint_tokenizer(tmp_path) is None
    tokenizer = checkpoint_tokenizer(write(tmp_path))
    assert tokenizer is not None
    assert tokenizer.get_vocab_size() == 4096


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b"[" * 100_000, b'{"model": 3}'])
def test_what_is_no_tokenizer_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"no usable tokenizer\.json"):
        checkpoint_tokenizer(tmp_path)


@pytest.mark.parametrize("kind", ["outside", "gone", "itself", "pipe", "folder"])
def test_only_a_file_of_the_folder_is_read(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    path = folder / "tokenizer.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to({"outside": DEMO, "gone": tmp_path / "gone", "itself": path}[kind])
    with pytest.raises(CheckpointError, match="cannot read the tokenizer"):
        checkpoint_tokenizer(folder)


def test_an_absurdly_large_file_is_refused_by_its_size(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with path.open("wb") as file:
        file.truncate((256 << 20) + 1)
    with pytest.raises(CheckpointError, match="an absurd size"):
        read_tokenizer_file(path)


def test_a_panic_of_the_library_is_an_error_of_ours(tmp_path: Path) -> None:
    tokenizer = checkpoint_tokenizer(write(tmp_path, decoder=PANICS))
    assert tokenizer is not None
    with pytest.raises(CheckpointError, match="copy the file again"), usable_tokenizer():
        compressed_ids(tokenizer)


def test_an_interrupt_stays_one() -> None:
    with pytest.raises(KeyboardInterrupt), usable_tokenizer():
        raise KeyboardInterrupt


def test_a_worker_and_doctor_refuse_a_tokenizer_that_panics(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    write(tmp_path, decoder=PANICS)
    with pytest.raises(CheckpointError, match="copy the file again"):
        load(tmp_path)
    with pytest.raises(CheckpointError, match="copy the file again"):
        doctor.examine(tmp_path, None, lambda line: None)


def test_ids_behind_the_tokenizer_count_as_the_pad_token() -> None:
    ids = np.array([0, 1, 2, 1], dtype=np.int64)
    assert pad_ids(ids, 6, 2).tolist() == [0, 1, 2, 1, 2, 2]
    assert pad_ids(ids, 3, 2).tolist() == ids.tolist()
    with pytest.raises(ConfigError, match="the tokenizer has ids below 4") as caught:
        pad_ids(ids, 6, 4)
    assert caught.value.field == "engram_pad_token_id"
