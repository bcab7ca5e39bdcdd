"""What can be asked for? The streaming requests, which blocking and asynchronous clients share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar, Unpack

from ripresa.cluster.client.errors import PreconditionError
from ripresa.cluster.client.events import Finished
from ripresa.cluster.client.exchange import Exchange
from ripresa.cluster.client.requests import (
    Effort,
    Options,
    Sampling,
    chat_request,
    conversation_of,
    generate_request,
)
from ripresa.protos import ripresa_pb2 as pb

S = TypeVar("S")
"""The kind of stream."""


class StreamingCalls(ABC, Generic[S]):
    """Requests that are answered by a stream.

    Args:
        timeout_s: deadline of those that name none.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        options: Options | None = None,
        return_token_ids: bool = False,
        timeout_s: float | None = None,
        **sampling: Unpack[Sampling],
    ) -> S:
        """Complete a plain text, or token ids; no template is applied.

        Args:
            timeout_s: deadline of the whole answer, retries and resumes included.

        Raises:
            InvalidArgument: the request cannot be sent. What the server refuses, the stream raises.
        """
        request = generate_request(prompt, sampling, options or {}, return_token_ids)
        return self.stream(Exchange(request, self.timeout_of(timeout_s)))

    def chat(
        self,
        messages: Iterable[pb.Message],
        *,
        tools: Iterable[pb.ToolDefinition] = (),
        tool_choice: str | None = None,
        effort: Effort | None = None,
        json_schema: Mapping[str, Any] | None = None,
        options: Options | None = None,
        return_token_ids: bool = False,
        timeout_s: float | None = None,
        **sampling: Unpack[Sampling],
    ) -> S:
        """Answer a whole conversation.

        Args:
            tool_choice: `auto`, `none`, `required`, or the name of the tool to call.
            effort: how much the model thinks; `none` for not at all.
            json_schema: what the answer's content must be.
            timeout_s: deadline of the whole answer, retries and resumes included.

        Raises:
            InvalidArgument: the request cannot be sent. What the server refuses, the stream raises.
        """
        conversation = conversation_of(messages, tools, effort, json_schema)
        request = chat_request(conversation, tool_choice, sampling, options or {}, return_token_ids)
        return self.stream(Exchange(request, self.timeout_of(timeout_s)))

    def timeout_of(self, timeout_s: float | None) -> float:
        """The deadline of a call, in seconds from now."""
        return self.timeout_s if timeout_s is None else timeout_s

    @abstractmethod
    def stream(self, exchange: Exchange) -> S:
        """The stream of an exchange that has not begun."""


class SessionTurns(Generic[S]):
    """A conversation that the server keeps, at one of its turns.

    Attributes:
        info: the server's facts about it, as they were when it was opened or found.
        head_turn_id: the turn that the next one goes on from; empty at the root.
    """

    def __init__(self, calls: StreamingCalls[S], info: pb.Session, head_turn_id: str) -> None:
        self._calls = calls
        self.info = info
        self.head_turn_id = head_turn_id
        self._turn_error = ""

    @property
    def session_id(self) -> str:
        return self.info.session_id

    def turn(
        self,
        messages: Iterable[pb.Message],
        *,
        tool_choice: str | None = None,
        options: Options | None = None,
        return_token_ids: bool = False,
        timeout_s: float | None = None,
        **sampling: Unpack[Sampling],
    ) -> S:
        """Say what is new, usually tool results or one user message, and stream the answer.

        Once the answer is finished, the next turn goes on from it.

        Raises:
            InvalidArgument: the request cannot be sent. What the server refuses, the stream raises.
            PreconditionError: the server could not keep the last turn (`Finished.turn_error`).
        """
        if self._turn_error:
            raise PreconditionError(
                "the session could not take its last turn; send the whole conversation, or open a "
                "new session",
                reason=self._turn_error,
            )
        asked: Options = {**(options or {}), "session_id": self.session_id}
        said = pb.SessionTurn(parent_turn_id=self.head_turn_id, messages=list(messages))
        request = chat_request(said, tool_choice, sampling, asked, return_token_ids)
        timeout = self._calls.timeout_of(timeout_s)
        return self._calls.stream(Exchange(request, timeout, on_finished=self._move_to))

    def _move_to(self, finished: Finished) -> None:
        self._turn_error = finished.turn_error
        self.head_turn_id = finished.turn_id or self.head_turn_id
