"""How does a user train and measure the demo model? `ripresa train`."""

from __future__ import annotations

from pathlib import Path

import click

from ripresa.cluster.progress import progress


@click.group()
def train() -> None:
    """Train the demo model, and measure it."""


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


@train.command("measure")
@click.option("--address", default="http://127.0.0.1:8000", show_default=True, help="HTTP port.")
@click.option(
    "--conversations",
    type=click.IntRange(1, 500),
    default=500,
    show_default=True,
    help="Of the 500 of the evaluation set, evenly spread.",
)
@click.option("--concurrency", type=click.IntRange(1, 64), default=4, show_default=True)
def train_measure(address: str, conversations: int, concurrency: int) -> None:
    """Ask a served model every question of the evaluation set; a table of exact matches.

    Every message of the assistant is asked for behind the reference's conversation, at
    temperature 0. `valid` is the share of messages with a call where one is due and none elsewhere.

    \b
    Example:
      ripresa serve --set model.path=/tmp/demo/checkpoint
      ripresa train measure --conversations 50
    """
    with progress("measuring"):
        from ripresa.cluster.training.live import measure_live, questions, served_model
        from ripresa.cluster.training.rendering import Renderer
        from ripresa.cluster.training.scores import table
        from ripresa.workers.demo.build_tokenizer import TOKENIZER
        from ripresa.workers.demo.ledger.evaluation import load_evaluation

        model = served_model(address)
        every = load_evaluation()
        chosen = [every[place * len(every) // conversations] for place in range(conversations)]
        asked = list(questions(Renderer(TOKENIZER), chosen))
        scores = list(measure_live(address, model, asked, concurrency))
    for line in table(scores, "valid"):
        click.echo(line)
