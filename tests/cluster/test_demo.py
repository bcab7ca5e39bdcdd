"""Does the demo's loop run the tools that answers call, and say what it did?"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from chat_support import calls_block, encode_output
from gateway_thread import GatewayThread, gateway_thread
from scripted_inference import Script, chat_script, scripted_gateways

from ripresa.cluster.client import Client
from ripresa.cluster.config import ClusterConfig
from ripresa.cluster.demo import MAX_CALL_TOKENS, TURNS, count_lines, list_files, run_demo, run_loop
from ripresa.cluster.gateway.chat_encoding import ChatEncoding
from ripresa.cluster.gateway.served_model import ServedModel
from ripresa.cluster.gateway.tokenizer import Tokenizer

EOS = 1


@pytest.fixture
def chatting(
    chat_model: ServedModel, demo: Tokenizer, encoding: ChatEncoding
) -> Iterator[GatewayThread]:
    with gateway_thread(chat_model, demo, encoding=encoding) as running:
        yield running


def call(name: str, **arguments: str) -> tuple[int, ...]:
    """What a model writes whose calls were opened for it."""
    block = calls_block([(name, [(key, "true", value) for key, value in arguments.items()])])
    return tuple(encode_output(block.partition("\n")[2]))


def loop(gateway: GatewayThread, *answers: tuple[int, ...]) -> None:
    gateway.router.answers = [*answers]
    with Client(gateway.address) as client:
        run_loop(client)
    assert not gateway.router.answers


def test_tools_are_run_and_their_results_sent_back(
    chatting: GatewayThread, demo: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    loop(
        chatting,
        (*call("list_files", folder="protos"), EOS),
        (*call("count_lines", folder="cluster", suffix=".md"), EOS),
        (*encode_output("It is small."), EOS),
    )
    said = capsys.readouterr().out
    assert 'call    list_files({"folder": "protos"})' in said
    assert "ripresa.proto" in said
    assert "It is small." in said
    _, second, third = (demo.decode(prompt.token_ids) for prompt in chatting.router.seen)
    assert list_files("protos") in second
    assert count_lines("cluster", ".md") in third
    for prompt in chatting.router.seen:
        rows = len(prompt.token_ids)
        assert f"{rows} tokens: 0 cached; computed {rows} encoder rows and 8 decoder rows" in said


def test_what_is_wrong_with_a_call_is_a_result(
    chatting: GatewayThread, demo: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    loop(
        chatting,
        (*call("list_files", folder="/etc"), EOS),
        (*call("no_such_tool"), EOS),
        (*encode_output("?"), EOS),
    )
    last = demo.decode(chatting.router.seen[-1].token_ids)
    assert "error: folder must be one of cluster, workers, kernels, protos, not '/etc'" in last
    assert "error: there is no tool no_such_tool" in last
    assert "no whole call" not in capsys.readouterr().out


def test_a_cut_call_and_none_are_told(
    chatting: GatewayThread, demo: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    loop(chatting, call("list_files", folder="endless " * MAX_CALL_TOKENS), (EOS,), (EOS,))
    assert capsys.readouterr().out.count("no whole call came") == 2
    assert "error: the call was cut" in demo.decode(chatting.router.seen[1].token_ids)


def test_the_tools_tell_the_truth() -> None:
    assert "ripresa.proto" in json.loads(list_files("protos"))
    counted = json.loads(count_lines("protos", ".md"))
    assert counted["files"] == 1
    assert counted["lines"] > 20
    with pytest.raises(ValueError, match="folder must be one of"):
        count_lines("..", ".py")
    with pytest.raises(ValueError, match="suffix must be one of"):
        count_lines("protos", "*")


def test_a_cluster_that_asks_for_a_key_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(chat_script())
    with scripted_gateways(script) as (address,):
        cluster = nullcontext(SimpleNamespace(grpc_address=address))
        monkeypatch.setattr("ripresa.cluster.demo.local_cluster", lambda config: cluster)
        run_demo(ClusterConfig(), "k")
    assert [told["authorization"] for told in script.metadata] == ["Bearer k"] * len(TURNS)
