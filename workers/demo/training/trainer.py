"""How does a model learn? One process's loop; several exchange gradients and stay bit-equal."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ripresa.workers.demo.training.fine_tuning import FineTuning
from ripresa.workers.demo.training.initial import initial_parameters
from ripresa.workers.demo.training.optimizer import Optimizer, balance, is_trained
from ripresa.workers.demo.training.plan import Plan, Step
from ripresa.workers.errors import ConfigError, ErrorCode, RipresaError
from ripresa.workers.models.deepseek_v41.config import ModelConfig
from ripresa.workers.models.deepseek_v41.engram_ids import Ids
from ripresa.workers.models.deepseek_v41.trainable.cuts import Cuts
from ripresa.workers.models.deepseek_v41.trainable.model import TrainableModel

SAVE_EVERY_S = 300.0
MAX_GRADIENT = 1.0
UNREADABLE = (OSError, RuntimeError, EOFError, pickle.UnpicklingError)
"""What `torch.load` raises of a file that is torn, or is none of torch's."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences of one length.

    Attributes:
        token_ids: [B, T] int64.
        weights: [B, T] float32, how much predicting each token counts.
        cuts: where the sequences are cut, if any is.
    """

    token_ids: torch.Tensor
    weights: torch.Tensor
    cuts: Cuts | None = None


class Batches(Protocol):
    """Where samples come from; a function of its arguments and of nothing that happened before."""

    def batch(self, number: int, step: Step, rank: int) -> Batch: ...


@dataclass(frozen=True, slots=True)
class Progress:
    """One step, as it went. Losses are a token's mean, in nats."""

    number: int
    step: Step
    loss: float
    index_loss: float
    num_tokens: int


class Trainer:
    """The state of a training.

    Args:
        compressed_ids: for n-gram hashing.
        plan, seed: what happens; a saved training goes on only with the same.
        start: parameters to begin with, by released name, which are copied; None for random ones.
        rank, num_ranks: this process among those that exchange gradients.
        dtype: of the large products.
    """

    def __init__(
        self,
        config: ModelConfig,
        compressed_ids: Ids | None,
        batches: Batches,
        plan: Plan | FineTuning,
        seed: int,
        *,
        start: Mapping[str, torch.Tensor] | None = None,
        rank: int = 0,
        num_ranks: int = 1,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.plan, self.number, self.num_tokens = plan, 0, 0
        self._batches, self._rank, self._num_ranks = batches, rank, num_ranks
        self._identity = {"plan": asdict(plan), "seed": seed, "num_ranks": num_ranks}
        if start is None:
            start = initial_parameters(config, seed)
        self.parameters = {name: values.clone() for name, values in start.items()}
        for name, parameter in self.parameters.items():
            parameter.requires_grad_(is_trained(name))
        self.model = TrainableModel(config, self.parameters, compressed_ids, dtype=dtype)
        self._optimizer = Optimizer(self.parameters, dtype)

    @property
    def is_finished(self) -> bool:
        return self.number >= self.plan.num_steps

    def step(self) -> Progress:
        """Train one step.

        Raises:
            ConfigError: the loss is not finite any more.
        """
        step = self.plan.step(self.number)
        batch = self._batches.batch(self.number, step, self._rank)
        output = self.model.forward(batch.token_ids, step.is_dense, batch.cuts)
        targets, weights = batch.token_ids[:, 1:].flatten(), batch.weights[:, 1:].flatten()
        counted = weights.nonzero()[:, 0]
        hidden = output.hidden[:, :-1].flatten(0, 1).index_select(0, counted)
        weights = weights[counted] / weights.sum()
        loss, _ = self.model.loss(hidden, targets[counted], weights)
        (loss + output.index_loss).backward()
        counts = output.counts.to(torch.float32)
        losses = torch.stack((loss.detach(), output.index_loss.detach()))
        if self._num_ranks > 1:
            self._exchange(counts, losses)
        if not bool(losses.isfinite().all()):
            raise ConfigError("training", f"the loss of step {self.number} is {losses.tolist()}")
        trained = [p for p in self.parameters.values() if p.requires_grad]
        torch.nn.utils.clip_grad_norm_(trained, MAX_GRADIENT)
        self._optimizer.step(step.rate)
        balance(self.parameters, counts, step.rate)
        self.num_tokens += batch.token_ids.numel() * self._num_ranks
        self.number += 1
        language, index = losses.tolist()
        return Progress(self.number, step, language, index, self.num_tokens)

    def _exchange(self, counts: torch.Tensor, losses: torch.Tensor) -> None:
        """Mean of gradients and losses, sum of counts over the processes."""
        gradients = []
        for parameter in self.parameters.values():
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradients.append(parameter.grad)
        parts = [*gradients, losses, counts]
        whole = torch.cat([part.flatten() for part in parts])
        dist.all_reduce(whole)
        for part, mean in zip(parts, whole.split([p.numel() for p in parts]), strict=True):
            part.copy_(mean.view(part.shape))
            if part is not counts:
                part /= self._num_ranks

    def save(self, path: Path) -> None:
        """Write everything that is needed to go on; the file appears whole or not at all.

        Raises:
            RipresaError: it cannot be written; the one that was there before still is.
        """
        content = {
            "identity": self._identity,
            "number": self.number,
            "num_tokens": self.num_tokens,
            "parameters": {name: p.detach() for name, p in self.parameters.items()},
            "optimizer": self._optimizer.state(),
        }
        temporary = path.with_name(f".{path.name}")
        try:
            with open(temporary, "wb") as file:
                torch.save(content, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except (OSError, RuntimeError) as error:  # torch's writer raises the latter
            raise unwritten(path, error) from error
        finally:
            temporary.unlink(missing_ok=True)

    def load(self, path: Path) -> None:
        """Go on where a saved training was.

        Raises:
            ConfigError: it was another training, or the file cannot be read.
        """
        try:
            content: dict[str, Any] = torch.load(path, weights_only=True)
        except UNREADABLE as error:
            raise ConfigError(
                "training",
                f"{path} cannot be read: {error}; put a whole copy in its place, or remove it to "
                "begin anew",
            ) from error
        if content["identity"] != self._identity:
            raise ConfigError(
                "training",
                f"{path} is of another training ({content['identity']}); finish it with the same "
                "size, tokens, seed and processes, or name another directory",
            )
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(content["parameters"][name])
        self._optimizer.load(content["optimizer"])
        self.number, self.num_tokens = content["number"], content["num_tokens"]


def train(
    trainer: Trainer,
    path: Path,
    report: Callable[[Progress], None],
    *,
    is_writer: bool = True,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Run to the end from where the trainer is; the writer saves every five minutes.

    Raises:
        ConfigError: the loss is not finite any more.
        RipresaError: the state cannot be written.
    """
    saved = clock()
    while not trainer.is_finished:
        report(trainer.step())
        if is_writer and (trainer.is_finished or clock() - saved >= SAVE_EVERY_S):
            trainer.save(path)
            saved = clock()


def unwritten(path: Path, error: Exception) -> RipresaError:
    """What to tell when a training's file cannot be written."""
    return RipresaError(
        ErrorCode.RESOURCE_EXHAUSTED,
        f"{path} cannot be written: {error}; what was saved before is still there: make room, and "
        "run the same command again to go on from it",
    )
