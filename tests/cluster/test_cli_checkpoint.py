"""Do the checkpoint and plan verbs say what is there, and refuse with a reason?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from edit_shard import remove_tensor
from safetensors.torch import load_file, save_file
from tiny_model import tiny_checkpoint, tiny_config

from ripresa.cluster.cli import FAILED, MISUSED, cli


def ripresa(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


@pytest.mark.parametrize(
    "verb", ["checkpoint", "checkpoint inspect", "checkpoint tiny", "plan", "plan memory"]
)
def test_help_teaches(verb: str) -> None:
    result = ripresa(*verb.split(), "--help")
    assert result.exit_code == 0
    if " " in verb:
        assert f"  ripresa {verb} " in result.output


@pytest.mark.parametrize("weight_format", ["f32", "bf16", "f8", "fp4", "released"])
def test_what_tiny_writes_inspect_understands(tmp_path: Path, weight_format: str) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(tiny_config()))
    folder = tmp_path / "model"
    made = ripresa(
        *("checkpoint", "tiny", str(folder), "--config", str(config)),
        *("--format", weight_format, "--seed", "3", "--shards", "2"),
    )
    assert made.exit_code == 0, made.output
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    seen = ripresa("checkpoint", "inspect", str(folder))
    assert seen.exit_code == 0, seen.output
    lines = seen.stdout.splitlines()
    assert "model: 4 layers (2 full, 1 reindex, 1 window), 2 in the encoder half" in lines
    assert any(line.split()[:2] == ["encoder", "worker"] for line in lines)
    assert any("Engram tables" in line and "one copy a machine" in line for line in lines)
    assert any("draft" in line and "NOT LOADED" in line for line in lines)
    formats = lines[lines.index("formats") + 1 : lines.index("readers")]
    quantised = {"f8": {"f8", "f8_rows"}, "fp4": {"fp4", "f8_rows"}}
    quantised["released"] = {"f8", "fp4", "f8_rows"}
    plain = {"f32"} if weight_format == "f32" else {"bf16", "f32"}
    assert {line.split()[0] for line in formats} == plain | quantised.get(weight_format, set())


def test_tiny_repeats_itself_and_keeps_off_other_files(tmp_path: Path) -> None:
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        arguments = ("checkpoint", "tiny", str(tmp_path / name), "--geometry", "demo")
        assert ripresa(*arguments, "--seed", seed, "--shards", "1").exit_code == 0
    file = "model-00001-of-00001.safetensors"
    contents = [(tmp_path / name / file).read_bytes() for name in "abc"]
    assert contents[0] == contents[1] != contents[2]
    assert (tmp_path / "a" / "tokenizer.json").exists()
    again = ripresa("checkpoint", "tiny", str(tmp_path / "a"), "--geometry", "demo")
    assert again.exit_code == MISUSED
    assert "is not empty; name a new folder" in again.stderr


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 48}, "released stores groups of 32 columns, and layers.0.ffn.experts"),
        ({"vocab_size": 1 << 30}, "a tiny checkpoint has at most"),
        ({"head_dim": "x"}, "text_config.head_dim: must be an integer"),
    ],
)
def test_tiny_refuses(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(tiny_config(**changes)))
    result = ripresa("checkpoint", "tiny", str(tmp_path / "model"), "--config", str(config))
    assert result.exit_code == MISUSED
    assert words in result.stderr
    assert not (tmp_path / "model").exists()


def test_tiny_wants_one_geometry(tmp_path: Path) -> None:
    assert ripresa("checkpoint", "tiny", str(tmp_path / "x")).exit_code == MISUSED


def test_inspect_lists_vision_and_says_that_it_is_not_loaded(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, shards=1)
    shard = tmp_path / "model-00001-of-00001.safetensors"
    extra = {
        "vision.blocks.0.attn.qkv.weight": torch.zeros(10),
        "aligner.proj.weight": torch.zeros(10),
        "image_start": torch.zeros(10),
        "layers.0.ffn.gate.bias_vl": torch.zeros(4),
        "mtp.0.ffn.gate.bias_vl": torch.zeros(2),
    }
    (tmp_path / "model.safetensors.index.json").unlink()
    save_file(load_file(shard) | extra, tmp_path / "model.safetensors")
    result = ripresa("checkpoint", "inspect", str(tmp_path))
    assert result.exit_code == 0, result.output
    (line,) = (line for line in result.stdout.splitlines() if "vision" in line)
    assert line.split()[:3] == ["vision", "5", "tensors"]
    assert "NOT LOADED, images are not supported" in line


def test_a_config_with_vision_is_refused(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    document = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(document | {"vision_config": {"depth": 2}}))
    result = ripresa("checkpoint", "inspect", str(tmp_path))
    assert result.exit_code == MISUSED
    assert 'vision_config: images are not supported; write "vision_config": null' in result.stderr


def test_inspect_refuses_tables_of_other_rows_than_their_primes_sum_to(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    document = json.loads((tmp_path / "config.json").read_text())
    document["text_config"]["engram_num_embeddings"][0] += 1
    (tmp_path / "config.json").write_text(json.dumps(document))
    result = ripresa("checkpoint", "inspect", str(tmp_path))
    assert result.exit_code == MISUSED
    assert "engram_num_embeddings: is [385], but the other engram fields give" in result.stderr


def test_inspect_fails_where_a_worker_would(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    remove_tensor(tmp_path, "norm.weight")
    result = ripresa("checkpoint", "inspect", str(tmp_path))
    assert result.exit_code == FAILED
    assert (
        "norm.weight: is missing: it is not in model.safetensors.index.json, nor in any of its"
        in result.stderr
    )


def test_plan_memory_prints_both_kinds_of_worker(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    result = ripresa(
        *("plan", "memory", "--set", f"model.path={tmp_path}", "--set", "encoders.replicas=2"),
        *("--available", "4G"),
    )
    assert result.exit_code == 0, result.output
    assert "encoders: one worker with the encoder half" in result.stdout
    assert "decoders: one worker with the whole model" in result.stdout
    assert "available: 4.3 GB, --available" in result.stdout


def test_plan_memory_tells_what_the_disk_tier_takes(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    path = tmp_path / "not" / "made yet"
    result = ripresa(
        *("plan", "memory", "--set", f"model.path={tmp_path}", "--available", "4G"),
        *("--set", f"disk.path={path}", "--set", "disk.capacity_bytes=1000000"),
    )
    assert result.exit_code == 0, result.output
    assert "disk: 1.0 MB at most, " in result.stdout
    assert f"below {path}" in result.stdout
    assert not path.parent.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("--set", "disk.path=/tmp/x", "--set", f"disk.capacity_bytes={10**18}"),
            "disk.capacity_bytes: 1000000.0 TB do not fit on the disk of /tmp",
        ),
        (("--available", "1M"), "model.path: a worker with the whole model takes"),
        (
            ("--available", "1G", "--set", "decoders.num_blocks=100000000"),
            "decoders.num_blocks: a worker with the whole model takes",
        ),
        (
            ("--available", "1G", "--set", "decoders.replicas=100"),
            "decoders.replicas: all workers together take",
        ),
        (("--available", "much"), "--available: 'much' is no size; say 64G"),
        (("--available", "0"), "--available: must be above 0"),
    ],
)
def test_plan_memory_refuses(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    tiny_checkpoint(tmp_path)
    result = ripresa("plan", "memory", "--set", f"model.path={tmp_path}", *arguments)
    assert result.exit_code == MISUSED
    assert words in result.stderr


@pytest.mark.parametrize(
    ("placement", "copies", "words"),
    [
        ("host_shared", 1, "page cache, one copy a machine, not counted above"),
        ("host_numa", 3, "a copy in each worker, counted above"),
        ("nvme", 0, "in their files, no memory"),
    ],
)
def test_plan_memory_counts_tables_where_they_are_placed(
    tmp_path: Path, placement: str, copies: int, words: str
) -> None:
    """A million rows of 32 columns and a scale: once a machine, once a worker, or never."""
    config = tiny_config(engram_num_embeddings=[1_000_000])
    (tmp_path / "config.json").write_text(json.dumps(config))

    def total(chosen: str) -> float:
        result = ripresa(
            *("plan", "memory", "--set", f"model.path={tmp_path}", "--available", "64G"),
            *("--set", "encoders.replicas=2", "--set", f"model.engram_placement={chosen}"),
            *("--set", "windows.policy=zero", "--set", "parked.capacity_bytes=0"),
            *("--set", "transfer.max_tail_bytes=1"),
        )
        assert result.exit_code == 0, result.output
        assert chosen != placement or f"33.0 MB  {placement}: {words}" in result.stdout
        (line,) = (line for line in result.stdout.splitlines() if line.startswith("all workers"))
        assert line.endswith(" MB")
        return float(line.split()[2])

    assert total(placement) - total("nvme") == pytest.approx(33.0 * copies, abs=0.2)


def test_check_config_knows_the_model_s_settings(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("model: {w8a8: true, engram_placement: host_numa}")
    refused = ripresa("check", "config", str(config))
    assert refused.exit_code == MISUSED
    assert "model.w8a8: the inputs of plain weights are never rounded" in refused.stderr
    tiny_checkpoint(tmp_path / "model", sliding_window=128)
    taken = ripresa("check", "config", str(config), "--set", f"model.path={tmp_path / 'model'}")
    assert taken.exit_code == 0, taken.output
    assert "  w8a8: true" in taken.stdout
    assert "  engram_placement: host_numa" in taken.stdout


def test_plan_memory_by_the_machine_s_own_limit() -> None:
    result = ripresa("plan", "memory")
    assert "available: " in result.stdout, result.output
