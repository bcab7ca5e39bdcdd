"""Which worker computes a prompt, and which one keeps a block that has to go? Two pure answers.

    computes   whoever holds most of the prompt, unless it has worked too much more than the others
    keeps      whoever's oldest block is oldest, so that all pools together evict like one

Whoever used a block last keeps it; what others hold of it are copies, the first to make room. A
last copy that has to make room goes to the keeper. Routing asks the first question, the directory
the second, for workers ahead of eviction (`workers/block_moves.py`); the simulation asks both.
"""

from __future__ import annotations

from collections.abc import Mapping

MAX_LEAD = 0.10
"""A worker this far above the mean work is spared, whatever it holds."""
AGE_TOLERANCE = 0.25
"""A worker lets a block go unless another one's is older by so much, as a share of that age."""


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
    evicting: str, age: Mapping[str, float], tolerance: float = AGE_TOLERANCE
) -> str:
    """The worker that should keep a block which one worker has to evict.

    Whoever's next block to go has not been used for longest; the evicting worker itself, which
    means that the block goes, as long as nobody's is much older than that block.

    Args:
        evicting: has the block now.
        age: for how long each worker's next block to go has not been used; infinity where room
            is left. The evicting worker's is the block's own.
        tolerance: share of the highest age that the block's may lack: moving costs bandwidth.
    """
    oldest = max(age.values())
    if age[evicting] >= (1 - tolerance) * oldest:
        return evicting
    return min(age, key=lambda worker: (-age[worker], worker))
