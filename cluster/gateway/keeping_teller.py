"""Who hears what the model has said, when it has said it? Beside the stream's client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from ripresa.cluster.gateway.chat_answer import ChatAnswer
from ripresa.cluster.gateway.chat_encoding import Turn
from ripresa.cluster.gateway.told_stream import Teller
from ripresa.workers.request import Finished, Tokens

M = TypeVar("M")


class KeepingTeller(Generic[M]):
    """A `Teller` that passes on each answer which the model has ended itself.

    An answer that was cut, or ended by a stop string, is not what a client sends back.

    Args:
        teller: who tells the stream.
        answers: one for each choice, to be parsed beside the telling.
        opening: token ids of the answer that are part of the prompt.
        eos_token_id: closes a turn.
        keep: hears an answer's choice, what it says, and all its token ids.
    """

    def __init__(
        self,
        teller: Teller[M],
        answers: Sequence[ChatAnswer],
        opening: Sequence[int],
        eos_token_id: int | None,
        keep: Callable[[int, Turn, Sequence[int]], None],
    ) -> None:
        self._teller = teller
        self._answers = answers
        self._eos_token_id = eos_token_id
        self._keep = keep
        self._token_ids: list[list[int]] = [list(opening) for _ in answers]

    def started(self) -> Sequence[M]:
        return self._teller.started()

    def deltas(self, choice: int, tokens: Tokens) -> Sequence[M]:
        self._token_ids[choice] += tokens.token_ids
        self._answers[choice].feed(tokens.token_ids)
        return self._teller.deltas(choice, tokens)

    def is_stopped(self, choice: int) -> bool:
        return self._teller.is_stopped(choice)

    def stopped(self, choice: int) -> Sequence[M]:
        return self._teller.stopped(choice)

    def finished(self, choice: int, finished: Finished) -> Sequence[M]:
        if finished.stop_token_id is not None and finished.stop_token_id == self._eos_token_id:
            answer = self._answers[choice]
            answer.finish(is_cut=False)
            calls = tuple((call.name, call.arguments) for call in answer.calls)
            token_ids = [*self._token_ids[choice], finished.stop_token_id]
            self._keep(choice, Turn(answer.content, calls), token_ids)
        return self._teller.finished(choice, finished)
