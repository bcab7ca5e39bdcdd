"""Is E2M1 its definition for every code, every tie, every neighbour of a tie and every byte?"""

from __future__ import annotations

import pytest
import torch

from ripresa.kernels.codecs import e2m1

MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
TIES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
CODE_AT_TIE = [0, 2, 2, 4, 4, 6, 6]
BELOW_TIE = torch.nextafter(TIES, torch.tensor(0.0))
ABOVE_TIE = torch.nextafter(TIES, torch.tensor(torch.inf))


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32)


def test_every_code_decodes_to_its_definition() -> None:
    values = e2m1.decode(torch.arange(16, dtype=torch.uint8))
    assert torch.equal(bits(values), bits(torch.cat((MAGNITUDES, -MAGNITUDES))))


def test_every_value_encodes_to_its_code() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(e2m1.encode(e2m1.decode(codes)), codes)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_ties_go_to_the_even_code_and_their_neighbours_to_the_nearest(sign: float) -> None:
    bit = 8 if sign < 0 else 0
    assert e2m1.encode(sign * TIES).tolist() == [code + bit for code in CODE_AT_TIE]
    assert e2m1.encode(sign * BELOW_TIE).tolist() == [code + bit for code in range(7)]
    assert e2m1.encode(sign * ABOVE_TIE).tolist() == [code + 1 + bit for code in range(7)]


def test_large_values_saturate() -> None:
    large = torch.tensor([6.0, 6.4, 7.0, 8.0, 100.0, 1e30, torch.inf])
    assert e2m1.encode(large).tolist() == [7] * 7
    assert e2m1.encode(-large).tolist() == [15] * 7


def test_the_smallest_numbers_round_to_zero_and_keep_their_sign() -> None:
    tiny = torch.tensor([2.0**-149, 2.0**-126, 1e-20])
    assert e2m1.encode(tiny).tolist() == [0, 0, 0]
    assert e2m1.encode(-tiny).tolist() == [8, 8, 8]


def test_rounding_without_codes_is_the_same_to_the_sign_of_zero() -> None:
    generator = torch.Generator().manual_seed(2)
    anything = torch.randint(-(2**31), 2**31, (100_000,), generator=generator).int()
    spread = torch.randn(100_000, generator=generator) * 4
    x = torch.cat((MAGNITUDES, TIES, BELOW_TIE, ABOVE_TIE, spread, anything.view(torch.float32)))
    x = torch.cat((x, -x))
    x = x[~x.isnan()]
    assert torch.equal(bits(e2m1.round_to_grid(x)), bits(e2m1.decode(e2m1.encode(x))))


def test_the_even_channel_lies_in_the_low_nibble() -> None:
    packed = e2m1.encode_packed(torch.tensor([[0.5, 1.0, -6.0, 4.0]]))
    assert packed.tolist() == [[0x21, 0x6F]]


def test_every_byte_unpacks_to_its_two_codes_and_packs_again() -> None:
    packed = torch.arange(256, dtype=torch.uint8)
    values = e2m1.decode_packed(packed)
    low, high = e2m1.decode(packed & 15), e2m1.decode(packed >> 4)
    assert torch.equal(bits(values.view(256, 2)), bits(torch.stack((low, high), -1)))
    assert torch.equal(e2m1.encode_packed(values.view(256, 2)).view(256), packed)
