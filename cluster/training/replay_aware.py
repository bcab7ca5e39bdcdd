"""How does a trained model learn to be replayed? A training that begins with its parameters."""

from __future__ import annotations

from dataclasses import dataclass

from ripresa.cluster.training.continued import LaterTraining
from ripresa.cluster.training.samples import LedgerBatches
from ripresa.workers.demo.build_tokenizer import TOKENIZER
from ripresa.workers.demo.training.cut_batches import CutBatches
from ripresa.workers.demo.training.fine_tuning import FineTuning
from ripresa.workers.demo.training.trainer import Batches

_FIRST_SEED = 1 << 20
"""Of the samples; those below are the other trainings'."""


@dataclass(frozen=True, slots=True)
class ReplayTraining(LaterTraining):
    """A replay-aware fine-tuning.

    Attributes:
        cut_share: of the sequences, those that are cut.
    """

    cut_share: float

    @property
    def plan(self) -> FineTuning:
        return FineTuning(self.num_steps, self.cut_share)

    @property
    def batches(self) -> Batches:
        samples = LedgerBatches(TOKENIZER, _FIRST_SEED + self.seed)
        return CutBatches(samples, self.config.sliding_window, self.seed, self.cut_share)
