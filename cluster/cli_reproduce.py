"""How does a user compute a recorded answer again? The verb `ripresa reproduce`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from ripresa.workers.recording import Recording
    from ripresa.workers.reproduce import Difference


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--model",
    "model_path",
    default="",
    metavar="FOLDER",
    help="The checkpoint that was served. Default: the bundled demo model.",
)
@click.option(
    "--numerics",
    type=click.Choice(["deterministic", "fast"]),
    default="deterministic",
    show_default=True,
    help="As the cluster was configured.",
)
@click.option(
    "--kv-format",
    type=click.Choice(["packed", "float32"]),
    default="packed",
    show_default=True,
    help="As the cluster was configured.",
)
@click.option("--w8a8", is_flag=True, help="The cluster was configured with model.w8a8.")
@click.pass_context
def reproduce(
    ctx: click.Context, file: Path, model_path: str, numerics: str, kv_format: str, w8a8: bool
) -> None:
    """Compute a recorded answer again, on an empty cache, and compare it token by token.

    FILE comes from `ripresa generate --record FILE`. The recipe in it says which rows were computed
    and read, so that the answer is the same whatever the cluster's caches held. Other weights, or
    other replay rules, are refused. Exits 1 if the answers differ by more than rounding.

    \b
    Examples:
      ripresa generate --prompt "Once upon" --max-tokens 40 --record answer.json
      ripresa reproduce answer.json
    """
    from ripresa.workers.cache.kv_layout import KVFormat
    from ripresa.workers.config import Numerics
    from ripresa.workers.recording import read_recording
    from ripresa.workers.reproduce import check_comparable, load_for
    from ripresa.workers.reproduce import reproduce as compute
    from ripresa.workers.worker_process import model_folder

    recording = read_recording(file)
    folder = model_folder(model_path)
    check_comparable(recording, folder)
    runner = load_for(
        recording,
        folder,
        Numerics(numerics),
        KVFormat(kv_format),
        w8a8,
        lambda line: click.echo(line, err=True),
    )
    result = asyncio.run(compute(recording, runner))
    click.echo(_what(recording, result.num_encoder_rows))
    if result.difference is None:
        click.echo(f"equal: all {len(result.output_ids)} tokens, and the end")
        return
    click.echo(_told(result.difference))
    if not result.difference.is_rounding:
        ctx.exit(1)


def _what(recording: Recording, num_encoder_rows: int) -> str:
    recipe = recording.recipe
    return (
        f"prompt {len(recording.token_ids)} tokens, plan {recipe.kind} from {recipe.start}, "
        f"{len(recipe.restarts)} restarts, tail {recipe.tail}, seed {recipe.seed}; "
        f"{num_encoder_rows} encoder rows computed"
    )


def _told(difference: Difference) -> str:
    def token(token_id: int | None, logit: float | None) -> str:
        if token_id is None:
            return "the end"
        return f"{token_id}" if logit is None else f"{token_id} (logit {logit:.6f})"

    recorded = token(difference.recorded, difference.recorded_logit)
    computed = token(difference.computed, difference.computed_logit)
    verdict = "within rounding" if difference.is_rounding else "DIFFERENT"
    return f"{verdict}: token {difference.index} was {recorded} and is now {computed}"
