"""How do measured messages become a table? Exact matches by task and distance."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ripresa.workers.demo.ledger.conversation import Task

ALL = "all"
"""Instead of a distance: every message of a task."""


@dataclass(frozen=True, slots=True)
class Score:
    """One assistant's message.

    Attributes:
        bucket: of the distance to what it was read from, if it was read.
        is_exact: all of it was right.
        share: how much of it was.
    """

    task: Task
    bucket: str | None
    is_exact: bool
    share: float


@dataclass(frozen=True, slots=True)
class Row:
    """The messages of a task, all of them or those of one bucket.

    Attributes:
        exact: share of messages that were right.
        share: mean share of a message that was.
    """

    task: Task
    distance: str
    num_messages: int
    exact: float
    share: float


def rows(scores: Sequence[Score]) -> Iterator[Row]:
    """By task, and in each by distance, behind all of them."""
    groups: dict[tuple[Task, str], list[Score]] = defaultdict(list)
    for score in scores:
        groups[score.task, ALL].append(score)
        if score.bucket is not None:
            groups[score.task, score.bucket].append(score)

    def order(key: tuple[Task, str]) -> tuple[int, int]:
        task, distance = key
        return list(Task).index(task), -1 if distance == ALL else int(distance.split("-")[0])

    for task, distance in sorted(groups, key=order):
        part = groups[task, distance]
        exact = sum(score.is_exact for score in part) / len(part)
        share = sum(score.share for score in part) / len(part)
        yield Row(task, distance, len(part), exact, share)


def table(scores: Sequence[Score], share: str) -> Iterator[str]:
    """Lines: task, distance, number of messages, exact matches, and the mean share, so named."""
    yield f"{'task':14} {'distance':>10} {'messages':>8} {'exact':>6} {share:>7}"
    for row in rows(scores):
        yield (
            f"{row.task:14} {row.distance:>10} {row.num_messages:8} {row.exact:6.3f} "
            f"{row.share:7.3f}"
        )
