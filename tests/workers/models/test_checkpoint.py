"""Does a checkpoint folder give exactly its tensors, or an error that names tensor and file?"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from edit_shard import (
    edit_header,
    edit_index,
    flip_payload,
    remove_tensor,
    shard_of,
)
from safetensors.torch import load_file, save_file
from tiny_model import tiny_checkpoint

from ripresa.kernels import dispatch as ops
from ripresa.workers.errors import CheckpointError, RipresaError
from ripresa.workers.models.checkpoint import Checkpoint, ProgressLines
from ripresa.workers.models.checkpoint_index import INDEX_FILE
from ripresa.workers.models.deepseek_v41.config import ModelConfig
from ripresa.workers.models.deepseek_v41.engram_table import EngramTable
from ripresa.workers.models.deepseek_v41.inventory import take_inventory
from ripresa.workers.models.deepseek_v41.tensor_specs import Half, Part, tensor_specs
from ripresa.workers.models.deepseek_v41.weights import load_weights
from ripresa.workers.models.random_weights import random_tensor
from ripresa.workers.models.tiny_checkpoint import WeightFormat

LINEAR = "layers.1.attn.wkv.weight"
EXPERT = "layers.3.ffn.experts.1.w2.weight"
TABLE = "layers.1.engram.embed.weight"
NORM = "layers.2.attn_norm.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_checkpoint(tmp_path / "model")
    return tmp_path / "model"


def open_and_check(folder: Path) -> None:
    """What a worker does before it reads anything."""
    config = ModelConfig.from_file(folder / "config.json")
    with Checkpoint(folder) as checkpoint:
        take_inventory(checkpoint.entries, config)


def read_everything(folder: Path) -> dict[str, torch.Tensor]:
    config = ModelConfig.from_file(folder / "config.json")
    with Checkpoint(folder) as checkpoint:
        take_inventory(checkpoint.entries, config)
        tensors = {}
        for spec in tensor_specs(config):
            if spec.part is Part.TABLE:
                table = EngramTable(checkpoint, spec.name, *spec.shape)
                tensors[spec.name] = table.rows(torch.arange(spec.shape[0]))
            else:
                tensors[spec.name] = checkpoint.read(spec.name, spec.shape)
        return tensors


@pytest.mark.parametrize("weight_format", WeightFormat)
def test_every_format_is_read_to_within_its_own_rounding(
    tmp_path: Path, weight_format: WeightFormat
) -> None:
    config = tiny_checkpoint(tmp_path / "model", weight_format)
    tensors = read_everything(tmp_path / "model")
    worst = 0.0
    for spec in tensor_specs(config):
        original = random_tensor(spec.name, spec.shape, 5).to(torch.float32)
        tensor = tensors[spec.name]
        assert tensor.dtype == torch.float32
        assert tensor.shape == spec.shape
        if not spec.storage.quantised or not weight_format.quantised:
            assert torch.equal(tensor, original), spec.name
        else:
            worst = max(worst, float((tensor - original).abs().max() / original.abs().max()))
    expected = {WeightFormat.F8: 1 / 16, WeightFormat.FP4: 1 / 4, WeightFormat.RELEASED: 1 / 4}
    assert worst <= expected.get(weight_format, 0.0)
    assert (worst > 0.01) == weight_format.quantised


def test_one_file_and_many_shards_are_the_same(folder: Path) -> None:
    sharded = read_everything(folder)
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
        path.unlink()
    (folder / INDEX_FILE).unlink()
    save_file(tensors, folder / "model.safetensors")
    single = read_everything(folder)
    assert sharded.keys() == single.keys()
    assert all(torch.equal(sharded[name], single[name]) for name in sharded)


def test_the_golden_quantised_checkpoint_is_dequantised_by_definition(shared: Path) -> None:
    folder = shared / "golden" / "case_c_quantised_dspark" / "checkpoint"
    stored = load_file(folder / "model.safetensors")
    for name, tensor in read_everything(folder).items():
        values = stored[name]
        if values.dtype is torch.int8:
            magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
            codes = values.view(torch.uint8)
            codes = torch.stack((codes & 15, codes >> 4), -1).flatten(1).long()
            values = magnitudes[codes & 7] * torch.where(codes >= 8, -1.0, 1.0)
        values = values.to(torch.float32)
        scale = stored.get(f"{name.removesuffix('.weight')}.scale")
        if scale is not None:
            factor = torch.exp2(scale.view(torch.uint8).double() - 127).float()
            factor = factor.repeat_interleave(32, 1)
            if len(factor) != len(values):
                factor = factor.repeat_interleave(32, 0)
            values = values * factor[: len(values), : values.shape[1]]
        assert torch.equal(tensor, values), name


def test_table_rows_come_in_any_order_and_outlive_the_checkpoint(folder: Path) -> None:
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    whole = ops.dequantise_f8_rows(tensors[TABLE], tensors["layers.1.engram.embed.scale"])
    with Checkpoint(folder) as checkpoint:
        table = EngramTable(checkpoint, TABLE, 384, 32)
    index = torch.tensor([383, 0, 7, 7, 200])
    assert torch.equal(table.rows(index), whole[index])
    assert table.rows(torch.tensor([], dtype=torch.int64)).shape == (0, 32)
    for outside in (-1, 384):
        with pytest.raises(IndexError):
            table.rows(torch.tensor([0, outside]))


def test_a_table_of_other_rows_is_refused(folder: Path) -> None:
    with (
        Checkpoint(folder) as checkpoint,
        pytest.raises(CheckpointError, match=r"other rows") as caught,
    ):
        EngramTable(checkpoint, TABLE, 385, 32)
    assert caught.value.field == TABLE


Damage = Callable[[Path], object]


def reshape(name: str, shape: list[int]) -> Damage:
    return lambda folder: edit_header(
        shard_of(folder, name), lambda header: header[name].update(shape=shape)
    )


def retype(name: str, dtype: str) -> Damage:
    return lambda folder: edit_header(
        shard_of(folder, name), lambda header: header[name].update(dtype=dtype)
    )


def copy_into_another_shard(folder: Path) -> None:
    first, second = sorted(folder.glob("model-*.safetensors"))[:2]
    tensors = load_file(second)
    name, tensor = next(iter(load_file(first).items()))
    save_file(tensors | {name: tensor}, second)


def add_tensor(folder: Path, name: str) -> str:
    """Four zeros under a new name; returns the file that has them."""
    file = "model-00002-of-00003.safetensors"
    save_file(load_file(folder / file) | {name: torch.zeros(4)}, folder / file)
    edit_index(folder, lambda document: document["weight_map"].update({name: file}))
    return file


def one_file_without(folder: Path, name: str) -> None:
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
        path.unlink()
    (folder / INDEX_FILE).unlink()
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")


DAMAGES: dict[str, tuple[Damage, str]] = {
    "missing": (
        lambda f: remove_tensor(f, NORM),
        r"attn_norm\.weight: is missing: it is not in model\.safetensors\.index\.json, ",
    ),
    "two missing": (
        lambda f: (remove_tensor(f, NORM), remove_tensor(f, "norm.weight")),
        "is missing, one of 2 missing tensors",
    ),
    "missing in one file": (
        lambda f: one_file_without(f, NORM),
        r"attn_norm\.weight: is missing: it is not in model\.safetensors;",
    ),
    "missing of a draft stage": (
        lambda f: remove_tensor(f, "mtp.0.attn.wkv.weight"),
        r"mtp\.0\.attn\.wkv\.weight: is missing: it is not in model\.safetensors\.index\.json",
    ),
    "unexpected": (
        lambda f: add_tensor(f, "mtp.0.main_nrom.weight"),
        r"mtp\.0\.main_nrom\.weight: is unexpected: it is F32 \[4\] in model-00002",
    ),
    "mis-shaped": (reshape(LINEAR, [64, 32]), r"wkv\.weight: is \[64, 32\] in model-"),
    "mis-shaped packed": (reshape(EXPERT, [32, 32]), r"w2\.weight: is \[32, 32\] in model-"),
    "wrong type": (retype(NORM, "I16"), r"attn_norm\.weight: is stored as I16 in model-"),
    "wrong type of one byte": (retype(LINEAR, "F8_E5M2"), r"stored as F8_E5M2 in model-"),
    "no scale": (
        lambda f: remove_tensor(f, "layers.1.attn.wkv.scale"),
        r"layers\.1\.attn\.wkv\.scale: is missing: layers\.1\.attn\.wkv\.weight is stored as F8",
    ),
    "mis-shaped scale": (
        reshape("layers.1.attn.wkv.scale", [2, 1]),
        r"wkv\.scale: is F8_E8M0 \[2, 1\] in model-.* needs F8_E8M0 \[1, 2\]",
    ),
    "scale of another type": (retype("layers.1.attn.wkv.scale", "U8"), r"wkv\.scale: is U8"),
    "duplicate": (copy_into_another_shard, "is in model-00001.* and in model-00002"),
    "cut": (
        lambda f: os.truncate(f / "model-00002-of-00003.safetensors", 50_000),
        r"model-00002-of-00003\.safetensors is corrupt or truncated",
    ),
    "empty": (
        lambda f: (f / "model-00002-of-00003.safetensors").write_bytes(b""),
        r"model-00002-of-00003\.safetensors is corrupt or truncated",
    ),
    "no shard": (
        lambda f: (f / "model-00002-of-00003.safetensors").unlink(),
        r"model-00002-of-00003\.safetensors is missing",
    ),
    "longer": (
        lambda f: (f / "model-00002-of-00003.safetensors").open("ab").write(b"\0"),
        "its tensors end at byte",
    ),
    "huge header": (
        lambda f: (f / "model-00002-of-00003.safetensors").write_bytes(
            (1 << 62).to_bytes(8, "little") + b"{}"
        ),
        "corrupt or truncated",
    ),
    "absurd shape": (reshape(NORM, [1 << 40, 1 << 40]), r"has 128 bytes, its shape takes"),
    "negative shape": (reshape(NORM, [-64]), "no sensible shape"),
    "overlapping": (
        lambda f: edit_header(
            shard_of(f, NORM),
            lambda h: h[NORM].update(data_offsets=h["layers.2.ffn_norm.weight"]["data_offsets"]),
        ),
        "does not begin where the one before it ends",
    ),
    "no index": (lambda f: (f / INDEX_FILE).unlink(), "holds neither"),
    "index is no JSON": (lambda f: (f / INDEX_FILE).write_text("{"), "is not a safetensors index"),
    "index is deep": (
        lambda f: (f / INDEX_FILE).write_text("[" * 200_000),
        "is not a safetensors index: is nested too deeply",
    ),
    "index is a list": (lambda f: (f / INDEX_FILE).write_text("[]"), "it has no weight_map"),
    "index says it twice": (
        lambda f: (f / INDEX_FILE).write_text('{"weight_map": {"a": "b", "a": "c"}}'),
        "names 'a' twice",
    ),
    "index lacks one": (
        lambda f: edit_index(f, lambda d: d["weight_map"].pop(NORM)),
        rf"attn_norm\.weight: is in model-.*, but not in {INDEX_FILE}",
    ),
    "index has one more": (
        lambda f: edit_index(
            f, lambda d: d["weight_map"].update(x="model-00001-of-00003.safetensors")
        ),
        "x: .* but it is in no shard",
    ),
    "index swaps": (
        lambda f: edit_index(
            f, lambda d: d["weight_map"].update({NORM: "model-00001-of-00003.safetensors"})
        ),
        r"puts it into model-00001-of-00003\.safetensors, but it is in model-",
    ),
    "index value": (
        lambda f: edit_index(f, lambda d: d["weight_map"].update({NORM: 3})),
        "gives it no file name",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named(folder: Path, damage: str) -> None:
    spoil, words = DAMAGES[damage]
    spoil(folder)
    with pytest.raises(CheckpointError) as caught:
        open_and_check(folder)
    assert caught.match(words)


@pytest.mark.parametrize(
    "file", ["/etc/passwd", "../secret.safetensors", "", ".", "..", "sub/x", "a\0b", "..\\x"]
)
def test_an_index_never_leads_out_of_the_folder(folder: Path, file: str) -> None:
    (folder.parent / "secret.safetensors").write_bytes(b"not to be read")
    edit_index(folder, lambda document: document["weight_map"].update({NORM: file}))
    with pytest.raises(CheckpointError, match="points outside") as caught:
        Checkpoint(folder)
    assert caught.value.field == NORM


def test_neither_does_a_link(folder: Path) -> None:
    shard = folder / "model-00002-of-00003.safetensors"
    outside = folder.parent / "elsewhere.safetensors"
    shard.rename(outside)
    shard.symlink_to(outside)
    with pytest.raises(CheckpointError, match="leads out of the folder"):
        Checkpoint(folder)
    shard.unlink()
    shard.symlink_to(shard.name)
    with pytest.raises(CheckpointError):
        Checkpoint(folder)
    shard.unlink()
    inside = folder / "renamed.safetensors"
    outside.rename(inside)
    shard.symlink_to(inside.name)
    open_and_check(folder)


@pytest.mark.parametrize("file", ["config.json", INDEX_FILE])
def test_nor_does_a_link_in_place_of_config_or_index(folder: Path, file: str) -> None:
    outside = folder.parent / "elsewhere.json"
    (folder / file).rename(outside)
    (folder / file).symlink_to(outside)
    with pytest.raises(RipresaError, match="leads out of the folder"):
        open_and_check(folder)
    (folder / file).unlink()
    (folder / file).symlink_to(file)
    with pytest.raises(RipresaError):
        open_and_check(folder)
    (folder / file).unlink()
    inside = folder / "renamed.json"
    outside.rename(inside)
    (folder / file).symlink_to(inside.name)
    open_and_check(folder)


def test_a_checkpoint_without_its_draft_stages_is_whole(folder: Path) -> None:
    index = json.loads((folder / INDEX_FILE).read_text())
    for name in index["weight_map"]:
        if name.startswith("mtp."):
            remove_tensor(folder, name)
    open_and_check(folder)


@pytest.mark.parametrize("name", ["vision.blocks.0.attn.qkv.weight", "layers.1.ffn.gate.bias_vl"])
def test_parts_for_images_are_refused_unless_the_config_says_text_alone(
    folder: Path, name: str
) -> None:
    file = add_tensor(folder, name)

    def load() -> None:
        config = ModelConfig.from_file(folder / "config.json")
        with Checkpoint(folder) as checkpoint:
            load_weights(checkpoint, config, Half.ENCODER)

    with pytest.raises(CheckpointError, match=rf"serves images, .* in {file}") as caught:
        load()
    assert caught.value.field == name
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(document | {"vision_config": None}))
    load()


def test_a_pipe_or_a_folder_in_a_shard_s_place_is_refused(folder: Path) -> None:
    shard = folder / "model-00002-of-00003.safetensors"
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises(CheckpointError, match="is no regular file"):
        Checkpoint(folder)
    shard.unlink()
    shard.mkdir()
    with pytest.raises(CheckpointError, match="is no regular file"):
        Checkpoint(folder)


@pytest.mark.parametrize(("code", "words"), [(255, "scale NaN"), (254, r"scale 2\^127")])
@pytest.mark.parametrize("name", [LINEAR, EXPERT, TABLE])
def test_a_scale_that_is_no_number_is_refused(
    folder: Path, name: str, code: int, words: str
) -> None:
    flip_payload(folder, f"{name.removesuffix('.weight')}.scale", bytes([code]))
    open_and_check(folder)
    with pytest.raises(CheckpointError, match=rf"{words}.* in model-"):
        read_everything(folder)


def test_a_file_cut_while_it_is_open_is_told(folder: Path) -> None:
    with Checkpoint(folder) as checkpoint:
        entry = checkpoint.entry(NORM)
        os.truncate(folder / entry.file, entry.start + 5)
        with pytest.raises(CheckpointError, match="the file has been cut"):
            checkpoint.read(NORM, (64,))


def test_quantised_weights_need_a_config_that_says_so(folder: Path) -> None:
    document = json.loads((folder / "config.json").read_text())
    del document["quantization_config"]
    (folder / "config.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match="has no quantization_config"):
        open_and_check(folder)


def test_read_refuses_what_the_caller_does_not_expect(folder: Path) -> None:
    with Checkpoint(folder) as checkpoint:
        for name, shape in ((LINEAR, (32, 65)), (EXPERT, (64, 64)), (NORM, (65,)), (NORM, ())):
            with pytest.raises(CheckpointError) as caught:
                checkpoint.read(name, shape)
            assert caught.value.field == name
        with pytest.raises(CheckpointError, match="has no such tensor"):
            checkpoint.read("x", (1,))


def test_progress_counts_bytes(folder: Path) -> None:
    told: list[tuple[int, int]] = []
    with Checkpoint(folder, lambda done, total: told.append((done, total))) as checkpoint:
        checkpoint.expect(128 + 2048 + 2)
        checkpoint.read(NORM, (64,))
        checkpoint.read(LINEAR, (32, 64))
    assert told == [(128, 2178), (130, 2178), (2178, 2178)]


def test_progress_lines_begin_after_two_seconds_and_become_rare() -> None:
    times = iter([0.0, 1.9, 2.0, 3.0, 4.0, 7.9, 8.5])
    lines: list[str] = []
    progress = ProgressLines("reading", lines.append, lambda: next(times))
    for done in range(6):
        progress(done * 10**9, 5 * 10**9)
    assert lines == [
        "reading: 1.0 of 5.0 GB in 2 s",
        "reading: 3.0 of 5.0 GB in 4 s",
        "reading: 5.0 of 5.0 GB in 8 s",
    ]
