"""Can a damaged or hostile config.json crash or stall whoever reads it?

A number that no tensor's shape depends on can change unseen; `ripresa doctor` compares the file's
hash for that.
"""

from __future__ import annotations

import copy
import json
import math
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_model import TEXT, tiny_checkpoint, tiny_config

from ripresa.workers.checkpoint_files import CheckpointFiles
from ripresa.workers.errors import CheckpointError, ConfigError
from ripresa.workers.models.checkpoint import Checkpoint
from ripresa.workers.models.deepseek_v41.config import ModelConfig
from ripresa.workers.models.deepseek_v41.inventory import take_inventory
from ripresa.workers.models.deepseek_v41.tensor_specs import tensor_specs

VALUES: list[Any] = [
    *(None, True, False, -1, 0, 1, 2, 3, 7, 2**14, 2**31, 2**40, 2**63, 2**64, 10**400),
    *(0.5, -0.0, 1e-300, 1e300, math.nan, math.inf, -math.inf, "", "x", "yarn"),
    *([], [0], [1, 1], [-1], [2**70], ["x"], [[]], [None], [0] * 100, {}, {"x": 1}, [{}]),
]


def parse(document: object) -> ModelConfig | None:
    """The geometry, all its tensors listed; None if it is refused. Other errors are crashes."""
    try:
        config = ModelConfig.from_dict(document)
    except ConfigError:
        return None
    for spec in tensor_specs(config):
        assert spec.num_parameters > 0
    for layer in range(config.num_hidden_layers):
        if config.ratio(layer):
            assert config.kv_source(layer) <= config.index_source(layer) <= layer
    return config


def fields_of(document: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, value in document.items():
        yield (name,)
        if isinstance(value, dict):
            yield from ((name, *inner) for inner in fields_of(value))


def changed(document: dict[str, Any], path: tuple[str, ...], value: object) -> dict[str, Any]:
    result = copy.deepcopy(document)
    inner = result
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return result


FIELDS = [*fields_of(tiny_config()), ("quantization_config",), ("vision_config",)]


@pytest.mark.parametrize("field", FIELDS, ids=".".join)
def test_any_value_in_any_field(field: tuple[str, ...]) -> None:
    for value in VALUES:
        parse(changed(tiny_config(), field, value))
    without = tiny_config()
    inner = without
    for name in field[:-1]:
        inner = inner[name]
    inner.pop(field[-1], None)
    parse(without)


def test_the_sound_config_is_read_with_and_without_the_text_level() -> None:
    config = parse(tiny_config())
    assert config is not None
    assert parse(copy.deepcopy(TEXT)) == config


@pytest.mark.parametrize("document", VALUES, ids=lambda value: repr(value)[:20])
def test_any_value_as_the_document(document: object) -> None:
    assert parse(document) is None


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"n_routed_experts": 2**20}, "text_config.n_routed_experts"),
        ({"num_hidden_layers": 2**13, "compress_ratios": [0] * 2**13}, "kv_source_layer_ids"),
        ({"engram_n_heads": 2**13}, "engram_n_heads"),
        ({"engram_layer_ids": [1, 1], "engram_num_embeddings": [5, 5]}, "engram_layer_ids"),
        ({"engram_vocab_size": 2**40}, "engram_num_embeddings"),
        ({"engram_n_heads": 400}, "engram_num_embeddings"),
        ({"engram_compressed_vocab_size": 2**40}, "engram_compressed_vocab_size"),
        ({"hc_sinkhorn_iters": 2**30}, "text_config.hc_sinkhorn_iters"),
        ({"dspark_n_routed_experts": 2**30}, "text_config.dspark_n_routed_experts"),
        ({"bos_token_id": 96}, "eos_token_id"),
        ({"sliding_window": 2**39}, "text_config.sliding_window"),
        ({"index_topk": 2**39}, "text_config.index_topk"),
        ({"candidate_topk_blocks": 2**39}, "text_config.candidate_topk_blocks"),
    ],
)
def test_sizes_that_would_stall_a_worker_are_refused(
    changes: dict[str, object], field: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(tiny_config(**changes))
    assert field in str(caught.value.field)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("text_config", "n_group"), 8),
        (("text_config", "topk_group"), 4),
        (("text_config", "first_k_dense_replace"), 3),
        (("text_config", "gate_temperature"), 0.5),
        (("text_config", "mlp_bias"), True),
        (("text_config", "a_new_idea"), 1),
        (("text_config", "rope_scaling", "mscale"), 1.0),
        (("text_config", "rope_scaling", "mscale_all_dim"), 1.0),
        (("text_config", "rope_scaling", "rope_type"), "linear"),
        (("text_config", "rope_scaling", "a_new_idea"), 1),
        (("quantization_config", "activation_scheme"), "static"),
        (("quantization_config", "a_new_idea"), 1),
        (("model_type",), "llama"),
        (("tie_word_embeddings",), True),
        (("a_new_idea",), 1),
    ],
    ids=lambda value: ".".join(value) if isinstance(value, tuple) else repr(value),
)
def test_what_would_make_another_model_is_refused_by_name(
    path: tuple[str, ...], value: object
) -> None:
    document = tiny_config()
    if path[0] == "quantization_config":
        document["quantization_config"] = {"quant_method": "fp8"}
    assert parse(document) is not None
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(changed(document, path, value))
    assert caught.value.field == ".".join(path)


