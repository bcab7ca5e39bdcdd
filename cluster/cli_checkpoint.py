"""How does a user look into a checkpoint, or make a small one? `ripresa checkpoint`."""

from __future__ import annotations

from pathlib import Path

import click

from ripresa.cluster.progress import progress
from ripresa.workers.demo.checkpoint import DEMO_MODEL

FORMATS = ("f32", "bf16", "f8", "fp4", "released")

checkpoint_folder = click.Path(file_okay=False, path_type=Path)
_served_folder = click.argument(
    "folder", metavar="[DIR]", type=checkpoint_folder, default=DEMO_MODEL, required=False
)


@click.group()
def checkpoint() -> None:
    """Look into checkpoints, make small ones."""


@checkpoint.command("inspect")
@_served_folder
def inspect(folder: Path) -> None:
    """Say what is in the checkpoint folder DIR and which worker would read which part.

    Every tensor's name, type and shape is held against config.json, as when a worker starts; only
    headers are read. What is recognised but not loaded is named: vision, and draft stages. Without
    DIR it is the bundled demo model.

    \b
    Example:
      ripresa checkpoint inspect /models/deepseek-v4.1-flash
    """
    with progress("reading headers"):
        from ripresa.workers.checkpoint_report import report_checkpoint

        for line in report_checkpoint(folder):
            click.echo(line)


@checkpoint.command("tiny")
@click.argument("folder", metavar="DIR", type=checkpoint_folder)
@click.option(
    "--config",
    "config_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A config.json with the sizes.",
)
@click.option("--geometry", type=click.Choice(["demo"]), help="The bundled model's sizes.")
@click.option(
    "--format",
    "weight_format",
    type=click.Choice(FORMATS),
    default="released",
    show_default=True,
    help="Storage of linear weights; released: experts fp4, the others f8.",
)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True)
@click.option("--shards", type=click.IntRange(1, 1000), default=4, show_default=True)
def tiny(
    folder: Path,
    config_file: Path | None,
    geometry: str | None,
    weight_format: str,
    seed: int,
    shards: int,
) -> None:
    """Write a checkpoint of random weights to the new folder DIR.

    Names, storage formats, shards and index are the release's; Engram tables and draft stages are
    there if the config has them. The same seed gives the same numbers on every machine.

    \b
    Examples:
      ripresa checkpoint tiny /tmp/tiny --geometry demo --format released
      ripresa checkpoint tiny /tmp/tiny --config config.json --format bf16 --seed 7
    """
    if (config_file is None) == (geometry is None):
        raise click.UsageError("give one of --config and --geometry")
    with progress("writing"):
        from ripresa.workers.models.tiny_checkpoint import (
            WeightFormat,
            read_config,
            write_tiny_checkpoint,
        )

        if config_file is None:
            config_file = DEMO_MODEL / "config.json"
        document = read_config(config_file)
        files = write_tiny_checkpoint(folder, document, WeightFormat(weight_format), seed, shards)
        if geometry is not None:
            tokenizer = config_file.with_name("tokenizer.json")
            (folder / tokenizer.name).write_bytes(tokenizer.read_bytes())
            files.append(folder / tokenizer.name)
    for file in files:
        click.echo(f"{file} {file.stat().st_size}")


@click.command()
@_served_folder
@click.option(
    "--golden",
    metavar="CASE",
    type=click.Path(file_okay=False, path_type=Path),
    help="Find the first layer that differs from this golden folder.",
)
@click.option("--record", is_flag=True, help="Write the files' hashes to DIR/SHA256SUMS first.")
@click.pass_context
def doctor(ctx: click.Context, folder: Path, golden: Path | None, record: bool) -> None:
    """Find out why the model in DIR is wrong: files, tokenizer, layers, perplexity.

    Files are hashed and held against DIR/SHA256SUMS if that is there. Then the whole model runs
    once on a shipped text: scale and broken numbers of every layer, and the perplexity. Needs
    memory for the whole model. Exits 1 if something is wrong. Without DIR it is the bundled model.

    \b
    Examples:
      ripresa doctor /models/deepseek-v4.1-flash
      ripresa doctor my_model --golden golden/case_b_grids_engram_replay
    """
    with progress("examining"):
        from ripresa.workers.doctor import examine

        good = examine(folder, golden, click.echo, record=record)
    if not good:
        ctx.exit(1)
