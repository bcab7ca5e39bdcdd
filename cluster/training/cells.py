"""What does bounded replay cost a model, and less after fine-tuning? Answers behind a boundary.

Each conversation of the evaluation set is cut at one block boundary b, and the answers that begin
within a window behind it are read as the reference gives them: by the whole model, and by one
whose layers begin with empty windows at c = b - R. Of the decoder half alone, b is the beginning
of one of these answers, as at the end of every prompt.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from statistics import mean, stdev

import torch

from ripresa.cluster.evaluation.bootstrap import Estimate, ratio
from ripresa.cluster.training.rendering import Answers, Renderer, Span
from ripresa.workers.demo.ledger.conversation import Conversation
from ripresa.workers.demo.training.cut_batches import REPLAYS
from ripresa.workers.errors import InvalidArgument
from ripresa.workers.models.deepseek_v41.trainable.cuts import Cuts
from ripresa.workers.models.deepseek_v41.trainable.model import TrainableModel

_PAD = 2


class Half(StrEnum):
    """Which layers begin at a cut, and so which answers are read."""

    DECODER = "decoder"
    BOTH = "encoder + decoder"


@dataclass(frozen=True, slots=True)
class Way:
    """One way to read answers. `replay`: R; None for the whole model, the exact cell."""

    half: Half
    replay: int | None

    @property
    def whole(self) -> Way:
        """The same answers, read by the whole model."""
        return Way(self.half, None)


WAYS = tuple(Way(half, replay) for half in Half for replay in (None, *REPLAYS))


@dataclass(frozen=True, slots=True)
class Reading:
    """One answer, read in one way.

    Attributes:
        losses: of its tokens, in nats, summed.
        is_exact: each token was the likeliest one, so that greedy decoding would have said it.
    """

    way: Way
    num_tokens: int
    losses: float
    is_exact: bool


@dataclass(frozen=True, slots=True)
class Cell:
    """Many readings in one way.

    Attributes:
        nll: nats a token.
        added: by the cut, nats a token, with its interval over conversations.
        exact: share of answers of which each token was the likeliest.
    """

    num_answers: int
    num_tokens: int
    nll: float
    added: Estimate
    exact: float


@dataclass(frozen=True, slots=True)
class Boundary:
    """Where a conversation is cut.

    Attributes:
        block: b of the encoder half, a block boundary.
        answers: those that begin within a window behind it.
        prompt: b of the decoder half alone, the beginning of one of them.
    """

    block: int
    answers: tuple[Span, ...]
    prompt: Span

    @property
    def stop(self) -> int:
        return self.answers[-1].stop

    def read(self, half: Half) -> tuple[Span, ...]:
        return self.answers if half is Half.BOTH else (self.prompt,)


def boundary_of(
    answers: Answers, window: int, number: int, given: int | None = None
) -> Boundary | None:
    """Where to cut a conversation; None for one that is too short.

    Args:
        number: of the conversation; draws the boundary.
        given: the boundary that a conversation was written for.
    """
    draws = random.Random(f"cells:{number}").random
    places = {}
    for block in range(max(REPLAYS) // window * window + window, len(answers.token_ids), window):
        behind = tuple(s for s in answers.spans if block <= s.start < block + window)
        if behind:
            places[block] = behind
    if not places:
        return None
    chosen = list(places)[int(draws() * len(places))]
    if given in places:
        chosen = given
    behind = places[chosen]
    return Boundary(chosen, behind, behind[int(draws() * len(behind))])


def read_answers(
    model: TrainableModel,
    renderer: Renderer,
    conversations: Iterable[tuple[int, Conversation]],
) -> Iterator[list[Reading]]:
    """The readings of each conversation; none of one that is too short.

    Args:
        conversations: with their numbers, which draw the boundaries.
    """
    window = model.config.sliding_window
    for number, conversation in conversations:
        answers = renderer.answers(conversation)
        boundary = boundary_of(answers, window, number, conversation.boundary)
        yield [] if boundary is None else list(_read(model, answers, boundary))


def _read(model: TrainableModel, answers: Answers, boundary: Boundary) -> Iterator[Reading]:
    window = model.config.sliding_window
    ids = torch.tensor(answers.token_ids[: boundary.stop])
    padded = torch.nn.functional.pad(ids, (0, -len(ids) % window), value=_PAD)
    cut = [way for way in WAYS if way.replay is not None]
    # The whole model goes first, for both halves.
    places = torch.tensor([(0, 0, 0), *(_cut(boundary, way) for way in cut)])
    with torch.no_grad():
        hidden = model.forward(padded.expand(len(places), -1), cuts=Cuts(*places.unbind(1))).hidden
        for way in WAYS:
            row = hidden[0 if way.replay is None else 1 + cut.index(way)]
            for span in boundary.read(way.half):
                logits = model.logits(row[span.start - 1 : span.stop - 1])
                targets = ids[span.start : span.stop]
                losses = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
                is_exact = bool((logits.argmax(-1) == targets).all())
                yield Reading(way, len(targets), float(losses), is_exact)


def _cut(boundary: Boundary, way: Way) -> tuple[int, int, int]:
    assert way.replay is not None
    if way.half is Half.DECODER:
        return 0, 0, boundary.prompt.start - way.replay
    start = boundary.block - way.replay
    return start, boundary.block, start


def cells(conversations: Iterable[Sequence[Reading]]) -> dict[Way, Cell]:
    """One cell of each way, from the readings of several conversations.

    Raises:
        InvalidArgument: nothing was read.
    """
    read = [readings for readings in conversations if readings]
    if not read:
        raise InvalidArgument("--conversations", "all of them are too short; take more")
    return {way: _cell(way, read) for way in WAYS}


def _cell(way: Way, conversations: Sequence[Sequence[Reading]]) -> Cell:
    mine = [[r for r in readings if r.way == way] for readings in conversations]
    whole = [[r for r in readings if r.way == way.whole] for readings in conversations]
    losses = [sum(r.losses for r in readings) for readings in mine]
    added = [loss - sum(r.losses for r in of) for loss, of in zip(losses, whole, strict=True)]
    counts = [sum(r.num_tokens for r in readings) for readings in mine]
    is_exact = [r.is_exact for readings in mine for r in readings]
    return Cell(
        len(is_exact),
        sum(counts),
        sum(losses) / sum(counts),
        ratio(added, counts, seed=0),
        sum(is_exact) / len(is_exact),
    )


def cell_table(before: Mapping[Way, Cell], after: Sequence[Mapping[Way, Cell]]) -> Iterator[str]:
    """Lines: the half that begins at the cut, R, and of both models the loss in nats a token, what
    the cut adds to it, and exact matches.

    Behind what is added comes its interval, 95 % of draws of conversations; of several fine-tunings
    each number is their mean, and behind it is the standard deviation.
    """
    yield (
        f"{'cut':17} {'R':>5} {'answers':>7} | {'before':>7} {'by the cut':>26} {'match':>5} | "
        f"{'after':>15} {'by the cut':>26} {'match':>12}"
    )
    for way, cell in before.items():
        tuned = [each[way] for each in after]
        yield (
            f"{way.half:17} {'whole' if way.replay is None else way.replay:>5} "
            f"{cell.num_answers:7} | "
            f"{cell.nll:7.4f} {_with_interval(cell.added):>26} {cell.exact:5.3f} | "
            f"{_spread([each.nll for each in tuned], '.4f'):>15} {_added(tuned):>26} "
            f"{_spread([each.exact for each in tuned], '.3f'):>12}"
        )


def _added(tuned: Sequence[Cell]) -> str:
    if len(tuned) == 1:
        return _with_interval(tuned[0].added)
    return _spread([cell.added.mean for cell in tuned], "+.4f")


def _with_interval(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:  # of too few conversations
        return f"{estimate.mean:+.4f} -"
    return f"{estimate.mean:+.4f} [{estimate.low:+.4f}, {estimate.high:+.4f}]"


def _spread(values: Sequence[float], form: str) -> str:
    text = f"{mean(values):{form}}"
    return text if len(values) == 1 else f"{text} ±{stdev(values):{form.lstrip('+')}}"


def write_cells(path: Path, models: Mapping[str, Mapping[Way, Cell]]) -> None:
    """Write every cell of some models, which have names, as JSON.

    Raises:
        InvalidArgument: the file cannot be written.
    """
    entries = [
        {"model": name, "cut": way.half, "replay": way.replay, **asdict(cell)}
        for name, found in models.items()
        for way, cell in found.items()
    ]
    try:
        path.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidArgument(str(path), f"cannot be written: {error.strerror}") from error
