"""Is nothing kept back of what Ray prints at its end, but what ended as it should?"""

from __future__ import annotations

import pytest

from ripresa.cluster.ray_farewells import without_farewells

FAILED = "failed. There are infinite retries remaining, so the task will be retried. Error:"
KILLED = "The actor is dead because it was killed by `ray.kill`."
CRASHED = "The actor is dead because its worker process has died."


def told(task: str, error: str) -> str:
    return f"(raylet) Task {task} {FAILED} {error}"


FAREWELLS = [
    told("ServeController.listen_for_change", KILLED),
    told("ServeController.graceful_shutdown", KILLED),
]
NEWS = [
    told("ServeController.listen_for_change", CRASHED),
    told("PrefixDirectory.look_up", KILLED),
    "(raylet) A worker died or was killed while executing a task.",
]


def test_news_are_told_and_farewells_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    with without_farewells():
        for line in (NEWS[0], *FAREWELLS, *NEWS[1:]):
            print(line)
    assert capsys.readouterr().out.splitlines() == NEWS


def test_news_are_told_of_a_stop_that_fails(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        print(NEWS[0])
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"), without_farewells():
        fail()
    assert capsys.readouterr().out.splitlines() == NEWS[:1]
