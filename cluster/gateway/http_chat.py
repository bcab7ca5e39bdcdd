"""What do the three chat protocols answer over HTTP? Chat Completions, Messages, Responses."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from ripresa.cluster.gateway.call import Call
from ripresa.cluster.gateway.chat_encoding import (
    PROMPT_ENCODING,
    AnswerParser,
    Chunk,
    Json,
    Protocol,
    WholeAnswer,
)
from ripresa.cluster.gateway.chat_prompt import AskedChat
from ripresa.cluster.gateway.http_body import body_of, call_of
from ripresa.cluster.gateway.http_document import documented
from ripresa.cluster.gateway.http_fields import (
    CHAT_FIELDS,
    FIELDS,
    MESSAGES_FIELDS,
    RESPONSES_FIELDS,
    conversation_of,
    name_in,
    options_of,
    read_body,
    require,
    sampling_of,
    tells_usage,
)
from ripresa.cluster.gateway.http_stream import Message, openai_failure, respond
from ripresa.cluster.gateway.http_usage import our_usage, usage
from ripresa.cluster.gateway.sampling import check_ranges
from ripresa.cluster.gateway.served_model import check_model
from ripresa.cluster.gateway.service import InferenceService
from ripresa.cluster.gateway.status import anthropic_error, http_error
from ripresa.cluster.gateway.stream_facts import StreamFacts
from ripresa.cluster.gateway.told_stream import Teller
from ripresa.cluster.routing.prompt import PromptRequest
from ripresa.workers.errors import RipresaError
from ripresa.workers.request import Finished, FinishReason, TokenLogprobs, Tokens

_REQUIRED: Mapping[Protocol, tuple[str, ...]] = {
    Protocol.CHAT_COMPLETIONS: ("messages",),
    Protocol.MESSAGES: ("messages", "max_tokens"),
    Protocol.RESPONSES: (),
}
_ID_PREFIX = {
    Protocol.CHAT_COMPLETIONS: "chatcmpl-",
    Protocol.MESSAGES: "msg_",
    Protocol.RESPONSES: "resp_",
}


@dataclass(frozen=True, slots=True)
class _Asked:
    """An accepted HTTP chat request.

    Attributes:
        streams: the answer is a stream of events.
        tells_usage: a Chat Completions stream ends with the usage.
        returns_ids: Chat Completions tell token ids beside the text, the prompt's too.
    """

    chat: AskedChat
    streams: bool
    tells_usage: bool
    returns_ids: bool

    @property
    def prompts(self) -> tuple[PromptRequest, ...]:
        return self.chat.prompts


class ChatTeller:
    """Tells a chat in its protocol's own chunks; a `Teller`."""

    def __init__(
        self,
        facts: StreamFacts,
        asked: _Asked,
        parsers: list[AnswerParser],
        wholes: list[WholeAnswer],
        response_id: str,
        model: str,
    ) -> None:
        self._facts = facts
        self._asked = asked
        self._parsers = parsers
        self._wholes = wholes
        self._num_open = len(parsers)
        self._base = {
            "id": response_id,
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
        }
        self._num_reasoning_tokens = 0
        self._is_prompt_told = not asked.returns_ids
        self._untold_ids: list[list[int]] = [[] for _ in parsers]
        self._is_native = asked.chat.prompt.protocol is not Protocol.CHAT_COMPLETIONS

    def started(self) -> list[Message]:
        prompt, cached = self._facts.num_prompt_tokens, self._facts.num_cached_tokens
        return [
            message
            for choice, parser in enumerate(self._parsers)
            for message in self._told(choice, parser.begin(prompt, cached))
        ]

    def deltas(self, choice: int, tokens: Tokens) -> list[Message]:
        spoken = self._facts.tokens(choice, tokens)
        self._untold_ids[choice] += tokens.token_ids
        logprobs = [_pair(entry) for entry in tokens.logprobs][: len(spoken)] or None
        return self._told(choice, self._parsers[choice].feed(spoken, logprobs))

    def is_stopped(self, choice: int) -> bool:
        return self._parsers[choice].is_over

    def stopped(self, choice: int) -> list[Message]:
        return self._end()

    def finished(self, choice: int, finished: Finished) -> list[Message]:
        self._untold_ids[choice] += self._facts.unstreamed(choice, finished)
        self._facts.finished(choice, finished.num_generated_tokens)
        is_cut = finished.reason is FinishReason.LENGTH
        return self._told(choice, self._parsers[choice].finish(is_cut=is_cut)) + self._end()

    def _told(self, choice: int, chunks: list[Chunk]) -> list[Message]:
        if not self._asked.streams:
            for chunk in chunks:
                self._wholes[choice].add(chunk)
            return []
        if self._is_native:
            return [Message(chunk.json(), chunk.event) for chunk in chunks]
        return [self._completion_chunk(choice, chunk) for chunk in chunks]

    def _completion_chunk(self, choice: int, chunk: Chunk) -> Message:
        body = json.loads(chunk.json())
        self._note_reasoning(body)
        (said,) = body["choices"]
        said["index"] = choice
        if self._asked.returns_ids:
            said["token_ids"], self._untold_ids[choice] = self._untold_ids[choice], []
        told: Json = {**self._base, "choices": [said]}
        if self._asked.tells_usage:
            told["usage"] = None
        if not self._is_prompt_told:
            told["prompt_token_ids"] = self._prompt_ids()
            self._is_prompt_told = True
        return Message(json.dumps(told, ensure_ascii=False))

    def _note_reasoning(self, body: Json) -> None:
        details = (body.get("usage") or {}).get("completion_tokens_details") or {}
        self._num_reasoning_tokens += details.get("reasoning_tokens", 0)

    def _end(self) -> list[Message]:
        """What follows the last choice: the usage of a stream, or the whole answer."""
        self._num_open -= 1
        if self._num_open:
            return []
        if self._asked.streams:
            if not self._asked.tells_usage:
                return []
            told = {**self._base, "choices": [], **self._usage()}
            return [Message(json.dumps(told))]
        bodies = [json.loads(whole.json()) for whole in self._wholes]
        if self._is_native:
            return [Message(json.dumps(bodies[0], ensure_ascii=False), is_whole=True)]
        for body in bodies:
            self._note_reasoning(body)
        choices = [{**body["choices"][0], "index": i} for i, body in enumerate(bodies)]
        whole = {**bodies[0], **self._base, "object": "chat.completion", "choices": choices}
        whole |= self._usage()
        if self._asked.returns_ids:
            whole["prompt_token_ids"] = self._prompt_ids()
            for said, token_ids in zip(choices, self._untold_ids, strict=True):
                said["token_ids"] = token_ids
        return [Message(json.dumps(whole, ensure_ascii=False), is_whole=True)]

    def _prompt_ids(self) -> list[int]:
        return list(self._asked.prompts[0].token_ids)

    def _usage(self) -> Json:
        told = usage(self._facts, self._num_reasoning_tokens)
        return {"usage": told, "ripresa": our_usage(self._facts)}


