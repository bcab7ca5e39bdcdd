"""How does a user measure with recorded workloads? The verb `ripresa bench trace`."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ripresa.cluster.progress import MAX_PAUSE_S, progress
from ripresa.workers.errors import InvalidArgument

if TYPE_CHECKING:
    from ripresa.cluster.simulation.policy_bench import PolicyFigures

RELEASED_WINDOW = 128
RELEASED_REWIND = 6


@click.group()
def bench() -> None:
    """Measure with recorded workloads."""


@bench.command("trace")
@click.argument("trace", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--workers", default=8, show_default=True, help="Workers.")
@click.option(
    "--capacity", default=1_000_000, show_default=True, help="Tokens that each worker can keep."
)
@click.option(
    "--spread-hours",
    default=4.0,
    show_default=True,
    help="Conversations without a recorded start begin within so many hours.",
)
@click.option("--seed", default=0, show_default=True, help="Of the conversations' starts.")
@click.option(
    "--keep-copies",
    is_flag=True,
    help="What a worker pulls for a prompt takes room of its capacity, too.",
)
@click.option("--max-lines", default=None, type=int, help="Read no more lines of the file.")
def bench_trace(
    trace: Path,
    workers: int,
    capacity: int,
    spread_hours: float,
    seed: int,
    keep_copies: bool,
    max_lines: int | None,
) -> None:
    """Replay a recorded workload through the policy alone: no model, no cluster, no timing.

    FILE holds prompt lengths and block ids, or whole prompts, one JSON object a line, gzipped or
    not. Round robin, sticky sessions and one cache of all workers' capacity run beside the
    cluster's own index, routing and placement. The table says which share of the prompts' tokens
    is reused, how much more than the mean the busiest worker computes, and which share of all
    tokens a worker had to pull from another one.

    \b
    Examples:
      ripresa bench trace traces/claude_code_sessions.jsonl.gz
      ripresa bench trace traces/mooncake_conversation.jsonl.gz --workers 4 --capacity 500000
    """
    for name, value in (("--workers", workers), ("--capacity", capacity)):
        if value < 1:
            raise InvalidArgument(name, f"must be 1 or more, got {value}")
    if not 0 <= spread_hours < float("inf"):
        raise InvalidArgument("--spread-hours", f"must not be below 0, got {spread_hours}")
    if max_lines is not None and max_lines < 1:
        raise InvalidArgument("--max-lines", f"must be 1 or more, got {max_lines}")
    if capacity < RELEASED_WINDOW:
        raise InvalidArgument("--capacity", f"one block takes {RELEASED_WINDOW}, got {capacity}")
    from ripresa.cluster.simulation.arrivals import Workload
    from ripresa.cluster.simulation.policy_bench import compare_policies
    from ripresa.cluster.simulation.trace import read_trace
    from ripresa.workers.replay_query import ReplayGeometry

    # Where the policy is concerned, layers do not matter: finished turns leave their windows.
    geometry = ReplayGeometry(RELEASED_WINDOW, RELEASED_REWIND, 1, 1)
    with progress(f"reading {trace.name}"):
        conversations = read_trace(trace, geometry.window, max_lines)
        workload = Workload(conversations, geometry.window, spread_hours * 3600, seed)
    click.echo(
        f"{trace.name}: {len(workload):,} prompts of {workload.num_conversations:,} conversations; "
        f"{workers} workers of {capacity:,} tokens each, starts by seed {seed}"
    )
    told_at = time.monotonic()

    def tell(name: str, number: int) -> None:
        nonlocal told_at
        if time.monotonic() - told_at > MAX_PAUSE_S:
            told_at = time.monotonic()
            click.echo(f"{name}: {number:,} of {len(workload):,} prompts", err=True)

    _print_figures(
        compare_policies(
            workload, workers, capacity, geometry, keeps_copies=keep_copies, on_prompt=tell
        )
    )


def _print_figures(found: Iterable[PolicyFigures]) -> None:
    from ripresa.cluster.simulation.policy_bench import ONE_CACHE, OURS

    click.echo(f"{'policy':<18}{'hit ratio':>10}{'worst/mean':>12}{'pulled':>8}{'uncached':>16}")
    ratios = {}
    for figures in found:
        ratios[figures.name] = figures.hit_ratio
        click.echo(
            f"{figures.name:<18}{figures.hit_ratio:>10.3f}{figures.worst_to_mean:>12.2f}"
            f"{figures.pulled_ratio:>8.3f}{figures.num_uncached_tokens:>16,}"
        )
    if ratios[ONE_CACHE]:
        click.echo(f"{OURS} / {ONE_CACHE}: {ratios[OURS] / ratios[ONE_CACHE]:.3f}")
