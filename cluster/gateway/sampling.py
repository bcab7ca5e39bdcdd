"""Are sampling parameters acceptable, and what exactly do they ask? The same rules for every API.

A value that cannot be honoured is refused by its name, never ignored or cut to a bound.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ripresa.cluster.gateway.output_format import OutputFormat, format_of, whole_grammar
from ripresa.cluster.gateway.served_model import ServedModel, check_token_ids
from ripresa.cluster.gateway.status import RequestError
from ripresa.cluster.routing.prompt import PromptRequest
from ripresa.protos import ripresa_pb2 as pb
from ripresa.workers.errors import ErrorCode, InvalidArgument
from ripresa.workers.request import OutputConstraint, SamplingParams

MAX_CHOICES = 8
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_BIASES = 1024
MAX_BIAS = 100.0
MAX_PENALTY = 2.0
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 10.0
"""Within these no logit, a float32, grows beyond what the sampler's float64 holds."""

_SEEDS = 1 << 64

Name = Callable[[str], str]
"""A parameter's name here -> its path in the request, for refusals."""


@dataclass(frozen=True, slots=True)
class AskedSampling:
    """Sampling as a client asked for it; None is the server's default.

    Attributes:
        format: what the answer must be.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    n: int = 1
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    format: OutputFormat | None = None


def asked_by(message: pb.SamplingParams) -> AskedSampling:
    """What a gRPC request asks for; raises InvalidArgument for a constraint to nothing."""
    optional = ("max_tokens", "temperature", "top_p", "top_k", "seed", "n", "repetition_penalty")
    given = {name: getattr(message, name) for name in optional if message.HasField(name)}  # type: ignore[arg-type]
    return AskedSampling(
        **given,
        min_tokens=message.min_tokens,
        min_p=message.min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        logit_bias=tuple(message.logit_bias.items()),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        format=format_of(
            message.constraint if message.HasField("constraint") else None, in_message("constraint")
        ),
    )


def in_message(parameter: str) -> str:
    """The path of a parameter in a gRPC request."""
    return f"sampling.{parameter}"


def check_sampling(
    asked: AskedSampling, model: ServedModel, num_prompt_tokens: int, name: Name = in_message
) -> SamplingParams:
    """The parameters of one choice, complete, a seed included.

    Raises:
        RipresaError: one of them is not acceptable; `field` names it.
    """
    check_ranges(asked, name)
    check_token_ids(asked.stop_token_ids, model, name("stop_token_ids"))
    _check_biases(asked, model, name)
    max_tokens = _max_tokens(asked, model, num_prompt_tokens, name)
    if not 0 <= asked.min_tokens <= max_tokens:
        raise InvalidArgument(
            name("min_tokens"), f"must be 0 to max_tokens ({max_tokens}), is {asked.min_tokens}"
        )
    seed = secrets.randbits(63) if asked.seed is None else asked.seed
    return settled(asked, max_tokens, seed)


def settled(asked: AskedSampling, max_tokens: int, seed: int) -> SamplingParams:
    """The parameters of one choice, with the server's defaults for what was not asked for.

    Raises InvalidArgument for a format that no answer can be kept to.
    """
    wanted = asked.format
    constraint = None
    if wanted is not None:
        constraint = OutputConstraint(whole_grammar(wanted), wanted.field)
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0 if asked.temperature is None else asked.temperature,
        top_k=None if asked.top_k in (0, -1) else asked.top_k,
        top_p=1.0 if asked.top_p is None else asked.top_p,
        stop_token_ids=asked.stop_token_ids,
        ignore_eos=asked.ignore_eos,
        seed=seed,
        min_p=asked.min_p,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        repetition_penalty=asked.repetition_penalty,
        logit_bias=asked.logit_bias,
        min_tokens=asked.min_tokens,
        logprobs=asked.logprobs,
        constraint=constraint,
    )


def choices_of(prompt: PromptRequest, count: int) -> tuple[PromptRequest, ...]:
    """As many requests for one prompt; the first is the prompt's own.

    Choice i has the seed plus i, and an id that no client can send. Only the first goes on with
    the session: one state can be parked for it.
    """
    first, seed = prompt.request_id, prompt.sampling.seed
    more = (
        replace(
            prompt,
            request_id=f"{first} {choice}",
            sampling=replace(prompt.sampling, seed=(seed + choice) % _SEEDS),
            session_id=None,
        )
        for choice in range(1, count)
    )
    return (prompt, *more)


def check_ranges(asked: AskedSampling, name: Name) -> None:
    """Refuse what is out of range whatever the prompt is."""

    def require(parameter: str, is_fine: bool, words: str) -> None:
        if not is_fine:
            value = getattr(asked, parameter)
            raise InvalidArgument(name(parameter), f"must be {words}, is {value}")

    temperature, top_p, top_k = asked.temperature, asked.top_p, asked.top_k
    require("max_tokens", asked.max_tokens is None or asked.max_tokens >= 1, "at least 1")
    is_fine = temperature is None or (math.isfinite(temperature) and temperature >= 0)
    require("temperature", is_fine, "a finite number of at least 0")
    require("top_p", top_p is None or 0 < top_p <= 1, "above 0 and at most 1")
    require("top_k", top_k is None or top_k >= -1, "at least 1, or 0 or -1 to keep all tokens")
    require("min_p", 0 <= asked.min_p <= 1, "0 to 1")
    for penalty in ("presence_penalty", "frequency_penalty"):
        is_fine = -MAX_PENALTY <= getattr(asked, penalty) <= MAX_PENALTY
        require(penalty, is_fine, f"{-MAX_PENALTY} to {MAX_PENALTY}")
    lowest = float(np.float32(MIN_REPETITION_PENALTY))  # as a gRPC client's comes: a little less
    is_fine = lowest <= asked.repetition_penalty <= MAX_REPETITION_PENALTY
    words = f"{MIN_REPETITION_PENALTY} to {MAX_REPETITION_PENALTY}"
    require("repetition_penalty", is_fine, words)
    require("n", 1 <= asked.n <= MAX_CHOICES, f"1 to {MAX_CHOICES}")
    require("seed", asked.seed is None or -_SEEDS < asked.seed < _SEEDS, "an integer of 64 bits")
    is_fine = asked.logprobs is None or 0 <= asked.logprobs <= MAX_LOGPROBS
    require("logprobs", is_fine, f"0 to {MAX_LOGPROBS}")
    if asked.format is not None:
        check_endings(asked.ignore_eos, name)
    _check_stops(asked, name)


def check_endings(ignore_eos: bool, name: Name) -> None:
    """Refuse what would let an answer that is bound to a constraint go on behind its end."""
    if ignore_eos:
        raise InvalidArgument(
            name("ignore_eos"), "cannot be: nothing may follow an answer that keeps to a constraint"
        )


def _check_stops(asked: AskedSampling, name: Name) -> None:
    if len(asked.stop) > MAX_STOP_STRINGS:
        raise InvalidArgument(name("stop"), f"at most {MAX_STOP_STRINGS} strings are allowed")
    for index, stop in enumerate(asked.stop):
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise InvalidArgument(
                f"{name('stop')}[{index}]", f"must have 1 to {MAX_STOP_CHARS} characters"
            )
    if len(asked.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidArgument(name("stop_token_ids"), f"at most {MAX_STOP_TOKEN_IDS} are allowed")


def _check_biases(asked: AskedSampling, model: ServedModel, name: Name) -> None:
    if len(asked.logit_bias) > MAX_BIASES:
        raise InvalidArgument(name("logit_bias"), f"at most {MAX_BIASES} tokens are allowed")
    for token_id, bias in asked.logit_bias:
        field = f"{name('logit_bias')}[{token_id}]"
        if not 0 <= token_id < model.vocab_size:
            raise InvalidArgument(
                field, f"is not in the vocabulary (token ids 0 to {model.vocab_size - 1})"
            )
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            raise InvalidArgument(field, f"must be {-MAX_BIAS} to {MAX_BIAS}, is {bias}")


def _max_tokens(
    asked: AskedSampling, model: ServedModel, num_prompt_tokens: int, name: Name
) -> int:
    """The asked number, or all that fits behind the prompt."""
    room = model.max_model_len - num_prompt_tokens
    if asked.max_tokens is None:
        return room
    if asked.max_tokens > room:
        raise RequestError(
            ErrorCode.INVALID_ARGUMENT,
            "CONTEXT_LENGTH_EXCEEDED",
            f"{asked.max_tokens} tokens do not fit: the prompt has {num_prompt_tokens} and the "
            f"model's context is {model.max_model_len}, which leaves {room}",
            field=name("max_tokens"),
            metadata=model.lengths(num_prompt_tokens),
        )
    return asked.max_tokens
