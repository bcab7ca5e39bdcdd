"""Does an agent's loop with two tools run against a cluster, by every client and both ways?"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import anthropic
import openai
import pytest
import ray.cloudpickle
import scripted_worker
from chat_support import calls_block, encode_output
from served_cluster import ServedCluster, eventually, served_cluster

MODEL = "deepseek-v4.1-demo"
EOS = 1
NUM_BLOCKS = 72
TOOLS: dict[str, Callable[..., Any]] = {
    "get_weather": lambda city: {"city": city, "celsius": -3},
    "to_fahrenheit": lambda celsius: celsius * 9 / 5 + 32,
}
FUNCTIONS: list[dict[str, Any]] = [
    {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
    {
        "name": "to_fahrenheit",
        "description": "Converts a temperature",
        "parameters": {
            "type": "object",
            "properties": {"celsius": {"type": "number"}},
            "required": ["celsius"],
        },
    },
]
QUESTION = "How warm is it in Oslo, in Fahrenheit?"
FINAL = "It is 26.6 °F in Oslo."
ANSWERS = (
    "I look it up.</think>One moment.\n\n"
    + calls_block([("get_weather", [("city", "true", "Oslo")])]),
    "Now convert.</think>" + calls_block([("to_fahrenheit", [("celsius", "false", "-3")])]),
    f"Done.</think>{FINAL}",
)


@pytest.fixture(scope="module")
def scripted() -> Iterator[ServedCluster]:
    """One decode worker that says the same three answers again and again."""
    ray.cloudpickle.register_pickle_by_value(scripted_worker)
    scripted_worker.SCRIPT[:] = [(*encode_output(answer), EOS) for answer in ANSWERS]
    settings = (
        *("encoders.replicas=0", "decoders.replicas=1", f"decoders.num_blocks={NUM_BLOCKS}"),
        # A worker that is late shall not be asked again: the script would go on.
        "worker_lease_s=60",
    )
    with (
        mock.patch("ripresa.cluster.app.DecodeWorker", scripted_worker.DecodeWorker),
        served_cluster(*settings) as cluster,
    ):
        yield cluster
    ray.cloudpickle.unregister_pickle_by_value(scripted_worker)


@pytest.fixture(scope="module")
def url(scripted: ServedCluster) -> str:
    return f"http://{scripted.cluster.http_address}"


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=600) as client:
        yield client


def call_tool(name: str, arguments: str) -> str:
    return json.dumps(TOOLS[name](**json.loads(arguments)))


def chat_turn(client: openai.OpenAI, messages: list[Any], stream: bool) -> tuple[Any, Any]:
    """One answer as a message to send back, and its usage."""
    tools: Any = [{"type": "function", "function": function} for function in FUNCTIONS]
    question: Any = {"model": MODEL, "messages": messages, "tools": tools, "max_tokens": 300}
    if not stream:
        answer = client.chat.completions.create(**question)
        return answer.choices[0].message.model_dump(exclude_none=True), answer.usage
    said: dict[str, Any] = {"role": "assistant", "content": ""}
    usage = None
    options = {"include_usage": True}
    for chunk in client.chat.completions.create(**question, stream=True, stream_options=options):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            said["content"] += choice.delta.content or ""
            reasoning = getattr(choice.delta, "reasoning_content", None)
            said["reasoning_content"] = said.get("reasoning_content", "") + (reasoning or "")
            for call in choice.delta.tool_calls or ():
                calls = said.setdefault("tool_calls", [])
                if call.id:
                    function = {"name": call.function.name, "arguments": ""}
                    calls.append({"id": call.id, "type": "function", "function": function})
                calls[call.index]["function"]["arguments"] += call.function.arguments
    return said, usage


def test_the_client_knows_each_answer_by_its_id(
    scripted: ServedCluster, client: openai.OpenAI
) -> None:
    ask: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    answer = client.chat.completions.create(**ask, extra_headers={"x-request-id": "mine"})
    assert (answer._request_id, answer.id) == ("mine", "chatcmpl-mine")
    answer = client.chat.completions.create(**ask)
    assert answer.id == f"chatcmpl-{answer._request_id}"
    raw = client.chat.completions.with_raw_response.create(**ask, stream=True)
    assert {chunk.id for chunk in raw.parse()} == {f"chatcmpl-{raw.request_id}"}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("echoes", [True, False], ids=["echo", "no_reasoning"])
def test_chat_completions(
    scripted: ServedCluster, client: openai.OpenAI, stream: bool, echoes: bool
) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    usages, names = [], []
    while True:
        said, usage = chat_turn(client, messages, stream)
        usages.append(usage)
        if not echoes:
            # As most frameworks do it; what the model really said is spliced back.
            said.pop("reasoning_content", None)
        messages.append(said)
        if not said.get("tool_calls"):
            break
        for call in said["tool_calls"]:
            names.append(call["function"]["name"])
            result = call_tool(call["function"]["name"], call["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    assert names == ["get_weather", "to_fahrenheit"]
    assert said["content"] == FINAL
    # Every turn goes on from what the one before left: all but the last block is there.
    for before, after in itertools.pairwise(usages):
        assert after.prompt_tokens_details.cached_tokens >= before.prompt_tokens - 256
    scripted.assert_idle()


def test_responses(scripted: ServedCluster, client: openai.OpenAI) -> None:
    history: list[Any] = [{"role": "user", "content": QUESTION}]
    tools: Any = [{"type": "function", **function} for function in FUNCTIONS]
    names: list[str] = []
    for _ in range(len(ANSWERS)):
        answer = client.responses.create(
            model=MODEL, input=history, tools=tools, max_output_tokens=300
        )
        history += [item.model_dump(exclude_none=True) for item in answer.output]
        for item in answer.output:
            if item.type == "function_call":
                names.append(item.name)
                result = call_tool(item.name, item.arguments)
                history.append(
                    {"type": "function_call_output", "call_id": item.call_id, "output": result}
                )
    assert names == ["get_weather", "to_fahrenheit"]
    assert answer.output_text == FINAL
    scripted.assert_idle()


def test_messages(scripted: ServedCluster, url: str) -> None:
    tools: Any = [
        {"name": f["name"], "description": f["description"], "input_schema": f["parameters"]}
        for f in FUNCTIONS
    ]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    names: list[str] = []
    with anthropic.Anthropic(base_url=url, api_key="-", max_retries=0, timeout=600) as client:
        while True:
            answer: Any = client.messages.create(
                model=MODEL,
                max_tokens=300,
                messages=messages,
                tools=tools,
                thinking={"type": "adaptive"},
            )
            content = [block.model_dump(exclude_none=True) for block in answer.content]
            messages.append({"role": "assistant", "content": content})
            if answer.stop_reason != "tool_use":
                break
            results = []
            for block in answer.content:
                if block.type == "tool_use":
                    names.append(block.name)
                    result = call_tool(block.name, json.dumps(block.input))
                    results.append(
                        {"type": "tool_result", "tool_use_id": block.id, "content": result}
                    )
            messages.append({"role": "user", "content": results})
    assert names == ["get_weather", "to_fahrenheit"]
    assert answer.content[-1].text == FINAL
    scripted.assert_idle()


def test_a_session_whose_tool_runs_is_whole_when_others_are_evicted(
    scripted: ServedCluster, client: openai.OpenAI
) -> None:
    """Six requests take the script's three answers twice.

    The others fill the pool and no more than that: a lease lasts for half a minute.
    """

    def granted() -> int:
        (worker,) = scripted.workers().values()
        return dict(scripted.report(worker).stats.leases.outcomes)["granted"]

    def complete(prompt: list[int], session: str, max_tokens: int) -> Any:
        answer = client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=max_tokens, extra_body={"session_id": session}
        )
        return answer.usage

    def check() -> None:
        assert granted() == before + 1

    before = granted()
    messages: list[Any] = [{"role": "user", "content": f"{QUESTION} {'Be exact. ' * 100}"}]
    said, leased = chat_turn(client, messages, stream=False)
    plain = [number % 1000 + 200 for number in range(1500)]
    complete(plain, "plain", 4)
    eventually(check)
    for number in range(2):
        complete([(number + k * k) % 2000 + 200 for k in range(64 * NUM_BLOCKS)], "", 1)
    messages.append(said)
    for call in said["tool_calls"]:
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": "-3"})
    _, after = chat_turn(client, messages, stream=False)
    # It goes on behind the last block that was complete, or from its state: nobody named a session.
    assert after.prompt_tokens_details.cached_tokens >= leased.total_tokens - 2 * 128
    evicted = complete([*plain, 300], "plain", 4)
    assert evicted.prompt_tokens_details.cached_tokens == 0
    scripted.assert_idle()


HOW_TO = Path(__file__).parents[2] / "cluster" / "gateway" / "HOWTO.md"


def how_to(address: str, http_address: str) -> dict[str, list[str]]:
    """The code blocks of each section, with this cluster's addresses."""
    text = HOW_TO.read_text()
    text = text.replace("127.0.0.1:9000", address).replace("127.0.0.1:8000", http_address)
    return {
        section.partition("\n")[0]: re.findall(r"```python\n(.*?)```", section, re.DOTALL)
        for section in text.split("\n## ")[1:]
    }


