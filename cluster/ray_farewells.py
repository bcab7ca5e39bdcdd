"""What does Ray say as it is stopped? Nothing of what ended as it should; everything else."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

import click

_FAREWELL = re.compile(r"Task ServeController\.\w+ failed\. .*killed by `ray\.kill`")


@contextmanager
def without_farewells() -> Iterator[None]:
    """Serve and Ray are stopped within; what they print is printed when they have.

    Serve's controller ends itself by `ray.kill` while this process waits for its answers. Ray
    takes these calls for failed ones and prints so, whatever `log_to_driver` says.
    """
    said = io.StringIO()
    try:
        with redirect_stdout(said):
            yield
    finally:
        for line in said.getvalue().splitlines():
            if not _FAREWELL.search(line):
                click.echo(line)
