"""How does a user train and measure the demo model? `ripresa train`."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ripresa.cluster.cli_options import YEAR_S, FiniteRange, with_api_key, with_overrides
from ripresa.cluster.progress import MAX_PAUSE_S, progress

if TYPE_CHECKING:
    from ripresa.cluster.training.cells import Cell, Way
    from ripresa.cluster.training.run import Training

F = TypeVar("F", bound=Callable[..., Any])

_conversations = click.option(
    "--conversations",
    type=click.IntRange(1, 500),
    default=500,
    show_default=True,
    help="Of the 500 of the evaluation set, evenly spread.",
)
_processes = click.option(
    "--processes",
    type=click.IntRange(1, 255),
    default=1,
    show_default=True,
    help="One for each idle core.",
)
_existing_folder = click.Path(exists=True, file_okay=False, path_type=Path)


def _with_extent(command: F) -> F:
    """The options of every training: where, of what, how long, and on how many cores."""
    options = (
        click.option(
            "--folder",
            required=True,
            type=click.Path(file_okay=False, path_type=Path),
            help="Where state, log and checkpoint are; a training that was begun there goes on.",
        ),
        click.option(
            "--size", type=click.Choice(["tiny", "demo"]), default="demo", show_default=True
        ),
        click.option(
            "--minutes",
            type=FiniteRange(0, YEAR_S / 60, min_open=True),
            help="About how long.",
        ),
        click.option(
            "--tokens", type=click.IntRange(min=1), help="How many tokens, instead of how long."
        ),
        click.option("--seed", type=click.IntRange(0, 2**20 - 1), default=0, show_default=True),
        _processes,
        click.option(
            "--products",
            type=click.Choice(["float32", "bfloat16"]),
            default="float32",
            show_default=True,
            help="bfloat16 is faster on CPUs that list avx512_bf16 or amx_bf16 among their flags, "
            "and many times slower on other x86 CPUs.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def _train(
    make: Callable[..., Training],
    *,
    folder: Path,
    size: str,
    minutes: float | None,
    tokens: int | None,
    seed: int,
    processes: int,
    products: str,
) -> None:
    """Begin the training that `make` gives for these options, or go on with the folder's."""
    if (minutes is None) == (tokens is None):
        raise click.UsageError("give one of --minutes and --tokens")
    with progress("preparing"):
        from ripresa.cluster.training.run import open_training, run_training
        from ripresa.workers.demo.training.sizes import Size

        asked = make(
            size=Size(size),
            num_tokens=tokens or 1,
            seed=seed,
            num_processes=processes,
            is_narrow=products == "bfloat16",
        )
        training = open_training(folder, asked, minutes)
    run_training(folder, training, click.echo)


@click.group()
def train() -> None:
    """Train the demo model, and measure it."""


@train.command("demo")
@_with_extent
def train_demo(**extent: Any) -> None:
    """Train the demo model, or its tiny twin, on conversations about coined ledgers.

    The state is saved every five minutes; the same command goes on after a kill. At the end
    FOLDER/checkpoint is a checkpoint to serve: `ripresa serve --set model.path=FOLDER/checkpoint`.

    \b
    Examples:
      ripresa train demo --minutes 75 --processes 2 --folder /tmp/demo
      ripresa train demo --size tiny --tokens 5000000 --folder /tmp/tiny
    """

    def made(**asked: Any) -> Training:
        from ripresa.cluster.training.run import Training

        return Training(**asked)

    _train(made, **extent)


_source = click.option(
    "--from",
    "source",
    required=True,
    type=_existing_folder,
    help="A finished training's folder, or a checkpoint of this size.",
)


@train.command("continue")
@_source
@_with_extent
def train_continue(source: Path, **extent: Any) -> None:
    """Train a trained model further, mostly on questions about what it read long before.

    The state is saved every five minutes; the same command goes on after a kill. At the end
    FOLDER/checkpoint is a checkpoint to serve.

    \b
    Example:
      ripresa train continue --from /tmp/demo --minutes 90 --folder /tmp/demo-longer
    """

    def made(**asked: Any) -> Training:
        from ripresa.cluster.training.continued import ContinuedTraining

        return ContinuedTraining(**asked, source=str(source.resolve()))

    _train(made, **extent)


