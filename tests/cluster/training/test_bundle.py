"""Does a finished training become the bundled model with all that its card tells, and no other?"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ripresa.cluster.training.bundle import FIGURES, bundle_training
from ripresa.cluster.training.card import BEGIN, CARD, END, write_card
from ripresa.cluster.training.figures import Figures, Marks, evenly
from ripresa.cluster.training.live import questions
from ripresa.cluster.training.rendering import Renderer
from ripresa.cluster.training.scores import Score
from ripresa.workers.demo.build_tokenizer import TOKENIZER
from ripresa.workers.demo.checkpoint import DEMO_MODEL
from ripresa.workers.demo.ledger.evaluation import load_evaluation
from ripresa.workers.errors import ConfigError

OPTIONS = {
    "size": "demo",
    "num_tokens": 6144,
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
        shutil.copy(DEMO_MODEL / name, folder / "checkpoint")
    save_file({"w": torch.arange(4)}, folder / "checkpoint" / "model.safetensors")
    (folder / "training.json").write_text(json.dumps(OPTIONS))
    entries = [entry(1, 60.0), entry(2, 120.0), {"tokens": 4096, "table": "..."}, entry(3, 60.0)]
    (folder / "log.jsonl").write_text("".join(f"{json.dumps(e)}\n" for e in entries))
    return folder


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "demo"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(DEMO_MODEL / name, folder)
    (folder / CARD).write_text(f"# A model\n\n{BEGIN}\nold\n{END}\n\nLimits.\n")
    return folder


def card(folder: Path) -> str:
    return (folder / CARD).read_text()


def test_weights_log_and_record_are_copied_and_the_card_tells_of_them(
    source: Path, target: Path
) -> None:
    (target / FIGURES).write_text("of other weights")
    bundle_training(source, ["1a2b3c4"], print, target)
    assert load_file(target / "model.safetensors")["w"].tolist() == [0, 1, 2, 3]
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
    (further / "log.jsonl").write_text(json.dumps(entry(1, 600.0)) + "\n")
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


@pytest.mark.parametrize(
    "damage", ["unfinished", "another geometry", "another tokenizer", "no log", "empty log"]
)
def test_what_is_no_training_of_this_model_changes_nothing(
    source: Path, target: Path, damage: str
) -> None:
    checkpoint = source / "checkpoint"
    if damage == "unfinished":
        (checkpoint / "model.safetensors").unlink()
    elif damage == "no log":
        (source / "log.jsonl").unlink()
    elif damage == "empty log":
        (source / "log.jsonl").write_text("")
    else:
        name = "config.json" if damage == "another geometry" else "tokenizer.json"
        (checkpoint / name).write_text("{}")
    with pytest.raises(ConfigError, match=r"finished|is not that of today's code|log\.jsonl"):
        bundle_training(source, ["1a2b3c4"], print, target)
    assert sorted(path.name for path in target.iterdir()) == [
        CARD,
        "config.json",
        "tokenizer.json",
    ]
