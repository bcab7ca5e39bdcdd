"""How does a training begin where another one ended? And which one makes the model learn more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ripresa.cluster.training.finished import finished_parameters
from ripresa.cluster.training.run import Training
from ripresa.cluster.training.samples import LedgerBatches
from ripresa.workers.demo.build_tokenizer import TOKENIZER
from ripresa.workers.demo.training.plan import Plan, continuation
from ripresa.workers.demo.training.sizes import config_of
from ripresa.workers.demo.training.trainer import Batches
from ripresa.workers.models.deepseek_v41.config import ModelConfig

_FIRST_SEED = 1 << 21
"""Of the samples; those below are the other trainings'."""


@dataclass(frozen=True, slots=True)
class LaterTraining(Training):
    """A training that begins with the parameters of another one.

    Attributes:
        source: folder of a finished training, or a checkpoint.
    """

    source: str

    @property
    def config(self) -> ModelConfig:
        return ModelConfig.from_dict(config_of(self.size))

    def start(self) -> Mapping[str, torch.Tensor]:
        return finished_parameters(Path(self.source), self.config)


@dataclass(frozen=True, slots=True)
class ContinuedTraining(LaterTraining):
    """Samples that the first training did not read, mostly questions about what is far back."""

    @property
    def plan(self) -> Plan:
        return continuation(self.num_steps)

    @property
    def batches(self) -> Batches:
        return LedgerBatches(TOKENIZER, _FIRST_SEED + self.seed)
