"""What happens at which step of a replay-aware fine-tuning? Every length, read as it is served."""

from __future__ import annotations

from dataclasses import dataclass

from ripresa.workers.demo.training.plan import TOKENS_PER_STEP, Phase, Step


@dataclass(frozen=True, slots=True)
class FineTuning:
    """A training that begins where another one ended; nothing in it depends on a clock.

    Attributes:
        num_steps: until the end.
        cut_share: of the sequences, those that are cut (`cut_batches.py`).
        lengths: of the sequences, by turns.
        peak: the highest rate, as a share of the other training's highest.
        ramp_steps: the first ones, in which the rate rises; from then on it falls to zero.
        tokens_per_step: of each process.
    """

    num_steps: int
    cut_share: float
    lengths: tuple[int, ...] = (512, 1024, 2048)
    peak: float = 0.1
    ramp_steps: int = 20
    tokens_per_step: int = TOKENS_PER_STEP

    def step(self, number: int) -> Step:
        """Step `number`, from 0."""
        length = self.lengths[number % len(self.lengths)]
        rate = min((number + 1) / self.ramp_steps, 1 - number / self.num_steps)
        num_sequences = max(self.tokens_per_step // length, 1)
        return Step(Phase.FULL, length, num_sequences, False, self.peak * max(rate, 0.0))
