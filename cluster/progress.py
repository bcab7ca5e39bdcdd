"""What tells a waiting user that something goes on? A line on stderr, after two seconds first."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

FIRST_AFTER_S = 2.0
MAX_PAUSE_S = 10.0


def _echo(line: str) -> None:
    click.echo(line, err=True)


@contextmanager
def progress(
    what: str, *, first_after_s: float = FIRST_AFTER_S, echo: Callable[[str], None] = _echo
) -> Iterator[None]:
    """While the body runs, say so after `first_after_s` seconds, then each time that doubles, and
    at least every ten seconds.

    A body that is quicker leaves no line.
    """
    over = threading.Event()
    started = time.monotonic()

    def tell() -> None:
        pause = first_after_s
        while not over.wait(pause):
            echo(f"{what}: {time.monotonic() - started:.0f} s so far")
            pause = min(time.monotonic() - started, MAX_PAUSE_S)

    teller = threading.Thread(target=tell, name="progress", daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()
