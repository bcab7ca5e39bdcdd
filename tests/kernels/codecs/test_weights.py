"""Do stored weights become the numbers that the specification says, and back?"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ripresa.kernels.codecs import weights

Pair = tuple[torch.Tensor, torch.Tensor]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(13))


def anything(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(14)).byte()


def finite_codes(*shape: int) -> torch.Tensor:
    codes = anything(*shape)
    return codes.masked_fill(codes & 0x7F == 0x7F, 0)


def scales(*shape: int) -> torch.Tensor:
    return (anything(*shape) % 40 + 100).to(torch.uint8)


@pytest.fixture(params=[1 << 20, 2048], ids=["one-chunk", "chunks"])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_CHUNK", request.param)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("shape", [(32, 32), (96, 64), (100, 70), (1, 1), (33, 31), (160, 32)])
def test_f8_tiles(shape: tuple[int, int]) -> None:
    codes = finite_codes(*shape)
    scale = scales(-(-shape[0] // 32), -(-shape[1] // 32))
    actual = weights.dequantise_f8(
        codes.view(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu)
    )
    value = codes.view(torch.float8_e4m3fn).float()
    for i in range(shape[0]):
        for j in range(0, shape[1], 32):
            factor = 2.0 ** (int(scale[i // 32, j // 32]) - 127)
            assert torch.equal(actual[i, j : j + 32], value[i, j : j + 32] * factor)


@pytest.mark.usefixtures("chunk")
def test_fp4() -> None:
    packed, scale = anything(70, 48), scales(70, 3)
    actual = weights.dequantise_fp4(packed.view(torch.int8), scale.view(torch.float8_e8m0fnu))
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    numbers = torch.tensor(magnitudes + [-m for m in magnitudes])
    assert actual.shape == (70, 96)
    for column in range(96):
        byte = packed[:, column // 2]
        code = byte >> 4 if column % 2 else byte & 15
        factor = torch.ldexp(torch.ones(70), scale[:, column // 32].int() - 127)
        assert torch.equal(actual[:, column], numbers[code.long()] * factor)


def test_f8_rows() -> None:
    codes, scale = finite_codes(5, 3, 64), scales(5, 3, 2)
    actual = weights.dequantise_f8_rows(codes, scale)
    factor = torch.ldexp(torch.ones(5, 3, 2), scale.int() - 127)
    value = codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(actual, value * factor.repeat_interleave(32, -1))


def test_bfloat16_is_exact() -> None:
    pairs: list[tuple[Callable[..., torch.Tensor], Pair]] = [
        (weights.dequantise_f8, (finite_codes(64, 64), scales(2, 2))),
        (weights.dequantise_f8_rows, (finite_codes(64, 64), scales(64, 2))),
        (weights.dequantise_fp4, (anything(64, 32), scales(64, 2))),
    ]
    for dequantise, stored in pairs:
        half = dequantise(*stored, dtype=torch.bfloat16)
        assert half.dtype is torch.bfloat16
        assert torch.equal(half.float(), dequantise(*stored))


ROUND_TRIPS: dict[str, tuple[Callable[[torch.Tensor], Pair], Callable[..., torch.Tensor]]] = {
    "f8": (weights.quantise_f8, weights.dequantise_f8),
    "f8-rows": (weights.quantise_f8_rows, weights.dequantise_f8_rows),
    "fp4": (weights.quantise_fp4, weights.dequantise_fp4),
}


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_what_was_stored_is_stored_again(name: str) -> None:
    quantise, dequantise = ROUND_TRIPS[name]
    once = dequantise(*quantise(normal(64, 96)))
    assert torch.equal(dequantise(*quantise(once)), once)


@pytest.mark.parametrize(
    ("name", "maximum", "limit"), [("f8", 448, 0.035), ("f8-rows", 448, 0.03), ("fp4", 6, 0.13)]
)
def test_the_scale_is_the_smallest_that_saturates_nothing(
    name: str, maximum: float, limit: float
) -> None:
    quantise, dequantise = ROUND_TRIPS[name]
    x = normal(64, 96)
    codes, scale = quantise(x)
    assert scale.dtype is torch.float8_e8m0fnu
    factor = torch.ldexp(torch.ones(scale.shape), scale.view(torch.uint8).int() - 127)
    tile = x.view(64 // (32 if name == "f8" else 1), -1, 3, 32)
    bound = tile.abs().amax((1, 3)) / maximum
    assert torch.all(bound <= factor)
    assert torch.all(factor / 2 < bound)
    assert ((dequantise(codes, scale) - x).norm() / x.norm()).item() <= limit


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_the_scale_at_and_beside_every_power_of_two(name: str) -> None:
    quantise, dequantise = ROUND_TRIPS[name]
    maximum = 6.0 if name == "fp4" else 448.0
    for exponent in range(-10, 60):
        edge = torch.tensor(maximum * 2.0**exponent)
        for bound, expected in ((edge, exponent), (edge * (1 + 2.0**-23), exponent + 1)):
            x = torch.zeros(32, 32)
            x[0, 7] = bound
            codes, scale = quantise(x)
            assert scale.view(torch.uint8).flatten()[0].item() == expected + 127
            assert dequantise(codes, scale)[0, 7].item() == pytest.approx(bound.item(), rel=0.07)


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_zeros(name: str) -> None:
    quantise, dequantise = ROUND_TRIPS[name]
    assert torch.all(dequantise(*quantise(torch.zeros(32, 64))) == 0)


def test_an_f8_weight_need_not_fill_its_tiles() -> None:
    x = normal(40, 70)
    codes, scale = weights.quantise_f8(x)
    assert codes.shape == (40, 70)
    assert scale.shape == (2, 3)
    error = (weights.dequantise_f8(codes, scale) - x).norm() / x.norm()
    assert error.item() < 0.035


def test_refuses_scales_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        weights.dequantise_f8(anything(64, 64), scales(2, 3))
    with pytest.raises(ValueError, match="do not fit"):
        weights.dequantise_f8_rows(anything(4, 64), scales(4, 3))
    with pytest.raises(ValueError, match="do not fit"):
        weights.dequantise_fp4(anything(4, 64), scales(4, 2))
    with pytest.raises(ValueError, match="one-byte"):
        weights.dequantise_fp4(torch.zeros(4, 64), scales(4, 2))