def test_fields_that_change_nothing_may_stand_there() -> None:
    plain = parse(tiny_config())
    said = tiny_config(n_group=1, topk_group=1, use_cache=True, torch_dtype="bfloat16")
    said |= {"transformers_version": "5.0", "audio_token_id": 7, "tie_word_embeddings": False}
    assert parse(said) == plain
    beside = tiny_config() | {"eos_token_id": 5}
    assert ModelConfig.from_dict(beside).eos_token_id == 5


def test_the_id_of_images_is_read_wherever_it_stands() -> None:
    for config in (tiny_config() | {"image_token_id": 7}, tiny_config(image_token_id=7)):
        assert ModelConfig.from_dict(config).image_token_id == 7
    assert ModelConfig.from_dict(tiny_config()).image_token_id is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"x": ' + b"9" * 10_000 + b"}",
        b'{"text_config": {}, "text_config": {}}',
        b'{"x": NaN}',
        b" " * (2 << 20),
        json.dumps(tiny_config()).encode("utf-16"),
    ],
    ids=["empty", "bytes", "deep", "deep objects", "digits", "twice", "nan", "large", "utf-16"],
)
def test_files_that_are_no_config(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError):
        ModelConfig.from_file(path)


def test_a_folder_or_a_pipe_is_no_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        ModelConfig.from_file(tmp_path)
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ConfigError, match="is no regular file"):
        ModelConfig.from_file(tmp_path / "config.json")


def flip_bits(folder: Path, trials: int, seed: int) -> None:
    """Flips in config.json: refused, or seen in the hash, and never a crash."""
    draw = random.Random(seed)
    path = folder / "config.json"
    content = path.read_bytes()
    for _ in range(trials):
        flipped = bytearray(content)
        flipped[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(flipped)
        try:
            config = ModelConfig.from_file(path)
            with Checkpoint(folder) as checkpoint:
                take_inventory(checkpoint.entries, config)
        except (ConfigError, CheckpointError):
            continue
    path.write_bytes(content)


def test_flipped_bits(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    flip_bits(tmp_path, trials=200, seed=1)


@pytest.mark.slow
def test_many_flipped_bits(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    flip_bits(tmp_path, trials=5000, seed=2)


def test_a_number_that_no_shape_shows_is_found_by_the_file_s_hash(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    CheckpointFiles(tmp_path).check(lambda line: None, record=True)
    path = tmp_path / "config.json"
    path.write_bytes(path.read_bytes().replace(b'"rope_theta": 10000', b'"rope_theta": 10001'))
    config = ModelConfig.from_file(path)
    assert config.rope_theta == 10001
    assert not CheckpointFiles(tmp_path).check(lambda line: None)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
ANY = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@pytest.mark.slow
@settings(max_examples=1500, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(changes=st.lists(st.tuples(st.sampled_from(FIELDS), ANY), min_size=1, max_size=4))
def test_many_values_in_many_fields(changes: list[tuple[tuple[str, ...], Any]]) -> None:
    document = tiny_config()
    for field, value in changes:
        try:
            document = changed(document, field, value)
        except (KeyError, TypeError):  # an earlier change took its object away
            continue
    parse(document)
