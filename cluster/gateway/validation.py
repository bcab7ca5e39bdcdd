"""Is a request acceptable, and what exactly does it ask? Nothing invalid passes this file.

Each refusal names the field. An option that the server cannot honour yet is refused, not ignored;
a value that asks for nothing (n = 1, min_p = 0) is fine.
"""

from __future__ import annotations

import math
import re
import secrets
from dataclasses import dataclass
from hashlib import blake2b

from ripresa.cluster.gateway.status import RequestError
from ripresa.cluster.gateway.tokenizer import Tokenizer
from ripresa.cluster.routing.prompt import PromptRequest
from ripresa.protos import ripresa_pb2 as pb
from ripresa.workers.errors import ErrorCode, InvalidArgument
from ripresa.workers.replay import ReplayMode, TailVariant
from ripresa.workers.request import CacheUse, SamplingParams

MAX_REQUEST_ID_CHARS = 128
_REQUEST_ID = re.compile(rf"[!-~]{{1,{MAX_REQUEST_ID_CHARS}}}")

MODES = {
    pb.REPLAY_MODE_UNSPECIFIED: ReplayMode.BOUNDED,
    pb.REPLAY_MODE_BOUNDED: ReplayMode.BOUNDED,
    pb.REPLAY_MODE_EXACT: ReplayMode.EXACT,
}
TAILS = {
    pb.TAIL_VARIANT_FLOORED: TailVariant.FLOORED,
    pb.TAIL_VARIANT_LAYER_EXACT: TailVariant.LAYER_EXACT,
    pb.TAIL_VARIANT_FULL: TailVariant.FULL,
}


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the gateway knows of the one model it serves.

    Attributes:
        name: what clients call it.
        max_model_len: most positions of a request, prompt and answer together.
        vocab_size: token ids are below it.
        eos_token_id: ends a stream unless `ignore_eos`; None if the model has none.
        weights_digest: which weights, in hexadecimal.
    """

    name: str
    max_model_len: int
    vocab_size: int
    eos_token_id: int | None
    weights_digest: str


def read_prompt(
    request: pb.GenerateRequest,
    model: ServedModel,
    tokenizer: Tokenizer,
    *,
    request_id: str,
    deadline: float | None,
    default_tail: TailVariant,
) -> PromptRequest:
    """The prompt that a Generate request asks for.

    Raises:
        RipresaError: the request is not acceptable; `field` names the part at fault.
    """
    check_request_id(request.options.request_id, "options.request_id")
    check_model(request.options.model, model, "options.model")
    _check_options(request.options)
    token_ids = _read_input(request, model, tokenizer)
    room = model.max_model_len - len(token_ids)
    return PromptRequest(
        request_id=request_id,
        token_ids=token_ids,
        sampling=_read_sampling(request.sampling, model, len(token_ids), room),
        tail=_read_tail(request.options.cache_policy, default_tail),
        deadline=deadline,
        cache=_read_cache_use(request.options),
        tenant_salt=_salt(request.options.cache_salt),
        session_id=request.options.session_id or None,
    )


def check_request_id(request_id: str, field: str) -> None:
    """Refuse an id that cannot go into a status, a log line or a header; empty means none."""
    if request_id and not _REQUEST_ID.fullmatch(request_id):
        raise InvalidArgument(
            field, f"must be at most {MAX_REQUEST_ID_CHARS} visible ASCII characters"
        )


def check_model(asked: str, model: ServedModel, field: str) -> None:
    """Refuse a model that is not served; an empty name means the served one."""
    if asked and asked != model.name:
        raise RequestError(
            ErrorCode.NOT_FOUND,
            "MODEL_NOT_FOUND",
            f"model {asked[:64]!r} is not served here; {model.name!r} is",
            field=field,
        )


def check_token_ids(token_ids: tuple[int, ...], model: ServedModel, field: str) -> None:
    if max(token_ids, default=0) < model.vocab_size:
        return
    for index, token_id in enumerate(token_ids):
        if token_id >= model.vocab_size:
            raise InvalidArgument(
                f"{field}[{index}]",
                f"token id {token_id} is not in the vocabulary (0 to {model.vocab_size - 1})",
            )


def check_text_fits(text: str, model: ServedModel, tokenizer: Tokenizer, field: str) -> None:
    """Refuse a text too long for the model whatever its tokens are; costs no tokenization."""
    _check_length(tokenizer.least_tokens(text), model, field, "at least ")


def _read_cache_use(options: pb.RequestOptions) -> CacheUse:
    policy = options.cache_policy
    return CacheUse(
        mode=MODES[policy.replay_mode],
        reads=not policy.disable_read,
        writes=not policy.disable_write,
        resumes=not (policy.disable_resume or policy.disable_read),
    )


def _salt(cache_salt: str) -> bytes:
    """What keeps a client's cached state apart; nothing for no salt."""
    if not cache_salt:
        return b""
    return blake2b(cache_salt.encode(), digest_size=16, person=b"ripresa.salt").digest()


