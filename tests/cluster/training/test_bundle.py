"""Does a finished training become the bundled model with all that its card tells, and no other?"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ripresa.cluster.training.bundle import FIGURES, WEIGHTS, bundle_training
from ripresa.cluster.training.card import BEGIN, CARD, END, write_card
from ripresa.cluster.training.figures import Figures, Marks, evenly
from ripresa.cluster.training.live import questions
from ripresa.cluster.training.rendering import Renderer
from ripresa.cluster.training.scores import Score
from ripresa.workers.demo.build_tokenizer import TOKENIZER
from ripresa.workers.demo.checkpoint import DEMO_MODEL, DEMO_TWIN
from ripresa.workers.demo.ledger.evaluation import load_evaluation
from ripresa.workers.errors import ConfigError, RipresaError

OPTIONS = {
    "size": "tiny",
    "num_tokens": 12288,
    "seed": 3,
    "num_processes": 2,
    "is_narrow": False,
}


def entry(step: int, wall_s: float) -> dict[str, object]:
    return {
        "step": step,
        "tokens": 2048 * step,
        "loss": 1.0 / step,
        "wall_s": wall_s,
        "cpu_s": wall_s / 2,
    }


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A training that went on once: 120 s, then 60 s."""
    folder = tmp_path / "training"
    (folder / "checkpoint").mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(DEMO_TWIN / name, folder / "checkpoint")
    shutil.copy(DEMO_TWIN / WEIGHTS, folder / "checkpoint")
    (folder / "training.json").write_text(json.dumps(OPTIONS))
    entries = [entry(1, 60.0), entry(2, 120.0), {"tokens": 4096, "table": "..."}, entry(3, 60.0)]
    (folder / "log.jsonl").write_text("".join(f"{json.dumps(e)}\n" for e in entries))
    return folder


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "demo"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(DEMO_TWIN / name, folder)
    (folder / CARD).write_text(f"# A model\n\n{BEGIN}\nold\n{END}\n\nLimits.\n")
    return folder


def card(folder: Path) -> str:
    return (folder / CARD).read_text()


def test_weights_log_and_record_are_copied_and_the_card_tells_of_them(
    source: Path, target: Path
) -> None:
    (target / FIGURES).write_text("of other weights")
    bundle_training(source, ["1a2b3c4"], print, target)
    assert (target / WEIGHTS).read_bytes() == (DEMO_TWIN / WEIGHTS).read_bytes()
    assert "model.safetensors" in (target / "SHA256SUMS").read_text()
    assert not (target / FIGURES).exists()
    write_card(target)
    told = card(target)
    assert "old" not in told
    assert told.startswith("# A model\n")
    assert told.endswith("\nLimits.\n")
    for words in (
        "3, commit 1a2b3c4",
        "0.01 M tokens in 3 steps, by 2 processes of one thread, float32 products",
        "3 minutes, 2 of them on a core",
        "0.611 nats",
        "These weights have not been measured.",
    ):
        assert words in told
    write_card(target)
    assert card(target) == told


def test_a_training_that_went_on_from_another_tells_of_both(
    source: Path, target: Path, tmp_path: Path
) -> None:
    further = tmp_path / "further"
    shutil.copytree(source, further)
    options = {**OPTIONS, "seed": 4, "source": str(source)}
    (further / "training.json").write_text(json.dumps(options))
    again = [entry(step, 200.0 * step) for step in (1, 2, 3)]
    (further / "log.jsonl").write_text("".join(f"{json.dumps(e)}\n" for e in again))
    with pytest.raises(ConfigError, match=r"2 trainings led to .*training, .*further; give a com"):
        bundle_training(further, ["1a2b3c4"], print, target)
    assert not (target / "training.json").exists()
    bundle_training(further, ["1a2b3c4", "5d6e7f8"], print, target)
    write_card(target)
    told = card(target)
    assert "| seed, code | 3, commit 1a2b3c4 | 4, commit 5d6e7f8 |" in told
    assert "| took | 3 minutes, 2 of them on a core by each process | 10 minutes, 5 of" in told
    assert str(tmp_path) not in (target / "training.json").read_text()


def test_what_a_training_went_on_from_is_told_by_its_name_alone(source: Path, target: Path) -> None:
    options = {**OPTIONS, "source": str(source.parent / "checkpoint-of-someone")}
    (source / "training.json").write_text(json.dumps(options))
    bundle_training(source, ["abc"], lambda _: None, target)
    (training,) = json.loads((target / "training.json").read_text())
    assert training["source"] == "checkpoint-of-someone"


