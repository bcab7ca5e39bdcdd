"""How does an evaluation run? Case by case, kept as it goes, then summed up and written."""

from __future__ import annotations

import asyncio
import platform
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from ripresa.cluster.client import Client
from ripresa.cluster.config import ClusterConfig
from ripresa.cluster.evaluation.arms import reach
from ripresa.cluster.evaluation.cases import (
    Case,
    cases_of,
    read_conversations,
    spread,
    stack_of,
)
from ripresa.cluster.evaluation.experiments import (
    Experiment,
    Result,
    at_boundaries,
    growth,
    longest_case,
    self_test,
    stack_length,
    stacked,
)
from ripresa.cluster.evaluation.laboratory import Laboratory, laboratory
from ripresa.cluster.evaluation.report import (
    REPORT,
    RESULTS,
    About,
    write_report,
    write_results,
)
from ripresa.cluster.evaluation.results_file import ResultsFile
from ripresa.cluster.evaluation.served import ask, check_served
from ripresa.cluster.evaluation.summary import Summary, summarise
from ripresa.cluster.progress import progress
from ripresa.cluster.training.rendering import Renderer
from ripresa.workers.config import Numerics
from ripresa.workers.demo.ledger.conversation import Conversation
from ripresa.workers.demo.ledger.evaluation import FILE
from ripresa.workers.errors import ErrorCode, InvalidArgument, RipresaError
from ripresa.workers.model_runner import model_digest
from ripresa.workers.models.checkpoint_tokenizer import TOKENIZER_FILE
from ripresa.workers.models.deepseek_v41.config import ModelConfig
from ripresa.workers.replay import RULES_VERSION
from ripresa.workers.replay_query import ReplayGeometry

Echo = Callable[[str], None]

MAX_ROUNDING = 0.02
"""Most by which logits may differ that numerics `fast` compute in two ways (replay rules, 9)."""
_REPEATS = 9
"""Times that each prompt of `growth` is timed: one slow run leaves the median's interval alone."""
_NUM_SELF_TESTED = 2
_A_TOKEN = 0


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What is asked for.

    Attributes:
        folder: the checkpoint.
        conversations: a file of the evaluation set's form; None for that set.
        limit: conversations.
        stacks: sequences for boundaries behind boundaries.
        seed: which conversations, and the bootstrap's draws.
        address: `host:port` of a gateway's gRPC that serves the checkpoint, to be asked as well;
            it changes no other result.
        api_key: the gateway's, if it asks for one.
    """

    folder: Path
    conversations: Path | None = None
    limit: int = 40
    stacks: int = 6
    seed: int = 0
    numerics: Numerics = Numerics.DETERMINISTIC
    address: str | None = None
    api_key: str = ""

    @property
    def digest(self) -> str:
        """Names geometry and weights."""
        return model_digest(self.folder, ModelConfig.from_file(self.folder / "config.json"))

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that results depend on, as JSON has it."""
        file = FILE if self.conversations is None else self.conversations
        return {
            "model": self.digest,
            "conversations": sha256(file.read_bytes()).hexdigest(),
            "limit": self.limit,
            "stacks": self.stacks,
            "seed": self.seed,
            "numerics": self.numerics.value,
            "rules": RULES_VERSION,
        }


async def run_self_test(asked: Evaluation, echo: Echo) -> bool:
    """Compare what must be equal; a line a comparison, and whether all agree.

    Boundaries are the last ones of long conversations: a hit that is no longer than the rows which
    the arm without approximation computes again leaves nothing out, and could not differ.

    Raises:
        RipresaError: the checkpoint or the conversations are unusable, or all too short.
    """
    conversations = read_conversations(asked.conversations)
    agrees = True
    async with laboratory(asked.folder, longest_case, asked.numerics, echo) as lab:
        chosen = spread(len(conversations), len(conversations), asked.seed)
        renderer = _renderer(asked.folder)
        cases = cases_of(
            conversations, chosen, renderer, lab.geometry, lab.max_tokens, None, asked.conversations
        )
        long_enough = (case for case in cases if _leaves_out(case, lab.geometry))
        tested = list(islice(long_enough, _NUM_SELF_TESTED))
        if not tested:
            raise RipresaError(
                ErrorCode.FAILED_PRECONDITION,
                "nothing was tested, because nothing could have failed: no conversation has a hit "
                f"and a prompt of more than {reach(lab.geometry)} tokens, all of which the exact "
                "arm computes again; name longer ones with --conversations",
            )
        starts = []
        for case in tested:
            for check in await self_test(lab, case):
                good = _is_equal(check.difference, asked.numerics)
                agrees &= good
                begins = "" if check.start is None else f", the hit's from token {check.start} on"
                starts += [] if check.start is None else [check.start]
                echo(
                    f"conversation {case.number}, {check.what}{begins}: largest difference of a "
                    f"logit {check.difference:.3g}  {'ok' if good else 'DIFFERS'}"
                )
    num_able = sum(start > 0 for start in starts)
    echo(f"{num_able} of {len(starts)} hits left rows out, and could have differed")
    return agrees and num_able == len(starts)


