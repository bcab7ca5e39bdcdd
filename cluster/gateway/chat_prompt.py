"""What does a chat request ask of the router? Its prompt, its parameters, what enforces them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ripresa.cluster.gateway.chat_encoding import ChatEncoding, Json, Prompt, Protocol, Stage
from ripresa.cluster.gateway.sampling import (
    AskedSampling,
    Name,
    check_ranges,
    check_sampling,
    choices_of,
)
from ripresa.cluster.gateway.served_model import ServedModel, check_length, check_text_fits
from ripresa.cluster.gateway.tokenizer import Tokenizer
from ripresa.cluster.gateway.validation import Arrival, check_options, prompt_request
from ripresa.cluster.routing.prompt import PromptRequest
from ripresa.protos import ripresa_pb2 as pb
from ripresa.workers.request import ForcedTokens, SamplingParams


@dataclass(frozen=True, slots=True)
class AskedChat:
    """A chat request that was accepted.

    Attributes:
        prompt: the rendered conversation.
        prompts: one for each choice.
    """

    prompt: Prompt
    prompts: tuple[PromptRequest, ...]


@dataclass(frozen=True, slots=True)
class ChatReader:
    """Reads chat requests of any protocol for one model."""

    encoding: ChatEncoding
    model: ServedModel
    tokenizer: Tokenizer

    def read(
        self,
        body: Json,
        protocol: Protocol,
        options: pb.RequestOptions,
        asked: AskedSampling,
        arrival: Arrival,
        name: Name,
    ) -> AskedChat:
        """Render, encode and check a request.

        Args:
            body: the conversation in its protocol's JSON.
            name: a sampling parameter's path in the request, for refusals.

        Raises:
            RipresaError: the request is not acceptable; `field` names the part at fault.
        """
        check_options(options)
        check_ranges(asked, name)
        prompt, token_ids = self.encode(body, protocol)
        sampling = check_sampling(asked, self.model, len(token_ids), name)
        sampling = _enforced(sampling, prompt, self.encoding)
        first = prompt_request(options, token_ids, sampling, arrival)
        return AskedChat(prompt, choices_of(first, asked.n))

    def encode(self, body: Json, protocol: Protocol) -> tuple[Prompt, tuple[int, ...]]:
        """A request's prompt and its token ids; they leave room for an answer."""
        prompt = self.encoding.render(body, protocol)
        check_text_fits(prompt.text, self.model, self.tokenizer, "messages")
        token_ids = tuple(self.encoding.encode(prompt.segments))
        check_length(len(token_ids), self.model, "messages")
        return prompt, token_ids


def _enforced(sampling: SamplingParams, prompt: Prompt, encoding: ChatEncoding) -> SamplingParams:
    """The parameters that make an answer keep to the tool choice."""
    if prompt.tool_choice.mode == "none":
        return replace(sampling, banned_token_ids=(encoding.call_token_id,))
    if not prompt.forced:
        return sampling
    reasons = prompt.begins_in is Stage.REASONING
    forced = ForcedTokens(
        token_ids=tuple(encoding.encode_markup(prompt.forced)),
        after=encoding.end_of_reasoning_id if reasons else None,
        forbidden_before=(encoding.call_token_id,) if reasons else (),
    )
    return replace(sampling, forced=forced)
