"""How does a trained model learn to be replayed? A training that begins with its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ripresa.cluster.training.finished import finished_parameters
from ripresa.cluster.training.run import Training
from ripresa.cluster.training.samples import LedgerBatches
from ripresa.workers.demo.build_tokenizer import TOKENIZER
from ripresa.workers.demo.training.cut_batches import CutBatches
from ripresa.workers.demo.training.fine_tuning import FineTuning
from ripresa.workers.demo.training.sizes import config_of
from ripresa.workers.demo.training.trainer import Batches
from ripresa.workers.models.deepseek_v41.config import ModelConfig

_FIRST_SEED = 1 << 20
"""Of the samples; those below are the other trainings'."""


@dataclass(frozen=True, slots=True)
class ReplayTraining(Training):
    """A replay-aware fine-tuning.

    Attributes:
        source: folder of a finished training, or a checkpoint.
        cut_share: of the sequences, those that are cut.
    """

    source: str
    cut_share: float

    @property
    def plan(self) -> FineTuning:
        return FineTuning(self.num_steps, self.cut_share)

    @property
    def batches(self) -> Batches:
        samples = LedgerBatches(TOKENIZER, _FIRST_SEED + self.seed)
        return CutBatches(samples, self._config.sliding_window, self.seed, self.cut_share)

    def start(self) -> Mapping[str, torch.Tensor]:
        return finished_parameters(Path(self.source), self._config)

    @property
    def _config(self) -> ModelConfig:
        return ModelConfig.from_dict(config_of(self.size))
