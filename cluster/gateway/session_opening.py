"""How is the beginning of a session's conversation checked, and computed ahead of its turns?"""

from __future__ import annotations

import uuid
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Never

from ripresa.cluster.gateway.call import Call
from ripresa.cluster.gateway.chat_encoding import Protocol
from ripresa.cluster.gateway.chat_messages import Paths, conversation_body
from ripresa.cluster.gateway.chat_prompt import AskedChat
from ripresa.cluster.gateway.sampling import AskedSampling, in_message
from ripresa.cluster.gateway.stream_facts import StreamFacts
from ripresa.protos import ripresa_pb2 as pb
from ripresa.workers.request import Finished, Tokens

if TYPE_CHECKING:
    from ripresa.cluster.gateway.service import InferenceService


@dataclass(frozen=True, slots=True)
class SessionOpening:
    """The beginning of a session's conversation, which is fine; a `Head`.

    Attributes:
        asked: it, and an empty message of the user's.
        user_id: opens such a message.
    """

    service: InferenceService
    asked: AskedChat
    user_id: int
    call: Call

    @property
    def num_tokens(self) -> int:
        """Up to the mark of the user's message behind it, which is not its own."""
        token_ids = self.asked.prompts[0].token_ids
        return len(token_ids) - 1 - token_ids[::-1].index(self.user_id)

    async def prefetch(self) -> None:
        """Compute it, and nothing of an answer that anybody hears of.

        Raises:
            RequestError: it is not admitted.
            RipresaError: it failed.
        """

        def tell(asked: AskedChat, facts: StreamFacts) -> Silence:
            return Silence()

        stream = self.service.stream(lambda: self.asked, tell, self.call)
        async with aclosing(stream) as messages:
            async for _ in messages:
                pass


async def read_head(
    service: InferenceService, conversation: pb.FullConversation, cache_salt: str, call: Call
) -> SessionOpening:
    """The beginning of a session's conversation, checked.

    Raises:
        RipresaError: it is no such beginning.
    """
    options = pb.RequestOptions(cache_salt=cache_salt)
    sampling = AskedSampling(max_tokens=1, temperature=0.0)
    # Its id is of no client's: the space is in none that one can send.
    arrival = replace(service.arrival(call), request_id=f"head {uuid.uuid4().hex}")
    reader = service.chat_reader()
    whole = pb.FullConversation()
    whole.CopyFrom(conversation)
    whole.messages.add(role=pb.ROLE_USER)

    def read() -> AskedChat:
        paths = Paths("preamble", "config")
        body, protocol = conversation_body(whole, paths), Protocol.CHAT_COMPLETIONS
        with paths.named():
            return reader.read(
                body, protocol, options, sampling, arrival, in_message, place=paths.of
            )

    asked = await service.off_loop(read, call)
    return SessionOpening(service, asked, reader.encoding.user_id, call)


class Silence:
    """A `Teller` that tells nothing."""

    def started(self) -> tuple[Never, ...]:
        return ()

    def deltas(self, choice: int, tokens: Tokens) -> tuple[Never, ...]:
        return ()

    def is_stopped(self, choice: int) -> bool:
        return False

    def stopped(self, choice: int) -> tuple[Never, ...]:
        return ()

    def finished(self, choice: int, finished: Finished) -> tuple[Never, ...]:
        return ()
