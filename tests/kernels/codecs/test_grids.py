"""Are cached rows on the specification's grids, byte for byte?

The expectation is a slow second implementation: float32 scalars for the scale, as the specification
writes it, and a search for the nearest number of the format.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from ripresa.kernels.codecs import e8m0, grids

f32 = np.float32

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = [
    math.ldexp(code & 7, -9) if code < 8 else math.ldexp(8 + (code & 7), (code >> 3) - 10)
    for code in range(127)
]
GRIDS: dict[str, Callable[[int], grids.BlockGrid]] = {
    "window": grids.window_grid,
    "entry": grids.entry_grid,
    "index": grids.index_grid,
}


def nearest(magnitude: float, numbers: list[float]) -> int:
    """The code of the nearest number, the even one of two as near, the last for all beyond."""
    magnitude = min(magnitude, numbers[-1])
    best = min(abs(magnitude - number) for number in numbers)
    codes = [c for c, number in enumerate(numbers) if abs(magnitude - number) == best]
    return min(codes, key=lambda code: code % 2)


def power_at_least(bound: np.float32) -> int:
    """The E8M0 code of the smallest power of two >= bound."""
    fraction, exponent = math.frexp(float(bound))
    return 127 + (exponent - 1 if fraction == 0.5 else exponent)


def slow_record(name: str, row: list[np.float32]) -> list[int]:
    """A record of `GRIDS[name]` from the words of the specification."""
    numbers = E4M3 if name == "window" else E2M1
    group = 16 if name == "entry" else 32
    codes, scale_codes = [], []
    for start in range(0, len(row), group):
        values = row[start : start + group]
        bound = max(abs(value) for value in values)
        if name == "window":
            scale_code = power_at_least(max(bound, f32(1e-4)) * f32(1 / 448))
            scale = f32(math.ldexp(1.0, scale_code - 127))
        elif name == "entry":
            scale_code = nearest(float(max(bound, f32(6 * 2.0**-9)) / f32(6)), E4M3)
            scale = f32(E4M3[scale_code])
        else:
            scale_code = power_at_least(max(bound, f32(6 * 2.0**-126)) * f32(1 / 6))
            scale = f32(math.ldexp(1.0, scale_code - 127))
        scale_codes.append(scale_code)
        for value in values:
            sign = math.copysign(1.0, float(value)) < 0
            code = nearest(abs(float(value / scale)), numbers)
            codes.append(code | sign << (7 if name == "window" else 3))
    if name != "window":
        codes = [even | odd << 4 for even, odd in zip(codes[::2], codes[1::2], strict=True)]
    return codes + scale_codes


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32)


def assert_record(name: str, row: torch.Tensor) -> None:
    """The bytes are the slow ones, and both ways back agree in every bit."""
    grid = GRIDS[name](row.shape[-1])
    record = grid.encode(row)
    assert record.tolist() == slow_record(name, list(row.numpy()))
    assert torch.equal(bits(grid.decode(record)), bits(grid.round_trip(row)))


def test_record_sizes_of_the_release() -> None:
    assert grids.window_grid(512).record_bytes == 528
    assert grids.entry_grid(512).record_bytes == 288
    assert grids.index_grid(128).record_bytes == 68
    assert grids.Float32Grid(512).record_bytes == 2048


@pytest.mark.parametrize("magnitude", [1e-35, 1e-6, 1e-4, 0.02, 1.0, 300.0, 1e4, 1e30, 3e38])
@pytest.mark.parametrize("name", GRIDS)
def test_rows_of_any_magnitude(name: str, magnitude: float) -> None:
    generator = torch.Generator().manual_seed(4)
    row = (torch.rand(64, generator=generator) * 2 - 1) * magnitude
    assert_record(name, row)


@pytest.mark.parametrize("name", GRIDS)
def test_zeros(name: str) -> None:
    assert_record(name, torch.zeros(32))
    assert_record(name, -torch.zeros(32))
    assert torch.all(GRIDS[name](32).round_trip(torch.zeros(3, 32)) == 0)


@pytest.mark.parametrize(("name", "maximum"), [("window", 448.0), ("index", 6.0)])
def test_the_scale_at_and_beside_every_power_of_two(name: str, maximum: float) -> None:
    """maximum * 2^k takes scale 2^k; the next float takes the next one, unless the multiplication
    by float32's 1 / maximum loses the difference."""
    for exponent in range(-20, 119):
        edge = torch.tensor(math.ldexp(maximum, exponent))
        for bound in (
            edge,
            torch.nextafter(edge, torch.tensor(0.0)),
            torch.nextafter(edge, torch.tensor(torch.inf)),
            edge * (1 + 2.0**-20),
        ):
            assert_record(name, torch.cat((bound[None], torch.linspace(-1, 1, 31) * bound)))
        row = torch.zeros(32)
        row[5] = edge
        scale = GRIDS[name](32).encode(row)[-1:]
        assert e8m0.decode(scale).item() == math.ldexp(1.0, exponent)


