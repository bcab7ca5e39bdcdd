"""What does `/v1/completions` answer? Text goes on without any template."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from fastapi import APIRouter, Request, Response

from ripresa.cluster.gateway.chat_encoding import Json
from ripresa.cluster.gateway.http_body import body_of, call_of
from ripresa.cluster.gateway.http_document import documented
from ripresa.cluster.gateway.http_fields import (
    COMPLETION_FIELDS,
    name_in,
    options_of,
    read_body,
    sampling_of,
    tells_usage,
)
from ripresa.cluster.gateway.http_parts import COMPLETION_PARTS, check_parts
from ripresa.cluster.gateway.http_stream import Message, openai_failure, respond
from ripresa.cluster.gateway.http_usage import our_usage, usage
from ripresa.cluster.gateway.output_format import read_format
from ripresa.cluster.gateway.sampling import check_sampling, choices_of
from ripresa.cluster.gateway.served_model import (
    check_length,
    check_model,
    check_prompt_ids,
    check_text_fits,
)
from ripresa.cluster.gateway.service import InferenceService
from ripresa.cluster.gateway.stop_strings import StoppableText
from ripresa.cluster.gateway.stream_facts import StreamFacts
from ripresa.cluster.gateway.tokenizer import Tokenizer
from ripresa.cluster.gateway.validation import check_options, prompt_request
from ripresa.cluster.routing.prompt import PromptRequest
from ripresa.workers.errors import InvalidArgument
from ripresa.workers.request import Finished, Tokens


@dataclass(frozen=True, slots=True)
class _Asked:
    """An accepted completion.

    Attributes:
        returns_ids: token ids are told beside the text, the prompt's too.
    """

    prompts: tuple[PromptRequest, ...]
    stop: tuple[str, ...]
    streams: bool
    tells_usage: bool
    returns_ids: bool


@dataclass(slots=True)
class _Choice:
    """One choice so far; `told` and `logprobs` are gathered only for a whole answer.

    Attributes:
        untold_ids: token ids that no chunk has told.
        is_begun: a chunk was told.
    """

    text: StoppableText
    told: str = ""
    untold_ids: list[int] = field(default_factory=list)
    is_begun: bool = False
    num_chars: int = 0
    logprobs: Json = field(
        default_factory=lambda: {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
    )
    finish_reason: str | None = None


class CompletionTeller:
    """Tells a completion in OpenAI's chunks, or as one body; a `Teller`."""

    def __init__(
        self, facts: StreamFacts, asked: _Asked, tokenizer: Tokenizer, response_id: str, model: str
    ) -> None:
        self._facts = facts
        self._asked = asked
        self._tokenizer = tokenizer
        self._sampling = asked.prompts[0].sampling
        self._choices = [
            _Choice(StoppableText(tokenizer.stream(), asked.stop, prompt.sampling.min_tokens))
            for prompt in asked.prompts
        ]
        self._num_open = len(asked.prompts)
        self._base: Json = {
            "id": response_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    def started(self) -> list[Message]:
        return []

    def deltas(self, choice: int, tokens: Tokens) -> list[Message]:
        spoken = self._facts.tokens(choice, tokens)
        own = self._choices[choice]
        own.untold_ids += tokens.token_ids
        text = own.text.feed(spoken)
        return self._told(choice, text, self._logprobs(own, tokens))

    def is_stopped(self, choice: int) -> bool:
        return self._choices[choice].text.matched is not None

    def stopped(self, choice: int) -> list[Message]:
        return self._end(choice, "", "stop")

    def finished(self, choice: int, finished: Finished) -> list[Message]:
        own = self._choices[choice]
        own.untold_ids += self._facts.unstreamed(choice, finished)
        self._facts.finished(choice, finished.num_generated_tokens)
        rest = own.text.finish()
        reason = "stop" if own.text.matched is not None else str(finished.reason)
        return self._end(choice, rest, reason)

    def _told(
        self, choice: int, text: str, logprobs: Json | None, reason: str | None = None
    ) -> list[Message]:
        own = self._choices[choice]
        own.num_chars += len(text)
        if not self._asked.streams:
            own.told += text
            for name, entries in (logprobs or {}).items():
                own.logprobs[name] += entries
            return []
        if not text and not logprobs and reason is None and not self._asked.returns_ids:
            return []
        said = {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": reason}
        said |= self._ids(own)
        body = {**self._base, "choices": [said]}
        if self._asked.tells_usage:
            body["usage"] = None
        return [Message(json.dumps(body, ensure_ascii=False))]

    def _end(self, choice: int, rest: str, reason: str) -> list[Message]:
        self._choices[choice].finish_reason = reason
        messages = self._told(choice, rest, None, reason)
        self._num_open -= 1
        if self._num_open:
            return messages
        told = {"usage": usage(self._facts), "ripresa": our_usage(self._facts)}
        if self._asked.streams:
            if self._asked.tells_usage:
                messages.append(Message(json.dumps({**self._base, "choices": [], **told})))
            return messages
        choices = [
            {
                "index": index,
                "text": own.told,
                "logprobs": None if self._sampling.logprobs is None else own.logprobs,
                "finish_reason": own.finish_reason,
                **self._ids(own),
            }
            for index, own in enumerate(self._choices)
        ]
        whole = {**self._base, "choices": choices, **told}
        return [Message(json.dumps(whole, ensure_ascii=False), is_whole=True)]

    def _ids(self, own: _Choice) -> Json:
        """Token ids that were not told yet, in vLLM's names; nothing if none are asked for."""
        if not self._asked.returns_ids:
            return {}
        ids: Json = {"token_ids": own.untold_ids}
        if not own.is_begun:
            ids["prompt_token_ids"] = list(self._asked.prompts[0].token_ids)
        own.untold_ids, own.is_begun = [], True
        return ids

    def _logprobs(self, own: _Choice, tokens: Tokens) -> Json | None:
        """OpenAI's older shape; offsets count characters that were certain before the token."""
        if not tokens.logprobs:
            return None
        return {
            "tokens": [self._spell(token_id) for token_id in tokens.token_ids],
            "token_logprobs": [entry.chosen for entry in tokens.logprobs],
            "top_logprobs": [
                {self._spell(token_id): logprob for token_id, logprob in entry.top}
                for entry in tokens.logprobs
            ],
            "text_offset": [own.num_chars] * len(tokens.token_ids),
        }

    def _spell(self, token_id: int) -> str:
        """A token's text; one that is no whole text by its bytes, as `bytes:\\xe6`."""
        raw = self._tokenizer.token_bytes([token_id])
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


_COMPLETION = ("id", "object", "created", "model", "choices", "usage")
"""What a whole answer always has."""


def completion_routes(service: Callable[[], InferenceService]) -> APIRouter:
    """`/v1/completions`."""
    router = APIRouter()

    @router.post(
        "/v1/completions",
        **documented(COMPLETION_FIELDS, ("prompt",), _COMPLETION, streams=True),
    )
    async def completions(request: Request) -> Response:
        """Go on with a text or with token ids."""
        gateway, call = service(), call_of(request)
        raw = await body_of(request, gateway.max_message_bytes)
        arrival = gateway.arrival(call)

        def read() -> _Asked:
            body = read_body(raw, COMPLETION_FIELDS)
            check_model(body.get("model", ""), gateway.model, "model")
            options = options_of(body, request.headers.get("x-session-id"))
            check_options(options)
            check_parts(body, COMPLETION_PARTS)
            wanted = read_format(body.get("response_format", {}), "response_format")
            asked = replace(sampling_of(body), format=wanted)
            if body.get("best_of", asked.n) != asked.n:
                raise InvalidArgument("best_of", "only best_of equal to n is supported")
            token_ids = _prompt(body, gateway)
            sampling = check_sampling(asked, gateway.model, len(token_ids), name_in(body))
            first = prompt_request(options, token_ids, sampling, arrival)
            prompts = choices_of(first, asked.n)
            streams, returns_ids = body.get("stream", False), body.get("return_token_ids", False)
            return _Asked(prompts, asked.stop, streams, tells_usage(body), returns_ids)

        def tell(asked: _Asked, facts: StreamFacts) -> CompletionTeller:
            response_id = f"cmpl-{call.request_id}"
            return CompletionTeller(
                facts, asked, gateway.tokenizer, response_id, gateway.model.name
            )

        stream = gateway.stream(read, tell, call)
        return await respond(
            request,
            stream,
            last="[DONE]",
            failed=openai_failure,
            max_unread_s=gateway.max_unread_s,
        )

    return router


def _prompt(body: Json, gateway: InferenceService) -> tuple[int, ...]:
    """The prompt's token ids: of a text, of a list with one text, or as they were given."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        (prompt,) = prompt
    if isinstance(prompt, str):
        check_text_fits(prompt, gateway.model, gateway.tokenizer, "prompt")
        token_ids = tuple(gateway.tokenizer.encode(prompt))
        check_length(len(token_ids), gateway.model, "prompt")
    elif isinstance(prompt, list) and all(type(each) is int for each in prompt):
        token_ids = tuple(prompt)
        check_length(len(token_ids), gateway.model, "prompt")
        check_prompt_ids(token_ids, gateway.model, "prompt")
    else:
        raise InvalidArgument("prompt", "must be one text, or one list of token ids")
    if not token_ids:
        raise InvalidArgument("prompt", "is empty; it needs at least one token")
    return token_ids
