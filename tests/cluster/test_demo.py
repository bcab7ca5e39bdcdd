"""Does the demo's loop run the tools that answers call, and say what it did and what was wrong?"""

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
from ripresa.cluster.demo import MAX_TOKENS, run_demo, run_loop, tour
from ripresa.cluster.gateway.chat_encoding import ChatEncoding
from ripresa.cluster.gateway.served_model import ServedModel
from ripresa.cluster.gateway.tokenizer import Tokenizer
from ripresa.cluster.training.rendering import Renderer
from ripresa.workers.demo.build_tokenizer import TOKENIZER
from ripresa.workers.demo.ledger.conversation import MAX_CALLS, Message
from ripresa.workers.demo.ledger.scripts import write
from ripresa.workers.demo.ledger.tool_server import TOOLS

EOS = 1
NUM_LEDGERS = 50


@pytest.fixture
def chatting(
    chat_model: ServedModel, demo: Tokenizer, encoding: ChatEncoding
) -> Iterator[GatewayThread]:
    with gateway_thread(chat_model, demo, encoding=encoding) as running:
        yield running


def said(message: Message) -> tuple[int, ...]:
    """What a model writes to say a message."""
    calls = [
        (
            call["function"]["name"],
            [
                (key, str(isinstance(value, str)).lower(), str(value))
                for key, value in json.loads(call["function"]["arguments"]).items()
            ],
        )
        for call in message.get("tool_calls", ())
    ]
    text = message["content"] + (f"\n\n{calls_block(calls)}" if calls else "")
    return (*encode_output(text), EOS)


def loop(gateway: GatewayThread, answers: list[tuple[int, ...]]) -> int:
    gateway.router.answers = answers
    with Client(gateway.address) as client:
        return run_loop(client, tour(0))


def right_answers() -> list[tuple[int, ...]]:
    return [said(m) for m in write(tour(0)).messages if m["role"] == "assistant"]


def test_right_answers_are_told_and_prompts_are_those_of_the_training(
    chatting: GatewayThread, encoding: ChatEncoding, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation = write(tour(0))
    assert loop(chatting, right_answers()) == len(tour(0).turns) == 4
    assert not chatting.router.answers
    shown = capsys.readouterr().out
    assert shown.count("\n  right\n") == 4
    assert "WRONG" not in shown
    prompts = [prompt.token_ids for prompt in chatting.router.seen]
    for prompt in prompts:
        rows = len(prompt)
        assert f"{rows} tokens: 0 cached; computed {rows} encoder rows and 8 decoder rows" in shown
    places = [p for p, m in enumerate(conversation.messages) if m["role"] == "assistant"]
    assert len(prompts) == len(places) == 9
    for place, prompt in zip(places, prompts, strict=True):
        body = {
            "messages": list(conversation.messages[:place]),
            "tools": list(TOOLS),
            "thinking": {"type": "disabled"},
        }
        expected = encoding.encode(encoding.render(body).segments)
        # Unlike an engine, the script tells the end of sentence as a token, so it is kept twice.
        once = [t for t, before in zip(prompt, (0, *prompt), strict=False) if (t, before) != (1, 1)]
        assert once == list(expected)
    renderer = Renderer(TOKENIZER)
    assert len(once) == 2 + renderer.num_tokens(conversation.messages[:-1], True)


def test_a_wrong_answer_is_told_with_the_right_one(
    chatting: GatewayThread, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = right_answers()
    answers[-1] = (*encode_output("it is somewhere"), EOS)
    assert loop(chatting, answers) == 3
    assert f"WRONG: the ledger says: {tour(0).turns[-1].answer}" in capsys.readouterr().out


def test_what_is_wrong_with_a_call_is_a_result(
    chatting: GatewayThread, demo: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = calls_block([("forget", [("key", "true", "everything")])])
    answers = [(*encode_output(broken), EOS), *right_answers()]
    assert loop(chatting, answers) == 4
    assert "error: no tool 'forget'" in demo.decode(chatting.router.seen[1].token_ids)
    assert "error: no tool 'forget'" in capsys.readouterr().out


def test_a_cut_call_gets_a_result_and_calls_without_end_are_wrong(
    chatting: GatewayThread, demo: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = tuple(encode_output(calls_block([("get", [("key", "true", "endless " * MAX_TOKENS)])])))
    again = right_answers()[0]
    assert loop(chatting, [cut, *[again] * 4, *right_answers()[2:]]) == 3
    assert "error: the call was cut" in demo.decode(chatting.router.seen[1].token_ids)
    assert capsys.readouterr().out.count("WRONG") == 1


def test_every_ledger_has_questions_for_tools_and_is_of_unseen_names() -> None:
    drawn = [write(tour(number)) for number in range(NUM_LEDGERS)]
    for conversation in drawn:
        calls = [
            call["function"]["name"]
            for message in conversation.messages
            for call in message.get("tool_calls", ())
        ]
        assert calls == ["get", "get", "set", "get", "get"]
    assert len({conversation.messages[0]["content"] for conversation in drawn}) == NUM_LEDGERS


def test_a_cluster_that_asks_for_a_key_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(chat_script())
    with scripted_gateways(script) as (address,):
        cluster = nullcontext(SimpleNamespace(grpc_address=address))
        monkeypatch.setattr("ripresa.cluster.demo.local_cluster", lambda config: cluster)
        assert not run_demo(ClusterConfig(), 0, "k"), "it calls tools without end"
    num_asked = len(tour(0).turns) * (MAX_CALLS + 1)
    assert [told["authorization"] for told in script.metadata] == ["Bearer k"] * num_asked