async def run_evaluation(
    asked: Evaluation, out: Path, report: Path | None, command: str, echo: Echo
) -> Summary:
    """Run what `out` does not hold yet, and write results, tables and charts.

    Args:
        report: another file for the page; its charts go into a folder of its name.
        command: what the page says it was made by.

    Raises:
        RipresaError: the checkpoint, the conversations or `out` are unusable; the arm without
            approximation is not equal to the cold run.
    """
    conversations = read_conversations(asked.conversations)
    with ResultsFile(out, asked.settings) as kept, ExitStack() as stack:
        client = None
        if asked.address is not None:
            client = stack.enter_context(Client(asked.address, api_key=asked.api_key or None))
            echo(f"asking {asked.address} for a token")
            await asyncio.to_thread(check_served, client, _A_TOKEN, asked.digest)
        async with laboratory(asked.folder, longest_case, asked.numerics, echo) as lab:
            await _fill_in(lab, asked, conversations, kept, client, echo)
            about = _about(asked, lab, kept, command, len(conversations))
        summary = summarise(kept.results, asked.seed)
        try:
            write_results(summary, about, out / RESULTS)
            write_report(summary, about, out / REPORT, out)
            if report is not None:
                write_report(summary, about, report, report.with_suffix(""))
        except OSError as error:
            raise RipresaError(
                ErrorCode.FAILED_PRECONDITION,
                f"the report cannot be written: {error}; make room or name another place, and run "
                "the command again: it goes on from what is there",
            ) from error
    for row in summary.checks:
        if not _is_equal(row.worst, asked.numerics):
            raise RipresaError(
                ErrorCode.INTERNAL,
                f"{row.experiment}: the arm without approximation differs from the cold run by "
                f"{row.worst:.3g}, so nothing of this may be trusted; see `ripresa eval replay "
                "--self-test`",
            )
    return summary


async def _fill_in(
    lab: Laboratory,
    asked: Evaluation,
    conversations: Sequence[Conversation],
    kept: ResultsFile,
    client: Client | None,
    echo: Echo,
) -> None:
    numbers = spread(len(conversations), asked.limit, asked.seed)
    renderer = _renderer(asked.folder)
    echo(f"rendering {len(numbers)} conversations")
    every = list(
        cases_of(
            conversations,
            numbers,
            renderer,
            lab.geometry,
            lab.max_tokens,
            asked.seed,
            asked.conversations,
        )
    )
    stacks = _stacks(lab, asked, conversations, renderer)
    usable = [case for case in every if case.answer is not None or case.hit is not None]
    if not usable:
        raise _too_short()
    asks = usable if client is not None else []
    pace = _Pace(len(usable) + len(stacks) + bool(stacks) + len(asks), echo)
    for case in usable:
        places = {Experiment.ANSWER: case.answer, Experiment.HIT: case.hit}
        wanted = [experiment for experiment, place in places.items() if place is not None]
        missing = [each for each in wanted if not kept.has(each, case.number)]
        if missing:
            async for result in at_boundaries(lab, case):
                if result.experiment in missing:
                    kept.add(result)
        pace.done(f"conversation {case.number}", was_computed=bool(missing))
    for case in stacks:
        missing = [] if kept.has(Experiment.STACK, case.number) else [Experiment.STACK]
        if missing:
            kept.add(await stacked(lab, case))
        pace.done(f"stack {case.number}", was_computed=bool(missing))
    for case in stacks[:1]:
        missing = [] if kept.has(Experiment.GROWTH, case.number) else [Experiment.GROWTH]
        if missing:
            kept.add(await growth(lab, case, _REPEATS))
        pace.done("growth", was_computed=bool(missing))
    if client is not None:
        digest = asked.digest
        for case in asks:
            is_missing = not kept.has(Experiment.SERVED, case.number)
            if is_missing:
                # Less than the client waits for a gateway that is gone.
                with progress(f"asking about conversation {case.number}", echo=echo):
                    matches, hits = await asyncio.to_thread(ask, client, case, digest)
                served = (tuple(matches), tuple(hits))
                kept.add(Result(Experiment.SERVED, case.number, matches=served[0], hits=served[1]))
            pace.done(f"served conversation {case.number}", was_computed=is_missing)


