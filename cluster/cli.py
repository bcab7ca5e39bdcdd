"""What can a user type? The `ripresa` command: its verbs, its help, its exit codes.

Each verb imports what it needs when it runs, so that `--help` answers at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ripresa.cluster.cli_admin import admin
from ripresa.cluster.cli_bench import bench
from ripresa.cluster.cli_checkpoint import checkpoint, doctor
from ripresa.cluster.cli_eval import evaluation
from ripresa.cluster.cli_explain import explain
from ripresa.cluster.cli_generate import generate
from ripresa.cluster.cli_options import with_api_key, with_overrides
from ripresa.cluster.cli_plan import plan
from ripresa.cluster.cli_reproduce import reproduce
from ripresa.cluster.cli_train import train
from ripresa.cluster.cli_verify_replay import verify_replay
from ripresa.cluster.progress import progress
from ripresa.cluster.version import VERSION
from ripresa.workers.errors import ErrorCode, RipresaError

if TYPE_CHECKING:
    from ripresa.cluster.config import ClusterConfig

FAILED = 1
"""Exit code: something that was asked for correctly did not work."""
MISUSED = 2
"""Exit code: what was asked for is wrong; also click's own for bad options."""

_MISUSE = frozenset({ErrorCode.INVALID_ARGUMENT, ErrorCode.NOT_FOUND, ErrorCode.ALREADY_EXISTS})


class _Failed(click.ClickException):
    exit_code = FAILED


class _Misused(click.ClickException):
    exit_code = MISUSED


class _Ripresa(click.Group):
    """Turns a `RipresaError` of any verb into one line on stderr and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except RipresaError as error:
            kind = _Misused if error.code in _MISUSE else _Failed
            raise kind(" ".join(str(error).split())) from error


config_file = click.Path(exists=False, dir_okay=False, path_type=Path)


@click.group(cls=_Ripresa, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="ripresa")
def cli() -> None:
    """Serve a DeepSeek-V4.1-class model from a cluster of encoder and decode workers.

    \b
    Try it:
      ripresa demo                            start, run an agent's loop, stop
      ripresa serve                           serve until Ctrl-C, on 127.0.0.1:9000
      ripresa generate --prompt "Once upon"   ask it, from another terminal

    \b
    Exit codes: 0 done; 1 it failed; 2 what was asked for is wrong; 130 interrupted.
    """


@cli.command()
@click.option("--config", type=config_file, help="Start from this configuration file.")
@click.option(
    "--ledger",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Draw another ledger and other questions.",
)
@with_overrides
@with_api_key
@click.pass_context
def demo(
    ctx: click.Context,
    config: Path | None,
    ledger: int,
    assignments: tuple[str, ...],
    api_key: str,
) -> None:
    """Start a local cluster, let its model answer with tools from a ledger, stop everything.

    The cluster is the real one, small: a gateway, an encoder worker and a decode worker with the
    bundled demo model, each in a process of its own. The model decides which tool it calls. Every
    answer prints its calls, their results, and how much of the prompt was cached and computed.
    Exits 1 if the bundled model answers wrong.

    \b
    Examples:
      ripresa demo
      ripresa demo --ledger 7
      ripresa demo --set decoders.replicas=2
      ripresa demo --set encoders.replicas=0    the decode worker prefills by itself
    """
    split = ("encoders.replicas=1", "planner.max_local_rows=0") if config is None else ()
    settings = _load(config, (*split, *assignments))
    _require_free_ports(settings)
    with progress("loading"):
        from ripresa.cluster.demo import run_demo

    if not run_demo(settings, ledger, api_key or None):
        ctx.exit(FAILED)


@cli.command()
@click.argument("config", type=config_file, required=False)
@with_overrides
def serve(config: Path | None, assignments: tuple[str, ...]) -> None:
    """Serve until interrupted. Without CONFIG: one decode worker with the demo model.

    \b
    Examples:
      ripresa serve
      ripresa serve config.yaml
      ripresa serve config.yaml --set encoders.replicas=2 --set gateway.grpc_port=9100

    `ripresa check config CONFIG` prints every setting with its value.
    """
    settings = _load(config, assignments)
    _require_free_ports(settings)
    with progress("loading"):
        from ripresa.cluster.app import serve_forever

    serve_forever(settings)


@cli.group()
def check() -> None:
    """Look before you start."""


@check.command("config")
@click.argument("config", type=config_file)
@with_overrides
def check_config(config: Path, assignments: tuple[str, ...]) -> None:
    """Check a configuration file; print every setting with its value.

    Unknown names, wrong types and values out of range are refused by their dotted name, and the
    budgets are held against the model's geometry. The output is a valid configuration file.

    \b
    Examples:
      ripresa check config config.yaml
      ripresa check config config.yaml --set encoders.replicas=2
    """
    from ripresa.cluster.config_tree import dump

    click.echo(dump(_load(config, assignments)), nl=False)


cli.add_command(admin)
cli.add_command(bench)
cli.add_command(generate)
cli.add_command(evaluation)
cli.add_command(explain)
cli.add_command(checkpoint)
cli.add_command(doctor)
cli.add_command(plan)
cli.add_command(reproduce)
cli.add_command(train)


@cli.group()
def verify() -> None:
    """Compare what is computed here with references."""


verify.add_command(verify_replay)


@verify.command("golden")
@click.argument("cases", metavar="CASE...", nargs=-1, required=True)
@click.option("--quick", is_flag=True, help="One process and split only, no other chunkings.")
@click.pass_context
def verify_golden(ctx: click.Context, cases: tuple[str, ...], quick: bool) -> None:
    """Recompute golden folders; a line a tensor: largest difference, limit, verdict.

    CASE is a folder with a checkpoint, inputs and reference tensors. Tensors of features that are
    not built yet are reported as skipped. Exits 1 if any tensor differs.

    \b
    Example:
      ripresa verify golden golden/case_a_plain_float golden/case_g_plain_replay
    """
    from ripresa.workers.verify_golden import verify_golden as verify_folders

    agrees = verify_folders(
        [Path(case) for case in cases],
        click.echo,
        quick=quick,
        progress=lambda line: click.echo(line, err=True),
    )
    if not agrees:
        ctx.exit(FAILED)


def _load(config: Path | None, assignments: Sequence[str]) -> ClusterConfig:
    """The configuration, checked by itself and against its model's geometry."""
    from ripresa.cluster.config import check_against_model, load_config
    from ripresa.workers.models.deepseek_v41.config import ModelConfig

    settings = load_config(config, assignments)
    model = ModelConfig.from_file(settings.model.config_file)
    check_against_model(settings, model)
    return settings


def _require_free_ports(settings: ClusterConfig) -> None:
    """Refuse a taken port before a cluster is started; a joined cluster's ports are elsewhere."""
    from ripresa.cluster.gateway.grpc_server import free_port

    gateway = settings.gateway
    if settings.ray.address is None:
        free_port(gateway.grpc_host, gateway.grpc_port, "gateway.grpc_port")
        free_port(gateway.http_host, gateway.http_port, "gateway.http_port")
        free_port(settings.admin.host, settings.admin.port, "admin.port")


def main() -> None:
    """The entry point. An interrupt ends with 130, like a shell's."""
    try:
        code = cli.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        raise SystemExit(error.exit_code) from error
    except click.Abort as error:
        click.echo("interrupted", err=True)
        raise SystemExit(130) from error
    raise SystemExit(code)
