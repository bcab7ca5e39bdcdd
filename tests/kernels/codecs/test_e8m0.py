"""Is every E8M0 code its power of two, and is rounding up exact at and beside every power?"""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from ripresa.kernels.codecs import e8m0

POWERS = torch.tensor([math.ldexp(1.0, e) for e in range(-126, 128)])
INFINITY = torch.tensor(torch.inf)


def test_every_code_is_its_power_of_two() -> None:
    values = e8m0.decode(torch.arange(256, dtype=torch.uint8)).tolist()
    assert values[:255] == [math.ldexp(1.0, e - 127) for e in range(255)]
    assert math.isnan(values[255])


def test_every_power_has_its_code() -> None:
    assert e8m0.encode(POWERS).tolist() == list(range(1, 255))
    assert e8m0.encode(INFINITY).item() == 255


def test_a_power_of_two_is_its_own_bound() -> None:
    assert torch.equal(e8m0.round_up(POWERS), POWERS)


def test_just_below_a_power_rounds_up_to_it() -> None:
    below = torch.nextafter(POWERS[1:], torch.tensor(0.0))
    assert torch.equal(e8m0.round_up(below), POWERS[1:])


def test_just_above_a_power_rounds_up_to_the_next() -> None:
    above = torch.nextafter(POWERS, INFINITY)
    expected = torch.cat((POWERS[1:], INFINITY[None]))
    assert torch.equal(e8m0.round_up(above), expected)


def test_what_is_not_finite_rounds_up_to_infinity() -> None:
    bad = torch.tensor([torch.inf, torch.nan])
    assert torch.equal(e8m0.round_up(bad), torch.tensor([torch.inf, torch.inf]))


@given(st.floats(min_value=2.0**-126, max_value=2.0**127, width=32))
def test_the_smallest_power_at_least(bound: float) -> None:
    power = e8m0.round_up(torch.tensor(bound)).item()
    assert math.frexp(power)[0] == 0.5
    assert power / 2 < bound <= power
