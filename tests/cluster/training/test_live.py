"""Does measuring a server count what it answers? Against a server that knows some answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from click.testing import CliRunner

from ripresa.cluster.cli import cli
from ripresa.cluster.training.live import Question, measure_live, questions, served_model
from ripresa.cluster.training.rendering import Renderer
from ripresa.workers.demo.build_tokenizer import TOKENIZER
from ripresa.workers.demo.ledger.conversation import Message, Task
from ripresa.workers.demo.ledger.evaluation import load_evaluation
from ripresa.workers.demo.ledger.tool_server import TOOLS
from ripresa.workers.errors import InvalidArgument, Unavailable


class Server(ThreadingHTTPServer):
    """Answers questions that it knows; says `no` to others. `seen`: bodies; `keys`: of requests."""

    def __init__(self, known: list[Question], status: int = 200) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers = {json.dumps(q.messages): q.reference for q in known}
        self.status = status
        self.seen: list[dict[str, Any]] = []
        self.keys: list[str | None] = []


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.keys.append(self.headers["Authorization"])
        self._send(200, {"data": [{"id": "a-model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append(body)
        self.server.keys.append(self.headers["Authorization"])
        said: Message = {"role": "assistant", "content": "no"}
        answer = self.server.answers.get(json.dumps(body["messages"]), said)
        self._send(self.server.status, {"choices": [{"message": answer}]})

    def _send(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def asked() -> list[list[Question]]:
    every = load_evaluation()
    renderer = Renderer(TOKENIZER)
    return [questions(renderer, conversation) for conversation in (*every[:2], *every[-6:])]


@pytest.fixture
def server(asked: list[list[Question]]) -> Iterator[Server]:
    """One that knows everything but what was read far away, and makes no call for two hops."""
    unknown = (Task.FAR, Task.TWO_HOP)
    with Server([q for part in asked for q in part if q.task not in unknown]) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def address(server: Server) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


def test_scores_are_those_of_the_answers(asked: list[list[Question]], server: Server) -> None:
    found = list(measure_live(address(server), served_model(address(server)), asked, 3))
    assert [len(part) for part in found] == [len(part) for part in asked]
    flat, scores = ([one for part in of for one in part] for of in (asked, found))
    assert [s.task for s in scores] == [q.task for q in flat]
    for question, score in zip(flat, scores, strict=True):
        assert score.is_exact == (question.task not in (Task.FAR, Task.TWO_HOP))
        is_missing = question.task is Task.TWO_HOP and "tool_calls" in question.reference
        assert score.share == float(not is_missing)
    assert {s.is_exact for s in scores} == {True, False}
    assert {s.share for s in scores} == {0.0, 1.0}
    assert all(body["model"] == "a-model" and body["temperature"] == 0 for body in server.seen)
    assert all(body["tools"] == list(TOOLS) for body in server.seen)


def test_a_refusal_is_told_and_so_is_a_server_that_is_not_there(
    asked: list[list[Question]], server: Server
) -> None:
    server.status = 400
    with pytest.raises(InvalidArgument, match="answered 400"):
        list(measure_live(address(server), "a-model", asked[:1], 1))
    with pytest.raises(Unavailable, match="start `ripresa serve`"):
        served_model("http://127.0.0.1:9")


@pytest.mark.parametrize(("options", "sent"), [((), None), (("--api-key", "k"), "Bearer k")])
def test_a_key_is_sent_with_every_question(
    server: Server, options: tuple[str, ...], sent: str | None
) -> None:
    command = ["train", "measure", "--address", address(server), "--conversations", "1"]
    result = CliRunner().invoke(cli, [*command, *options])
    assert result.exit_code == 0, result.output
    assert len(server.keys) > 1
    assert set(server.keys) == {sent}
