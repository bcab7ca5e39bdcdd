"""How does a user learn what replay costs in quality? The verb `ripresa eval replay`."""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from ripresa.cluster.cli_options import with_api_key
from ripresa.cluster.progress import progress
from ripresa.workers.errors import ConfigError, InvalidArgument

_DIFFERS = 1
"""Exit code: what must be equal is not."""


@click.group("eval")
def evaluation() -> None:
    """Measure a model's quality."""


@evaluation.command("replay")
@click.option(
    "--checkpoint",
    default="",
    metavar="FOLDER",
    help="A checkpoint with its tokenizer.json. Default: the bundled demo model.",
)
@click.option(
    "--conversations",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A file like workers/demo/ledger/evaluation.jsonl.xz. Default: that one.",
)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=40,
    show_default=True,
    help="Conversations, evenly spread over the file.",
)
@click.option(
    "--stacks",
    type=click.IntRange(min=0),
    default=6,
    show_default=True,
    help="Sequences for boundaries behind boundaries, and for costs by length.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "--numerics",
    type=click.Choice(["deterministic", "fast"]),
    default="deterministic",
    show_default=True,
    help="With deterministic ones, equal means bit for bit.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where results, tables and charts go; an evaluation that was begun there goes on.",
)
@click.option(
    "--report",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the page to this file as well, its charts beside it.",
)
@click.option(
    "--address",
    metavar="HOST:PORT",
    help="The gRPC port of a gateway that serves the checkpoint: ask it too, in every mode.",
)
@with_api_key
@click.option("--self-test", is_flag=True, help="Only compare what must be equal.")
@click.pass_context
def eval_replay(
    ctx: click.Context,
    checkpoint: str,
    conversations: Path | None,
    limit: int,
    stacks: int,
    seed: int,
    numerics: str,
    out: Path | None,
    report: Path | None,
    address: str | None,
    api_key: str,
    self_test: bool,
) -> None:
    """Measure what bounded replay costs: exact, decoder-bounded and both halves bounded.

    A decode engine in this process computes the same tokens in every way, through its real prefix
    cache and planner, and is compared with a cold run token by token. A gateway of --address is
    asked for a token first, and for the conversations last. Every conversation is kept when it is
    done, so that the same command goes on after a kill. Exits 1 if the arm without approximation
    is not equal to the cold run.

    \b
    Examples:
      ripresa eval replay --self-test
      ripresa eval replay --out /tmp/replay --limit 4 --stacks 1
      ripresa eval replay --checkpoint /tmp/demo/checkpoint --out /tmp/replay \\
          --report docs/replay-quality.md
    """
    if out is None and not self_test:
        raise click.UsageError("name a folder for the results with --out, or ask for --self-test")
    with progress("loading"):
        from ripresa.cluster.evaluation.evaluate import Evaluation, run_evaluation, run_self_test
        from ripresa.workers.config import Numerics
        from ripresa.workers.worker_process import model_folder

        folder = model_folder(checkpoint)
    asked = Evaluation(
        folder, conversations, limit, stacks, seed, Numerics(numerics), address, api_key
    )

    def echo(line: str) -> None:
        click.echo(line, err=not self_test)

    try:
        if self_test:
            if not asyncio.run(run_self_test(asked, echo)):
                ctx.exit(_DIFFERS)
            return
        assert out is not None
        command = _command(sys.argv[1:], api_key)
        asyncio.run(run_evaluation(asked, out, report, command, echo))
    except ConfigError as error:  # of the folder's config.json: no setting names it here
        raise InvalidArgument("--checkpoint", error.message) from error
    click.echo(f"wrote {out}" if report is None else f"wrote {out} and {report}")


def _command(arguments: Sequence[str], api_key: str) -> str:
    """What the page says it was made by: the key is not for its readers."""
    told = [each.replace(api_key, "KEY") if api_key else each for each in arguments]
    return shlex.join(["ripresa", *told])
