"""What happens at which step? Lengths, tasks and rates as plain functions of what has been done."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

TOKENS_PER_STEP = 2048


class Phase(StrEnum):
    """What is read: mostly copying first, at the end mostly questions about what is far back."""

    WARM_UP = "warm-up"
    FULL = "full"
    DISTANT = "distant"


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
        warm_up: share of steps, the first ones, with the copying mix; distant: of the last ones.
        dense: share with dense attention only.
        peak: the highest rate.
        decay: share of steps, the last ones, in which the rate falls to zero.
        ramp_steps: the first ones, in which it rises.
        tokens_per_step: of each process.
    """

    num_steps: int
    lengths: tuple[tuple[float, int], ...] = ((0.6, 512), (0.9, 1024), (1.0, 2048))
    warm_up: float = 0.08
    distant: float = 0.5
    dense: float = 0.4
    peak: float = 1.0
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
        num_sequences = max(self.tokens_per_step // length, 1)
        return Step(self._phase(done), length, num_sequences, is_dense, self.peak * rate)

    def _phase(self, done: float) -> Phase:
        if done < self.warm_up:
            return Phase.WARM_UP
        return Phase.FULL if done < 1 - self.distant else Phase.DISTANT


def continuation(num_steps: int) -> Plan:
    """The plan of a training that goes on from where another one ended.

    Its sequences are long, so that what is asked for is one of many records that were read.
    """
    return Plan(
        num_steps,
        lengths=((0.5, 1024), (1.0, 2048)),
        warm_up=0.0,
        distant=1.0,
        dense=0.3,
        peak=0.7,
        decay=0.4,
    )
