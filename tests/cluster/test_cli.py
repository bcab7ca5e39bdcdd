"""Does the command line teach, check, ask and fail as it says?"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml
from click.testing import CliRunner, Result
from gateway_thread import GatewayThread

from ripresa.cluster.cli import FAILED, MISUSED, cli
from ripresa.cluster.gateway.tokenizer import Tokenizer
from ripresa.workers.errors import Unavailable


def ripresa(*arguments: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(cli, arguments, input=stdin)


VERBS = ["", "demo", "serve", "check", "check config", "generate", "verify", "verify golden"]


@pytest.mark.parametrize("verb", VERBS)
def test_help_teaches(verb: str) -> None:
    result = ripresa(*verb.split(), "--help")
    assert result.exit_code == 0
    assert "Usage:" in result.output
    if verb not in ("check", "verify"):
        assert f"  ripresa {verb}".rstrip() in result.output  # an example to copy


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys, click.testing, ripresa.cluster.cli as c;"
        "click.testing.CliRunner().invoke(c.cli, ['generate', '--help']);"
        "print([m for m in ('torch', 'ray', 'grpc', 'fastapi', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_check_config_prints_every_setting(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("encoders: {replicas: 2}")
    result = ripresa("check", "config", str(path), "--set", "gateway.grpc_port=9100")
    assert result.exit_code == 0
    settings = yaml.safe_load(result.stdout)
    assert settings["encoders"]["replicas"] == 2
    assert settings["gateway"]["grpc_port"] == 9100
    assert settings["numerics"] == "fast"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("encoders: {replcas: 2}", "encoders.replcas: is no setting; did you mean `replicas`?"),
        ("decoders: {max_batched_tokens: 255}", "decoders.max_batched_tokens: must be at least"),
        ("model: {path: /nowhere}", "model.path: /nowhere/config.json does not exist"),
    ],
)
def test_check_config_names_what_is_wrong(tmp_path: Path, text: str, line: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    result = ripresa("check", "config", str(path))
    assert result.exit_code == MISUSED
    assert line in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("verb", ["serve", "demo"])
@pytest.mark.parametrize("port", ["gateway.grpc_port", "gateway.http_port", "admin.port"])
def test_a_taken_port_is_told_before_anything_starts(verb: str, port: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        ports = ("gateway.grpc_port=0", "gateway.http_port=0", "admin.port=0", f"{port}={number}")
        result = ripresa(verb, *(word for value in ports for word in ("--set", value)))
    assert result.exit_code == MISUSED
    assert f"{port}: cannot listen on 127.0.0.1:{number}: Address already in use" in result.stderr


def test_verify_golden_fails_on_a_folder_that_is_none(tmp_path: Path) -> None:
    assert ripresa("verify", "golden", str(tmp_path)).exit_code == FAILED
    assert ripresa("verify", "golden").exit_code == MISUSED


def test_generate_streams_text(gateway: GatewayThread, tokenizer: Tokenizer) -> None:
    gateway.router.script = tuple(tokenizer.encode("日本 ok "))
    count = str(len(gateway.router.script))
    result = ripresa(
        *("generate", "--address", gateway.address, "--prompt", "hi"),
        *("--max-tokens", count, "--seed", "7", "--temperature", "0", "--tail", "full"),
    )
    assert result.exit_code == 0
    assert result.stdout == "日本 ok \n"
    assert f"answer {count} tokens (length)" in result.stderr
    assert "seed 7, worker decode-0" in result.stderr
    (prompt,) = gateway.router.seen
    assert prompt.tail == "full"
    assert prompt.sampling.temperature == 0


def test_generate_prints_json_events(gateway: GatewayThread) -> None:
    result = ripresa(
        *("generate", "--address", gateway.address, "--token-ids", "0,40,9", "--json"),
        *("--max-tokens", "2", "--stop-token-id", "41", "--ignore-eos"),
    )
    events = [json.loads(line) for line in result.stdout.splitlines()]
    names = ["started", "tokens", "text", "tokens", "finished", "completed"]
    assert [event["event"] for event in events] == names
    assert [event["token_ids"] for event in events if event["event"] == "tokens"] == [[40], [41]]
    assert (events[-2]["reason"], events[-2]["stop_token_id"]) == ("stop", 41)
    assert events[-1]["usage"]["completion_tokens"] == 2
    assert events[-1]["build"]["weights_digest"] == "ab12"
    assert gateway.router.seen[0].token_ids == (0, 40, 9)


def test_generate_asks_for_a_mode_and_goes_on_with_a_session(gateway: GatewayThread) -> None:
    arguments = (
        "generate",
        "--address",
        gateway.address,
        "--token-ids",
        "0,40",
        "--max-tokens",
        "1",
    )
    options = ("--mode", "exact", "--tail", "exact", "--session", "mine")
    assert ripresa(*arguments, *options).exit_code == 0
    assert ripresa(*arguments).exit_code == 0
    asked, default = gateway.router.seen
    assert (asked.cache.mode, asked.tail, asked.session_id) == ("exact", "exact", "mine")
    assert (default.cache.mode, default.tail, default.session_id) == ("bounded", "floored", None)


def test_generate_reads_stdin(gateway: GatewayThread, tokenizer: Tokenizer) -> None:
    arguments = ("generate", "--address", gateway.address, "--max-tokens", "1")
    assert ripresa(*arguments, "--prompt-file", "-", stdin="héllo\n").exit_code == 0
    assert tokenizer.decode(gateway.router.seen[0].token_ids) == "héllo\n"


@pytest.mark.parametrize(
    ("arguments", "stdin", "words"),
    [
        ((), None, "give one of --prompt"),
        (("--prompt", "a", "--token-ids", "1"), None, "give one of --prompt"),
        (("--token-ids", "1,x"), None, "--token-ids: must be numbers"),
        (("--token-ids", "1,-2"), None, "prompt: cannot be sent"),
        (("--prompt-file", "-"), b"ab\xff", "--prompt-file: is not UTF-8: byte 2"),
        (("--prompt", ""), None, "text: the prompt is empty"),
        (("--prompt", "a", "--temperature", "-1"), None, "sampling.temperature: must be"),
        (("--prompt", "a", "--model", "x"), None, "model 'x' is not served here"),
        (("--token-ids", "99999"), None, "token_ids.ids[0]: token id 99999"),
        (("--prompt", "a", "--mode", "canonical", "--tail", "exact"), None, "ask for that mode"),
        (("--prompt", "a", "--session", "x" * 1025), None, "options.session_id: must have"),
    ],
)
def test_generate_refuses(
    gateway: GatewayThread, arguments: tuple[str, ...], stdin: bytes | None, words: str
) -> None:
    result = ripresa("generate", "--address", gateway.address, *arguments, stdin=stdin)
    assert result.exit_code == MISUSED
    assert words in result.stderr
    assert gateway.router.seen == []


def test_generate_tells_a_failure(gateway: GatewayThread) -> None:
    gateway.router.failure = Unavailable("the decode worker died")
    result = ripresa("generate", "--address", gateway.address, "--prompt", "a")
    assert result.exit_code == FAILED
    assert result.stderr.endswith("Error: the decode worker died\n")


def test_generate_without_a_gateway() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
        result = ripresa(
            "generate", "--address", address, "--prompt", "a", "--connect-timeout", "0.2"
        )
    assert result.exit_code == FAILED
    assert f"no gateway answers at {address}; start one with `ripresa serve`" in result.stderr


def every_option(command: click.Command) -> Iterator[click.Parameter]:
    yield from command.params
    for below in command.commands.values() if isinstance(command, click.Group) else ():
        yield from every_option(below)


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "demo", "--folder", "none", "--minutes"),
        ("generate", "--prompt", "hi", "--timeout"),
        ("generate", "--prompt", "hi", "--connect-timeout"),
        ("admin", "drain", "d0", "--grace"),
    ],
    ids=lambda arguments: arguments[-1],
)
def test_no_time_is_longer_than_anybody_waits(arguments: tuple[str, ...]) -> None:
    """More than timers and gRPC can count was a traceback, or a deadline that had passed."""
    for number in ("1e300", "1e10"):
        result = CliRunner().invoke(cli, (*arguments, number))
        assert result.exit_code == MISUSED
        assert "is not in the range" in result.stderr


def test_no_range_lets_nan_or_inf_through() -> None:
    ranges = [each for each in every_option(cli) if isinstance(each.type, click.FloatRange)]
    assert len(ranges) >= 8
    for option in ranges:
        for number in ("nan", "inf", "-inf", "1e999"):
            with pytest.raises(click.BadParameter):
                option.type.convert(number, option, None)
    # The server has words for these, and hears of them from other clients as well.
    loose = {each.name for each in every_option(cli) if each.type is click.FLOAT}
    assert loose == {"temperature", "top_p"}
