"""Does the configuration refuse what is wrong, by its dotted name, and keep what is right?"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import torch
import yaml
from tiny_model import tiny_config

from ripresa.cluster.config import (
    MAX_TEMP_DIR_CHARS,
    ClusterConfig,
    TransferBackend,
    TransferSettings,
    check_against_model,
    load_config,
)
from ripresa.cluster.config_tree import dump
from ripresa.workers.config import DiskConfig, EngramPlacement, Numerics
from ripresa.workers.config import TransferConfig as EngineTransferConfig
from ripresa.workers.demo.checkpoint import DEMO_MODEL
from ripresa.workers.errors import ConfigError
from ripresa.workers.models.deepseek_v41.config import ModelConfig
from ripresa.workers.replay import TailVariant
from ripresa.workers.transfer.base import LaneConfig
from ripresa.workers.transfer.registry import create_transport
from ripresa.workers.worker_process import transport_name


def load(text: str, tmp_path: Path, *assignments: str) -> ClusterConfig:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return load_config(path, assignments)


def test_defaults() -> None:
    config = load_config(None)
    assert config == ClusterConfig()
    assert config.encoders.replicas == 0
    assert config.decoders.replicas == 1


def test_a_file_and_overrides(tmp_path: Path) -> None:
    text = """
    encoders: {replicas: 2, num_blocks: 64}
    gateway:
      grpc_port: 9100
    numerics: deterministic
    """
    config = load(
        text, tmp_path, "encoders.replicas=3", "ray.temp_dir=/tmp/r", "transfer.chunk_timeout_s=1"
    )
    assert (config.encoders.replicas, config.encoders.num_blocks) == (3, 64)
    assert config.gateway.grpc_port == 9100
    assert config.numerics is Numerics.DETERMINISTIC
    assert config.ray.temp_dir == "/tmp/r"
    assert config.transfer.chunk_timeout_s == 1.0


def test_an_empty_file_and_an_empty_group_are_all_defaults(tmp_path: Path) -> None:
    assert load("", tmp_path) == ClusterConfig()
    assert load("encoders:\n", tmp_path) == ClusterConfig()


def test_dump_reads_back(tmp_path: Path) -> None:
    config = load("transfer: {backend: gloo}", tmp_path, "ray.num_cpus=4", "default_tail=full")
    assert load(dump(config), tmp_path) == config
    assert yaml.safe_load(dump(config))["transfer"]["backend"] == "gloo"


QUANTISED = {
    "quant_method": "fp8",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}

REFUSED = {
    "no placement": (
        "model: {engram_placement: gpu}",
        "model.engram_placement",
        "one of host_shared, host_numa, nvme, is 'gpu'",
    ),
    "text for a switch": ("model: {w8a8: on please}", "model.w8a8", "true or false"),
    "unknown group": ("encoder: {replicas: 1}", "encoder", "did you mean `encoders`?"),
    "unknown key": ("encoders: {replcas: 1}", "encoders.replcas", "did you mean `replicas`?"),
    "nothing near": ("gateway: {xyzzy: 1}", "gateway.xyzzy", "valid here: replicas, grpc_host"),
    "text for a number": ("decoders: {replicas: two}", "decoders.replicas", "a whole number"),
    "bool for a number": ("decoders: {replicas: yes}", "decoders.replicas", "is True"),
    "float for a number": ("decoders: {replicas: 1.5}", "decoders.replicas", "is 1.5"),
    "null for a number": ("decoders: {replicas: null}", "decoders.replicas", "is None"),
    "number for a text": ("model: {name: 4}", "model.name", "a text"),
    "below its range": ("decoders: {replicas: 0}", "decoders.replicas", "at least 1, is 0"),
    "above its range": ("gateway: {grpc_port: 70000}", "gateway.grpc_port", "at most 65535"),
    "NaN": ("transfer: {chunk_timeout_s: .nan}", "transfer.chunk_timeout_s", "is nan"),
    "no choice": ("numerics: exact", "numerics", "one of deterministic, fast"),
    "a value for a group": ("encoders: 2", "encoders", "a group of settings, not 2"),
    "exact tail": ("default_tail: exact", "default_tail", "needs mode exact"),
    "loopback": (
        "{encoders: {replicas: 1}, transfer: {backend: loopback}}",
        "transfer.backend",
        "use auto or gloo",
    ),
    "one port twice": ("gateway: {http_port: 9000}", "gateway.http_port", "gateway.grpc_port"),
    "shared free port": (
        "gateway: {replicas: 2, grpc_port: 0}",
        "gateway.grpc_port",
        "several gateways",
    ),
    "empty name": ("model: {name: ' '}", "model.name", "not be empty"),
    "relative disk": ("disk: {path: blocks}", "disk.path", "an absolute path"),
    "empty disk": ("disk: {path: ''}", "disk.path", "an absolute path"),
    "root as disk": ("disk: {path: /}", "disk.path", "of its own"),
    "NUL in disk": ('disk: {path: "/a\\0b"}', "disk.path", "an absolute path"),
    "no room on disk": ("disk: {capacity_bytes: 0}", "disk.capacity_bytes", "below 1"),
    "no time on disk": ("disk: {max_age_h: 0}", "disk.max_age_h", "no number of hours"),
    "for ever on disk": ("disk: {max_age_h: .inf}", "disk.max_age_h", "inf"),
    "more than all tokens": ("shadow: {share: 2}", "shadow.share", "not between 0 and 1"),
    "no context": ("shadow: {max_tokens: 0}", "shadow.max_tokens", "below 1"),
    "no distributions": ("shadow: {capacity_bytes: -1}", "shadow.capacity_bytes", "below 0"),
    "no time to wait": ("shadow: {max_wait_s: 0}", "shadow.max_wait_s", "no number of seconds"),
    "never lapses": ("parked: {time_to_live_s: .nan}", "parked.time_to_live_s", "finite"),
    "endless trip": ("planner: {round_trip_s: .inf}", "planner.round_trip_s", "finite"),
    "relative temp dir": ("ray: {temp_dir: tmp}", "ray.temp_dir", "absolute"),
    "long temp dir": (
        f"ray: {{temp_dir: /{'x' * MAX_TEMP_DIR_CHARS}}}",
        "ray.temp_dir",
        "at most 40 characters",
    ),
}


@pytest.mark.parametrize(("text", "field", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(tmp_path: Path, text: str, field: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(text, tmp_path)
    assert caught.value.field == field
    assert words in caught.value.message


def test_no_yaml_names_the_file_and_the_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.yaml: is not valid YAML: .*line 2"):
        load("a: 1\n b: {", tmp_path)
    with pytest.raises(ConfigError, match=r"`replicas` stands twice .*line 1"):
        load("encoders: {replicas: 1, replicas: 2}", tmp_path)
    with pytest.raises(ConfigError, match="`name: value`"):
        load("- 1", tmp_path)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.yaml: cannot be read: No such file"):
        load_config(tmp_path / "gone.yaml")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="it is not UTF-8"):
        load_config(tmp_path / "binary")


@pytest.mark.parametrize(
    ("assignment", "field", "words"),
    [
        ("encoders.replicas", "--set", "a.b=value"),
        ("=3", "--set", "a.b=value"),
        ("encoders.replicas=[", "encoders.replicas", "no valid value|not a valid value"),
        ("numerics.x=1", "numerics", "is no group"),
        ("encoders.replcas=1", "encoders.replcas", "did you mean `replicas`"),
    ],
)
def test_a_wrong_override(tmp_path: Path, assignment: str, field: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        load("numerics: fast", tmp_path, assignment)
    assert caught.value.field == field


def test_workers_get_their_part() -> None:
    config = load_config(
        None,
        ["encoders.num_blocks=7", "decoders.max_num_seqs=3", "transfer.max_section_blocks=2"],
    )
    assert config.encoder_engine().num_blocks == 7
    assert config.decoder_engine().max_num_seqs == 3
    assert config.decoder_engine().transfer.max_section_blocks == 2
    assert load_config(None, ["transfer.max_lanes=2"]).lanes() == LaneConfig(max_lanes=2)


def test_state_may_travel_through_ray(tmp_path: Path) -> None:
    config = load("{encoders: {replicas: 1}, transfer: {backend: object_store}}", tmp_path)
    assert transport_name(config.transfer.backend) == "object_store"


def test_object_store_outside_a_cluster_is_refused() -> None:
    with pytest.raises(ConfigError, match="inside a Ray cluster"):
        create_transport("object_store", "127.0.0.1", torch.device("cpu"))


def test_both_kinds_of_worker_share_a_disk() -> None:
    disk = DiskConfig("/var/cache/ripresa", 1 << 30, 24)
    config = ClusterConfig(disk=disk)
    assert config.encoder_engine().disk == config.decoder_engine().disk == disk
    assert ClusterConfig().decoder_engine().disk.path is None


def test_transfer_defaults_are_the_workers_own() -> None:
    """The tree repeats them to document and check them; they must not drift."""
    settings = TransferSettings()
    for owner in (LaneConfig(), EngineTransferConfig()):
        for field in fields(owner):
            if hasattr(settings, field.name):
                assert getattr(settings, field.name) == getattr(owner, field.name), field.name
    assert settings.backend is TransferBackend.AUTO
    assert ClusterConfig().decoder_engine().default_tail is TailVariant.FLOORED


def test_periodic_windows_end_on_block_boundaries() -> None:
    model = ModelConfig.from_file(DEMO_MODEL / "config.json")
    check_against_model(load_config(None, ["windows.period=100"]), model)
    with pytest.raises(ConfigError, match="multiple of this model's window, 128, is 100") as caught:
        check_against_model(
            load_config(None, ["windows.policy=periodic", "windows.period=100"]), model
        )
    assert caught.value.field == "windows.period"


def test_a_budget_below_two_windows_is_refused() -> None:
    model = ModelConfig.from_file(DEMO_MODEL / "config.json")
    assert model.sliding_window == 128
    check_against_model(load_config(None, ["decoders.max_batched_tokens=256"]), model)
    with pytest.raises(ConfigError, match="at least two windows of this model, 256, is 255"):
        check_against_model(load_config(None, ["decoders.max_batched_tokens=255"]), model)
    small_encoders = ["encoders.max_batched_tokens=64", "encoders.replicas=1"]
    with pytest.raises(ConfigError) as caught:
        check_against_model(load_config(None, small_encoders), model)
    assert caught.value.field == "encoders.max_batched_tokens"


def test_the_model_s_settings_reach_every_worker() -> None:
    config = load_config(None, ["model.w8a8=true", "model.engram_placement=nvme"])
    for engine in (config.encoder_engine(), config.decoder_engine()):
        assert engine.w8a8
        assert engine.engram_placement is EngramPlacement.NVME
    default = load_config(None).decoder_engine()
    assert not default.w8a8
    assert default.engram_placement is EngramPlacement.HOST_SHARED


def test_w8a8_needs_a_model_that_the_release_would_round() -> None:
    config = load_config(None, ["model.w8a8=true"])
    sizes = tiny_config()
    rounded = sizes | {"quantization_config": QUANTISED}
    check_against_model(config, ModelConfig.from_dict(rounded))
    with pytest.raises(ConfigError, match="no quantization_config") as caught:
        check_against_model(config, ModelConfig.from_dict(sizes))
    assert caught.value.field == "model.w8a8"
    narrow = tiny_config(q_lora_rank=48) | {"quantization_config": QUANTISED}
    with pytest.raises(ConfigError, match="the q_lora_rank, 48, is no multiple"):
        check_against_model(config, ModelConfig.from_dict(narrow))
