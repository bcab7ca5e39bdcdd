"""Does the name of a model's weights change with them, also where only samples are hashed?"""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tiny_model import tiny_checkpoint

from ripresa.workers import model_runner
from ripresa.workers.model_runner import model_digest

EVERY = 4096


@pytest.mark.parametrize("whole_bytes", [1 << 30, 0], ids=["whole", "samples"])
def test_other_weights_have_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole_bytes: int
) -> None:
    monkeypatch.setattr(model_runner, "_HASHED_WHOLE_BYTES", whole_bytes)
    monkeypatch.setattr(model_runner, "_SAMPLE_EVERY_BYTES", EVERY)
    monkeypatch.setattr(model_runner, "_SAMPLE_BYTES", 64)
    config = tiny_checkpoint(tmp_path, shards=1)
    names = {model_digest(tmp_path, config)}
    assert names == {model_digest(tmp_path, config)}
    (shard,) = tmp_path.glob("*.safetensors")
    weights = load_file(shard)
    largest = max(weights, key=lambda name: weights[name].nbytes)
    row_bytes = weights[largest][0].nbytes
    num_rows = EVERY // row_bytes + 1
    last = len(weights[largest]) - 1
    assert last > 2 * num_rows
    # A stretch anywhere of as many bytes as samples are apart, and the very last row.
    for first, count in ((0, num_rows), (last // 2, num_rows), (last, 1)):
        weights = load_file(shard)
        weights[largest][first : first + count] = 0.5
        save_file(weights, shard)
        names.add(model_digest(tmp_path, config))
    assert len(names) == 4
