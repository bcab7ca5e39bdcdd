"""How is the demo model trained? One process a core, a saved state, and a checkpoint at the end."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from torch.multiprocessing.spawn import spawn

from ripresa.cluster.training.measure import measure
from ripresa.cluster.training.rendering import Renderer
from ripresa.cluster.training.samples import LedgerBatches
from ripresa.cluster.training.scores import table
from ripresa.cluster.training.step_log import StepLog
from ripresa.workers.demo.build_tokenizer import TOKENIZER
from ripresa.workers.demo.ledger.evaluation import load_evaluation
from ripresa.workers.demo.training.export import export
from ripresa.workers.demo.training.fine_tuning import FineTuning
from ripresa.workers.demo.training.plan import TOKENS_PER_STEP, Plan
from ripresa.workers.demo.training.sizes import Size, config_of
from ripresa.workers.demo.training.trainer import Batches, Progress, Trainer, train, unwritten
from ripresa.workers.errors import ConfigError, ErrorCode, RipresaError
from ripresa.workers.models.deepseek_v41.config import ModelConfig
from ripresa.workers.models.deepseek_v41.engram_ids import compressed_ids

PLAN = "training.json"
STATE = "state.pt"
LOG = "log.jsonl"
CHECKPOINT = "checkpoint"
SHOWN_EVERY_S = 10.0
MEASURED_EVERY_TOKENS = 250_000
NUM_MEASURED = 24
"""Conversations that are measured on the way."""
_TIMED_STEPS = 4
PEER_TIMEOUT = timedelta(minutes=30)
_MEND = f"where there is no {STATE} beside it, remove it, else restore it; or name another folder"


@dataclass(frozen=True, slots=True)
class Training:
    """One training, from its first step to its checkpoint.

    Attributes:
        is_narrow: large products are bf16, which is faster on CPUs that have such instructions.
    """

    size: Size
    num_tokens: int
    seed: int
    num_processes: int
    is_narrow: bool

    @property
    def num_steps(self) -> int:
        return max(self.num_tokens // (TOKENS_PER_STEP * self.num_processes), 1)

    @property
    def plan(self) -> Plan | FineTuning:
        return Plan(self.num_steps)

    @property
    def batches(self) -> Batches:
        return LedgerBatches(TOKENIZER, self.seed)

    def start(self) -> Mapping[str, torch.Tensor] | None:
        """Parameters to begin with; None for random ones."""
        return None

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.is_narrow else torch.float32


def open_training(folder: Path, asked: Training, minutes: float | None) -> Training:
    """The training of a folder: the one that was begun there, or else the one asked for.

    Args:
        asked: its tokens count only where `minutes` is None.
        minutes: read as many tokens as this machine now reads in this time, or as many as were
            found when the training was begun.

    Raises:
        ConfigError: the folder's training is of another size, length, seed or number of processes,
            or cannot be read.
        RipresaError: the options cannot be written.
    """
    file = folder / PLAN
    if file.exists():
        fields = read_options(folder)
        begun = asked if minutes is None else replace(asked, num_tokens=fields["num_tokens"])
        if fields != _fields(begun):
            raise ConfigError(
                "--folder",
                f"{folder} holds a training of {fields}; go on with the same options, or name "
                "another folder",
            )
        return begun
    training = asked if minutes is None else replace(asked, num_tokens=tokens_in(minutes, asked))
    temporary = folder / f".{PLAN}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(temporary, "w", encoding="utf-8") as written:
            written.write(json.dumps(_fields(training)) + "\n")
            written.flush()
            os.fsync(written.fileno())
        temporary.replace(file)
    except OSError as error:
        raise unwritten(file, error) from error
    finally:
        temporary.unlink(missing_ok=True)
    return training


def read_options(folder: Path) -> dict[str, Any]:
    """The options of a folder's training.

    Raises:
        ConfigError: they cannot be read.
    """
    file = folder / PLAN
    try:
        fields = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError("--folder", f"{file} cannot be read: {error}; {_MEND}") from error
    if not isinstance(fields, dict) or not {"size", "num_tokens", "seed"} <= fields.keys():
        raise ConfigError("--folder", f"{file} does not hold a training's options; {_MEND}")
    return fields


def _fields(training: Training) -> dict[str, object]:
    return {**asdict(training), "size": training.size.value}


def tokens_in(minutes: float, training: Training) -> int:
    """How many tokens a training reads in some time on this machine, as idle as it is now.

    Args:
        training: of any length.
    """
    torch.set_num_threads(1)
    trainer = make_trainer(replace(training, num_processes=1))
    trainer.step()
    first, begun = trainer.num_tokens, time.monotonic()
    for _ in range(_TIMED_STEPS):
        trainer.step()
    per_s = (trainer.num_tokens - first) / (time.monotonic() - begun)
    return int(per_s * training.num_processes * 60 * minutes)


def run_training(folder: Path, training: Training, echo: Callable[[str], None]) -> None:
    """Train to the end, or on from where the folder's state is, and write a checkpoint.

    Raises:
        ConfigError: the folder holds another training's state, or a torn one.
        RipresaError: state, log or checkpoint cannot be written, or another process trains there.
    """
    with _alone(folder):
        if training.num_processes == 1:
            _run_rank(0, folder, training, "", echo)
            return
        with tempfile.TemporaryDirectory() as meeting:
            arguments = (folder, training, f"{meeting}/processes", echo)
            spawn(_run_rank, arguments, nprocs=training.num_processes)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One training at a time has the folder, by a lock that ends with its process."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise RipresaError(
            ErrorCode.FAILED_PRECONDITION,
            f"another process trains in {folder}; wait for it, or name another folder",
        ) from error
    finally:
        os.close(lock)


def _run_rank(
    rank: int, folder: Path, training: Training, meeting: str, echo: Callable[[str], None]
) -> None:
    torch.set_num_threads(1)
    trainer = make_trainer(training, rank)
    if training.num_processes > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{meeting}",
            rank=rank,
            world_size=training.num_processes,
            timeout=PEER_TIMEOUT,
        )
    state = folder / STATE
    if state.exists():
        trainer.load(state)
    if rank:
        train(trainer, state, lambda _: None, is_writer=False)
    else:
        echo(
            f"{trainer.number} of {trainer.plan.num_steps} steps are done, of "
            f"{training.num_tokens} tokens in all"
        )
        with StepLog(folder / LOG, trainer.num_tokens) as log:
            train(trainer, state, _Teller(trainer, log, echo))
        export(folder / CHECKPOINT, config_of(training.size), trainer.parameters)
        echo(f"wrote {folder / CHECKPOINT}")
    if training.num_processes > 1:
        dist.destroy_process_group()


def make_trainer(training: Training, rank: int = 0) -> Trainer:
    config = ModelConfig.from_dict(config_of(training.size))
    return Trainer(
        config,
        compressed_ids(Tokenizer.from_file(str(TOKENIZER))),
        training.batches,
        training.plan,
        training.seed,
        start=training.start(),
        rank=rank,
        num_ranks=training.num_processes,
        dtype=training.dtype,
    )


class _Teller:
    """Says how far the training is, keeps its log, and measures on the way."""

    def __init__(self, trainer: Trainer, log: StepLog, echo: Callable[[str], None]) -> None:
        self._trainer, self._log, self._echo = trainer, log, echo
        self._renderer = Renderer(TOKENIZER)
        self._held_out = load_evaluation()[-NUM_MEASURED:]
        self._begun, self._cpu = time.monotonic(), time.process_time()
        self._shown = self._begun
        self._first_tokens: int | None = None
        self._measured: int | None = None

    def __call__(self, progress: Progress) -> None:
        if self._first_tokens is None or self._measured is None:
            self._first_tokens = self._measured = progress.num_tokens
            # The first step has no speed yet.
            self._shown = time.monotonic()
        now = time.monotonic()
        done = progress.num_tokens - self._first_tokens
        speed = done / max(now - self._begun, 1e-9)
        entry = {
            "step": progress.number,
            "tokens": progress.num_tokens,
            "loss": round(progress.loss, 5),
            "index_loss": round(progress.index_loss, 5),
            "length": progress.step.length,
            "dense": progress.step.is_dense,
            "wall_s": round(now - self._begun, 1),
            "cpu_s": round(time.process_time() - self._cpu, 1),
        }
        self._log.write(entry)
        if now - self._shown >= SHOWN_EVERY_S:
            self._shown = now
            left = self._trainer.plan.num_steps - progress.number
            per_step = progress.num_tokens / progress.number
            eta = left * per_step / speed if speed else 0.0
            self._echo(
                f"step {progress.number}/{self._trainer.plan.num_steps}  "
                f"{progress.num_tokens / 1e6:.2f} M tokens  loss {progress.loss:.3f}  "
                f"index {progress.index_loss:.3f}  {speed:.0f} tokens/s  "
                f"{eta / 60:.0f} min left"
            )
        if progress.num_tokens - self._measured >= MEASURED_EVERY_TOKENS:
            self._measured = progress.num_tokens
            scores = list(measure(self._trainer.model, self._renderer, self._held_out))
            for line in table(scores, "tokens"):
                self._echo(line)
                self._log.write({"tokens": progress.num_tokens, "table": line})
