"""Is the Triton window attention the definition, wherever the rows lie and whatever lies beside?

Every expectation is a dense float64 softmax straight from the definition. Rows that no query may
see are NaN, pools and buffers are views with a NaN row on either side, outputs start as NaN. The
last test breaks the kernel's guards one at a time and wants these very checks to notice.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from ripresa.kernels import dispatch as ops
from ripresa.kernels.window_attention import triton as kernel

Attention = Callable[..., torch.Tensor]

FLOAT32_LIMIT = 2e-6
# The interpreter truncates where the device rounds to nearest: one ulp of bfloat16 at the output.
BFLOAT16_LIMIT = 8e-3


@dataclass(frozen=True)
class Case:
    """One call; `window` and the names are those of the operation."""

    q: torch.Tensor
    kv: torch.Tensor
    lo: torch.Tensor
    hi: torch.Tensor
    sink: torch.Tensor
    window: int
    pool: torch.Tensor | None
    slots: torch.Tensor | None

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.q.shape[-1])

    def run(self, attention: Attention) -> torch.Tensor:
        return attention(
            self.q,
            self.kv,
            self.lo,
            self.hi,
            self.sink,
            self.scale,
            self.window,
            self.pool,
            self.slots,
        )


@pytest.fixture(autouse=True)
def _nan_in_new_memory() -> Iterator[None]:
    """`torch.empty` gives NaN, so that what a kernel leaves unwritten shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values as a view: NaN rows around, rows apart by an odd stride."""
    shape = list(x.shape)
    shape[0] += 2
    shape[-1] += 3
    backing = torch.full(shape, torch.nan, dtype=x.dtype)
    view = backing[1:-1, ..., : x.shape[-1]]
    view.copy_(x)
    return view


def slots_of(
    generator: torch.Generator, num_tokens: int, width: int, valid: int, entries: int
) -> torch.Tensor:
    """[num_tokens, width]: `valid` distinct entries at random places, -1 elsewhere."""
    slots = torch.full((num_tokens, width), -1, dtype=torch.int32)
    for t in range(num_tokens):
        where = torch.randperm(width, generator=generator)[:valid]
        slots[t, where] = torch.randperm(entries, generator=generator)[:valid].int()
    return slots


def make_case(
    num_tokens: int = 2,
    context: int = 20,
    window: int = 8,
    floor: Callable[[int], int] = lambda position: 0,
    valid: int = 5,
    width: int = 40,
    heads: int = 8,
    dim: int = 64,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """`num_tokens` new rows of a sequence behind `context` older ones, all in one buffer.

    Position i reads max(0, i - window + 1, min(i, floor(i))) .. i.
    """
    g = torch.Generator().manual_seed(num_tokens * 1009 + context * 31 + window + valid)
    position = torch.arange(context, context + num_tokens)
    first = torch.tensor([min(int(i), floor(int(i))) for i in position])
    lo = torch.maximum((position - window + 1).clamp(min=0), first)
    hi = position + 1
    rows = torch.arange(context + num_tokens)
    seen = ((rows >= lo[:, None]) & (rows < hi[:, None])).any(0)
    kv = torch.randn(len(rows), dim, generator=g).masked_fill(~seen[:, None], torch.nan)
    entries = max(2 * valid, 3)
    slots = slots_of(g, num_tokens, width, valid, entries)
    pool = torch.randn(entries, dim, generator=g)
    used = torch.zeros(entries, dtype=torch.bool)
    used[slots[slots >= 0].long()] = True
    pool[~used] = torch.nan
    return Case(
        q=strided(torch.randn(num_tokens, heads, dim, generator=g).to(dtype)),
        kv=strided(kv.to(dtype)),
        lo=lo,
        hi=hi,
        sink=torch.randn(heads, generator=g),
        window=window,
        pool=strided(pool.to(dtype)),
        slots=slots,
    )


def dense(case: Case) -> torch.Tensor:
    """The definition in float64 over every row there is, with masks."""
    rows = torch.arange(case.kv.shape[0])
    allowed = (rows >= case.lo[:, None]) & (rows < case.hi[:, None])
    keys = case.kv.double()
    if case.pool is not None and case.slots is not None:
        chosen = case.slots[:, :, None] == torch.arange(case.pool.shape[0])
        allowed = torch.cat((allowed, chosen.any(1)), 1)
        keys = torch.cat((keys, case.pool.double()))
    keys = keys.masked_fill(~allowed.any(0)[:, None], 0.0)
    scores = torch.einsum("thd,nd->thn", case.q.double(), keys) * case.scale
    scores = scores.masked_fill(~allowed[:, None, :], -torch.inf)
    sink = case.sink.double()[None, :, None].expand(*scores.shape[:2], 1)
    weights = torch.softmax(torch.cat((scores, sink), -1), -1)[..., :-1]
    weights = weights.masked_fill(sink == torch.inf, 0.0)
    return torch.einsum("thn,nd->thd", weights, keys)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, limit: float) -> None:
    """Relative Frobenius distance, of the whole and of the worst query."""
    difference = actual.double() - expected.double()
    whole = float(difference.norm() / expected.double().norm().clamp(min=1e-30))
    each = difference.flatten(1).norm(dim=1) / expected.double().flatten(1).norm(dim=1)
    assert whole <= limit, f"relative error {whole:.2e} over {limit:.0e}"
    worst = float(each.max())
    assert worst <= 2 * limit, f"worst query {worst:.2e} over {2 * limit:.0e}"


def check(attention: Attention, case: Case, limit: float = FLOAT32_LIMIT) -> None:
    assert_close(case.run(attention), dense(case), limit)


@pytest.mark.parametrize("context", [0, 1, 127, 128, 129, 300])
@pytest.mark.parametrize("window", [1, 8, 128])
def test_a_query_reads_its_window(window: int, context: int) -> None:
    check(kernel.window_attention, make_case(window=window, context=context))


@pytest.mark.parametrize("window", [1, 8, 128])
@pytest.mark.parametrize("num_tokens", [1, 17, 33])
def test_many_queries(num_tokens: int, window: int) -> None:
    check(kernel.window_attention, make_case(num_tokens, context=7, window=window, valid=33))


FLOORS: dict[str, Callable[[int], int]] = {
    "none": lambda i: 0,
    "one": lambda i: 1,
    "itself": lambda i: i,
    "whole-window": lambda i: i - 127,
    "below-window": lambda i: i - 128,
    "half-window": lambda i: i - 60,
}


@pytest.mark.parametrize("context", [1, 128, 300])
@pytest.mark.parametrize("floor", FLOORS)
def test_a_read_floor_hides_older_rows(floor: str, context: int) -> None:
    check(kernel.window_attention, make_case(context=context, window=128, floor=FLOORS[floor]))


@pytest.mark.parametrize("valid", [0, 1, 31, 32, 33, 512])
def test_pool_entries_and_empty_slots(valid: int) -> None:
    check(kernel.window_attention, make_case(valid=valid, width=max(valid, 96)))


def check_empty_first_tiles(attention: Attention) -> None:
    """A whole step of keys may be empty before the first entry."""
    case = make_case(valid=3, width=3)
    assert case.slots is not None
    slots = torch.cat((torch.full((2, 70), -1, dtype=torch.int32), case.slots), 1)
    check(attention, replace(case, slots=slots))


def test_empty_tiles_before_the_first_entry() -> None:
    check_empty_first_tiles(kernel.window_attention)


def test_empty_slots_change_nothing() -> None:
    case = make_case(valid=0)
    without = replace(case, pool=None, slots=None).run(kernel.window_attention)
    assert torch.equal(case.run(kernel.window_attention), without)
    none_wide = replace(case, slots=torch.empty((2, 0), dtype=torch.int32))
    assert torch.equal(none_wide.run(kernel.window_attention), without)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_of_either_width_and_any_stride(dtype: torch.dtype) -> None:
    case = make_case(num_tokens=3, valid=9)
    assert case.slots is not None
    backing = torch.full((40, 9), 10**6, dtype=dtype)
    backing[:, 3:6] = case.slots.T
    check(kernel.window_attention, replace(case, slots=backing.T[3:6]))


def check_slots_beyond_the_pool(attention: Attention) -> None:
    """An entry past the end is none, and the memory there is not looked at."""
    case = make_case(valid=4)
    assert case.pool is not None
    assert case.slots is not None
    slots = case.slots.clone()
    slots[:, 0] = case.pool.shape[0]
    expected = dense(replace(case, slots=slots))
    assert_close(replace(case, slots=slots).run(attention), expected, FLOAT32_LIMIT)


def test_slots_beyond_the_pool_are_none() -> None:
    check_slots_beyond_the_pool(kernel.window_attention)


def check_sinks(attention: Attention) -> None:
    """From no sink at all to nothing but the sink, one head each."""
    sinks = torch.tensor([-torch.inf, -1e4, -200.0, -104.0, 0.0, 80.0, 1e4, torch.inf])
    case = replace(make_case(valid=33), sink=sinks)
    actual = case.run(attention)
    assert_close(actual, dense(case), FLOAT32_LIMIT)
    assert torch.all(actual[:, -2:] == 0)


def test_sinks_at_the_extremes() -> None:
    check_sinks(kernel.window_attention)


def test_the_order_of_queries_changes_no_bit() -> None:
    case = make_case(num_tokens=17, valid=33)
    assert case.slots is not None
    order = torch.randperm(17, generator=torch.Generator().manual_seed(3))
    shuffled = replace(
        case, q=case.q[order], lo=case.lo[order], hi=case.hi[order], slots=case.slots[order]
    )
    expected = case.run(kernel.window_attention)[order]
    assert torch.equal(shuffled.run(kernel.window_attention), expected)
    alone = replace(case, q=case.q[4:5], lo=case.lo[4:5], hi=case.hi[4:5], slots=case.slots[4:5])
    assert torch.equal(alone.run(kernel.window_attention)[0], case.run(kernel.window_attention)[4])


def test_where_pool_entries_lie_changes_no_bit() -> None:
    case = make_case(valid=33)
    assert case.pool is not None
    assert case.slots is not None
    place = torch.randperm(len(case.pool), generator=torch.Generator().manual_seed(5))
    moved = torch.empty_like(case.pool)
    moved[place] = case.pool
    slots = torch.where(case.slots >= 0, place[case.slots.clamp(min=0)], -1)
    actual = replace(case, pool=moved, slots=slots).run(kernel.window_attention)
    assert torch.equal(actual, case.run(kernel.window_attention))


def test_the_order_of_slots_is_irrelevant() -> None:
    case = make_case(valid=33, width=96)
    assert case.slots is not None
    check(kernel.window_attention, replace(case, slots=case.slots.flip(1)))


def test_where_a_sequence_lies_in_the_buffer_changes_no_bit() -> None:
    case = make_case(context=40, window=16)
    stranger = torch.full((11, 64), torch.nan)
    moved = replace(
        case, kv=torch.cat((stranger, case.kv, stranger)), lo=case.lo + 11, hi=case.hi + 11
    )
    assert torch.equal(moved.run(kernel.window_attention), case.run(kernel.window_attention))


@pytest.mark.parametrize(("heads", "dim"), [(1, 16), (5, 48), (17, 32), (65, 64), (64, 512)])
def test_any_number_of_heads_and_channels(heads: int, dim: int) -> None:
    check(kernel.window_attention, make_case(heads=heads, dim=dim, valid=33))


@pytest.mark.parametrize(("heads", "dim"), [(8, 64), (64, 512)])
def test_bfloat16_inputs(heads: int, dim: int) -> None:
    case = make_case(heads=heads, dim=dim, valid=33, dtype=torch.bfloat16)
    assert case.run(kernel.window_attention).dtype is torch.bfloat16
    check(kernel.window_attention, case, BFLOAT16_LIMIT)


def test_offsets_beyond_32_bits() -> None:
    """Rows 2^29 elements apart; only the pages of the few rows used are ever touched."""
    torch.use_deterministic_algorithms(False)
    stride = 2**29
    case = make_case(num_tokens=1, context=0, valid=2, dtype=torch.bfloat16)
    assert case.pool is not None
    assert case.slots is not None
    backing = torch.empty(5 * stride + 64, dtype=torch.bfloat16)
    pool = backing.as_strided((6, 64), (stride, 1))
    used = case.slots[case.slots >= 0].long()
    pool[torch.tensor([0, 5])] = case.pool[used]
    slots = torch.tensor([[-1, 5, 0]], dtype=torch.int32)
    far = replace(case, pool=pool, slots=slots).run(kernel.window_attention)
    near = replace(case, slots=used.flip(0)[None]).run(kernel.window_attention)
    assert_close(far, near, BFLOAT16_LIMIT)


def test_the_reference_agrees() -> None:
    case = make_case(num_tokens=17, context=300, window=128, valid=33)
    reference = ops.implementation(ops.window_attention, "torch")
    assert_close(case.run(kernel.window_attention), case.run(reference), FLOAT32_LIMIT)


def test_no_queries() -> None:
    case = make_case()
    empty = replace(case, q=case.q[:0], lo=case.lo[:0], hi=case.hi[:0], pool=None, slots=None)
    assert empty.run(kernel.window_attention).shape == (0, 8, 64)


def test_refuses_what_it_does_not_support() -> None:
    case = make_case()
    apart = case.q.transpose(0, 2).contiguous().transpose(0, 2)
    for wrong in (
        replace(case, q=case.q.to(torch.float16)),
        replace(case, kv=case.kv.to(torch.bfloat16)),
        replace(case, q=apart),
        replace(case, q=torch.zeros(2, 1, 1024), kv=torch.zeros(30, 1024), pool=None, slots=None),
    ):
        with pytest.raises(ValueError, match="use the torch implementation"):
            wrong.run(kernel.window_attention)
    with pytest.raises(ValueError, match="together"):
        replace(case, slots=None).run(kernel.window_attention)


GUARDS = {
    "slot below the pool": ("(slot >= 0) & (slot < pool_rows)", "slot < pool_rows"),
    "slot beyond the pool": ("(slot >= 0) & (slot < pool_rows)", "slot >= 0"),
    "last partial tile of slots": ("mask=index < num_slots,", "mask=index < num_slots - 1,"),
    "read floor": ("lo = tl.load(lo_ptr + t)", "lo = tl.load(lo_ptr + t) - 1"),
    "end of the range": ("valid = start + key < count", "valid = start + key <= count"),
    "last row of the range": ("valid = start + key < count", "valid = start + key < count - 1"),
    "sink in the denominator": ("tl.full([BLOCK_H], 1.0,", "tl.full([BLOCK_H], 0.0,"),
    "sink in the maximum": ("tl.minimum(tl.maximum(sink, -SINK_LIMIT), SINK_LIMIT)", "sink * 0"),
    "sinks of infinity": ("tl.minimum(tl.maximum(sink, -SINK_LIMIT), SINK_LIMIT)", "sink"),
    "rescaling of the sum": ("total * shrink", "total"),
    "rescaling of the accumulator": ("acc * shrink[:, None]", "acc"),
}

CHECKS: tuple[Callable[[Attention], None], ...] = (
    lambda attention: check(attention, make_case(valid=33)),
    lambda attention: check(attention, make_case(context=300, window=128, floor=FLOORS["one"])),
    lambda attention: check(attention, make_case(context=40, valid=40, width=40)),
    check_empty_first_tiles,
    check_slots_beyond_the_pool,
    check_sinks,
)


def load_mutant(monkeypatch: pytest.MonkeyPatch, folder: Path, guard: str) -> Attention:
    """The kernel module with one guard broken."""
    source = inspect.getsource(kernel)
    whole, broken = GUARDS[guard]
    assert source.count(whole) == 1, f"{whole!r} is no longer one place in the kernel"
    path = folder / "mutant.py"
    path.write_text(source.replace(whole, broken))
    spec = importlib.util.spec_from_file_location("mutant", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "mutant", module)
    spec.loader.exec_module(module)
    attention: Attention = module.window_attention
    return attention


def test_the_checks_pass_on_the_whole_kernel() -> None:
    for run_check in CHECKS:
        run_check(kernel.window_attention)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("guard", GUARDS)
def test_a_broken_guard_is_noticed(
    guard: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant = load_mutant(monkeypatch, tmp_path, guard)

    def passes(run_check: Callable[[Attention], None]) -> bool:
        try:
            run_check(mutant)
        except AssertionError:
            return False
        return True

    assert not all([passes(run_check) for run_check in CHECKS])
