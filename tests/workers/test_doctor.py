"""Does the doctor find what is wrong with a model, and nothing in a sound one?"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from edit_shard import flip_payload
from tiny_model import tiny_checkpoint

from ripresa.cluster.cli import FAILED, cli
from ripresa.workers.checkpoint_files import SUMS_FILE, CheckpointFiles
from ripresa.workers.doctor import NUM_TEXT_TOKENS, examine, shipped_text
from ripresa.workers.errors import CheckpointError, ConfigError
from ripresa.workers.models.tiny_checkpoint import WeightFormat, write_tiny_checkpoint

DEMO = Path(__file__).parents[2] / "workers" / "demo"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model's sizes and tokenizer in released formats."""
    folder = tmp_path_factory.mktemp("demo") / "model"
    document = json.loads((DEMO / "config.json").read_text())
    write_tiny_checkpoint(folder, document, WeightFormat.RELEASED, seed=1, shards=2)
    shutil.copy(DEMO / "tokenizer.json", folder)
    return folder


@pytest.fixture
def folder(demo: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    shutil.copytree(demo, tmp_path / "model")
    return tmp_path / "model"


def examined(folder: Path, golden: Path | None = None) -> tuple[bool, list[str]]:
    lines: list[str] = []
    return examine(folder, golden, lines.append), lines


def test_a_sound_model(demo: Path) -> None:
    good, lines = examined(demo)
    assert good
    layers = [line for line in lines if "stream rms" in line]
    assert len(layers) == 8
    assert not any("NOT FINITE" in line for line in layers)
    (line,) = (line for line in lines if line.startswith("perplexity: "))
    assert 1000 < float(line.split()[1]) < 1e6, "random weights know nothing"
    assert any(line.startswith("compressed ids: ") for line in lines)
    assert lines[-1] == "nothing wrong was found"


@pytest.mark.parametrize("has_broken_layer", [False, True])
def test_without_a_tokenizer_the_layers_still_run(folder: Path, has_broken_layer: bool) -> None:
    (folder / "tokenizer.json").unlink()
    if has_broken_layer:
        flip_payload(folder, "layers.3.ffn_norm.weight", b"\x7f\x7f")  # the largest bf16
    good, lines = examined(folder)
    assert good is not has_broken_layer
    assert sum("stream rms" in line for line in lines) == 8
    assert any("random token ids, for want of a tokenizer.json" in line for line in lines)
    assert not any(line.startswith(("perplexity", "compressed ids")) for line in lines)
    if has_broken_layer:
        assert "layers: WRONG, not every number is finite" in lines
        assert lines[-1] == "SOMETHING IS WRONG"
    else:
        assert "NOT CHECKED are compressed ids and the perplexity" in lines[-1]


def test_without_a_tokenizer_a_model_with_engram_runs_too(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "model")
    good, lines = examined(tmp_path / "model")
    assert good
    assert sum("stream rms" in line for line in lines) == 4


def test_a_tokenizer_outside_the_folder_is_not_read(folder: Path) -> None:
    outside = folder.parent / "tokenizer.json"
    (folder / "tokenizer.json").rename(outside)
    (folder / "tokenizer.json").symlink_to(outside)
    with pytest.raises(CheckpointError, match="leads out of the folder"):
        examined(folder)


def test_the_shipped_text_is_long_enough() -> None:
    assert len(shipped_text()) == 16 * NUM_TEXT_TOKENS


def test_a_weight_that_is_not_finite_is_refused_by_name(folder: Path) -> None:
    flip_payload(folder, "layers.3.ffn_norm.weight", b"\xc0\x7f")  # a bf16 NaN
    with pytest.raises(CheckpointError, match=r"layers\.3\.ffn_norm\.weight.*NaN"):
        examined(folder)


def test_an_overflow_is_found_in_its_layer(folder: Path) -> None:
    flip_payload(folder, "layers.3.ffn_norm.weight", b"\x7f\x7f")  # the largest bf16
    good, lines = examined(folder)
    assert not good
    layers = [line for line in lines if "stream rms" in line]
    broken = [number for number, line in enumerate(layers) if "NOT FINITE" in line]
    assert broken == [3, 4, 5, 6, 7]
    assert any("perplexity" in line and "WRONG" in line for line in lines)


def test_a_flipped_weight_is_found_by_its_file_s_hash(folder: Path) -> None:
    assert CheckpointFiles(folder).check(lambda line: None, record=True)
    lines: list[str] = []
    assert CheckpointFiles(folder).check(lines.append)
    assert len(lines) == 5
    assert all(f"as in {SUMS_FILE}" in line for line in lines)
    flip_payload(folder, "layers.3.attn.wkv.weight", b"\x01")
    lines.clear()
    assert not CheckpointFiles(folder).check(lines.append)
    assert sum("DIFFERS" in line for line in lines) == 1


def test_the_tokenizer_of_another_model(folder: Path) -> None:
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text())
    last = len(document["model"]["vocab"]) + len(document["added_tokens"])
    document["added_tokens"].append(document["added_tokens"][0] | {"id": last, "content": "<new>"})
    path.write_text(json.dumps(document))
    good, lines = examined(folder)
    assert not good
    assert any("WRONG" in line and "compressed ids" in line for line in lines)
    path.write_text("{}")
    with pytest.raises(CheckpointError, match=r"no usable tokenizer\.json"):
        examined(folder)


@pytest.mark.parametrize("case", ["case_b_grids_engram_replay", "case_c_quantised_dspark"])
def test_a_golden_model_agrees_with_its_folder(shared: Path, case: str) -> None:
    good, lines = examined(shared / "golden" / case / "checkpoint", shared / "golden" / case)
    assert good
    assert any("every layer agrees" in line for line in lines)


def test_the_first_layer_that_differs_is_named(shared: Path, tmp_path: Path) -> None:
    case = shared / "golden" / "case_g_plain_replay"
    shutil.copytree(case / "checkpoint", tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    content = bytearray(path.read_bytes())
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    start = 8 + length + header["layers.3.ffn_norm.weight"]["data_offsets"][0]
    content[start + 1] ^= 1  # twice or half the first channel
    path.write_bytes(content)
    good, lines = examined(tmp_path / "model", case)
    assert not good
    assert any("the first difference" in line and "hidden of layer 3" in line for line in lines)


def test_a_golden_folder_of_a_larger_vocabulary(shared: Path, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "model")
    with pytest.raises(ConfigError, match="outside this model's vocabulary"):
        examined(tmp_path / "model", shared / "golden" / "case_a_plain_float")


def test_the_verb(folder: Path) -> None:
    done = CliRunner().invoke(cli, ["doctor", str(folder), "--record"])
    assert done.exit_code == 0, done.output
    assert (folder / SUMS_FILE).read_text().count("\n") == 5
    flip_payload(folder, "norm.weight", b"\xc0\x7f")
    done = CliRunner().invoke(cli, ["doctor", str(folder)])
    assert done.exit_code == FAILED
    assert "norm.weight: holds NaN" in done.output
    help_text = CliRunner().invoke(cli, ["doctor", "--help"]).output
    assert "  ripresa doctor " in help_text
