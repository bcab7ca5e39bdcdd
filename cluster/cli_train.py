"""How does a user train the demo model? `ripresa train`."""

from __future__ import annotations

from pathlib import Path

import click

from ripresa.cluster.progress import progress


@click.group()
def train() -> None:
    """Train small models."""


@train.command("demo")
@click.option(
    "--folder",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Where state, log and checkpoint are; a training that was begun there goes on.",
)
@click.option("--size", type=click.Choice(["tiny", "demo"]), default="demo", show_default=True)
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), help="About how long.")
@click.option("--tokens", type=click.IntRange(min=1), help="How many tokens, instead of how long.")
@click.option("--seed", type=click.IntRange(0, 2**20 - 1), default=0, show_default=True)
@click.option(
    "--processes",
    type=click.IntRange(1, 255),
    default=1,
    show_default=True,
    help="One for each idle core.",
)
@click.option(
    "--products",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    show_default=True,
    help="bfloat16 is faster on CPUs that have such instructions.",
)
def train_demo(
    folder: Path,
    size: str,
    minutes: float | None,
    tokens: int | None,
    seed: int,
    processes: int,
    products: str,
) -> None:
    """Train the demo model, or its tiny twin, on conversations about coined ledgers.

    The state is saved every five minutes; the same command goes on after a kill. At the end
    FOLDER/checkpoint is a checkpoint to serve: `ripresa serve --set model.path=FOLDER/checkpoint`.

    \b
    Examples:
      ripresa train demo --minutes 75 --processes 2 --folder /tmp/demo
      ripresa train demo --size tiny --tokens 5000000 --folder /tmp/tiny
    """
    if (minutes is None) == (tokens is None):
        raise click.UsageError("give one of --minutes and --tokens")
    with progress("preparing"):
        from ripresa.cluster.training.run import Training, open_training, run_training
        from ripresa.workers.demo.training.sizes import Size

        asked = Training(Size(size), tokens or 1, seed, processes, products == "bfloat16")
        training = open_training(folder, asked, minutes)
    run_training(folder, training, click.echo)
