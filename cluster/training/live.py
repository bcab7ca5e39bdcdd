"""What can a served model do? The evaluation set, message by message, through a gateway's HTTP."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from ripresa.cluster.client import policy
from ripresa.cluster.gateway.status import MAX_PUSHBACK_S
from ripresa.cluster.training.rendering import Renderer
from ripresa.cluster.training.scores import Score
from ripresa.workers.demo.ledger.checker import Verdict, compare, distance_bucket
from ripresa.workers.demo.ledger.conversation import Conversation, Message, Task
from ripresa.workers.demo.ledger.tool_server import TOOLS
from ripresa.workers.errors import ErrorCode, InvalidArgument, RipresaError, Unavailable

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
        RipresaError: as `measure_live` does.
    """
    url = f"{_base(address)}/v1/models"
    document = _request(url, api_key)
    try:
        name = document["data"][0]["id"]
    except (LookupError, TypeError) as error:
        raise _stranger(url, "it lists no model") from error
    if not isinstance(name, str):
        raise _stranger(url, "its model has no name")
    return name


def measure_live(
    address: str,
    model: str,
    asked: Iterable[Sequence[Question]],
    concurrency: int,
    api_key: str = "",
) -> Iterator[tuple[int, list[Score]]]:
    """Ask a gateway at temperature 0; gives each conversation's number and scores, as they come.

    Every request declares the tools, also where the conversation does not: a gateway reads calls of
    declared tools alone. What a busy gateway puts off is asked again, as the clients do it.

    A score's share is 1 for a call that a tool server can read where one is due, and for text
    where none is.

    Args:
        asked: the questions of each conversation, asked in order: each finds its beginning cached.
        concurrency: conversations at a time.

    Raises:
        Unavailable: nobody answers there, or the gateway stays too busy. As with the others,
            conversations that had begun before are given first.
        InvalidArgument: the gateway refuses a request, or there is none.
        RipresaError: it asks for another key, failed, or takes too long.
    """
    url = f"{_base(address)}/v1/chat/completions"

    def ask(question: Question) -> Score:
        body = {
            "model": model,
            "messages": question.messages,
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
            "thinking": {"type": "disabled"},
            "tools": TOOLS,
        }
        answer = _message(url, _request(url, api_key, body))
        verdict = compare(question.reference, answer)
        is_valid = verdict.is_valid_call or not question.reference.get("tool_calls")
        is_valid = is_valid and verdict is not Verdict.UNWANTED_CALL
        return Score(question.task, question.bucket, verdict is Verdict.RIGHT, float(is_valid))

    failures: list[BaseException] = []

    def ask_all(part: Sequence[Question]) -> list[Score] | None:
        return None if failures else list(map(ask, part))

    with ThreadPoolExecutor(concurrency) as pool:
        numbers = {pool.submit(ask_all, part): number for number, part in enumerate(asked)}
        try:
            for done in as_completed(numbers):
                error = done.exception()
                if error is not None:
                    # Not by cancelling the others: `as_completed` waits for those that never ran.
                    failures.append(error)
                elif (scores := done.result()) is not None:
                    yield numbers[done], scores
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    if failures:
        raise failures[0]


def _base(address: str) -> str:
    """An address to which paths can be added."""
    try:
        parts = urlsplit(address)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_one = False
    if not (is_one and address.isascii() and address.isprintable() and " " not in address):
        raise InvalidArgument("--address", f"must be like http://127.0.0.1:8000, got {address!r}")
    return address.rstrip("/")


def _message(url: str, document: Any) -> Message:
    try:
        message: Message = document["choices"][0]["message"]
    except (LookupError, TypeError) as error:
        raise _stranger(url, "its answer has no message") from error
    if not isinstance(message, dict):
        raise _stranger(url, "its answer has no message")
    return message


def _request(url: str, api_key: str, body: dict[str, Any] | None = None) -> Any:
    """The JSON that is answered; what may succeed later is asked again, by the clients' policy."""
    for attempt in range(1, policy.MAX_ATTEMPTS):
        try:
            return _ask(url, api_key, body)
        except RipresaError as error:
            asked_s = error.retry_after_s
            if asked_s is None or asked_s > MAX_PUSHBACK_S:
                raise
            time.sleep(max(asked_s, policy.backoff_s(attempt)))
    return _ask(url, api_key, body)


def _ask(url: str, api_key: str, body: dict[str, Any] | None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    if api_key:
        if not (api_key.isascii() and api_key.isprintable()):
            raise InvalidArgument("--api-key", "must be printable ASCII characters")
        headers["Authorization"] = f"Bearer {api_key}"
    request = urllib.request.Request(url, data, headers)
    try:
        content = _read(request)
    except urllib.error.HTTPError as error:
        raise _refusal(url, error) from error
    except (http.client.IncompleteRead, ConnectionError) as error:
        raise _nobody(url, error) from error
    except (http.client.HTTPException, UnicodeError) as error:
        raise _stranger(url, f"it speaks no HTTP: {error!r}") from error
    except OSError as error:
        if isinstance(getattr(error, "reason", error), TimeoutError):
            raise _late(url) from error
        raise _nobody(url, error) from error
    try:
        return json.loads(content)
    except ValueError as error:
        raise _stranger(url, f"it answers no JSON: {content[:60]!r}") from error


def _read(request: urllib.request.Request) -> bytes:
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        content: bytes = response.read()
        return content


def _refusal(url: str, error: urllib.error.HTTPError) -> RipresaError:
    try:
        text = error.read().decode(errors="replace")
    except (OSError, http.client.HTTPException):
        text = error.reason
    said = f"{url} answered {error.code}: {text[:500]}"
    wait = error.headers.get("Retry-After", "")
    retry_after_s = float(wait) if wait.isascii() and wait.isdigit() else 0.0
    match error.code:
        case HTTPStatus.TOO_MANY_REQUESTS:
            return RipresaError(ErrorCode.RESOURCE_EXHAUSTED, said, retry_after_s=retry_after_s)
        case HTTPStatus.BAD_GATEWAY | HTTPStatus.SERVICE_UNAVAILABLE | HTTPStatus.GATEWAY_TIMEOUT:
            return Unavailable(said, retry_after_s=retry_after_s)
        case HTTPStatus.UNAUTHORIZED | HTTPStatus.FORBIDDEN:
            return RipresaError(ErrorCode.UNAUTHENTICATED, f"{said}; give a key with --api-key")
        case code if code >= HTTPStatus.INTERNAL_SERVER_ERROR:
            return RipresaError(ErrorCode.INTERNAL, f"{said}; its log says more")
    return InvalidArgument("--address", said)


def _nobody(url: str, error: Exception) -> Unavailable:
    return Unavailable(
        f"nobody answers at {url}: {error}; start `ripresa serve`", retry_after_s=0.0
    )


def _late(url: str) -> RipresaError:
    return RipresaError(
        ErrorCode.DEADLINE_EXCEEDED,
        f"{url} did not answer within {TIMEOUT_S:.0f} s; ask for fewer at a time with "
        "--concurrency, or when the server is less busy",
    )


def _stranger(url: str, what: str) -> InvalidArgument:
    return InvalidArgument(
        "--address", f"no gateway of ripresa answers at {url}: {what}; name its HTTP port"
    )
