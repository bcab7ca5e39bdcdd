"""Is a long wait told, and a short one not?"""

from __future__ import annotations

import threading

import pytest

from ripresa.cluster.progress import progress


def test_a_quick_body_leaves_no_line() -> None:
    lines: list[str] = []
    with progress("quick", first_after_s=3600, echo=lines.append):
        pass
    assert lines == []


def test_a_long_body_is_told_again_and_again() -> None:
    lines: list[str] = []
    enough = threading.Event()

    def echo(line: str) -> None:
        lines.append(line)
        if len(lines) == 3:
            enough.set()

    with progress("starting", first_after_s=0.01, echo=echo):
        assert enough.wait(60)
    assert lines[0] == "starting: 0 s so far"
    assert threading.active_count() == 1 or not any(
        thread.name == "progress" for thread in threading.enumerate()
    )


def test_a_failure_ends_the_telling() -> None:
    with pytest.raises(ZeroDivisionError), progress("failing", first_after_s=3600):
        raise ZeroDivisionError
    assert not any(thread.name == "progress" for thread in threading.enumerate())
