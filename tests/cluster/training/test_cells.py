"""Do the cells of a comparison hold what was read, and does a cut move only what it should?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from tokenizers import Tokenizer

from ripresa.cluster.cli import cli
from ripresa.cluster.evaluation.bootstrap import Estimate
from ripresa.cluster.training.cells import (
    WAYS,
    Cell,
    Half,
    Reading,
    Way,
    boundary_of,
    cell_table,
    cells,
    read_answers,
    write_cells,
)
from ripresa.cluster.training.rendering import Answers, Renderer, Span
from ripresa.workers.demo.build_tokenizer import TOKENIZER
from ripresa.workers.demo.ledger.conversation import Conversation, Task
from ripresa.workers.demo.ledger.evaluation import load_evaluation
from ripresa.workers.demo.training.cut_batches import REPLAYS
from ripresa.workers.demo.training.initial import initial_parameters
from ripresa.workers.demo.training.sizes import Size, config_of
from ripresa.workers.errors import InvalidArgument
from ripresa.workers.models.deepseek_v41.config import ModelConfig
from ripresa.workers.models.deepseek_v41.engram_ids import compressed_ids
from ripresa.workers.models.deepseek_v41.trainable.cuts import Cuts
from ripresa.workers.models.deepseek_v41.trainable.model import TrainableModel

WINDOW = 128
SEVERAL = 207
"""Number of a short conversation with several answers behind its boundary."""


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(TOKENIZER)


@pytest.fixture(scope="module")
def conversations() -> list[Conversation]:
    return load_evaluation()


def answers_at(*spans: tuple[int, int], length: int = 1000) -> Answers:
    return Answers((5,) * length, tuple(Span(Task.NEAR, a, b, None) for a, b in spans))


def test_answers_are_those_that_begin_within_a_window_behind_the_boundary() -> None:
    answers = answers_at((140, 150), (250, 260), (256, 270), (300, 310), (380, 400), (384, 390))
    found = [boundary_of(answers, WINDOW, number) for number in range(40)]
    assert {b.block for b in found if b} == {256, 384}
    for boundary in filter(None, found):
        starts = [span.start for span in boundary.answers]
        assert starts == {256: [256, 300, 380], 384: [384]}[boundary.block]
        assert boundary.prompt in boundary.answers
        assert boundary.stop == boundary.answers[-1].stop
    assert len({b.prompt for b in found if b}) == 4
    assert {boundary_of(answers, WINDOW, 7, 256).block for _ in range(3)} == {256}  # type: ignore[union-attr]
    assert boundary_of(answers_at((140, 150)), WINDOW, 0) is None


def test_the_evaluation_set_is_cut_where_it_was_written_for(
    renderer: Renderer, conversations: list[Conversation]
) -> None:
    for number in range(0, 100, 9):
        conversation = conversations[number]
        answers = renderer.answers(conversation)
        boundary = boundary_of(answers, WINDOW, number, conversation.boundary)
        assert boundary is not None
        assert boundary.block == conversation.boundary


def test_every_way_of_reading_is_a_forward_with_its_cut(
    renderer: Renderer, conversations: list[Conversation]
) -> None:
    config = ModelConfig.from_dict(config_of(Size.TINY))
    generator = torch.Generator().manual_seed(0)
    parameters = {
        name: values + 0.05 * torch.randn(values.shape, generator=generator)
        for name, values in initial_parameters(config, 0).items()
    }
    ids = compressed_ids(Tokenizer.from_file(str(TOKENIZER)))
    model = TrainableModel(config, parameters, ids)
    conversation = conversations[SEVERAL]
    answers = renderer.answers(conversation)
    boundary = boundary_of(answers, WINDOW, SEVERAL)
    assert boundary is not None
    (readings,) = read_answers(model, renderer, [(SEVERAL, conversation)])
    assert len(readings) == (len(REPLAYS) + 1) * (len(boundary.answers) + 1)
    found = cells([readings])
    assert tuple(found) == WAYS
    token_ids = torch.tensor([answers.token_ids])
    padded = torch.nn.functional.pad(token_ids, (0, -token_ids.shape[1] % WINDOW), value=2)

    def losses(places: tuple[int, int, int], span: Span) -> float:
        where = Cuts(*torch.tensor([places]).unbind(1))
        with torch.no_grad():
            logits = model.logits(model.forward(padded, cuts=where).hidden)[0]
        rows, targets = logits[span.start - 1 : span.stop - 1], token_ids[0, span.start : span.stop]
        return float(torch.nn.functional.cross_entropy(rows, targets, reduction="sum"))

    prompt, block = boundary.prompt, boundary.block
    expected = {
        Way(Half.DECODER, None): losses((0, 0, 0), prompt),
        Way(Half.DECODER, 32): losses((0, 0, prompt.start - 32), prompt),
        Way(Half.BOTH, 64): losses((block - 64, block, block - 64), boundary.answers[-1]),
    }
    for way, loss in expected.items():
        *_, last = (reading for reading in readings if reading.way == way)
        assert last.losses == pytest.approx(loss, rel=1e-4)
    for half in Half:
        whole = found[Way(half, None)].nll
        assert all(abs(found[Way(half, replay)].nll - whole) > 1e-5 for replay in REPLAYS)


class Oracle:
    """Knows every token of whole sequences, and of cut ones those before some place."""

    def __init__(self, known_below: int) -> None:
        self.config = ModelConfig.from_dict(config_of(Size.TINY))
        self._known_below = known_below

    def forward(self, token_ids: torch.Tensor, cuts: Cuts | None = None) -> Oracle:
        self.hidden = torch.roll(token_ids, -1, 1)
        if cuts is not None:
            is_cut = (cuts.decoder > 0)[:, None]
            is_known = torch.arange(token_ids.shape[1]) < self._known_below - 1
            self.hidden = torch.where(is_cut & ~is_known, 0, self.hidden)
        return self

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return 20.0 * torch.nn.functional.one_hot(hidden, self.config.vocab_size).float()


def test_an_answer_matches_if_every_token_does(
    renderer: Renderer, conversations: list[Conversation]
) -> None:
    conversation = conversations[SEVERAL]
    boundary = boundary_of(renderer.answers(conversation), WINDOW, SEVERAL)
    assert boundary is not None
    assert len(boundary.answers) == 3
    oracle = Oracle(boundary.answers[0].stop)
    (readings,) = read_answers(oracle, renderer, [(SEVERAL, conversation)])  # type: ignore[arg-type]
    found = cells([readings])
    assert found[Way(Half.BOTH, None)].exact == 1.0
    assert found[Way(Half.BOTH, None)].nll < 1e-4
    for replay in REPLAYS:
        assert found[Way(Half.BOTH, replay)].exact == pytest.approx(1 / 3)


def cell(nll: float, added: float, exact: float) -> Cell:
    return Cell(4, 40, nll, Estimate(added, added - 0.01, added + 0.02), exact)


BEFORE = {Way(Half.BOTH, None): cell(0.5, 0.0, 0.9), Way(Half.BOTH, 32): cell(0.8, 0.3, 0.6)}
AFTER = [
    {Way(Half.BOTH, None): cell(0.52, 0.0, 0.9), Way(Half.BOTH, 32): cell(0.6, 0.08, 0.8)},
    {Way(Half.BOTH, None): cell(0.48, 0.0, 0.8), Way(Half.BOTH, 32): cell(0.7, 0.22, 0.7)},
]


def test_the_table_gives_intervals_and_the_deviation_of_several_seeds() -> None:
    _, whole, cut = cell_table(BEFORE, AFTER)
    assert whole.split("|")[0].split() == ["encoder", "+", "decoder", "whole", "4"]
    assert cut.replace("|", "").split()[3:] == [
        "32", "4", "0.8000", "+0.3000", "[+0.2900,", "+0.3200]", "0.600",
        "0.6500", "±0.0707", "+0.1500", "±0.0990", "0.750", "±0.071",
    ]  # fmt: skip
    *_, alone = cell_table(BEFORE, AFTER[:1])
    assert alone.split("|")[2].split() == ["0.6000", "+0.0800", "[+0.0700,", "+0.1000]", "0.800"]


def test_cells_are_means_over_tokens_and_answers() -> None:
    whole, cut = Way(Half.DECODER, None), Way(Half.DECODER, 0)
    first = [Reading(whole, 3, 1.0, True), Reading(cut, 3, 1.5, True)]
    second = [Reading(whole, 1, 0.5, True), Reading(cut, 1, 0.5, False)]
    others = [Reading(way, 2, 1.0, True) for way in WAYS if way not in (whole, cut)]
    few = cells([[*first, *others], [], second + others])
    assert few[cut].added == Estimate(0.125)
    assert any(" +0.1250 - " in line for line in cell_table(few, [few]))
    found = cells([[*first, *others], [], second + others] * 4)
    assert (found[cut].num_answers, found[cut].num_tokens) == (8, 16)
    assert (found[cut].nll, found[cut].exact) == (0.5, 0.5)
    assert found[cut].added.mean == 0.125
    low, high = found[cut].added.low, found[cut].added.high
    assert low is not None
    assert high is not None
    assert low <= 0.125 <= high
    assert found[whole].added == Estimate(0.0, 0.0, 0.0)
    with pytest.raises(InvalidArgument, match="too short"):
        cells([[], []])


def test_cells_are_written_with_their_names(tmp_path: Path) -> None:
    write_cells(tmp_path / "cells.json", {"before": BEFORE})
    first, second = json.loads((tmp_path / "cells.json").read_text())
    assert first["replay"] is None
    assert second == {
        "model": "before", "cut": "encoder + decoder", "replay": 32, "num_answers": 4,
        "num_tokens": 40, "nll": 0.8, "added": {"mean": 0.3, "low": 0.29, "high": 0.32},
        "exact": 0.6,
    }  # fmt: skip
    with pytest.raises(InvalidArgument, match="cannot be written"):
        write_cells(tmp_path / "nowhere" / "cells.json", {"before": BEFORE})


def test_models_of_different_sizes_are_not_compared(tmp_path: Path) -> None:
    for size in Size:
        (tmp_path / size).mkdir()
        (tmp_path / size / "config.json").write_text(json.dumps(config_of(size)))
    result = CliRunner().invoke(cli, ["train", "cells", *(str(tmp_path / size) for size in Size)])
    assert isinstance(result.exception, SystemExit)
    assert result.exit_code == 2
    assert "of another size than" in result.output
