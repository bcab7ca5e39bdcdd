"""How far may a tensor be from its reference? One step of its grid in few rows, and no more."""

from __future__ import annotations

import pytest
import torch

from ripresa.workers.golden_limits import GridStep, Limit

DIM = 64
STEPS = {
    "window": GridStep.of_window(DIM),
    "entry": GridStep.of_entry(DIM),
    "index key": GridStep.of_index_key(DIM),
}


@pytest.fixture(params=sorted(STEPS))
def step(request: pytest.FixtureRequest) -> GridStep:
    return STEPS[str(request.param)]


def rows(step: GridStep, count: int = 20) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return step.grid.round_trip(torch.randn(count, DIM, generator=generator))


def judge(step: GridStep, expected: torch.Tensor, computed: torch.Tensor) -> bool:
    return Limit(1e-5, step, least_rare=1).judge(expected, computed)[1]


def neighbour(step: GridStep, row: torch.Tensor, channel: int) -> torch.Tensor:
    """The row after the smallest change of one channel that the grid shows."""
    moved = row.clone()
    scale = 1.0
    while torch.equal(step.grid.round_trip(moved), row):
        scale *= 1.01
        moved[channel] = row[channel] * scale
    return step.grid.round_trip(moved)


def test_any_rounding_that_lands_on_the_other_side_is_one_step(step: GridStep) -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(4000, DIM, generator=generator) * torch.rand(4000, 1, generator=generator)
    here, there = step.grid.round_trip(x), step.grid.round_trip(x * (1 + 3e-5))
    differ = (here != there).any(-1)
    assert int(differ.sum()) > 10
    assert step.at_most_one(here[differ], there[differ])


def test_one_row_may_be_a_step_off(step: GridStep) -> None:
    expected = rows(step)
    computed = expected.clone()
    computed[7] = neighbour(step, expected[7], int(expected[7].abs().median(0).indices))
    assert not torch.equal(expected, computed)
    assert judge(step, expected, computed)


def test_many_rows_may_not_be_a_step_off(step: GridStep) -> None:
    expected = rows(step)
    computed = torch.stack([neighbour(step, row, int(row.abs().argmax())) for row in expected])
    assert not judge(step, expected, computed)


@pytest.mark.parametrize("change", ["off the grid", "sign", "zeroed", "doubled"])
def test_one_value_that_no_rounding_gives_is_found(step: GridStep, change: str) -> None:
    computed = rows(step)
    expected = computed.clone()
    channel = int(expected[7].abs().argmax())
    value = expected[7, channel].clone()
    changed = {"off the grid": 0.97 * value, "sign": -value, "zeroed": 0 * value}
    expected[7, channel] = changed.get(change, 2 * value)
    assert not judge(step, expected, computed)
