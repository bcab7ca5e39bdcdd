"""Do chunks end where they may, and does a prefill always get on?"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ripresa.workers.errors import ConfigError
from ripresa.workers.scheduling.budget import check_budget, chunk_stop, prefill_rows

WINDOWS = st.sampled_from([2, 8, 128])


@given(window=WINDOWS, data=st.data())
def test_every_prefill_ends_in_legal_chunks(window: int, data: st.DataObject) -> None:
    stop = data.draw(st.integers(1, 12 * window))
    start = data.draw(st.integers(0, max(0, stop - window)))
    chunks = []
    position = start
    stalled = 0
    while position < stop:
        rows = data.draw(st.integers(1, 5 * window)) if stalled == 0 else 2 * window
        end = chunk_stop(position, stop, rows, window)
        if end is None:
            assert rows < 2 * window
            stalled += 1
            continue
        assert position < end <= position + rows
        assert end == stop or end % window == 0
        chunks.append(end - position)
        position, stalled = end, 0
    assert position == stop
    assert chunks[-1] >= min(window, stop - start)


def test_the_chunk_before_the_last_is_shortened() -> None:
    assert chunk_stop(0, 35, 32, 8) == 24
    assert chunk_stop(24, 35, 32, 8) == 35
    assert chunk_stop(0, 40, 32, 8) == 32


def test_a_prefill_that_cannot_reach_a_boundary_waits() -> None:
    assert chunk_stop(0, 15, 14, 8) is None
    assert chunk_stop(0, 16, 8, 8) == 8


def test_decode_rows_leave_two_windows_to_prompts() -> None:
    assert prefill_rows(64, 10, 8) == 54
    assert prefill_rows(64, 60, 8) == 16


def test_a_budget_below_two_windows_is_refused() -> None:
    check_budget(16, 8)
    with pytest.raises(ConfigError) as caught:
        check_budget(15, 8)
    assert caught.value.field == "engine.max_batched_tokens"
    assert "16" in caught.value.message
