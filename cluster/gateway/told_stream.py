"""How does a running request become the messages of some protocol?"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Protocol, TypeVar

from ripresa.cluster.gateway.run import Run
from ripresa.cluster.gateway.stream_facts import StreamFacts
from ripresa.cluster.routing.prompt import Placed, Planned
from ripresa.workers.request import Finished, Tokens

M = TypeVar("M")
M_co = TypeVar("M_co", covariant=True)


class Teller(Protocol[M_co]):
    """Makes the messages of one stream, in order. Choices are numbered from 0."""

    def started(self) -> Sequence[M_co]:
        """The prompt is placed and what is computed of it is known. Called once, first."""

    def deltas(self, choice: int, tokens: Tokens) -> Sequence[M_co]:
        """A choice has more tokens."""

    def is_stopped(self, choice: int) -> bool:
        """Its last tokens held a stop string: the choice is over, and `stopped` closes it."""

    def stopped(self, choice: int) -> Sequence[M_co]:
        """The end of a choice in which a stop string was found."""

    def finished(self, choice: int, finished: Finished) -> Sequence[M_co]:
        """The end of a choice; behind the last one, of either kind, the end of the stream."""


async def told(run: Run, facts: StreamFacts, teller: Teller[M]) -> AsyncGenerator[M]:
    """The messages of a running request.

    Raises:
        RipresaError: it failed; nothing follows.
    """
    async with aclosing(run.events()) as events:
        async for choice, event in events:
            messages: Sequence[M] = ()
            match event:
                case Placed() if choice == 0:
                    facts.placed(event)
                    if event.recipe is not None:
                        facts.planned(event.recipe, event.prefix)
                        messages = teller.started()
                case Planned() if choice == 0:
                    facts.planned(event.recipe, event.prefix)
                    messages = teller.started()
                case Tokens():
                    messages = teller.deltas(choice, event)
                    if teller.is_stopped(choice):
                        run.stop(choice)
                        messages = [*messages, *teller.stopped(choice)]
                case Finished():
                    messages = teller.finished(choice, event)
            for message in messages:
                yield message
