"""Does measuring a server count what it answers? Against a server that knows some answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from ripresa.cluster.cli import FAILED, MISUSED, cli
from ripresa.cluster.client import policy
from ripresa.cluster.training.live import Question, measure_live, questions, served_model
from ripresa.cluster.training.rendering import Renderer
from ripresa.workers.demo.build_tokenizer import TOKENIZER
from ripresa.workers.demo.ledger.conversation import Message, Task
from ripresa.workers.demo.ledger.evaluation import load_evaluation
from ripresa.workers.demo.ledger.tool_server import TOOLS
from ripresa.workers.errors import ErrorCode, InvalidArgument, RipresaError, Unavailable


class Server(ThreadingHTTPServer):
    """Answers questions that it knows; says `no` to others. `seen`: bodies; `keys`: of requests.

    Attributes:
        status: of answers to questions.
        num_busy: questions that are put off first.
        raw: what is sent instead of answers, once `break_after` questions were answered; with 0,
            instead of the model's name as well.
    """

    def __init__(self, known: list[Question], status: int = 200) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers = {json.dumps(q.messages): q.reference for q in known}
        self.status = status
        self.num_busy = 0
        self.raw: bytes | None = None
        self.num_answered = 0
        self.break_after = 0
        self.seen: list[dict[str, Any]] = []
        self.keys: list[str | None] = []


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.keys.append(self.headers["Authorization"])
        if self.server.raw is not None and not self.server.break_after:
            self.wfile.write(self.server.raw)
            return
        self._send(200, {"data": [{"id": "a-model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append(body)
        self.server.keys.append(self.headers["Authorization"])
        if self.server.num_busy:
            self.server.num_busy -= 1
            self._send(503, {"error": {"message": "try again"}}, {"Retry-After": "0"})
            return
        self.server.num_answered += 1
        if self.server.raw is not None and self.server.num_answered > self.server.break_after:
            self.wfile.write(self.server.raw)
            return
        said: Message = {"role": "assistant", "content": "no"}
        answer = self.server.answers.get(json.dumps(body["messages"]), said)
        self._send(self.server.status, {"choices": [{"message": answer}]})

    def _send(
        self, status: int, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
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
    by_number = dict(measure_live(address(server), served_model(address(server)), asked, 3))
    found = [by_number[number] for number in range(len(asked))]
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
    for status, code in (
        (401, ErrorCode.UNAUTHENTICATED),
        (429, ErrorCode.RESOURCE_EXHAUSTED),
        (500, ErrorCode.INTERNAL),
        (503, ErrorCode.UNAVAILABLE),
    ):
        server.status = status
        with pytest.raises(RipresaError, match=f"answered {status}") as refused:
            list(measure_live(address(server), "a-model", asked[:1], 1))
        assert refused.value.code is code


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Nobody waits; how long would have been."""
    pauses: list[float] = []
    clock = SimpleNamespace(sleep=pauses.append)
    monkeypatch.setattr("ripresa.cluster.training.live.time", clock)
    return pauses


def test_a_busy_server_is_asked_again_so_many_times(
    asked: list[list[Question]], server: Server, no_pause: list[float]
) -> None:
    server.num_busy = policy.MAX_ATTEMPTS - 1
    ((_, scores),) = measure_live(address(server), "a-model", asked[:1], 1)
    assert len(scores) == len(asked[0])
    assert no_pause == [policy.backoff_s(n) for n in range(1, policy.MAX_ATTEMPTS)]
    server.num_busy = policy.MAX_ATTEMPTS
    with pytest.raises(Unavailable, match="try again"):
        list(measure_live(address(server), "a-model", asked[:1], 1))
    assert len(no_pause) == 2 * (policy.MAX_ATTEMPTS - 1)


HTTP = b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n%s"
BAD_ANSWERS = {
    "a page": (HTTP % (6, b"<html>"), MISUSED, "answers no JSON"),
    "no HTTP": (b"\x00\x00\x06\x04\r\n\r\n", MISUSED, "speaks no HTTP"),
    "half an answer": (HTTP % (60, b"{"), FAILED, "nobody answers"),
    "no answer": (b"", FAILED, "nobody answers"),
    "another object": (HTTP % (2, b"{}"), MISUSED, "no gateway of ripresa"),
    "no choice": (HTTP % (27, b'{"choices": [], "data": []}'), MISUSED, "no gateway of ripresa"),
    "a list": (HTTP % (2, b"[]"), MISUSED, "no gateway of ripresa"),
    "an odd one": (
        HTTP % (45, b'{"choices": [{"message": 1}], "data": [{}]}  '),
        MISUSED,
        "no gateway of ripresa",
    ),
}


@pytest.mark.parametrize("kind", BAD_ANSWERS)
@pytest.mark.parametrize("is_late", [False, True])
def test_what_is_no_answer_is_told_and_what_was_measured_is_shown(
    asked: list[list[Question]], server: Server, kind: str, is_late: bool
) -> None:
    """The second of three conversations fails; or the first request does."""
    server.raw, code, words = BAD_ANSWERS[kind]
    server.break_after = len(asked[0]) if is_late else 0
    command = ["train", "measure", "--address", address(server), "--conversations", "3"]
    result = CliRunner().invoke(cli, [*command, "--concurrency", "1"])
    assert result.exit_code == code, result.output
    assert words in result.stderr
    rows = [line.split() for line in result.stdout.splitlines()]
    if is_late:
        assert "measured 1 of 3 conversations" in result.stderr
        assert sum(int(row[-3]) for row in rows if row[-4] == "all") == len(asked[0])
    else:
        assert rows == []


@pytest.mark.timeout(60)
def test_a_failure_ends_what_has_not_begun(asked: list[list[Question]], server: Server) -> None:
    server.raw, _, words = BAD_ANSWERS["a list"]
    with pytest.raises(InvalidArgument, match=words):
        list(measure_live(address(server), "a-model", [asked[0]] * 200, 1))


@pytest.mark.parametrize(
    "wrong", ["127.0.0.1:8000", "http://", "ftp://a", "http://a:b", "http://[", "http://a b", "ö"]
)
def test_what_is_no_address_is_refused(wrong: str) -> None:
    result = CliRunner().invoke(cli, ["train", "measure", "--address", wrong])
    assert result.exit_code == MISUSED, result.output
    assert "--address: must be like http://127.0.0.1:8000" in result.stderr


def test_an_address_may_end_with_a_slash(server: Server) -> None:
    assert served_model(f"{address(server)}/") == "a-model"


@pytest.mark.parametrize(("options", "sent"), [((), None), (("--api-key", "k"), "Bearer k")])
def test_a_key_is_sent_with_every_question(
    server: Server, options: tuple[str, ...], sent: str | None
) -> None:
    command = ["train", "measure", "--address", address(server), "--conversations", "1"]
    result = CliRunner().invoke(cli, [*command, *options])
    assert result.exit_code == 0, result.output
    assert len(server.keys) > 1
    assert set(server.keys) == {sent}