def test_the_table_is_of_the_figures(source: Path, target: Path) -> None:
    bundle_training(source, ["1a2b3c4"], print, target)
    every = load_evaluation()
    renderer = Renderer(TOKENIZER)
    scores = {
        place: [
            Score(q.task, q.bucket, is_exact=n % 3 > 0, share=float(n % 4 > 0))
            for n, q in enumerate(questions(renderer, every[place]))
        ]
        for place in (0, 499)
    }
    answers = [score for part in scores.values() for score in part]
    figures = Figures("ab12", {place: Marks.of(part) for place, part in scores.items()})
    figures.save(target / FIGURES)
    assert Figures.load(target / FIGURES) == figures
    assert list(figures.scores(renderer, every)) == answers
    write_card(target)
    told = card(target)
    assert f"{len(answers)} messages of 2 of the 500 conversations" in told
    calls = [a for a in answers if a.task == "T1 call"]
    exact = sum(a.is_exact for a in calls) / len(calls)
    valid = sum(a.share for a in calls) / len(calls)
    verdict = "0.95" if exact >= 0.95 else "0.95, **missed**"
    assert f"| T1 call | all | {len(calls)} | {exact:.3f} | {valid:.3f} | {verdict} |" in told


def test_figures_of_another_number_of_messages_are_refused() -> None:
    every = load_evaluation()
    figures = Figures("ab12", {0: Marks((True,), (True,))})
    with pytest.raises(ValueError, match="zip"):
        list(figures.scores(Renderer(TOKENIZER), every))


def test_places_are_spread() -> None:
    assert evenly(4, 500) == [0, 125, 250, 375]
    assert evenly(500, 500) == list(range(500))


Damage = Callable[[Path, Path], None]
"""Of a training's folder, and the checkpoint in it."""


def damaged_log(source: Path, _: Path) -> None:
    lines = (source / "log.jsonl").read_text().splitlines(keepends=True)
    (source / "log.jsonl").write_text("".join(lines[:2]))


def of(name: str, content: str | None) -> Damage:
    """Another content of a file; None for no file."""

    def damage(source: Path, _: Path) -> None:
        file = source / name
        file.unlink() if content is None else file.write_text(content)

    return damage


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def damage(source: Path, checkpoint: Path) -> None:
        tensors = load_file(checkpoint / WEIGHTS)
        change(tensors)
        save_file(tensors, checkpoint / WEIGHTS)

    return damage


def options(**changes: object) -> Damage:
    kept = {name: value for name, value in {**OPTIONS, **changes}.items() if value is not None}
    return of("training.json", json.dumps(kept))


def truncated(source: Path, checkpoint: Path) -> None:
    os.truncate(checkpoint / WEIGHTS, (checkpoint / WEIGHTS).stat().st_size // 2)


def of_the_other_size(source: Path, checkpoint: Path) -> None:
    shutil.copy(DEMO_MODEL / WEIGHTS, checkpoint)


def a_state(number: int) -> Damage:
    def damage(source: Path, checkpoint: Path) -> None:
        content = {"number": number, "identity": {"plan": {"num_steps": 3}}, "parameters": {}}
        torch.save(content, source / "state.pt")

    return damage


DAMAGES: dict[str, tuple[Damage, str]] = {
    "unfinished": (of("checkpoint/model.safetensors", None), "finished"),
    "another geometry": (of("checkpoint/config.json", "{}"), "is not that of today's code"),
    "another tokenizer": (of("checkpoint/tokenizer.json", "{}"), "is not that of today's code"),
    "no tokenizer": (of("checkpoint/tokenizer.json", None), "cannot be read"),
    "a torn geometry": (of("checkpoint/config.json", '{"a"'), "cannot be read"),
    "no log": (of("log.jsonl", None), "cannot be read"),
    "an empty log": (of("log.jsonl", ""), "tells of 0 steps, the training has 3"),
    "half a log": (damaged_log, "tells of 2 steps, the training has 3"),
    "torn options": (of("training.json", "{"), "cannot be read"),
    "an unknown size": (options(size="huge"), "no options of a training"),
    "no precision": (options(is_narrow=None), "is_narrow"),
    "no processes": (options(num_processes=0), "no options of a training"),
    "half the weights": (truncated, "model.safetensors"),
    "no weights": (of("checkpoint/model.safetensors", ""), "model.safetensors"),
    "weights of the other size": (of_the_other_size, "model.safetensors"),
    "a tensor less": (weights(lambda tensors: tensors.popitem()), "checkpoint"),
    "weights that are none": (
        weights(lambda tensors: next(iter(tensors.values())).fill_(float("nan"))),
        "holds NaN or infinite values",
    ),
    "a state on its way": (a_state(2), "is at step 2 of 3"),
    "a torn state": (of("state.pt", "torn"), "cannot be read"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_what_is_no_training_of_this_model_changes_nothing(
    source: Path, target: Path, kind: str
) -> None:
    damage, said = DAMAGES[kind]
    damage(source, source / "checkpoint")
    (target / FIGURES).write_text("of other weights")
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    with pytest.raises(RipresaError, match=said):
        bundle_training(source, ["1a2b3c4"], print, target)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
