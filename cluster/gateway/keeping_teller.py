"""How is what the model says kept while it is told?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from ripresa.cluster.gateway.chat_answer import ChatAnswer
from ripresa.cluster.gateway.chat_encoding import Turn
from ripresa.cluster.gateway.said_turns import OpenTurn, SaidTurns
from ripresa.cluster.gateway.told_stream import Teller
from ripresa.workers.request import Finished, Tokens

M = TypeVar("M")


class KeepingTeller(Generic[M]):
    """A `Teller` that keeps each answer which the model has ended itself.

    An answer that was cut, or ended by a stop string, is not what a client sends back.

    Args:
        teller: who tells the stream.
        answers: one for each choice, to be parsed beside the telling.
        turn: the turn that the answers fill.
        eos_token_id: closes a turn.
    """

    def __init__(
        self,
        teller: Teller[M],
        answers: Sequence[ChatAnswer],
        said: SaidTurns,
        turn: OpenTurn,
        eos_token_id: int | None,
    ) -> None:
        self._teller = teller
        self._answers = answers
        self._said = said
        self._turn = turn
        self._eos_token_id = eos_token_id
        self._token_ids: list[list[int]] = [list(turn.opening) for _ in answers]

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
            key = self._turn.key(Turn(answer.content, calls))
            self._said.keep(key, [*self._token_ids[choice], finished.stop_token_id])
        return self._teller.finished(choice, finished)
