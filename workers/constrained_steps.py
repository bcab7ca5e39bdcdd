"""How do an engine's steps keep to their requests' constraints, without waiting for grammars?

Grammars are compiled in one thread, and what they allow next is found in another, while the step
computes its rows: the sampler finds it done.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from ripresa.workers.errors import ErrorCode, InvalidArgument, RipresaError
from ripresa.workers.grammar import Grammars, Matcher
from ripresa.workers.models.base import ModelRunner
from ripresa.workers.request import OutputConstraint
from ripresa.workers.sampler import TokenMask
from ripresa.workers.sequence import Sequence as Answer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    """What is known of one step's constrained rows, by slot.

    Attributes:
        masks: what may come.
        errors: why nothing can be said; such a request cannot go on.
    """

    masks: dict[int, TokenMask] = field(default_factory=dict)
    errors: dict[int, RipresaError] = field(default_factory=dict)


class FoundLater:
    """One step's masks, under way; a `StepMasks`."""

    def __init__(self, found: Future[Found]) -> None:
        self._found = found

    def of(self, slot: int) -> TokenMask | None:
        return self._found.result().masks.get(slot)

    @property
    def errors(self) -> dict[int, RipresaError]:
        return self._found.result().errors


class ConstrainedSteps:
    """The constraints of one engine's requests.

    Args:
        runner: whose vocabulary counts; read when the first constraint comes.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._grammars = Grammars(lambda: runner.vocabulary())
        # Threads start with their first work: an engine without constraints has none of them.
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._finding = ThreadPoolExecutor(1, thread_name_prefix="masks")

    async def open(self, constraint: OutputConstraint | None) -> Matcher | None:
        """What will follow a new request's answer.

        Raises:
            RipresaError: see `Grammars.matcher`.
        """
        if constraint is None:
            return None
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._compiling, self._grammars.matcher, constraint)

    def begin(self, rows: Sequence[tuple[int, Matcher, Answer]]) -> FoundLater | None:
        """Begin to find what may come in some slots of a step; None if no answer is bound yet.

        Called between steps: the answers' tokens are taken as they are now.
        """
        wanted = [
            (slot, matcher, answer.token_ids[start + matcher.num_followed :])
            for slot, matcher, answer in rows
            if (start := _start(answer)) is not None
        ]
        return FoundLater(self._finding.submit(_find, wanted)) if wanted else None

    def close(self) -> None:
        """Give the threads back, when what they do is done; no step may follow."""
        self._compiling.shutdown(cancel_futures=True)
        self._finding.shutdown(cancel_futures=True)


def _start(answer: Answer) -> int | None:
    """The position of the first token that the constraint decides."""
    begun = answer.history.constrained_from
    return None if begun is None else answer.request.num_prompt_tokens + begun


def _find(wanted: Sequence[tuple[int, Matcher, list[int]]]) -> Found:
    found = Found()
    for slot, matcher, token_ids in wanted:
        try:
            matcher.follow(token_ids)
            found.masks[slot] = matcher.mask()
        except InvalidArgument as error:
            found.errors[slot] = error
        except Exception as error:
            logger.exception("the mask of slot %d was not found", slot)
            message = f"what may come next was not found: {type(error).__name__}: {error}"
            found.errors[slot] = RipresaError(ErrorCode.INTERNAL, message)
    return found
