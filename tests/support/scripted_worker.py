"""A test build of the decode worker: the model computes as ever, and a script chooses the tokens.

A weak model would call no tool. Everything else is real: prompts, caches, steps, streams.
"""

from __future__ import annotations

from typing import Any

from ripresa.workers.decode_worker import DecodeWorker as RealDecodeWorker
from ripresa.workers.models.base import StepOutput
from ripresa.workers.scheduling.step_plan import StepPlan

SCRIPT: list[tuple[int, ...]] = []
"""The answers, one request after the other, and again; set before the worker is deployed."""


class Script:
    """Puts the next answer's tokens in the place of what a slot's request sampled."""

    def __init__(self, runner: Any, answers: list[tuple[int, ...]]) -> None:
        self._answers = answers
        self._num_begun = 0
        self._left: dict[int, list[int]] = {}
        self._execute = runner.execute
        self._release_slot = runner.release_slot
        runner.execute = self.execute
        runner.release_slot = self.release_slot

    def execute(self, plan: StepPlan, inbound: Any = None, masks: Any = None) -> StepOutput:
        output: StepOutput = self._execute(plan, inbound, masks)
        for slot in output.sampled:
            if slot not in self._left:
                answer = self._answers[self._num_begun % len(self._answers)]
                self._num_begun += 1
                self._left[slot] = list(answer)
            output.sampled[slot] = self._left[slot].pop(0)
        return output

    def release_slot(self, slot: int) -> None:
        self._left.pop(slot, None)
        self._release_slot(slot)


class DecodeWorker(RealDecodeWorker):
    """The decode worker with a script."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, *args: Any, script: list[tuple[int, ...]] | None = None
    ) -> None:
        await RealDecodeWorker.__init__(self, *args)  # type: ignore[misc]
        Script(self._runner, script or SCRIPT)