def _read_input(
    request: pb.GenerateRequest, model: ServedModel, tokenizer: Tokenizer
) -> tuple[int, ...]:
    which = request.WhichOneof("input")
    if which is None:
        raise InvalidArgument("input", "give the prompt as `text` or as `token_ids`")
    if which == "text":
        field = "text"
        check_text_fits(request.text, model, tokenizer, field)
        token_ids = tuple(tokenizer.encode(request.text))
        _check_length(len(token_ids), model, field)
    else:
        field = "token_ids.ids"
        token_ids = tuple(request.token_ids.ids)
        _check_length(len(token_ids), model, field)
        check_token_ids(token_ids, model, field)
    if not token_ids:
        raise InvalidArgument(field, "the prompt is empty; it needs at least one token")
    return token_ids


def _check_length(num_tokens: int, model: ServedModel, field: str, about: str = "") -> None:
    if num_tokens >= model.max_model_len:
        raise RequestError(
            ErrorCode.INVALID_ARGUMENT,
            "CONTEXT_LENGTH_EXCEEDED",
            f"the prompt has {about}{num_tokens} tokens; with at least one token to generate, "
            f"the model's context of {model.max_model_len} allows {model.max_model_len - 1}",
            field=field,
            metadata=_lengths(model, num_tokens),
        )


def _check_options(options: pb.RequestOptions) -> None:
    policy = options.cache_policy
    if policy.replay_mode not in pb.ReplayMode.values():
        raise InvalidArgument("options.cache_policy.replay_mode", "is no known replay mode")
    unsupported = {
        "priority": options.priority != 0,
        "max_queue_time": options.HasField("max_queue_time"),
        "cache_policy.replay_mode": policy.replay_mode == pb.REPLAY_MODE_CANONICAL,
    }
    _refuse_unsupported("options", unsupported)


def _read_tail(policy: pb.CachePolicy, default: TailVariant) -> TailVariant:
    field = "options.cache_policy.tail"
    if policy.tail == pb.TAIL_VARIANT_UNSPECIFIED:
        return default
    if policy.tail == pb.TAIL_VARIANT_EXACT:
        raise InvalidArgument(field, "tail `exact` is not supported yet")
    if policy.tail not in TAILS:
        raise InvalidArgument(field, "is no known tail variant")
    return TAILS[policy.tail]


def _read_sampling(
    sampling: pb.SamplingParams, model: ServedModel, prompt_tokens: int, room: int
) -> SamplingParams:
    unsupported = {
        "min_p": sampling.min_p != 0,
        "presence_penalty": sampling.presence_penalty != 0,
        "frequency_penalty": sampling.frequency_penalty != 0,
        "min_tokens": sampling.min_tokens != 0,
        "stop": bool(sampling.stop),
        "n": sampling.HasField("n") and sampling.n != 1,
        "logit_bias": bool(sampling.logit_bias),
        "logprobs": sampling.HasField("logprobs"),
        "constraint": sampling.HasField("constraint"),
    }
    _refuse_unsupported("sampling", unsupported)
    temperature = sampling.temperature if sampling.HasField("temperature") else 1.0
    if not (math.isfinite(temperature) and temperature >= 0):
        raise InvalidArgument(
            "sampling.temperature", f"must be a finite number of at least 0, is {temperature}"
        )
    top_p = sampling.top_p if sampling.HasField("top_p") else 1.0
    if not 0 < top_p <= 1:
        raise InvalidArgument("sampling.top_p", f"must be above 0 and at most 1, is {top_p}")
    top_k = sampling.top_k if sampling.HasField("top_k") else None
    if top_k is not None and top_k < 1:
        raise InvalidArgument(
            "sampling.top_k", f"must be at least 1, is {top_k}; leave it out to keep all tokens"
        )
    stop_token_ids = tuple(sampling.stop_token_ids)
    check_token_ids(stop_token_ids, model, "sampling.stop_token_ids")
    return SamplingParams(
        max_tokens=_read_max_tokens(sampling, model, prompt_tokens, room),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop_token_ids=stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        seed=sampling.seed if sampling.HasField("seed") else secrets.randbits(63),
    )


def _read_max_tokens(
    sampling: pb.SamplingParams, model: ServedModel, prompt_tokens: int, room: int
) -> int:
    """The asked number, or all that fits behind the prompt."""
    if not sampling.HasField("max_tokens"):
        return room
    if sampling.max_tokens < 1:
        raise InvalidArgument("sampling.max_tokens", "must be at least 1, is 0")
    if sampling.max_tokens > room:
        raise RequestError(
            ErrorCode.INVALID_ARGUMENT,
            "CONTEXT_LENGTH_EXCEEDED",
            f"{sampling.max_tokens} tokens do not fit: the prompt has {prompt_tokens} and the "
            f"model's context is {model.max_model_len}, which leaves {room}",
            field="sampling.max_tokens",
            metadata=_lengths(model, prompt_tokens),
        )
    return sampling.max_tokens


def _refuse_unsupported(prefix: str, asked: dict[str, bool]) -> None:
    for name, is_asked in asked.items():
        if is_asked:
            raise InvalidArgument(f"{prefix}.{name}", f"`{name}` is not supported yet")


def _lengths(model: ServedModel, prompt_tokens: int) -> dict[str, str]:
    return {"max_model_len": str(model.max_model_len), "prompt_tokens": str(prompt_tokens)}
