"""Which options, and types of options, do several verbs share?"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import click

YEAR_S = 365 * 24 * 3600
"""What is asked to last longer is a slip of the hand, and more than timers and gRPC can count."""

F = TypeVar("F", bound=Callable[..., Any])


class FiniteRange(click.FloatRange):
    """A number within a range; `nan`, which no comparison keeps out, and `inf` are none."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


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
