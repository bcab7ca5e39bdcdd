"""Do processes that exchange gradients stay equal, and learn what one with all samples would?"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tiny_model import tiny_config
from torch.multiprocessing.spawn import spawn

from ripresa.workers.demo.training.plan import Plan, Step
from ripresa.workers.demo.training.trainer import Batch, Trainer
from ripresa.workers.models.deepseek_v41.config import ModelConfig
from ripresa.workers.models.deepseek_v41.engram_ids import paired_ids

NUM_STEPS = 3


class Sequences:
    """Two sequences for each process, or all four."""

    def __init__(self, splits: bool) -> None:
        self._splits = splits

    def batch(self, number: int, step: Step, rank: int) -> Batch:
        generator = torch.Generator().manual_seed(number)
        token_ids = torch.randint(3, 20, (4, step.length), generator=generator)
        mine = token_ids[2 * rank : 2 * rank + 2] if self._splits else token_ids
        return Batch(mine, torch.ones(mine.shape))


def trainer(rank: int, num_ranks: int) -> Trainer:
    config = ModelConfig.from_dict(tiny_config(num_nextn_predict_layers=0))
    plan = Plan(NUM_STEPS, lengths=((1.0, 16),), ramp_steps=1)
    return Trainer(
        config,
        paired_ids(config.vocab_size),
        Sequences(num_ranks > 1),
        plan,
        seed=3,
        rank=rank,
        num_ranks=num_ranks,
    )


def run(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{folder}/processes"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    mine = trainer(rank, 2)
    losses = [mine.step().loss for _ in range(NUM_STEPS)]
    parameters = {name: p.detach() for name, p in mine.parameters.items()}
    torch.save({"losses": losses, "parameters": parameters}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_learn_as_one(tmp_path: Path) -> None:
    spawn(run, (str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert first["losses"] == second["losses"]
    for name, parameter in first["parameters"].items():
        assert torch.equal(parameter, second["parameters"][name]), name
    alone = trainer(0, 1)
    losses = [alone.step().loss for _ in range(NUM_STEPS)]
    assert first["losses"] == pytest.approx(losses, rel=1e-3)
