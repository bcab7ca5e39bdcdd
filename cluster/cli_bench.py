"""How does a user measure with recorded workloads? The verb `ripresa bench trace`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ripresa.cluster.cli_options import FiniteRange, with_api_key
from ripresa.cluster.progress import MAX_PAUSE_S, progress
from ripresa.workers.errors import InvalidArgument

if TYPE_CHECKING:
    from ripresa.cluster.simulation.arrivals import Workload
    from ripresa.cluster.simulation.policy_bench import PolicyFigures
    from ripresa.workers.replay_query import ReplayGeometry

RELEASED_WINDOW = 128
RELEASED_REWIND = 6
CONNECT_TIMEOUT_S = 15.0


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
    type=FiniteRange(min=0),
    default=4.0,
    show_default=True,
    help="Conversations without a recorded start begin within so many hours.",
)
@click.option("--seed", default=0, show_default=True, help="Of the conversations' starts.")
@click.option(
    "--leases",
    "lease_share",
    type=FiniteRange(0, 1),
    help="Also sticky sessions whose tool calls pin at most this share of a worker; slow.",
)
@click.option("--max-lines", type=click.IntRange(min=1), help="Read no more lines of the file.")
@click.option("--address", help="Send the prompts, scaled down, to the cluster at this gateway.")
@click.option(
    "--scale", default=16, show_default=True, help="Of a live run: tokens that become one."
)
@click.option(
    "--max-prompts", default=200, show_default=True, help="Of a live run: prompts to send."
)
@click.option(
    "--max-prompt-tokens",
    default=3_000,
    show_default=True,
    help="Of a live run: longer prompts lose their ends.",
)
@click.option(
    "--max-tokens", default=4, show_default=True, help="Of a live run: tokens of an answer."
)
@click.option(
    "--concurrency", default=4, show_default=True, help="Of a live run: prompts under way."
)
@with_api_key
def bench_trace(
    trace: Path,
    seed: int,
    spread_hours: float,
    lease_share: float | None,
    max_lines: int | None,
    address: str | None,
    api_key: str,
    **counts: int,
) -> None:
    """Replay a recorded workload through the policy alone: no model, no cluster, no timing.

    FILE holds prompt lengths and block ids, or whole prompts, one JSON object a line, gzipped or
    not. Round robin, sticky sessions and one cache of all workers' capacity run beside the
    cluster's own index, routing and placement. The table says which share of the prompts' tokens
    is reused, how much more than the mean the busiest worker computes, and which shares of all
    tokens a worker had to pull from another one, or gave to another one instead of evicting them.

    With --address the prompts go to a running cluster instead, their lengths scaled down and their
    token ids made from the block ids. It prints which share of the tokens was cached, what one
    cache that forgets nothing would have had, and times to the first token as ratios.

    \b
    Examples:
      ripresa bench trace traces/claude_code_sessions.jsonl.gz
      ripresa bench trace traces/mooncake_conversation.jsonl.gz --workers 4 --capacity 500000
      ripresa bench trace traces/claude_code_sessions.jsonl.gz --address 127.0.0.1:9000
    """
    for name, value in counts.items():
        if value < 1:
            raise InvalidArgument(f"--{name.replace('_', '-')}", f"must be 1 or more, got {value}")
    if counts["capacity"] < RELEASED_WINDOW:
        raise InvalidArgument("--capacity", f"one block takes {RELEASED_WINDOW} tokens")
    from ripresa.cluster.simulation.arrivals import Workload
    from ripresa.cluster.simulation.trace import read_trace
    from ripresa.workers.replay_query import ReplayGeometry

    # Where the policy is concerned, layers do not matter: finished turns leave their windows.
    geometry = ReplayGeometry(RELEASED_WINDOW, RELEASED_REWIND, 1, 1)
    window = RELEASED_WINDOW * (1 if address is None else counts["scale"])
    with progress(f"reading {trace.name}"):
        workload = Workload(read_trace(trace, window, max_lines), window, spread_hours * 3600, seed)
    click.echo(
        f"{trace.name}: {len(workload):,} prompts of {workload.num_conversations:,} "
        f"conversations, starts by seed {seed}"
    )
    if address is None:
        _replay(workload, geometry, counts["workers"], counts["capacity"], lease_share)
    else:
        _replay_live(workload, geometry, address, api_key, counts)


def _telling(what: str, num_prompts: int) -> Callable[[int], None]:
    """Says on stderr how far it is, every few seconds."""
    told_at = time.monotonic()

    def tell(number: int) -> None:
        nonlocal told_at
        if time.monotonic() - told_at > MAX_PAUSE_S:
            told_at = time.monotonic()
            click.echo(f"{what}: {number:,} of {num_prompts:,} prompts", err=True)

    return tell


def _replay(
    workload: Workload,
    geometry: ReplayGeometry,
    workers: int,
    capacity: int,
    lease_share: float | None,
) -> None:
    from ripresa.cluster.simulation.policy_bench import compare_policies
    from ripresa.workers.config import LeaseConfig

    click.echo(f"{workers} workers of {capacity:,} tokens each")
    _print_figures(
        compare_policies(
            workload,
            workers,
            capacity,
            geometry,
            leases=None if lease_share is None else LeaseConfig(max_share=lease_share),
            telling=lambda name: _telling(name, len(workload)),
        )
    )


def _replay_live(
    workload: Workload,
    geometry: ReplayGeometry,
    address: str,
    api_key: str,
    counts: Mapping[str, int],
) -> None:
    from ripresa.cluster.client import Client
    from ripresa.cluster.simulation.live_bench import Answered, replay_live

    with Client(address, api_key=api_key or None) as client:
        with progress(f"connecting to {address}"):
            client.wait_until_connected(CONNECT_TIMEOUT_S)

        def ask(tokens: Sequence[int], max_tokens: int) -> Answered:
            stream = client.generate(
                tokens, max_tokens=max_tokens, temperature=0.0, ignore_eos=True
            )
            completed = stream.answer().completed
            assert completed is not None  # or `answer` would have raised
            usage, timings = completed.usage, completed.timings
            first_token_s = timings.time_to_first_token_s or 0.0
            return Answered(usage.prompt_tokens, usage.cached_tokens, first_token_s)

        figures = replay_live(
            workload,
            geometry,
            ask,
            max_prompts=counts["max_prompts"],
            max_prompt_tokens=counts["max_prompt_tokens"],
            max_tokens=counts["max_tokens"],
            concurrency=counts["concurrency"],
            on_prompt=_telling(address, min(counts["max_prompts"], len(workload))),
        )
    click.echo(
        f"{figures.num_prompts:,} prompts sent, {counts['scale']} tokens as one; "
        f"{figures.num_cut:,} lost their ends"
    )
    click.echo(f"hit ratio {figures.hit_ratio:.3f}; unbounded cache {figures.best_ratio:.3f}")
    if figures.cold_s and figures.first_token_s is not None:
        ratios = " ".join(f"{time_s / figures.cold_s:.2f}" for time_s in figures.first_token_s)
        click.echo(f"first token of warm prompts, p50 p90 p99 / median of cold ones: {ratios}")


def _print_figures(found: Iterable[PolicyFigures]) -> None:
    from ripresa.cluster.simulation.policy_bench import ONE_CACHE, OURS

    click.echo(
        f"{'policy':<18}{'hit ratio':>10}{'worst/mean':>12}{'pulled':>8}{'moved':>8}"
        f"{'uncached':>16}"
    )
    ratios = {}
    for figures in found:
        ratios[figures.name] = figures.hit_ratio
        click.echo(
            f"{figures.name:<18}{figures.hit_ratio:>10.3f}{figures.worst_to_mean:>12.2f}"
            f"{figures.pulled_ratio:>8.3f}{figures.moved_ratio:>8.3f}{figures.num_uncached_tokens:>16,}"
        )
    if ratios[ONE_CACHE]:
        click.echo(f"{OURS} / {ONE_CACHE}: {ratios[OURS] / ratios[ONE_CACHE]:.3f}")
