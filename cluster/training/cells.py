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
        exact: share of answers of which each token was the likeliest.
    """

    num_answers: int
    num_tokens: int
    nll: float
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
    """The readings of each conversation, with its number; none of one that is too short."""
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


def cells(readings: Iterable[Reading]) -> dict[Way, Cell]:
    """One cell of each way that something was read in."""
    groups: dict[Way, list[Reading]] = {}
    for reading in readings:
        groups.setdefault(reading.way, []).append(reading)
    return {way: _cell(groups[way]) for way in WAYS if way in groups}


def _cell(readings: Sequence[Reading]) -> Cell:
    num_tokens = sum(reading.num_tokens for reading in readings)
    return Cell(
        len(readings),
        num_tokens,
        sum(reading.losses for reading in readings) / num_tokens,
        sum(reading.is_exact for reading in readings) / len(readings),
    )


def cell_table(before: Mapping[Way, Cell], after: Sequence[Mapping[Way, Cell]]) -> Iterator[str]:
    """Lines: the half that begins at the cut, R, and of both models the loss in nats a token, what
    the cut adds to it, and exact matches; of several fine-tunings mean and standard deviation."""
    yield (
        f"{'cut':17} {'R':>6} {'answers':>7} | {'before':>7} {'by cut':>8} {'match':>6} | "
        f"{'after':>15} {'by cut':>16} {'match':>13}"
    )
    for way, cell in before.items():
        whole = Way(way.half, None)
        tuned = [each[way] for each in after]
        added = [each[way].nll - each[whole].nll for each in after]
        yield (
            f"{way.half:17} {'exact' if way.replay is None else way.replay:>6} "
            f"{cell.num_answers:7} | "
            f"{cell.nll:7.4f} {cell.nll - before[whole].nll:+8.4f} {cell.exact:6.3f} | "
            f"{_spread([each.nll for each in tuned], '.4f'):>15} {_spread(added, '+.4f'):>16} "
            f"{_spread([each.exact for each in tuned], '.3f'):>13}"
        )


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
