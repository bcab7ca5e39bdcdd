"""How does a user see what workers will take before starting them? The verb `ripresa plan`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ripresa.workers.errors import ConfigError

if TYPE_CHECKING:
    from ripresa.cluster.config import ClusterConfig
    from ripresa.workers.host_memory import AvailableMemory
    from ripresa.workers.memory_plan import MemoryPlan

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@click.group()
def plan() -> None:
    """Work out what a configuration needs."""


@plan.command("memory")
@click.argument("config", type=click.Path(dir_okay=False, path_type=Path), required=False)
@click.option(
    "--set",
    "assignments",
    metavar="A.B=VALUE",
    multiple=True,
    help="Override a setting by its dotted name; repeat it for more.",
)
@click.option(
    "--available",
    metavar="BYTES",
    help="Memory of the machine that the plan is for, as 64G; default: what this one has left.",
)
def plan_memory(config: Path | None, assignments: tuple[str, ...], available: str | None) -> None:
    """What the workers of CONFIG keep in memory, item by item, and whether it fits.

    Only the model's config.json is read, so this works before a checkpoint is there. With
    `ray.address` null all workers share this machine; otherwise each is held against the limit by
    itself. Exits 2 and names the setting to change if something does not fit.

    \b
    Examples:
      ripresa plan memory config.yaml
      ripresa plan memory config.yaml --set decoders.num_blocks=4096 --available 64G
    """
    from ripresa.cluster.config import load_config

    settings = load_config(config, assignments)
    plans = [(plan, replicas) for plan, replicas in _plans(settings) if replicas > 0]
    for worker_plan, replicas in plans:
        for line in worker_plan.lines():
            click.echo(line)
        click.echo(f"  {'replicas':<16}{replicas:>12}")
    _show_disk(settings, max(worker_plan.block_bytes for worker_plan, _ in plans))
    limit = _limit(available)
    if limit is None:
        click.echo("available: unknown; name it with --available")
        return
    from ripresa.workers.memory_plan import size

    click.echo(f"available: {size(limit.num_bytes)}, {limit.source}")
    for worker_plan, _ in plans:
        worker_plan.require_fit(limit)
    total = sum(worker_plan.peak * replicas for worker_plan, replicas in plans)
    total += max(worker_plan.shared_tables for worker_plan, _ in plans)
    if settings.ray.address is None:
        click.echo(f"all workers: {size(total)}")
        if total > limit.num_bytes:
            raise ConfigError(
                "decoders.replicas",
                f"all workers together take {size(total)}, {size(limit.num_bytes)} are left by "
                f"{limit.source}; set fewer replicas or num_blocks, or join a cluster of more "
                "machines with ray.address",
            )


def _show_disk(settings: ClusterConfig, block_bytes: int) -> None:
    """What the disk tier may take of a machine, and whether this one's disk has so much."""
    from ripresa.workers.memory_plan import size

    disk = settings.disk
    if disk.path is None:
        return
    num_blocks = disk.capacity_bytes // block_bytes
    click.echo(f"disk: {size(disk.capacity_bytes)} at most, {num_blocks} blocks, below {disk.path}")
    if settings.ray.address is not None:
        return
    folder = Path(disk.path)
    while not folder.is_dir():
        folder = folder.parent
    total = shutil.disk_usage(folder).total
    if disk.capacity_bytes > total:
        raise ConfigError(
            "disk.capacity_bytes",
            f"{size(disk.capacity_bytes)} do not fit on the disk of {folder}, which has "
            f"{size(total)}",
        )


def _plans(settings: ClusterConfig) -> list[tuple[MemoryPlan, int]]:
    from ripresa.workers.memory_plan import plan_memory as plan_of
    from ripresa.workers.model_runner import DEFAULT_WORKSPACE_BYTES, kv_layout
    from ripresa.workers.models.deepseek_v41.config import ModelConfig
    from ripresa.workers.models.deepseek_v41.tensor_specs import Half

    model = ModelConfig.from_file(settings.model.config_file)
    return [
        (
            plan_of(
                model,
                half,
                engine,
                settings.lanes(),
                kv_layout(model, engine.kv_format, ""),
                DEFAULT_WORKSPACE_BYTES,
            ),
            replicas,
        )
        for half, engine, replicas in (
            (Half.ENCODER, settings.encoder_engine(), settings.encoders.replicas),
            (Half.ALL, settings.decoder_engine(), settings.decoders.replicas),
        )
    ]


def _limit(available: str | None) -> AvailableMemory | None:
    from ripresa.workers.host_memory import AvailableMemory, available_memory

    if available is None:
        return available_memory()
    text = available.strip().upper().removesuffix("B").removesuffix("I")
    number, unit = (text[:-1], text[-1:]) if text[-1:] in UNITS else (text, "")
    try:
        num_bytes = int(float(number) * UNITS[unit])
    except (ValueError, OverflowError) as error:
        raise ConfigError("--available", f"{available!r} is no size; say 64G") from error
    if num_bytes <= 0:
        raise ConfigError("--available", "must be above 0")
    return AvailableMemory(num_bytes, "--available")
