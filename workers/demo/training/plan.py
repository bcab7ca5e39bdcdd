"""What happens at which step? Lengths, tasks and rates as plain functions of what has been done."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

TOKENS_PER_STEP = 2048


class Phase(StrEnum):
    """Which conversations are drawn: mostly copying first."""

    WARM_UP = "warm-up"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Step:
    """What one step trains on, and how far.

    Attributes:
        length: tokens of a sequence.
        is_dense: attention reads every visible entry and the indexer learns to follow it;
            otherwise it reads what the indexer chooses.
        rate: of learning, as a share of the highest.
    """

    phase: Phase
    length: int
    num_sequences: int
    is_dense: bool
    rate: float


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole training; nothing in it depends on a clock.

    Attributes:
        num_steps: until the end.
        lengths: sequence lengths, one after the other, with the share of steps where each ends.
        warm_up: share of steps with the copying mix; dense: share with dense attention only.
        decay: share of steps, the last ones, in which the rate falls to zero.
        ramp_steps: the first ones, in which it rises.
        tokens_per_step: of each process.
    """

    num_steps: int
    lengths: tuple[tuple[float, int], ...] = ((0.6, 512), (0.9, 1024), (1.0, 2048))
    warm_up: float = 0.08
    dense: float = 0.4
    decay: float = 0.25
    ramp_steps: int = 30
    tokens_per_step: int = TOKENS_PER_STEP

    def step(self, number: int) -> Step:
        """Step `number`, from 0."""
        done = number / self.num_steps
        length = next((length for end, length in self.lengths if done < end), self.lengths[-1][1])
        # Every other step of a while reads both ways, so that nothing is lost at once.
        is_dense = done < self.dense or (done < 2 * self.dense and number % 2 == 0)
        rate = min(1.0, (number + 1) / self.ramp_steps, (1 - done) / self.decay)
        return Step(
            Phase.WARM_UP if done < self.warm_up else Phase.FULL,
            length,
            max(self.tokens_per_step // length, 1),
            is_dense,
            rate,
        )