@train.command("replay")
@_source
@click.option(
    "--cut-share",
    type=FiniteRange(0, 1),
    default=0.5,
    show_default=True,
    help="Of the sequences, those that are cut; 0 trains on without cuts, to compare with.",
)
@_with_extent
def train_replay(source: Path, cut_share: float, **extent: Any) -> None:
    """Fine-tune a trained model to be replayed: its windows begin anew at drawn places.

    Half of the cut sequences are cut in the decoder half alone, as at the end of a prompt, the
    others in both, as behind a prefix hit. The state is saved every five minutes; the same command
    goes on after a kill. At the end FOLDER/checkpoint is a checkpoint to serve.

    \b
    Examples:
      ripresa train replay --size tiny --from /tmp/tiny --minutes 8 --folder /tmp/tiny-replay
      ripresa train cells /tmp/tiny /tmp/tiny-replay
    """

    def made(**asked: Any) -> Training:
        from ripresa.cluster.training.replay_aware import ReplayTraining

        return ReplayTraining(**asked, source=str(source.resolve()), cut_share=cut_share)

    _train(made, **extent)


@train.command("cells")
@click.argument("before", type=_existing_folder)
@click.argument("after", type=_existing_folder, nargs=-1, required=True)
@_conversations
@_processes
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write every cell there too.",
)
def train_cells(
    before: Path,
    after: tuple[Path, ...],
    conversations: int,
    processes: int,
    json_file: Path | None,
) -> None:
    """Compare a model BEFORE and AFTER fine-tuning, exact and replayed, at every length R.

    Each argument is a training's folder or a checkpoint; several AFTER, of different seeds, give
    mean and standard deviation. Of every conversation the answers behind one boundary are read as
    the reference gives them. `by the cut` is what replay adds to the loss, in nats a token, with
    its 95 % interval over conversations.

    \b
    Examples:
      ripresa train cells /tmp/tiny /tmp/tiny-replay
      ripresa train cells /tmp/tiny /tmp/seed-1 /tmp/seed-2 /tmp/seed-3 --json cells.json
    """
    with progress("loading"):
        from ripresa.cluster.training.cells import cell_table, write_cells
        from ripresa.cluster.training.finished import check_same_size

        check_same_size((before, *after))
    found = {str(f): _cells_of(f, conversations, processes) for f in (before, *after)}
    for line in cell_table(found[str(before)], [found[str(folder)] for folder in after]):
        click.echo(line)
    if json_file is not None:
        write_cells(json_file, found)


def _cells_of(folder: Path, num_conversations: int, num_processes: int) -> dict[Way, Cell]:
    with progress(f"loading {folder}"):
        from ripresa.cluster.training.cell_readers import read_in_processes
        from ripresa.cluster.training.cells import cells
        from ripresa.cluster.training.figures import evenly
        from ripresa.workers.demo.ledger.evaluation import load_evaluation

        every = list(enumerate(load_evaluation()))
    chosen = [every[place] for place in evenly(num_conversations, len(every))]
    readings, shown = [], time.monotonic()
    for done, found in enumerate(read_in_processes(folder, chosen, num_processes), 1):
        readings.append(found)
        if time.monotonic() - shown >= MAX_PAUSE_S:
            shown = time.monotonic()
            click.echo(f"{folder}: {done} of {num_conversations} conversations", err=True)
    return cells(readings)


@train.command("bundle")
@click.argument("folder", type=_existing_folder)
@click.option(
    "--commit",
    "commits",
    required=True,
    multiple=True,
    help="Of the code that trained it; of each training that led to it, the first one first.",
)
@_conversations
@click.option("--concurrency", type=click.IntRange(1, 64), default=8, show_default=True)
@with_overrides
def train_bundle(
    folder: Path,
    commits: tuple[str, ...],
    conversations: int,
    concurrency: int,
    assignments: tuple[str, ...],
) -> None:
    """Make the finished training in FOLDER the bundled model of its size, and measure it.

    Checkpoint, logs and options are copied into this checkout. A local cluster then serves them
    and is asked the evaluation set, as `ripresa train measure` does; the figures go into the model
    card. Commit what has changed.

    \b
    Examples:
      ripresa train bundle /tmp/demo --commit 1a2b3c4
      ripresa train bundle /tmp/demo-longer --commit 1a2b3c4 --commit 5d6e7f8
    """
    with progress("copying"):
        from ripresa.cluster.training.bundle import bundle_training
        from ripresa.cluster.training.card import write_card

        bundled = bundle_training(folder, commits, click.echo)
        write_card(bundled)
    try:
        _measure_bundled(bundled, conversations, concurrency, assignments)
    finally:
        write_card(bundled)


