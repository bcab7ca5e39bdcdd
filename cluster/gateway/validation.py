"""Is a request acceptable, and what exactly does it ask? Nothing invalid passes this file.

Each refusal names the field. An option that the server cannot honour yet is refused, not ignored;
a value that asks for nothing is fine.
"""

from __future__ import annotations

import re
from collections.abc import Sized
from dataclasses import dataclass
from hashlib import blake2b

from google.protobuf.duration_pb2 import Duration

from ripresa.cluster.gateway.sampling import asked_by, check_sampling, choices_of
from ripresa.cluster.gateway.served_model import (
    ServedModel,
    check_length,
    check_model,
    check_prompt_ids,
    check_text_fits,
)
from ripresa.cluster.gateway.tokenizer import Tokenizer
from ripresa.cluster.routing.prompt import PromptRequest
from ripresa.protos import ripresa_pb2 as pb
from ripresa.workers.errors import InvalidArgument
from ripresa.workers.replay import ReplayMode, TailVariant
from ripresa.workers.request import CacheUse, SamplingParams
from ripresa.workers.scheduling.admission import check_tail

MAX_REQUEST_ID_CHARS = 128
_REQUEST_ID = re.compile(rf"[!-~]{{1,{MAX_REQUEST_ID_CHARS}}}")

MAX_NAME_CHARS = 1024
"""Of a session's or a salt's name: a gateway remembers many."""

MODES = {
    pb.REPLAY_MODE_UNSPECIFIED: ReplayMode.BOUNDED,
    pb.REPLAY_MODE_BOUNDED: ReplayMode.BOUNDED,
    pb.REPLAY_MODE_EXACT: ReplayMode.EXACT,
    pb.REPLAY_MODE_CANONICAL: ReplayMode.CANONICAL,
}
TAILS = {
    pb.TAIL_VARIANT_FLOORED: TailVariant.FLOORED,
    pb.TAIL_VARIANT_LAYER_EXACT: TailVariant.LAYER_EXACT,
    pb.TAIL_VARIANT_FULL: TailVariant.FULL,
    pb.TAIL_VARIANT_EXACT: TailVariant.EXACT,
}