def test_every_entry_scale_and_every_tie_between_scales() -> None:
    scales = torch.tensor(E4M3[1:])
    ties = (scales[:-1] + scales[1:]) / 2
    for scale in torch.cat((scales, ties, torch.tensor([460.0, 465.0, 1e5]))):
        for bound in (6 * scale, torch.nextafter(6 * scale, torch.tensor(torch.inf))):
            assert_record("entry", torch.cat((bound[None], torch.linspace(-1, 1, 15) * bound)))


@pytest.mark.parametrize("name", GRIDS)
@given(
    row=st.lists(
        st.floats(width=32, allow_nan=False, allow_infinity=False),
        min_size=32,
        max_size=32,
    )
)
@settings(max_examples=60, deadline=None)
def test_any_finite_row(name: str, row: list[float]) -> None:
    assert_record(name, torch.tensor(row))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", GRIDS)
def test_a_row_that_is_not_finite_is_stored_as_zeros_and_counted(name: str, bad: float) -> None:
    grid = GRIDS[name](64)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(6))
    clean = grid.encode(x)
    x[1, 40] = bad
    x[3, 0] = bad
    count = torch.zeros((), dtype=torch.int64)
    records = grid.encode(x, count)
    assert count.item() == 2
    assert torch.all(records[[1, 3]] == 0)
    assert torch.equal(records[[0, 2, 4]], clean[[0, 2, 4]])
    assert torch.all(grid.decode(records)[[1, 3]] == 0)
    assert torch.equal(bits(grid.decode(records)), bits(grid.round_trip(x)))
    grid.encode(x, count)
    assert count.item() == 4


# Entries with a scale below E4M3's normal numbers may move again: the scale is too coarse.
SETTLING = {
    "window": st.floats(-(2.0**100), 2.0**100, width=32),
    "entry": st.floats(-3000.0, 3000.0, width=32),
    "index": st.floats(-(2.0**100), 2.0**100, width=32),
}


@pytest.mark.parametrize("name", GRIDS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_row_on_the_grid_stays_where_it_is(name: str, data: st.DataObject) -> None:
    row = torch.tensor(data.draw(st.lists(SETTLING[name], min_size=32, max_size=32)))
    if name == "entry":
        row[::16] = 6 * 2.0**-6 + row[::16].abs()
    grid = GRIDS[name](32)
    once = grid.round_trip(row)
    assert torch.equal(bits(grid.round_trip(once)), bits(once))
    assert torch.equal(bits(grid.decode(grid.encode(once))), bits(once))


@pytest.mark.parametrize("name", ["window", "index"])
def test_a_power_of_two_shifts_the_scales_and_nothing_else(name: str) -> None:
    grid = GRIDS[name](64)
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(7))
    low, high = grid.encode(x), grid.encode(x * 2.0**9)
    assert torch.equal(low[:, : grid.code_bytes], high[:, : grid.code_bytes])
    assert torch.equal(low[:, grid.code_bytes :] + 9, high[:, grid.code_bytes :])


