"""Does the bundled model do alone what its card and `make demo` say? Asked through a cluster."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from served_cluster import ServedCluster

from ripresa.cluster.client import Client
from ripresa.cluster.demo import run_loop, tour
from ripresa.cluster.training.bundle import FIGURES
from ripresa.cluster.training.figures import Figures
from ripresa.cluster.training.live import measure_live, questions
from ripresa.cluster.training.rendering import Renderer
from ripresa.workers.demo.build_tokenizer import TOKENIZER
from ripresa.workers.demo.checkpoint import DEMO_MODEL, MODEL_NAME
from ripresa.workers.demo.ledger.conversation import MAX_CALLS
from ripresa.workers.demo.ledger.evaluation import load_evaluation
from ripresa.workers.demo.ledger.tool_server import TOOLS, ToolServer

NUM_CONVERSATIONS = 6
MAX_DIFFERENT = 0.1
"""Share of messages that other rounding, of a machine or a batch, may turn right or wrong."""


def test_the_demo_answers_as_the_ledger_has_it(
    bundled: ServedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tour(0)
    with Client(bundled.address) as client:
        num_right = run_loop(client, script)
    shown = capsys.readouterr().out
    assert num_right == len(script.turns), shown
    assert shown.count("  call    get(") == 4
    assert shown.count("  call    set(") == 1
    bundled.assert_idle()


def test_a_framework_s_loop_runs_without_a_word_about_tools(bundled: ServedCluster) -> None:
    script = tour(0)
    server = ToolServer(script.world)
    messages: list[Any] = []
    with openai.OpenAI(
        base_url=f"http://{bundled.cluster.http_address}/v1", api_key="-", max_retries=0
    ) as client:
        for turn in script.turns:
            messages.append({"role": "user", "content": turn.user})
            for _ in range(MAX_CALLS + 1):
                tools: Any = TOOLS
                answer = client.chat.completions.create(
                    model=MODEL_NAME,
                    messages=messages,
                    tools=tools,
                    temperature=0,
                    extra_body={"thinking": {"type": "disabled"}},
                )
                said = answer.choices[0].message.model_dump(exclude_none=True)
                messages.append(said)
                if not said.get("tool_calls"):
                    break
                for call in said["tool_calls"]:
                    function = call["function"]
                    result = server.call(function["name"], function["arguments"])
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
            assert said["content"] == turn.answer
    bundled.assert_idle()


def test_a_sample_of_the_evaluation_is_answered_as_the_card_tells(bundled: ServedCluster) -> None:
    figures = Figures.load(DEMO_MODEL / FIGURES)
    places = sorted(figures.marks)[:: max(len(figures.marks) // NUM_CONVERSATIONS, 1)]
    every = load_evaluation()
    renderer = Renderer(TOKENIZER)
    asked = [questions(renderer, every[place]) for place in places]
    address = f"http://{bundled.cluster.http_address}"
    found = dict(measure_live(address, MODEL_NAME, asked, len(asked)))
    compared = [
        (question, was, score.is_exact)
        for number, (place, part) in enumerate(zip(places, asked, strict=True))
        for question, was, score in zip(
            part, figures.marks[place].exact, found[number], strict=True
        )
    ]
    assert len({question.task for question, _, _ in compared}) >= 5
    different = [(q.task, q.messages[-1], was, now) for q, was, now in compared if was != now]
    assert len(different) <= MAX_DIFFERENT * len(compared), different