def _measure_bundled(
    folder: Path, conversations: int, concurrency: int, assignments: tuple[str, ...]
) -> None:
    with ExitStack() as stack:
        with progress("starting a cluster"):
            from ripresa.cluster.app import local_cluster
            from ripresa.cluster.config import load_config
            from ripresa.cluster.training.bundle import FIGURES
            from ripresa.cluster.training.figures import Figures, Marks, evenly
            from ripresa.cluster.training.live import measure_live, questions, served_model
            from ripresa.cluster.training.rendering import Renderer
            from ripresa.workers.demo.build_tokenizer import TOKENIZER
            from ripresa.workers.demo.ledger.evaluation import load_evaluation
            from ripresa.workers.model_runner import model_digest
            from ripresa.workers.models.deepseek_v41.config import ModelConfig

            # Another server may be running; nobody else asks this one.
            free = ("gateway.grpc_port=0", "gateway.http_port=0", "admin.port=0")
            config = load_config(None, (*free, f"model.path={folder}", *assignments))
            cluster = stack.enter_context(local_cluster(config))
        renderer, every = Renderer(TOKENIZER), load_evaluation()
        chosen = evenly(conversations, len(every))
        asked = [questions(renderer, every[place]) for place in chosen]
        address = f"http://{cluster.http_address}"
        found = measure_live(address, served_model(address), asked, concurrency)
        digest = model_digest(folder, ModelConfig.from_file(config.model.config_file))
        marks: dict[int, Marks] = {}
        shown = time.monotonic()
        try:
            for number, scores in found:
                marks[chosen[number]] = Marks.of(scores)
                if time.monotonic() - shown >= MAX_PAUSE_S:
                    shown = time.monotonic()
                    click.echo(_measured(len(marks), len(asked)), err=True)
                    Figures(digest, marks).save(folder / FIGURES)
        finally:
            click.echo(_measured(len(marks), len(asked)), err=True)
            if marks:
                Figures(digest, marks).save(folder / FIGURES)


def _measured(done: int, total: int) -> str:
    return f"measured {done} of {total} conversations"


@train.command("measure")
@click.option(
    "--address",
    default="http://127.0.0.1:8000",
    show_default=True,
    help="Where the gateways serve HTTP.",
)
@_conversations
@click.option("--concurrency", type=click.IntRange(1, 64), default=4, show_default=True)
@with_api_key
def train_measure(address: str, conversations: int, concurrency: int, api_key: str) -> None:
    """Ask a served model every question of the evaluation set; a table of exact matches.

    Every message of the assistant is asked for behind the reference's conversation, at
    temperature 0, with the tools declared. `valid` is the share of messages with a call where one
    is due and none elsewhere. If it ends early, the table is of the conversations until then.

    \b
    Example:
      ripresa serve --set model.path=/tmp/demo/checkpoint
      ripresa train measure --conversations 50
    """
    with progress("preparing"):
        from ripresa.cluster.training.figures import evenly
        from ripresa.cluster.training.live import measure_live, questions, served_model
        from ripresa.cluster.training.rendering import Renderer
        from ripresa.cluster.training.scores import table
        from ripresa.workers.demo.build_tokenizer import TOKENIZER
        from ripresa.workers.demo.ledger.evaluation import load_evaluation

        model = served_model(address, api_key)
        every = load_evaluation()
        chosen = [every[place] for place in evenly(conversations, len(every))]
        renderer = Renderer(TOKENIZER)
        asked = [questions(renderer, conversation) for conversation in chosen]
    scores, shown, done = [], time.monotonic(), 0
    try:
        for _, part in measure_live(address, model, asked, concurrency, api_key):
            scores += part
            done += 1
            if time.monotonic() - shown >= MAX_PAUSE_S:
                shown = time.monotonic()
                click.echo(_measured(done, len(asked)), err=True)
    finally:  # what was measured before a failure is no less true
        for line in table(scores, "valid") if scores else ():
            click.echo(line)
        if done < len(asked):
            click.echo(_measured(done, len(asked)), err=True)
