"""Which messages does a Chat stream consist of? A request's events become responses here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from ripresa.cluster.gateway.chat_answer import CallDelta, ChatAnswer, Delta
from ripresa.cluster.gateway.stream_facts import StreamFacts
from ripresa.protos import ripresa_pb2 as pb
from ripresa.workers.request import Finished, FinishReason, Tokens

REASONS: Mapping[str, pb.FinishReason.ValueType] = MappingProxyType(
    {
        "stop": pb.FINISH_REASON_STOP,
        "length": pb.FINISH_REASON_LENGTH,
        "tool_calls": pb.FINISH_REASON_TOOL_CALLS,
    }
)


class ChatResponses:
    """Builds the responses of one stream, in order; a `Teller`.

    Args:
        answers: one for each choice.
        return_token_ids: deltas carry ids beside the text.
    """

    def __init__(
        self, facts: StreamFacts, answers: Sequence[ChatAnswer], *, return_token_ids: bool
    ) -> None:
        self._facts = facts
        self._answers = answers
        self._return_token_ids = return_token_ids
        self._num_open = len(answers)
        self._sequence = 0

    def started(self) -> list[pb.ChatResponse]:
        for answer in self._answers:
            answer.begin(self._facts.num_prompt_tokens, self._facts.num_cached_tokens)
        return [self._numbered(pb.ChatResponse(started=self._facts.started()))]

    def deltas(self, choice: int, tokens: Tokens) -> list[pb.ChatResponse]:
        """What some tokens add; ids and log probabilities go with the first delta.

        Raises:
            RipresaError: the tokens do not continue the choice where it stood.
        """
        spoken = self._facts.tokens(choice, tokens)
        deltas = self._messages(choice, self._answers[choice].feed(spoken))
        raw = pb.TokenDelta(choice=choice, logprobs=self._facts.logprobs(tokens))
        if self._return_token_ids:
            raw.token_ids.extend(tokens.token_ids)
        if raw.token_ids or raw.logprobs:
            deltas = deltas or [pb.ChatDelta(choice=choice)]
            deltas[0].tokens.CopyFrom(raw)
        return [self._numbered(pb.ChatResponse(delta=delta)) for delta in deltas]

    def is_stopped(self, choice: int) -> bool:
        return self._answers[choice].parser.is_over

    def stopped(self, choice: int) -> list[pb.ChatResponse]:
        end = self._finished(choice)
        end.stop_string = self._answers[choice].matched_stop or ""
        return self._end(end)

    def finished(self, choice: int, finished: Finished) -> list[pb.ChatResponse]:
        self._facts.finished(choice, finished.num_generated_tokens)
        answer = self._answers[choice]
        rest = answer.finish(is_cut=finished.reason is FinishReason.LENGTH)
        responses = [
            self._numbered(pb.ChatResponse(delta=delta)) for delta in self._messages(choice, rest)
        ]
        end = self._finished(choice)
        if finished.stop_token_id is not None:
            end.stop_token_id = finished.stop_token_id
        return responses + self._end(end)

    def _messages(self, choice: int, deltas: Sequence[Delta]) -> list[pb.ChatDelta]:
        messages = []
        for delta in deltas:
            message = pb.ChatDelta(choice=choice)
            if isinstance(delta, CallDelta):
                message.tool_call.index = delta.index
                if delta.id:
                    message.tool_call.id = self._facts.call_id(choice, delta.index)
                message.tool_call.name = delta.name
                message.tool_call.arguments_delta = delta.arguments
                message.tool_call.done = delta.done
            elif delta.part == "reasoning":
                message.reasoning = delta.text
            else:
                message.content = delta.text
            messages.append(message)
        return messages

    def _finished(self, choice: int) -> pb.Finished:
        answer = self._answers[choice]
        calls = [
            pb.ToolCall(
                id=self._facts.call_id(choice, index),
                name=call.name,
                arguments_json=call.arguments,
            )
            for index, call in enumerate(answer.calls)
        ]
        message = pb.Message(
            role=pb.ROLE_ASSISTANT,
            content=answer.content,
            reasoning_content=answer.reasoning,
            tool_calls=calls,
        )
        reason = REASONS[answer.finish_reason or "stop"]
        return pb.Finished(choice=choice, reason=reason, message=message)

    def _end(self, end: pb.Finished) -> list[pb.ChatResponse]:
        responses = [self._numbered(pb.ChatResponse(finished=end))]
        self._num_open -= 1
        if not self._num_open:
            reasoning = sum(answer.num_reasoning_tokens for answer in self._answers)
            completed = self._facts.completed(reasoning)
            responses.append(self._numbered(pb.ChatResponse(completed=completed)))
        return responses

    def _numbered(self, response: pb.ChatResponse) -> pb.ChatResponse:
        response.sequence = self._sequence
        self._sequence += 1
        return response