@pytest.mark.parametrize(("name", "limit"), [("window", 3.2e-2), ("entry", 0.11), ("index", 0.13)])
def test_what_rounding_costs(name: str, limit: float) -> None:
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(8))
    error = GRIDS[name](512).round_trip(x) - x
    assert (error.norm() / x.norm()).item() <= limit
    moved = error[error != 0]
    up = (moved > 0).double().mean().item()
    assert abs(up - 0.5) < 0.01


@pytest.mark.parametrize("make", [*GRIDS.values(), grids.Float32Grid])
def test_any_layout_of_memory_gives_the_same_bytes(make: Callable[[int], grids.Grid]) -> None:
    grid = make(64)
    x = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(9))
    records = grid.encode(x)
    assert records.shape == (3, 5, grid.record_bytes)
    wide = torch.full((3, 5, 70), torch.nan)
    wide[..., 3:67] = x
    assert torch.equal(grid.encode(wide[..., 3:67]), records)
    assert torch.equal(grid.encode(x.transpose(0, 1)), records.transpose(0, 1))
    pool = torch.full((5, 3, grid.record_bytes + 7), 0xAB, dtype=torch.uint8)
    pool[..., : grid.record_bytes] = records.transpose(0, 1)
    rows = grid.decode(pool[..., : grid.record_bytes].transpose(0, 1))
    assert torch.equal(bits(rows), bits(grid.round_trip(x)))
    assert grid.encode(x[:0]).shape == (0, 5, grid.record_bytes)
    assert grid.decode(records[:0]).shape == (0, 5, 64)
    assert grid.round_trip(x[:0]).shape == (0, 5, 64)


@pytest.mark.parametrize("make", [*GRIDS.values(), grids.Float32Grid])
def test_the_input_is_left_alone(make: Callable[[int], grids.Grid]) -> None:
    grid = make(64)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(10))
    before = x.clone()
    records = grid.encode(x)
    bytes_before = records.clone()
    grid.round_trip(x)
    grid.decode(records)
    assert torch.equal(x, before)
    assert torch.equal(records, bytes_before)


def test_float32_rows_keep_every_bit() -> None:
    grid = grids.Float32Grid(8)
    x = torch.tensor([[torch.nan, torch.inf, -0.0, 1e-45, 1.0, -3.5, 3e38, 0.1]])
    assert torch.equal(bits(grid.decode(grid.encode(x))), bits(x))


def test_linear_inputs_are_rounded_to_the_window_grid() -> None:
    x = torch.randn(4, 96, generator=torch.Generator().manual_seed(11))
    expected = grids.window_grid(96).round_trip(x)
    assert torch.equal(bits(grids.round_linear_input(x)), bits(expected))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_linear_input_that_is_not_finite_stays_in_sight(bad: float) -> None:
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(12))
    expected = grids.round_linear_input(x)
    x[1, 3] = bad
    rounded = grids.round_linear_input(x)
    assert rounded[1, :32].isnan().all()
    assert torch.equal(rounded[0], expected[0])
    assert torch.equal(rounded[1, 32:], expected[1, 32:])


@pytest.mark.parametrize(("make", "dim"), [(grids.window_grid, 48), (grids.entry_grid, 24)])
def test_rows_must_divide_into_groups(make: Callable[[int], grids.Grid], dim: int) -> None:
    with pytest.raises(ValueError, match="divide"):
        make(dim)
    with pytest.raises(ValueError, match="divide"):
        make(0)


GOLDEN_TENSORS = {".state.swa.": "window", ".state.main.": "entry", ".state.index_key.": "index"}


@pytest.mark.parametrize("case", ["case_b_grids_engram_replay", "case_c_quantised_dspark"])
def test_golden_rows_are_fixed_points(shared: Path, case: str) -> None:
    tensors = load_file(shared / "golden" / case / "golden.safetensors")
    seen = set()
    for key, rows in tensors.items():
        names = [name for part, name in GOLDEN_TENSORS.items() if part in key]
        if not names or key.endswith("positions"):
            continue
        grid = GRIDS[names[0]](rows.shape[-1])
        assert torch.equal(grid.round_trip(rows), rows), key
        assert torch.equal(grid.decode(grid.encode(rows)), rows), key
        seen.add(names[0])
    assert seen == set(GRIDS)