MAX_QUEUE_S = 3_600
"""Longest time that a client may ask to wait for room."""
MAX_EXPECTED_S = 86_400
"""Longest time that a client may expect to need until it goes on."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """What is known of a call beside its message.

    Attributes:
        request_id: the client's, or one that the server made.
        deadline: seconds since the epoch; None for none.
        default_tail: tail variant of requests that name none.
        tenant: whose it is; empty where there are no tenants.
        max_queue_s: longest wait for room of requests that do not say it.
    """

    request_id: str
    deadline: float | None
    default_tail: TailVariant
    tenant: str = ""
    max_queue_s: float = 0.0


@dataclass(frozen=True, slots=True)
class AskedText:
    """A completion that was accepted.

    Attributes:
        prompts: one for each choice.
        stop: strings that end a choice.
    """

    prompts: tuple[PromptRequest, ...]
    stop: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ConversationBounds:
    """How many parts a conversation may have, its earlier turns included: rendering takes time for
    each, however short.
    """

    max_messages: int = 10_000
    max_tools: int = 1_000

    def check(self, messages: object, tools: object = None, field: str = "messages") -> None:
        """Refuse lists that are too long; raises InvalidArgument.

        Args:
            field: what the messages are called; tools are `tools`.
        """
        bounds = ((field, messages, self.max_messages), ("tools", tools, self.max_tools))
        for name, parts, most in bounds:
            if isinstance(parts, Sized) and not isinstance(parts, str) and len(parts) > most:
                setting = "max_tools" if name == "tools" else "max_messages"
                raise InvalidArgument(
                    name, f"has {len(parts)} parts; at most {most} are allowed (gateway.{setting})"
                )


BOUNDS = ConversationBounds()


def read_generate(
    request: pb.GenerateRequest, model: ServedModel, tokenizer: Tokenizer, arrival: Arrival
) -> AskedText:
    """What a Generate request asks for.

    Raises:
        RipresaError: the request is not acceptable; `field` names the part at fault.
    """
    check_request_id(request.options.request_id, "options.request_id")
    check_model(request.options.model, model, "options.model")
    check_options(request.options)
    token_ids = _read_input(request, model, tokenizer)
    asked = asked_by(request.sampling)
    sampling = check_sampling(asked, model, len(token_ids))
    first = prompt_request(request.options, token_ids, sampling, arrival)
    return AskedText(choices_of(first, asked.n), asked.stop)


def prompt_request(
    options: pb.RequestOptions,
    token_ids: tuple[int, ...],
    sampling: SamplingParams,
    arrival: Arrival,
) -> PromptRequest:
    """The request for one choice; `options` have been checked.

    Raises InvalidArgument for a tail variant that is not supported.
    """
    return PromptRequest(
        request_id=scoped_id(arrival.tenant, arrival.request_id),
        token_ids=token_ids,
        sampling=sampling,
        tail=_read_tail(options.cache_policy, arrival.default_tail),
        deadline=arrival.deadline,
        cache=_read_cache_use(options),
        tenant_salt=tenant_salt(arrival.tenant, options.cache_salt),
        session_id=options.session_id or None,
        priority=options.priority,
        max_queue_s=_read_queue_time(options, arrival.max_queue_s),
        expect_next_within_s=_read_expectation(options),
    )


def check_request_id(request_id: str, field: str) -> None:
    """Refuse an id that cannot go into a status, a log line or a header; empty means none."""
    if request_id and not _REQUEST_ID.fullmatch(request_id):
        raise InvalidArgument(
            field, f"must be at most {MAX_REQUEST_ID_CHARS} visible ASCII characters"
        )


def check_name(name: str, field: str) -> None:
    """Refuse the name of a session or a salt that is too long to be remembered."""
    if len(name) > MAX_NAME_CHARS:
        raise InvalidArgument(field, f"must have at most {MAX_NAME_CHARS} characters")


def check_expectation(seconds: float, field: str) -> None:
    """Refuse a time until the next request that is none."""
    if not 0 < seconds <= MAX_EXPECTED_S:
        raise InvalidArgument(
            field, f"must be above 0 and at most {MAX_EXPECTED_S} seconds, is {seconds:g}"
        )


def _read_cache_use(options: pb.RequestOptions) -> CacheUse:
    policy = options.cache_policy
    return CacheUse(
        mode=MODES[policy.replay_mode],
        reads=not policy.disable_read,
        writes=not policy.disable_write,
        resumes=not (policy.disable_resume or policy.disable_read),
    )


def tenant_salt(tenant: str, cache_salt: str) -> bytes:
    """What keeps cached state apart: 16 bytes for a tenant, 16 more for his client's own salt.

    Nothing where there is neither.
    """
    salt = b""
    if tenant:
        salt = blake2b(tenant.encode(), digest_size=16, person=b"ripresa.owner").digest()
    if cache_salt:
        salt += blake2b(cache_salt.encode(), digest_size=16, person=b"ripresa.salt").digest()
    return salt


def scoped_id(tenant: str, request_id: str) -> str:
    """How a request is called behind the gateway: tenants cannot meet each other's ids.

    The space is in no id that a client can send, and in no tenant's name.
    """
    return f"{tenant} {request_id}" if tenant else request_id


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
        check_length(len(token_ids), model, field)
    else:
        field = "token_ids.ids"
        token_ids = tuple(request.token_ids.ids)
        check_length(len(token_ids), model, field)
        check_prompt_ids(token_ids, model, field)
    if not token_ids:
        raise InvalidArgument(field, "the prompt is empty; it needs at least one token")
    return token_ids


def check_options(options: pb.RequestOptions) -> None:
    """Refuse names that are too long, and values out of range."""
    policy = options.cache_policy
    if policy.replay_mode not in pb.ReplayMode.values():
        raise InvalidArgument("options.cache_policy.replay_mode", "is no known replay mode")
    check_name(options.session_id, "options.session_id")
    check_name(options.cache_salt, "options.cache_salt")
    check_queue_time(_read_queue_time(options, 0.0), "options.max_queue_time")
    if (seconds := _read_expectation(options)) is not None:
        check_expectation(seconds, "options.expect_next_within")


def _read_expectation(options: pb.RequestOptions) -> float | None:
    """Seconds after the answer within which the client expects to go on; None if not told."""
    if not options.HasField("expect_next_within"):
        return None
    return seconds_of(options.expect_next_within, "options.expect_next_within")


def seconds_of(duration: Duration, field: str) -> float:
    """A span of time that a client gave.

    Raises:
        InvalidArgument: it is no valid `google.protobuf.Duration`, which protobuf itself lets pass.
    """
    seconds, nanos = duration.seconds, duration.nanos
    if abs(nanos) >= 10**9 or seconds * nanos < 0:
        raise InvalidArgument(
            field, "is no duration: `nanos` must have the sign of `seconds`, and be under a second"
        )
    return seconds + nanos / 1e9


def check_queue_time(seconds: float, field: str) -> None:
    """Refuse a wait that nobody would sit out."""
    if not 0 <= seconds <= MAX_QUEUE_S:
        raise InvalidArgument(field, f"must be 0 to {MAX_QUEUE_S} s")


def _read_queue_time(options: pb.RequestOptions, default: float) -> float:
    """Seconds for which the request may wait for room."""
    if not options.HasField("max_queue_time"):
        return default
    return seconds_of(options.max_queue_time, "options.max_queue_time")


def _read_tail(policy: pb.CachePolicy, default: TailVariant) -> TailVariant:
    field = "options.cache_policy.tail"
    if policy.tail == pb.TAIL_VARIANT_UNSPECIFIED:
        return default
    if policy.tail not in TAILS:
        raise InvalidArgument(field, "is no known tail variant")
    check_tail(TAILS[policy.tail], MODES[policy.replay_mode], field)
    return TAILS[policy.tail]