def _stacks(
    lab: Laboratory, asked: Evaluation, conversations: Sequence[Conversation], renderer: Renderer
) -> list[Case]:
    """Sequences of the last conversations, which the others need not be of."""
    length = min(stack_length(lab.geometry), lab.max_tokens)
    numbers = reversed(range(len(conversations)))
    cases = cases_of(
        conversations, numbers, renderer, lab.geometry, length, asked.seed, asked.conversations
    )
    return list(islice(stack_of(cases, length), asked.stacks))


def _renderer(folder: Path) -> Renderer:
    file = folder / TOKENIZER_FILE
    if not file.is_file():
        raise InvalidArgument(
            "--checkpoint",
            f"{folder} has no {TOKENIZER_FILE}, by which conversations become tokens",
        )
    num_ids = Tokenizer.from_file(str(file)).get_vocab_size()
    vocab_size = ModelConfig.from_file(folder / "config.json").vocab_size
    if num_ids > vocab_size:
        raise InvalidArgument(
            "--checkpoint",
            f"{file} has {num_ids} tokens, the model {vocab_size}; put the model's own there",
        )
    return Renderer(file)


def _about(
    asked: Evaluation, lab: Laboratory, kept: ResultsFile, command: str, num_conversations: int
) -> About:
    experiments = Counter(result.experiment.value for result in kept.results)
    at_boundaries = (Experiment.ANSWER, Experiment.HIT)
    used = {result.number for result in kept.results if result.experiment in at_boundaries}
    config = ModelConfig.from_file(asked.folder / "config.json")
    served = ClusterConfig()
    file = "the committed set" if asked.conversations is None else asked.conversations.name
    facts = {
        "checkpoint": f"`{asked.folder.name}`, {config.num_hidden_layers} layers of width "
        f"{config.hidden_size}, window {config.sliding_window}, digest `{asked.digest}`",
        "conversations": f"{len(used)} of the {num_conversations} in {file}, seed {asked.seed}",
        "measured": ", ".join(f"{name} {number}" for name, number in experiments.items()),
        "numerics": _numerics(asked.numerics, served.numerics),
        "replay rules": RULES_VERSION,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, torch "
        f"{torch.__version__}",
    }
    return About(
        command,
        facts,
        lab.geometry.window,
        lab.anchor_interval,
        served.default_tail,
        served.anchor_interval,
    )


def _numerics(measured: Numerics, served: Numerics) -> str:
    if measured is served:
        return measured.value
    return f"{measured}; `ripresa serve` has `{served}` by default, and other rounding with it"


def _too_short() -> RipresaError:
    return RipresaError(
        ErrorCode.FAILED_PRECONDITION,
        "none of the conversations is long enough for a hit; raise --limit, or name another file "
        "of --conversations",
    )


def _leaves_out(case: Case, geometry: ReplayGeometry) -> bool:
    """Whether both of its hits have rows that the arm without approximation needs not."""
    if case.hit is None or case.answer is None:
        return False
    return min(case.hit, case.answer - 1) > reach(geometry)


def _is_equal(difference: float, numerics: Numerics) -> bool:
    most = 0.0 if numerics is Numerics.DETERMINISTIC else MAX_ROUNDING
    return difference <= most


class _Pace:
    """Says how far it is, and about how long the rest takes."""

    def __init__(self, total: int, echo: Echo) -> None:
        self._total = total
        self._echo = echo
        self._num_done = 0
        self._num_computed = 0
        self._began = time.monotonic()

    def done(self, what: str, *, was_computed: bool) -> None:
        self._num_done += 1
        self._num_computed += was_computed
        if not was_computed:
            return
        seconds = (time.monotonic() - self._began) / self._num_computed
        left = seconds * (self._total - self._num_done)
        self._echo(f"{self._num_done} of {self._total}: {what}; about {left / 60:.0f} min are left")
