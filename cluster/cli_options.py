"""Which options do several verbs share?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


def with_api_key(command: F) -> F:
    """The key of a server that asks for one; the environment keeps it out of process lists."""
    option = click.option(
        "--api-key",
        envvar="RIPRESA_API_KEY",
        default="",
        help="Your key, if the server asks for one.  [env: RIPRESA_API_KEY]",
    )
    return option(command)


def with_overrides(command: F) -> F:
    """The `--set` option of every verb that reads a configuration."""
    option = click.option(
        "--set",
        "assignments",
        metavar="A.B=VALUE",
        multiple=True,
        help="Override a setting by its dotted name; repeat it for more.",
    )
    return option(command)
