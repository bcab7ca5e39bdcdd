"""How does an operator look after a cluster? The verbs below `ripresa admin`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ripresa.cluster.cli_options import FiniteRange

if TYPE_CHECKING:
    from ripresa.cluster.client.admin import AdminClient

F = TypeVar("F", bound=Callable[..., Any])

CONNECT_TIMEOUT_S = 10.0


def with_address(command: F) -> F:
    """The options of every verb that asks a cluster."""
    options = (
        click.option(
            "--address",
            default="127.0.0.1:9001",
            show_default=True,
            help="A gateway's Admin port (admin.port).",
        ),
        click.option(
            "--api-key",
            envvar="RIPRESA_ADMIN_KEY",
            default="",
            help="An operator's key, if the port asks for one.  [env: RIPRESA_ADMIN_KEY]",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


@contextmanager
def connected(address: str, api_key: str) -> Iterator[AdminClient]:
    from ripresa.cluster.client.admin import AdminClient

    with AdminClient(address, api_key or None) as client:
        client.wait_until_connected(CONNECT_TIMEOUT_S)
        yield client


@click.group()
def admin() -> None:
    """Look after a running cluster, and its API keys.

    \b
    Examples:
      ripresa admin status
      ripresa admin drain WORKER_ID
      ripresa admin flush --tenant acme
    """


@admin.command()
@with_address
def status(address: str, api_key: str) -> None:
    """Print the workers: kind, state, requests, sessions, KV memory in use."""
    with connected(address, api_key) as client:
        found = client.status()
    click.echo(
        f"{'worker':<16}{'kind':<10}{'state':<10}{'running':>8}{'waiting':>8}{'sessions':>9}"
        f"{'KV in use':>18}"
    )
    for worker in found.workers:
        used, total = worker.kv_bytes_used / 1e6, worker.kv_bytes_total / 1e6
        click.echo(
            f"{worker.worker_id:<16}{worker.kind:<10}{_state(worker.state):<10}"
            f"{worker.running_requests:>8}{worker.waiting_requests:>8}{worker.open_sessions:>9}"
            f"{f'{used:.1f} of {total:.1f} MB':>18}"
        )


@admin.command()
@click.argument("worker_id")
@click.option(
    "--grace",
    "grace_s",
    type=FiniteRange(0, 24 * 3600),
    help="Seconds for its streams to end there, a second or two if less than one is asked for; "
    "then they go on elsewhere. Default: 30.",
)
@click.option(
    "--migrate/--no-migrate",
    default=True,
    show_default=True,
    help="Give its sessions, with their KV, to other workers.",
)
@with_address
def drain(worker_id: str, grace_s: float | None, migrate: bool, address: str, api_key: str) -> None:
    """Let a worker leave without losing anything; print how far it is.

    It takes no new requests from now on. Ctrl-C ends the printing alone: the drain goes on, and
    `ripresa admin resume` calls it off. A drained worker can be stopped.
    """
    with (
        connected(address, api_key) as client,
        closing(client.drain(worker_id, grace_s=grace_s, migrate=migrate)) as told,
    ):
        for progress in told:
            click.echo(
                f"{_state(progress.state)}: {progress.running_requests} requests and "
                f"{progress.sessions_left} sessions left, "
                f"{progress.bytes_migrated / 1e6:.1f} MB moved"
            )


@admin.command()
@click.argument("worker_id")
@with_address
def resume(worker_id: str, address: str, api_key: str) -> None:
    """Let a worker that was drained, or is being, take requests again."""
    with connected(address, api_key) as client:
        client.resume(worker_id)
    click.echo(f"{worker_id} is ready")


@admin.command("prefix-stats")
@click.option("--top", type=click.IntRange(0, 100), default=10, show_default=True)
@click.option("--tenant", default="", help="Only this tenant's prefixes.")
@with_address
def prefix_stats(top: int, tenant: str, address: str, api_key: str) -> None:
    """Print what the prefix directory was asked for, and the prefixes that are used most."""
    with connected(address, api_key) as client:
        found = client.prefix_stats(tenant=tenant, top=top)
    click.echo(
        f"{found.lookups:,} lookups of {found.lookup_tokens:,} tokens; "
        f"{found.hit_tokens:,} of them were held by some worker"
    )
    for entry in found.top:
        when = entry.last_used_time.ToDatetime().isoformat(" ", "seconds")
        click.echo(
            f"{entry.digest.hex()}  {entry.num_tokens:>8,} tokens  {entry.hits:>6,} hits  "
            f"last {when} UTC  on {', '.join(entry.worker_ids) or 'no worker now'}"
        )


@admin.command()
@click.option("--tenant", default="", help="Only this tenant's state.")
@click.option("--worker", "worker_id", default="", help="Only on this worker.")
@click.option("--all", "everything", is_flag=True, help="Everybody's state, everywhere.")
@with_address
def flush(tenant: str, worker_id: str, everything: bool, address: str, api_key: str) -> None:
    """Forget cached prefixes and sessions, in memory and on disk; running requests go on.

    Workers of one machine share its disk: of that, `--worker` forgets the machine's.
    """
    if everything is bool(tenant or worker_id):
        raise click.UsageError("name a --tenant, a --worker or both; or say --all")
    with connected(address, api_key) as client:
        num_tokens = client.flush(tenant=tenant, worker_id=worker_id)
    click.echo(f"{num_tokens:,} tokens of block KV forgotten, every copy counted")


@admin.command("new-key")
def new_key() -> None:
    """Make an API key: the key itself for its user, its digest for the key file.

    The key is shown here and nowhere again; the server needs the digest alone. In the file:

    \b
      tenants:
        acme:
          keys: ["sha256:..."]
          max_running: 8            optional: answers under way at once
          tokens_per_minute: 200000 optional: computed and generated tokens
    """
    from ripresa.cluster.gateway import api_keys

    key = api_keys.new_key()
    click.echo(f"key     {key}")
    click.echo(f"digest  {api_keys.key_digest(key)}")


def _state(state: Any) -> str:
    from ripresa.cluster.client.admin import state_name

    return state_name(state)