# What whole answers always have.
_COMPLETION = ("id", "object", "created", "model", "choices", "usage")
_MESSAGE = ("id", "type", "role", "model", "content", "stop_reason", "usage")
_RESPONSE = ("id", "object", "created_at", "model", "status", "output", "usage")


def chat_routes(service: Callable[[], InferenceService]) -> APIRouter:
    """`/v1/chat/completions`, `/v1/messages` and `/v1/responses`."""
    router = APIRouter()
    required = _REQUIRED[Protocol.CHAT_COMPLETIONS]

    @router.post(
        "/v1/chat/completions", **documented(CHAT_FIELDS, required, _COMPLETION, streams=True)
    )
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation, as OpenAI's Chat Completions."""
        return await _answer(request, service(), Protocol.CHAT_COMPLETIONS)

    @router.post(
        "/v1/messages",
        **documented(
            MESSAGES_FIELDS, _REQUIRED[Protocol.MESSAGES], _MESSAGE, streams=True, anthropic=True
        ),
    )
    async def messages(request: Request) -> Response:
        """Answer a conversation, as Anthropic's Messages."""
        return await _answer(request, service(), Protocol.MESSAGES)

    @router.post(
        "/v1/messages/count_tokens",
        **documented(MESSAGES_FIELDS, ("messages",), ("input_tokens",), anthropic=True),
    )
    async def count_tokens(request: Request) -> Response:
        """Tokens of a Messages conversation."""
        gateway, call = service(), call_of(request)
        raw = await body_of(request, gateway.max_message_bytes)

        def count() -> int:
            body = read_body(raw, MESSAGES_FIELDS)
            require(body, ("messages",))
            check_ranges(sampling_of(body), name_in(body))
            check_model(body.get("model", ""), gateway.model, "model")
            conversation = conversation_of(body, Protocol.MESSAGES)
            conversation.setdefault("max_tokens", 1)
            _, token_ids = gateway.chat_reader().encode(
                conversation, Protocol.MESSAGES, call.tenant, body.get("cache_salt", "")
            )
            return len(token_ids)

        return JSONResponse({"input_tokens": await gateway.off_loop(count, call)})

    @router.post("/v1/responses", **documented(RESPONSES_FIELDS, (), _RESPONSE, streams=True))
    async def responses(request: Request) -> Response:
        """Answer a conversation, as OpenAI's Responses; nothing is stored."""
        return await _answer(request, service(), Protocol.RESPONSES)

    return router


