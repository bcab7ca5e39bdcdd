"""How many rows may a step compute, and where may a prompt's chunk end?

    |<------------------ rows of one step ------------------>|
    | decode rows, one each | chunks of tails and prompts,   |
    |                       | first come, first served       |

Chunks end on block boundaries, except the last one, which holds at least min(W, L) rows, so that
the decoder tail is computed in one forward (replay rules, section 2).
"""

from __future__ import annotations

from ripresa.workers.errors import ConfigError


def check_budget(max_batched_tokens: int, window: int) -> None:
    """Raise ConfigError for a budget below 2W: some last chunk would never fit."""
    if max_batched_tokens < 2 * window:
        raise ConfigError(
            "engine.max_batched_tokens",
            f"{max_batched_tokens} is below twice the window; set it to {2 * window} or more",
        )


def prefill_rows(max_batched_tokens: int, num_decode_rows: int, window: int) -> int:
    """Rows of a step that are left for tails and prompts.

    Never below 2W: with less, the oldest prompt might not reach its next legal chunk end, and
    enough decoding sequences would hold it up for ever.
    """
    return max(2 * window, max_batched_tokens - num_decode_rows)


def chunk_stop(position: int, stop: int, rows: int, window: int) -> int | None:
    """Where the chunk that starts at `position` of a prefill up to `stop` ends.

    Args:
        position, stop: next row and end of the whole prefill; their distance is at least
            min(W, stop), which every earlier chunk has left.
        rows: most rows of the chunk.
        window: W.

    Returns:
        `stop` if all remaining rows fit; else the highest block boundary that fits and leaves
        at least W rows; None if there is none above `position`. There always is one for
        `rows >= 2W`.
    """
    if stop - position <= rows:
        return stop
    boundary = min(position + rows, stop - window) // window * window
    return boundary if boundary > position else None
