"""What does the gateway know of the model it serves, and what fits it?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ripresa.cluster.gateway.status import RequestError
from ripresa.cluster.gateway.tokenizer import Tokenizer
from ripresa.workers.errors import ErrorCode, InvalidArgument


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the gateway knows of the one model it serves.

    Attributes:
        name: what clients call it.
        max_model_len: most positions of a request, prompt and answer together.
        vocab_size: token ids are below it.
        eos_token_id: ends a stream unless `ignore_eos`; None if the model has none.
        weights_digest: which weights, in hexadecimal.
        image_token_id: stands for a piece of an image; None if the model has none.
    """

    name: str
    max_model_len: int
    vocab_size: int
    eos_token_id: int | None
    weights_digest: str
    image_token_id: int | None = None

    def lengths(self, num_prompt_tokens: int) -> dict[str, str]:
        """Metadata of a refusal for a length."""
        return {"max_model_len": str(self.max_model_len), "prompt_tokens": str(num_prompt_tokens)}


def check_model(asked: str, model: ServedModel, field: str) -> None:
    """Refuse a model that is not served; an empty name means the served one."""
    if asked and asked != model.name:
        raise RequestError(
            ErrorCode.NOT_FOUND,
            "MODEL_NOT_FOUND",
            f"model {asked[:64]!r} is not served here; {model.name!r} is",
            field=field,
            resource=("model", asked),
        )


def check_token_ids(token_ids: Sequence[int], model: ServedModel, field: str) -> None:
    """Refuse ids beyond the vocabulary."""
    if min(token_ids, default=0) >= 0 and max(token_ids, default=0) < model.vocab_size:
        return
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < model.vocab_size:
            raise InvalidArgument(
                f"{field}[{index}]",
                f"token id {token_id} is not in the vocabulary (0 to {model.vocab_size - 1})",
            )


def check_prompt_ids(token_ids: Sequence[int], model: ServedModel, field: str) -> None:
    """Refuse ids beyond the vocabulary, and those that stand for images."""
    check_token_ids(token_ids, model, field)
    if model.image_token_id in token_ids:
        raise InvalidArgument(
            f"{field}[{token_ids.index(model.image_token_id)}]",
            f"token id {model.image_token_id} stands for an image, and images are not supported",
        )


def check_text_fits(text: str, model: ServedModel, tokenizer: Tokenizer, field: str) -> None:
    """Refuse a text too long for the model whatever its tokens are; costs no tokenization."""
    check_length(tokenizer.least_tokens(text), model, field, "at least ")


def check_length(num_tokens: int, model: ServedModel, field: str, about: str = "") -> None:
    """Refuse a prompt that leaves no room for a token."""
    if num_tokens >= model.max_model_len:
        raise RequestError(
            ErrorCode.INVALID_ARGUMENT,
            "CONTEXT_LENGTH_EXCEEDED",
            f"the prompt has {about}{num_tokens} tokens; with at least one token to generate, "
            f"the model's context of {model.max_model_len} allows {model.max_model_len - 1}",
            field=field,
            metadata=model.lengths(num_tokens),
        )