FIRST, *HOW_TOS = how_to("", "")


def test_the_how_tos_begin_with_their_tools() -> None:
    assert FIRST == "Two tools"
    assert len(HOW_TOS) == 7


@pytest.mark.parametrize("title", HOW_TOS)
def test_a_how_to_runs(scripted: ServedCluster, title: str) -> None:
    """Frameworks included: each block asks, has both tools called, and ends with the answer."""
    blocks = how_to(scripted.address, scripted.cluster.http_address)
    namespace: dict[str, Any] = {}
    exec(blocks[FIRST][0], namespace)
    called: list[tuple[str, Any]] = []

    def recorded(function: Callable[..., str]) -> Callable[..., str]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> str:
            called.append((function.__name__, *args, *kwargs.values()))
            return function(*args, **kwargs)

        return call

    for name, function in namespace["TOOLS"].items():
        namespace[name] = namespace["TOOLS"][name] = recorded(function)
    assert blocks[title]
    for block in blocks[title]:
        called.clear()
        namespace.pop("final", None)
        exec(block, namespace)
        assert called == [("get_weather", "Oslo"), ("to_fahrenheit", -3)]
        assert namespace["final"] == FINAL
    scripted.assert_idle()


def test_a_client_that_leaves_ends_the_work(scripted: ServedCluster, client: openai.OpenAI) -> None:
    """Through Serve's proxy, whose way to say so is its own."""
    question: Any = [{"role": "user", "content": QUESTION}]
    stream = client.chat.completions.create(
        model=MODEL, messages=question, stream=True, max_tokens=300
    )
    next(iter(stream))
    stream.close()
    scripted.assert_idle()
    # The script has moved on by one answer; the others are said, so that it begins anew.
    for _ in ANSWERS[1:]:
        client.chat.completions.create(model=MODEL, messages=question, max_tokens=300)
    scripted.assert_idle()
