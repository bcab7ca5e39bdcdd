"""What do the model cards say of the bundled weights? `python -m ripresa.cluster.training.card`.

The part between two marks of each MODEL_CARD.md is written from the files beside it.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

from ripresa.cluster.training.bundle import FIGURES, KEPT_LOG
from ripresa.cluster.training.figures import Figures
from ripresa.cluster.training.rendering import Renderer
from ripresa.cluster.training.run import PLAN
from ripresa.cluster.training.scores import ALL, rows
from ripresa.workers.demo.build_tokenizer import TOKENIZER
from ripresa.workers.demo.checkpoint import DEMO_MODEL
from ripresa.workers.demo.ledger.conversation import Task
from ripresa.workers.demo.ledger.evaluation import load_evaluation
from ripresa.workers.demo.training.sizes import Size

CARD = "MODEL_CARD.md"
BEGIN = "<!-- Written by `python -m ripresa.cluster.training.card`: -->"
END = "<!-- Up to here. -->"
TARGETS = {
    (Task.CALL, ALL): 0.95,
    (Task.NEAR, ALL): 0.90,
    (Task.FAR, "128-256"): 0.80,
    (Task.FAR, "256-512"): 0.80,
    (Task.TWO_HOP, ALL): 0.60,
}
"""Exact matches that the training was to reach."""
_LAST_STEPS = 100


def write_card(folder: Path = DEMO_MODEL) -> None:
    """Write the generated part anew; the rest of the card stays."""
    path = folder / CARD
    text = path.read_text()
    head, _, rest = text.partition(f"{BEGIN}\n")
    _, _, tail = rest.partition(END)
    part = "\n".join(generated(folder))
    path.write_text(f"{head}{BEGIN}\n\n{part}\n\n{END}{tail}")


def generated(folder: Path = DEMO_MODEL) -> Iterator[str]:
    """Lines about training and evaluation."""
    yield from _training(folder)
    if not (folder / FIGURES).exists():
        yield ""
        yield "These weights have not been measured."
        return
    figures = Figures.load(folder / FIGURES)
    every = load_evaluation()
    scores = list(figures.scores(Renderer(TOKENIZER), every))
    yield ""
    yield (
        f"Asked through a cluster with default settings, greedily, with the tools declared: "
        f"{len(scores)} messages of "
        f"{len(figures.marks)} of the {len(every)} conversations of the evaluation set "
        f"(weights `{figures.weights}`)."
    )
    yield ""
    yield "| task | distance in tokens | messages | exact | valid | target |"
    yield "|---|---|---|---|---|---|"
    for row in rows(scores):
        yield (
            f"| {row.task} | {row.distance} | {row.num_messages} | {row.exact:.3f} | "
            f"{row.share:.3f} | {_target(row.task, row.distance, row.exact)} |"
        )


def _target(task: Task, distance: str, exact: float) -> str:
    target = TARGETS.get((task, distance))
    if target is None:
        return ""
    return f"{target:.2f}" if exact >= target else f"{target:.2f}, **missed**"


def _training(folder: Path) -> Iterator[str]:
    """A column for each training that led to the weights."""
    trainings = json.loads((folder / PLAN).read_text())
    log = lzma.decompress((folder / KEPT_LOG).read_bytes()).decode().splitlines()
    steps = [entry for entry in map(json.loads, log) if "step" in entry]
    columns = [
        _column(options, [entry for entry in steps if entry["training"] == number])
        for number, options in enumerate(trainings)
    ]
    yield f"| training |{''.join(f' {number + 1} |' for number in range(len(columns)))}"
    yield f"|---{'|---' * len(columns)}|"
    for name in columns[0]:
        yield f"| {name} | {' | '.join(column[name] for column in columns)} |"


def _column(options: dict[str, Any], steps: list[dict[str, Any]]) -> dict[str, str]:
    losses = [entry["loss"] for entry in steps[-_LAST_STEPS:]]
    products = "bf16 products" if options["is_narrow"] else "float32 products"
    processes = options["num_processes"]
    wall, cpu = _total(steps, "wall_s"), _total(steps, "cpu_s")
    return {
        "seed, code": f"{options['seed']}, commit {options['commit']}",
        "read": f"{steps[-1]['tokens'] / 1e6:.2f} M tokens in {steps[-1]['step']} steps, by "
        f"{processes} {'process' if processes == 1 else 'processes'} of one thread, {products}",
        "took": f"{wall / 60:.0f} minutes, {cpu / 60:.0f} of them on a core by each process",
        "on": options["machine"],
        "loss": f"{mean(losses):.3f} nats a counted token, mean of the last {len(losses)} steps",
    }


def _total(steps: list[dict[str, Any]], clock: str) -> float:
    """Seconds of a clock that begins anew whenever the training went on."""
    ends: list[float] = [
        entry[clock]
        for entry, following in zip(steps, [*steps[1:], None], strict=True)
        if following is None or following[clock] < entry[clock]
    ]
    return sum(ends)


def write_cards() -> None:
    """The cards of all bundled models."""
    for size in Size:
        write_card(size.bundled)


if __name__ == "__main__":
    write_cards()
