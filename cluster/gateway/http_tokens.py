"""What do `/v1/models`, `/tokenize` and `/detokenize` answer?"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from fastapi import APIRouter, Request

from ripresa.cluster.gateway.chat_encoding import Json, Protocol
from ripresa.cluster.gateway.http_body import body_of, call_of
from ripresa.cluster.gateway.http_document import documented
from ripresa.cluster.gateway.http_fields import CHAT_FIELDS, conversation_of, options_of, read_body
from ripresa.cluster.gateway.served_model import check_model, check_text_fits, check_token_ids
from ripresa.cluster.gateway.service import InferenceService
from ripresa.workers.errors import InvalidArgument

_MODEL = {"model": CHAT_FIELDS["model"]}
_CONVERSATION = (
    *("messages", "tools", "tool_choice", "thinking", "reasoning_effort"),
    *("add_generation_prompt", "continue_final_message"),
)
TOKENIZE_FIELDS = {
    **_MODEL,
    "prompt": {"type": "string"},
    **{name: CHAT_FIELDS[name] for name in (*_CONVERSATION, "cache_salt")},
}
DETOKENIZE_FIELDS = {**_MODEL, "tokens": {"type": "array", "items": {"type": "integer"}}}


def token_routes(service: Callable[[], InferenceService]) -> APIRouter:
    """The endpoints that run no model."""
    router = APIRouter()
    began = int(time.time())

    @router.get("/v1/models")
    async def models() -> Json:
        """The one model that is served."""
        return {"object": "list", "data": [_model(service(), began)]}

    @router.get("/v1/models/{model:path}")
    async def model(model: str) -> Json:
        """What is known of a model."""
        check_model(model, service().model, "model")
        return _model(service(), began)

    @router.post(
        "/tokenize",
        **documented(TOKENIZE_FIELDS, (), ("tokens", "count", "max_model_len", "cached_tokens")),
    )
    async def tokenize(request: Request) -> Json:
        """The token ids of a text, or of a conversation as it would be rendered, and how many of
        them the cluster holds the state of."""
        gateway, call = service(), call_of(request)
        raw = await body_of(request, gateway.max_message_bytes)

        def encode() -> tuple[Sequence[int], str]:
            body = read_body(raw, TOKENIZE_FIELDS)
            cache_salt = options_of(body, None).cache_salt
            check_model(body.get("model", ""), gateway.model, "model")
            if ("prompt" in body) is ("messages" in body):
                raise InvalidArgument("prompt", "give either `prompt` or `messages`")
            if "prompt" in body:
                check_text_fits(body["prompt"], gateway.model, gateway.tokenizer, "prompt")
                return gateway.tokenizer.encode(body["prompt"]), cache_salt
            conversation = conversation_of(body, Protocol.CHAT_COMPLETIONS)
            _, ids = gateway.chat_reader().encode(
                conversation, Protocol.CHAT_COMPLETIONS, call.tenant, cache_salt
            )
            return ids, cache_salt

        tokens, cache_salt = await gateway.off_loop(encode, call)
        return {
            "tokens": list(tokens),
            "count": len(tokens),
            "max_model_len": gateway.model.max_model_len,
            "cached_tokens": await gateway.num_held_tokens(tokens, cache_salt, call),
        }

    @router.post("/detokenize", **documented(DETOKENIZE_FIELDS, ("tokens",), ("prompt",)))
    async def detokenize(request: Request) -> Json:
        """The text of some token ids."""
        gateway, call = service(), call_of(request)
        raw = await body_of(request, gateway.max_message_bytes)

        def decode() -> str:
            body = read_body(raw, DETOKENIZE_FIELDS)
            check_model(body.get("model", ""), gateway.model, "model")
            tokens, limit = body.get("tokens"), gateway.model.max_model_len
            if tokens is None:
                raise InvalidArgument("tokens", "is missing")
            if len(tokens) > limit:
                raise InvalidArgument("tokens", f"at most {limit} fit the model's context")
            check_token_ids(tokens, gateway.model, "tokens")
            return gateway.tokenizer.decode(tokens)

        return {"prompt": await gateway.off_loop(decode, call)}

    return router


def _model(gateway: InferenceService, began: int) -> Json:
    return {
        "id": gateway.model.name,
        "object": "model",
        "created": began,
        "owned_by": "ripresa",
        "max_model_len": gateway.model.max_model_len,
    }
