"""Do measured rates follow what steps took?"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ripresa.workers.scheduling.step_rates import MIN_PREFILL_ROWS, Rates, StepRates

PREFILLS = st.lists(
    st.tuples(st.integers(MIN_PREFILL_ROWS, 1000), st.floats(1e-4, 10.0)), min_size=1
)


@given(PREFILLS)
def test_an_average_lies_between_its_steps(steps: list[tuple[int, float]]) -> None:
    rates = StepRates()
    for num_rows, seconds in steps:
        rates.add(num_rows, seconds, is_prefill=True)
    each = [seconds / num_rows for num_rows, seconds in steps]
    assert rates.rates.row_s is not None
    assert min(each) * (1 - 1e-9) <= rates.rates.row_s <= max(each) * (1 + 1e-9)
    assert rates.rates.decode_step_s is None


def test_a_faster_worker_is_believed_after_a_while() -> None:
    rates = StepRates()
    rates.add(100, 10.0, is_prefill=True)
    for _ in range(60):
        rates.add(100, 1.0, is_prefill=True)
    assert rates.rates.row_s == pytest.approx(0.01, rel=0.05)


def test_steps_of_few_rows_say_nothing_of_a_row() -> None:
    rates = StepRates()
    rates.add(MIN_PREFILL_ROWS - 1, 1.0, is_prefill=True)
    assert rates.rates == Rates()
    rates.add(4, 0.25, is_prefill=False)
    assert rates.rates == Rates(None, 0.25)
