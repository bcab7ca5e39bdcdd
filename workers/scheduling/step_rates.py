"""How fast does a worker compute? Averages over its steps, the newest counting most.

A row of either half of the model counts as one: the halves have about as many layers each. Pure:
durations are arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

NEWEST_SHARE = 0.1
"""Weight of the newest step in an average."""

MIN_PREFILL_ROWS = 16
"""Steps with fewer rows say little about the time of one: what a step costs anyway dominates."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured speed; None until a step told it.

    Attributes:
        row_s: seconds of a row of one half of the model, in steps that compute prompts.
        decode_step_s: seconds of a step that only continues streams.
    """

    row_s: float | None = None
    decode_step_s: float | None = None


class StepRates:
    """The averages of one worker."""

    def __init__(self) -> None:
        self._row_s: float | None = None
        self._decode_step_s: float | None = None

    @property
    def rates(self) -> Rates:
        return Rates(self._row_s, self._decode_step_s)

    def add(self, num_rows: int, seconds: float, *, is_prefill: bool) -> None:
        """Count a step.

        Args:
            num_rows: rows computed in each half, added.
            is_prefill: a part of a prompt was among them.
        """
        if not is_prefill:
            self._decode_step_s = _average(self._decode_step_s, seconds)
        elif num_rows >= MIN_PREFILL_ROWS:
            self._row_s = _average(self._row_s, seconds / num_rows)


def _average(old: float | None, new: float) -> float:
    return new if old is None else old + NEWEST_SHARE * (new - old)