async def _answer(request: Request, gateway: InferenceService, protocol: Protocol) -> Response:
    call = call_of(request)
    raw = await body_of(request, gateway.max_message_bytes)
    reader = gateway.chat_reader()
    arrival = gateway.arrival(call)
    response_id = _ID_PREFIX[protocol] + call.request_id

    def read() -> _Asked:
        body = read_body(raw, FIELDS[protocol])
        require(body, _REQUIRED[protocol])
        check_model(body.get("model", ""), gateway.model, "model")
        options = options_of(body, request.headers.get("x-session-id"))
        conversation = conversation_of(body, protocol)
        chat = reader.read(
            conversation, protocol, options, sampling_of(body), arrival, name_in(body)
        )
        returns_ids = body.get("return_token_ids", False)
        return _Asked(chat, body.get("stream", False), tells_usage(body), returns_ids)

    def tell(asked: _Asked, facts: StreamFacts) -> Teller[Message]:
        encoding, count = reader.encoding, len(asked.prompts)
        parsers = [encoding.parser(asked.chat.prompt, response_id) for _ in range(count)]
        now = int(time.time())
        wholes = [
            encoding.whole(protocol, response_id, now) for _ in range(0 if asked.streams else count)
        ]
        name = gateway.model.name
        teller = ChatTeller(facts, asked, parsers, wholes, response_id, name)
        return gateway.keeping(teller, asked.chat)

    stream = gateway.stream(read, tell, call, encoding=PROMPT_ENCODING)
    last = "[DONE]" if protocol is Protocol.CHAT_COMPLETIONS else None
    return await respond(
        request,
        stream,
        last=last,
        failed=_failure(protocol, call),
        max_unread_s=gateway.max_unread_s,
    )


def _failure(protocol: Protocol, call: Call) -> Callable[[RipresaError], Message]:
    """How a protocol tells that its stream failed."""
    if protocol is Protocol.CHAT_COMPLETIONS:
        return openai_failure

    def messages(error: RipresaError) -> Message:
        _, _, body = anthropic_error(error, call.request_id)
        return Message(json.dumps(body), "error")

    def responses(error: RipresaError) -> Message:
        _, _, body = http_error(error)
        return Message(json.dumps({"type": "error", **body["error"]}), "error")

    return messages if protocol is Protocol.MESSAGES else responses


def _pair(entry: TokenLogprobs) -> tuple[float, list[tuple[int, float]]]:
    return entry.chosen, list(entry.top)
