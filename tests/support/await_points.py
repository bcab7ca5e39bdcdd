"""At which turns of the event loop is something cancelled? At each one, while that is cheap."""

from __future__ import annotations

from collections.abc import Iterator

_STRIDE = 16
"""One part in so many of the turns so far is skipped."""


def numbers_of_turns(step: int = 1) -> Iterator[int]:
    """0, `step`, 2 `step` and so on, in growing strides, without end.

    What waits for a thread takes any number of the turns of a loop that has nothing else to do, so
    that trying every one has no bound that holds on every machine.
    """
    turns = 0
    while True:
        yield turns
        turns += step + turns // _STRIDE
