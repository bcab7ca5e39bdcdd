"""Is E4M3 its definition for every code, every tie and every neighbour of a tie?"""

from __future__ import annotations

import math

import pytest
import torch

from ripresa.kernels.codecs import e4m3

CODES = torch.arange(256, dtype=torch.uint8)


def definition(code: int) -> float:
    sign, exponent, mantissa = code >> 7, (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        magnitude = math.ldexp(mantissa, -9)
    else:
        magnitude = math.ldexp(8 + mantissa, exponent - 10)
    return -magnitude if sign else magnitude


POSITIVE = torch.tensor([definition(code) for code in range(0x7F)])  # ascending, 0 to 448
TIES = (POSITIVE[:-1] + POSITIVE[1:]) / 2
EVEN_AT_TIE = torch.tensor([code + code % 2 for code in range(0x7E)], dtype=torch.uint8)
BELOW_TIE = torch.nextafter(TIES, torch.tensor(0.0))
ABOVE_TIE = torch.nextafter(TIES, torch.tensor(torch.inf))


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32)


def test_every_code_decodes_to_its_definition() -> None:
    expected = torch.tensor([definition(code) for code in range(256)])
    values = e4m3.decode(CODES)
    nan = expected.isnan()
    assert torch.equal(values.isnan(), nan)
    assert torch.equal(bits(values[~nan]), bits(expected[~nan]))


def test_every_value_encodes_to_its_code() -> None:
    finite = CODES[~e4m3.decode(CODES).isnan()]
    assert torch.equal(e4m3.encode(e4m3.decode(finite)), finite)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_ties_go_to_the_even_code_and_their_neighbours_to_the_nearest(sign: float) -> None:
    bit = 0x80 if sign < 0 else 0
    lower = torch.arange(0x7E, dtype=torch.uint8)
    assert torch.equal(e4m3.encode(sign * TIES), EVEN_AT_TIE + bit)
    assert torch.equal(e4m3.encode(sign * BELOW_TIE), lower + bit)
    assert torch.equal(e4m3.encode(sign * ABOVE_TIE), lower + 1 + bit)


def test_large_values_saturate() -> None:
    large = torch.tensor([448.0, 449.0, 463.9, 464.0, 480.0, 500.0, 1e30, torch.inf])
    assert e4m3.encode(large).tolist() == [0x7E] * 8
    assert e4m3.encode(-large).tolist() == [0xFE] * 8


def test_nan_has_a_code() -> None:
    assert e4m3.decode(e4m3.encode(torch.tensor([torch.nan]))).isnan().all()


def test_rounding_without_codes_is_the_same_to_the_sign_of_zero() -> None:
    generator = torch.Generator().manual_seed(1)
    anything = torch.randint(-(2**31), 2**31, (200_000,), generator=generator).int()
    x = torch.cat((POSITIVE, TIES, BELOW_TIE, ABOVE_TIE, anything.view(torch.float32)))
    x = torch.cat((x, -x))
    x = x[x.abs() < 464]
    assert len(x) > 100_000
    assert torch.equal(bits(e4m3.round_to_grid(x)), bits(e4m3.decode(e4m3.encode(x))))
    assert e4m3.round_to_grid(torch.tensor([torch.nan])).isnan().all()


def test_many_codes_at_once() -> None:
    """More than one chunk of the look-up, the last one short, from memory with gaps."""
    wide = torch.randint(0, 256, (700, 300), generator=torch.Generator().manual_seed(3)).byte()
    codes = wide[:, :299]
    expected = e4m3.decode(CODES)[codes.long()]
    assert torch.equal(bits(e4m3.decode(codes)), bits(expected))
