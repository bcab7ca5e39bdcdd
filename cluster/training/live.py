"""What can a served model do? The evaluation set, message by message, through a gateway's HTTP."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ripresa.cluster.training.rendering import Renderer
from ripresa.cluster.training.scores import Score
from ripresa.workers.demo.ledger.checker import Verdict, compare, distance_bucket
from ripresa.workers.demo.ledger.conversation import Conversation, Message, Task
from ripresa.workers.demo.ledger.tool_server import TOOLS
from ripresa.workers.errors import InvalidArgument, Unavailable

MAX_TOKENS = 160
"""No reference's message is longer."""
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Question:
    """One message that the model is asked for."""

    messages: tuple[Message, ...]
    reference: Message
    task: Task
    bucket: str | None


def questions(renderer: Renderer, conversation: Conversation) -> list[Question]:
    """Every message of the assistant, with the reference's conversation before it."""
    spans = renderer.answers(conversation).spans
    return [
        Question(
            conversation.messages[: expected.message],
            conversation.messages[expected.message],
            expected.task,
            None if span.distance is None else distance_bucket(span.distance),
        )
        for expected, span in zip(conversation.expected, spans, strict=True)
    ]


def served_model(address: str, api_key: str = "") -> str:
    """The name of a gateway's model.

    Args:
        address: of its HTTP port, as `http://127.0.0.1:8000`.
        api_key: empty for none.

    Raises:
        Unavailable: nobody answers there.
    """
    name: str = _request(f"{address}/v1/models", api_key)["data"][0]["id"]
    return name


def measure_live(
    address: str,
    model: str,
    asked: Iterable[Sequence[Question]],
    concurrency: int,
    api_key: str = "",
) -> Iterator[list[Score]]:
    """Ask a gateway at temperature 0; gives the scores of each conversation.

    Every request declares the tools, also where the conversation does not: a gateway reads calls of
    declared tools alone.

    A score's share is 1 for a call that a tool server can read where one is due, and for text
    where none is.

    Args:
        asked: the questions of each conversation, asked in order: each finds its beginning cached.
        concurrency: conversations at a time.

    Raises:
        Unavailable: nobody answers there.
        InvalidArgument: the gateway refuses a request.
    """

    def ask(question: Question) -> Score:
        body = {
            "model": model,
            "messages": question.messages,
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
            "thinking": {"type": "disabled"},
            "tools": TOOLS,
        }
        answer = _request(f"{address}/v1/chat/completions", api_key, body)["choices"][0]["message"]
        verdict = compare(question.reference, answer)
        is_valid = verdict.is_valid_call or not question.reference.get("tool_calls")
        is_valid = is_valid and verdict is not Verdict.UNWANTED_CALL
        return Score(question.task, question.bucket, verdict is Verdict.RIGHT, float(is_valid))

    with ThreadPoolExecutor(concurrency) as pool:
        yield from pool.map(lambda part: list(map(ask, part)), asked)


def _request(url: str, api_key: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    request = urllib.request.Request(url, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")
        raise InvalidArgument("--address", f"{url} answered {error.code}: {text[:500]}") from error
    except OSError as error:
        raise Unavailable(f"nobody answers at {url}: {error}; start `ripresa serve`") from error
