"""Which messages does a Generate stream consist of? A request's events become responses here."""

from __future__ import annotations

from ripresa.cluster.gateway.stop_strings import StoppableText
from ripresa.cluster.gateway.stream_facts import REASON, StreamFacts
from ripresa.cluster.gateway.tokenizer import Tokenizer
from ripresa.cluster.gateway.validation import AskedText
from ripresa.protos import ripresa_pb2 as pb
from ripresa.workers.request import Finished, FinishReason, Tokens


class Responses:
    """Builds the responses of one stream, in order; a `Teller`.

    Args:
        return_token_ids: deltas carry ids beside the text.
    """

    def __init__(
        self,
        facts: StreamFacts,
        asked: AskedText,
        tokenizer: Tokenizer,
        *,
        return_token_ids: bool,
    ) -> None:
        self._facts = facts
        self._return_token_ids = return_token_ids
        self._texts = [
            StoppableText(tokenizer.stream(), asked.stop, prompt.sampling.min_tokens)
            for prompt in asked.prompts
        ]
        self._num_open = len(asked.prompts)
        self._sequence = 0

    def started(self) -> list[pb.GenerateResponse]:
        return [self._numbered(pb.GenerateResponse(started=self._facts.started()))]

    def deltas(self, choice: int, tokens: Tokens) -> list[pb.GenerateResponse]:
        """The delta of some tokens; none if it would be empty (a character is incomplete).

        Raises:
            RipresaError: the tokens do not continue the choice where it stood.
        """
        spoken = self._facts.tokens(choice, tokens)
        text = self._texts[choice].feed(spoken)
        delta = pb.TokenDelta(choice=choice, text=text, logprobs=self._facts.logprobs(tokens))
        if self._return_token_ids:
            delta.token_ids.extend(tokens.token_ids)
        if not delta.text and not delta.token_ids and not delta.logprobs:
            return []
        return [self._numbered(pb.GenerateResponse(delta=delta))]

    def is_stopped(self, choice: int) -> bool:
        return self._texts[choice].matched is not None

    def stopped(self, choice: int) -> list[pb.GenerateResponse]:
        end = pb.Finished(choice=choice, reason=REASON[FinishReason.STOP])
        end.stop_string = self._texts[choice].matched or ""
        return self._end(end)

    def finished(self, choice: int, finished: Finished) -> list[pb.GenerateResponse]:
        self._facts.finished(choice, finished.num_generated_tokens)
        text = self._texts[choice]
        rest = text.finish()
        responses = []
        if rest:
            delta = pb.TokenDelta(choice=choice, text=rest)
            responses.append(self._numbered(pb.GenerateResponse(delta=delta)))
        end = pb.Finished(choice=choice, reason=REASON[finished.reason])
        if text.matched is not None:
            end.reason, end.stop_string = REASON[FinishReason.STOP], text.matched
        elif finished.stop_token_id is not None:
            end.stop_token_id = finished.stop_token_id
        return responses + self._end(end)

    def _end(self, end: pb.Finished) -> list[pb.GenerateResponse]:
        responses = [self._numbered(pb.GenerateResponse(finished=end))]
        self._num_open -= 1
        if not self._num_open:
            completed = self._facts.completed()
            responses.append(self._numbered(pb.GenerateResponse(completed=completed)))
        return responses

    def _numbered(self, response: pb.GenerateResponse) -> pb.GenerateResponse:
        response.sequence = self._sequence
        self._sequence += 1
        return response
