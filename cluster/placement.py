"""Which worker computes a prompt, and which one keeps its new blocks? Two answers, both pure.

    computes   whoever holds most of the prompt, unless it has worked too much more than the others
    keeps      whoever's oldest block is oldest, so that all pools together evict like one

Blocks stay where they are kept: what a computing worker pulls for a prompt is a working copy, the
first to make room afterwards. Routing asks the first question; only the simulation asks the second
yet: a running worker keeps what it computed.
"""

from __future__ import annotations

from collections.abc import Mapping

MAX_LEAD = 0.10
"""A worker this far above the mean work is spared, whatever it holds."""
AGE_TOLERANCE = 0.5
"""A computing worker keeps its blocks while its oldest one is this close to the oldest of all."""


def computing_worker(
    held: Mapping[str, int],
    work: Mapping[str, float],
    max_lead: float = MAX_LEAD,
    max_lead_work: float = 0.0,
) -> str:
    """The worker that holds most of a prompt among those whose work is not far above the mean.

    Args:
        held: blocks of the prompt by worker; a worker left out holds none.
        work: rows computed and queued so far, or seconds of them, of every candidate.
        max_lead: share of the mean by which a candidate's work may exceed it.
        max_lead_work: the same as a number of its own; the larger one counts.

    Among equals the one with the least work, then the lower name. The least loaded worker is
    never above the mean, so there always is one.
    """
    mean = sum(work.values()) / len(work)
    limit = mean + max(max_lead * mean, max_lead_work)
    fit = (worker for worker, done in work.items() if done <= limit)
    return min(fit, key=lambda worker: (-held.get(worker, 0), work[worker], worker))


def keeping_worker(
    computing: str, age: Mapping[str, float], tolerance: float = AGE_TOLERANCE
) -> str:
    """The worker that should keep a new block of a prompt.

    The one that computes it, as long as its own next block to go is nearly as old as anybody's:
    so the blocks of a conversation stay together. Otherwise whoever's is oldest.

    Args:
        computing: has the block now.
        age: for how long each worker's next block to go has not been used; infinity where room
            is free.
        tolerance: share of the highest age that the computing worker's may lack.
    """
    oldest = max(age.values())
    if age[computing] >= (1 - tolerance) * oldest:
        return computing
    return min(age, key=lambda worker: (-age[worker], worker))
