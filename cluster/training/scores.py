"""How do measured messages become a table? Exact matches by task and distance."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ripresa.workers.demo.ledger.conversation import Task


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


def table(scores: Sequence[Score], share: str) -> Iterator[str]:
    """Lines: task, distance, number of messages, exact matches, and the mean share, so named."""
    groups: dict[tuple[str, str], list[Score]] = defaultdict(list)
    for score in scores:
        groups[score.task, "all"].append(score)
        if score.bucket is not None:
            groups[score.task, score.bucket].append(score)

    def order(key: tuple[str, str]) -> tuple[int, int]:
        return list(Task).index(Task(key[0])), -1 if key[1] == "all" else int(key[1].split("-")[0])

    yield f"{'task':14} {'distance':>10} {'messages':>8} {'exact':>6} {share:>7}"
    for key in sorted(groups, key=order):
        part = groups[key]
        exact = sum(score.is_exact for score in part) / len(part)
        mean = sum(score.share for score in part) / len(part)
        yield f"{key[0]:14} {key[1]:>10} {len(part):8} {exact:6.3f} {mean:7.3f}"
