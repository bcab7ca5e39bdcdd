"""What does a chat request ask of the router? Its prompt, its parameters, what enforces them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ripresa.cluster.gateway.chat_constraint import constraint_of
from ripresa.cluster.gateway.chat_encoding import (
    MESSAGES_IN,
    ChatEncoding,
    Json,
    Prompt,
    Protocol,
)
from ripresa.cluster.gateway.prefix_breaks import Outline, outline_of
from ripresa.cluster.gateway.said_turns import OpenTurn, Said, SplicedPrompt, splice
from ripresa.cluster.gateway.sampling import (
    AskedSampling,
    Name,
    check_endings,
    check_ranges,
    check_sampling,
    choices_of,
)
from ripresa.cluster.gateway.served_model import ServedModel, check_length, check_text_fits
from ripresa.cluster.gateway.tokenizer import Tokenizer
from ripresa.cluster.gateway.validation import (
    BOUNDS,
    Arrival,
    ConversationBounds,
    check_options,
    prompt_request,
    tenant_salt,
)
from ripresa.cluster.routing.prompt import PromptRequest
from ripresa.protos import ripresa_pb2 as pb
from ripresa.workers.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class AskedChat:
    """A chat request that was accepted.

    Attributes:
        prompt: the rendered conversation.
        prompts: one for each choice.
        open_turn: what the answer will be kept by; None to keep none.
        outline: what the next prompt of the conversation is compared with; None for a resumed one.
    """

    prompt: Prompt
    prompts: tuple[PromptRequest, ...]
    open_turn: OpenTurn | None
    outline: Outline | None


@dataclass(frozen=True, slots=True)
class ChatReader:
    """Reads chat requests of any protocol for one model.

    Attributes:
        said: what the model said in earlier answers.
        bounds: of every conversation.
    """

    encoding: ChatEncoding
    model: ServedModel
    tokenizer: Tokenizer
    said: Said
    bounds: ConversationBounds = BOUNDS

    def read(
        self,
        body: Json,
        protocol: Protocol,
        options: pb.RequestOptions,
        asked: AskedSampling,
        arrival: Arrival,
        name: Name,
        place: Name = str,
    ) -> AskedChat:
        """Render, encode and check a request.

        Args:
            body: the conversation in its protocol's JSON.
            name: a sampling parameter's path in the request, for refusals.
            place: the path in the request of what has one in the body, for refusals by workers.

        Raises:
            RipresaError: the request is not acceptable; `field` names the part at fault.
        """
        check_options(options)
        check_ranges(asked, name)
        prompt, spliced = self._encode(body, protocol, options, arrival.tenant)
        if prompt.stop and asked.min_tokens:
            raise InvalidArgument(
                name("min_tokens"),
                "a chat takes it or stop strings, not both: leave one out, or ask for a completion",
            )
        token_ids = tuple(spliced.token_ids)
        free = replace(asked, format=None)
        sampling = check_sampling(free, self.model, len(token_ids), name)
        constraint = constraint_of(prompt, asked.format, self.encoding)
        if constraint is not None:
            check_endings(asked.ignore_eos, name)
            constraint = replace(constraint, field=place(constraint.field))
            sampling = replace(sampling, constraint=constraint)
        if prompt.tool_choice.mode == "none":
            sampling = replace(sampling, banned_token_ids=(self.encoding.call_token_id,))
        first = prompt_request(options, token_ids, sampling, arrival)
        open_turn = spliced.open_turn if first.cache.writes else None
        encoding = self.encoding
        outline = outline_of(
            spliced,
            user_id=encoding.user_id,
            end_id=encoding.end_id,
            end_of_reasoning_id=encoding.end_of_reasoning_id,
        )
        return AskedChat(prompt, choices_of(first, asked.n), open_turn, outline)

    def reread(
        self,
        body: Json,
        protocol: Protocol,
        prompts: tuple[PromptRequest, ...],
        turn: OpenTurn | None,
    ) -> AskedChat:
        """A request that was accepted before, here or in another gateway, as it was then."""
        return AskedChat(self.encoding.render(body, protocol), prompts, turn, None)

    def encode(
        self, body: Json, protocol: Protocol, tenant: str, cache_salt: str
    ) -> tuple[Prompt, tuple[int, ...]]:
        """A request's prompt and its token ids."""
        options = pb.RequestOptions(cache_salt=cache_salt)
        prompt, spliced = self._encode(body, protocol, options, tenant)
        return prompt, tuple(spliced.token_ids)

    def _encode(
        self, body: Json, protocol: Protocol, options: pb.RequestOptions, tenant: str
    ) -> tuple[Prompt, SplicedPrompt]:
        """A prompt that leaves room for an answer."""
        field = MESSAGES_IN[protocol]
        self.bounds.check(body.get(field), body.get("tools"), field)
        prompt = self.encoding.render(body, protocol)
        check_text_fits(prompt.text, self.model, self.tokenizer, field)
        said = None if options.cache_policy.disable_read else self.said
        spliced = splice(self.encoding, prompt, said, tenant_salt(tenant, options.cache_salt))
        check_length(len(spliced.token_ids), self.model, field)
        return prompt, spliced
