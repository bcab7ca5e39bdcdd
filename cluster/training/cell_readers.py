"""How are many conversations read on several cores? By processes that each hold the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

import torch

from ripresa.cluster.training.cells import Reading, read_answers
from ripresa.cluster.training.finished import read_parameters, trainable
from ripresa.cluster.training.rendering import Renderer
from ripresa.workers.demo.build_tokenizer import TOKENIZER
from ripresa.workers.demo.ledger.conversation import Conversation
from ripresa.workers.errors import Unavailable
from ripresa.workers.models.deepseek_v41.config import ModelConfig


def read_in_processes(
    folder: Path, conversations: Sequence[tuple[int, Conversation]], num_processes: int
) -> Iterator[list[Reading]]:
    """The readings of each conversation, as `read_answers` gives them, in order.

    Args:
        folder: a training's, or a checkpoint.

    Raises:
        ConfigError, CheckpointError: the folder holds no model.
        Unavailable: a process was killed.
    """
    model = read_parameters(folder)
    pool = ProcessPoolExecutor(num_processes, get_context("spawn"), _Reader.load, model)
    try:
        with pool:
            yield from pool.map(_Reader.read, conversations)
    except BrokenProcessPool as error:
        raise Unavailable(
            "a process that read conversations was killed; see whether memory suffices for "
            f"{num_processes}, or give fewer --processes"
        ) from error


class _Reader:
    """What one process holds from its beginning to its end."""

    held: _Reader

    def __init__(self, config: ModelConfig, parameters: Mapping[str, torch.Tensor]) -> None:
        self.model = trainable(config, parameters)
        self.renderer = Renderer(TOKENIZER)

    @classmethod
    def load(cls, config: ModelConfig, parameters: Mapping[str, torch.Tensor]) -> None:
        torch.set_num_threads(1)
        cls.held = cls(config, parameters)

    @classmethod
    def read(cls, conversation: tuple[int, Conversation]) -> list[Reading]:
        (readings,) = read_answers(cls.held.model, cls.held.renderer, [conversation])
        return readings
