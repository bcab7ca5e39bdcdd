"""Are exactly the best entries chosen, in any number of chunks, within the workspace?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from live_bytes import peak_live_bytes

from ripresa.kernels import dispatch as ops


def reader(keys: torch.Tensor) -> Callable[[int, int], torch.Tensor]:
    """Keys as a pool gives them: what lies beyond the last entry is not a number."""

    def read(first: int, last: int) -> torch.Tensor:
        found = torch.full((keys.shape[0], last - first, keys.shape[2]), float("nan"))
        have = keys[:, first:last]
        found[:, : have.shape[1]] = have
        return found

    return read


def scores_of(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The definition, in float64: [G, M, N]."""
    dots = torch.einsum("gmhd,gnd->gmhn", q.double(), keys.double()).clamp(min=0)
    return torch.einsum("gmhn,gmh->gmn", dots, weights.double())


@st.composite
def problems(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, weights, keys, visible, in small whole numbers so that ties are common and exact."""
    groups, rows, entries = (
        draw(st.integers(1, 3)),
        draw(st.integers(1, 4)),
        draw(st.integers(1, 90)),
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))

    def whole(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=generator).float()

    visible = torch.randint(0, entries + 1, (groups, rows), generator=generator)
    visible[0, 0] = max(int(visible[0, 0]), 1)
    return whole(groups, rows, 2, 4), whole(groups, rows, 2), whole(groups, entries, 4), visible


@settings(max_examples=150)
@given(problem=problems(), k=st.integers(1, 40), workspace=st.sampled_from([1, 5000, 1 << 20]))
def test_the_best_visible_entries_are_chosen_ties_to_the_lowest(
    problem: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], k: int, workspace: int
) -> None:
    q, weights, keys, visible = problem
    chosen = ops.select_entries(q, weights, reader(keys), visible, k, workspace)
    expected = scores_of(q, weights, keys)
    for group, row in torch.cartesian_prod(
        torch.arange(visible.shape[0]), torch.arange(visible.shape[1])
    ).tolist():
        seen = int(visible[group, row])
        order = sorted(range(seen), key=lambda t: (-float(expected[group, row, t]), t))
        best = sorted(order[:k])
        assert chosen[group, row].tolist() == best + [-1] * (k - len(best))


@settings(max_examples=100)
@given(
    problem=problems(),
    num_blocks=st.integers(1, 6),
    block_size=st.sampled_from([1, 4, 8]),
    workspace=st.sampled_from([1, 1 << 20]),
)
def test_candidate_blocks_hold_the_newest_entry_and_the_best_others(
    problem: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    num_blocks: int,
    block_size: int,
    workspace: int,
) -> None:
    q, weights, keys, visible = problem
    blocks = ops.select_candidates(
        q, weights, reader(keys), visible, num_blocks, block_size, workspace
    )
    expected = scores_of(q, weights, keys)
    for group in range(visible.shape[0]):
        for row in range(visible.shape[1]):
            seen = int(visible[group, row])
            count = -(-seen // block_size)
            score = {
                b: float(
                    expected[group, row, b * block_size : min((b + 1) * block_size, seen)].max()
                )
                for b in range(count)
            }
            if count:
                score[(seen - 1) // block_size] = float("inf")
            best = sorted(sorted(score, key=lambda b: (-score[b], b))[:num_blocks])
            assert blocks[group, row].tolist() == best + [-1] * (num_blocks - len(best))


@settings(max_examples=60)
@given(problem=problems(), k=st.integers(1, 12), workspace=st.sampled_from([1, 1 << 20]))
def test_only_entries_of_candidate_blocks_are_chosen(
    problem: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], k: int, workspace: int
) -> None:
    q, weights, keys, visible = problem
    size = 4
    blocks = ops.select_candidates(q, weights, reader(keys), visible, 4, size, 1 << 20)
    chosen = ops.select_entries(q, weights, reader(keys), visible, k, workspace, blocks, size)
    if int(visible.max()) <= k:
        return  # everything visible is chosen; a model's candidate pool then holds all of it
    expected = scores_of(q, weights, keys)
    for group in range(visible.shape[0]):
        for row in range(visible.shape[1]):
            seen = int(visible[group, row])
            allowed = [t for t in range(seen) if t // size in blocks[group, row].tolist()]
            order = sorted(allowed, key=lambda t: (-float(expected[group, row, t]), t))
            best = sorted(order[:k])
            assert chosen[group, row].tolist() == best + [-1] * (k - len(best))


def test_peak_live_bytes_sees_what_is_alive_at_once() -> None:
    def one_after_the_other() -> None:
        for _ in range(3):
            torch.empty(1 << 20).zero_()

    def both() -> torch.Tensor:
        return torch.empty(1 << 20).zero_() + torch.empty(1 << 20).zero_()

    assert peak_live_bytes(one_after_the_other) == 4 << 20
    assert peak_live_bytes(both) == 12 << 20


@dataclass(frozen=True)
class Case:
    """Sizes of a selection; `tied` scores are all equal, the case in which most is allocated."""

    groups: int
    rows: int
    heads: int
    dim: int
    k: int
    blocks: int
    context: int
    workspace: int
    tied: bool = False
    min_rows: int = 0


SMALL = Case(1, 1, 4, 32, 64, 256, 200_000, 8 << 20)
RELEASED = Case(1, 512, 32, 128, 512, 2048, 4096, 64 << 20)
CASES = {
    "one row": SMALL,
    "64 rows": replace(SMALL, rows=64),
    "512 rows": replace(SMALL, rows=512, context=30_000),
    "tied": replace(SMALL, rows=64, tied=True),
    "many sequences": replace(SMALL, groups=64, context=20_000),
    "several sequences of rows": replace(SMALL, groups=4, rows=24, context=20_000, tied=True),
    "padded": replace(SMALL, min_rows=16, context=50_000),
    "small": replace(SMALL, rows=128, context=20_000, workspace=1 << 20, tied=True),
    "released sizes": RELEASED,
    "released sizes, tied": replace(RELEASED, rows=96, context=20_000, tied=True),
    "released sizes, one row": replace(RELEASED, rows=1, context=200_000),
    "released sizes, 64 sequences": replace(RELEASED, groups=64, rows=1),
}


def assert_within_the_workspace(case: Case) -> None:
    """Both selections and the restricted one, reading keys as a packed pool gives them."""
    generator = torch.Generator().manual_seed(1)
    grid = ops.index_grid(case.dim)
    shape = (case.groups, case.rows, case.heads)
    records = grid.encode(torch.randn(case.context + 512, case.dim, generator=generator))
    q = torch.randn(*shape, case.dim, generator=generator)
    weights = torch.randn(shape, generator=generator) * (not case.tied)
    visible = (case.context - torch.arange(case.rows)).expand(case.groups, -1)

    def read(first: int, last: int) -> torch.Tensor:
        index = torch.arange(first, last).expand(case.groups, -1).flatten()
        keys = grid.decode(records.index_select(0, index))
        return keys.view(case.groups, last - first, case.dim)

    def candidates() -> torch.Tensor:
        return ops.select_candidates(
            q, weights, read, visible, case.blocks, 8, case.workspace, case.min_rows
        )

    def entries(restricted: torch.Tensor | None) -> torch.Tensor:
        return ops.select_entries(
            q, weights, read, visible, case.k, case.workspace, restricted, 8, case.min_rows
        )

    blocks = candidates()
    works = {
        "candidates": candidates,
        "entries": partial(entries, None),
        "restricted": partial(entries, blocks),
    }
    peaks = {name: peak_live_bytes(work) for name, work in works.items()}
    assert max(peaks.values()) <= case.workspace, peaks
    assert max(peaks.values()) > case.workspace // 8, f"most of it lies idle: {peaks}"


@pytest.mark.parametrize("name", CASES)
def test_all_that_is_alive_fits_the_workspace(name: str) -> None:
    assert_within_the_workspace(CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("rows", [64, 512])
def test_a_released_context_of_200_000_tokens_fits_the_workspace(rows: int) -> None:
    assert_within_the_workspace(replace(RELEASED, rows=rows, context=200_000))


@pytest.mark.parametrize("rows", [1, 64])
def test_a_context_of_200_000_tokens_is_searched_whole(rows: int) -> None:
    generator = torch.Generator().manual_seed(1)
    context, heads, dim, k, workspace = 200_000, 4, 32, 64, 8 << 20
    keys = torch.randn(1, context, dim, generator=generator)
    q = torch.randn(1, rows, heads, dim, generator=generator)
    weights = torch.randn(1, rows, heads, generator=generator)
    visible = torch.full((1, rows), context) - torch.arange(rows)
    chosen = ops.select_entries(q, weights, lambda a, b: keys[:, a:b], visible, k, workspace)
    for row in (0, rows - 1):
        best = scores_of(q, weights, keys)[0, row, : int(visible[0, row])].topk(k).indices
        # In float32 two entries at the boundary may change places.
        assert len(set(best.tolist()) & set(chosen[0, row].tolist())) >= k - 1


@settings(max_examples=60)
@given(problem=problems(), k=st.integers(1, 40), workspace=st.sampled_from([1, 9000, 40_000]))
def test_no_slice_of_rows_or_entries_changes_a_choice(
    problem: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], k: int, workspace: int
) -> None:
    q, weights, keys, visible = problem
    whole = ops.select_entries(q, weights, reader(keys), visible, k, 1 << 20)
    assert torch.equal(ops.select_entries(q, weights, reader(keys), visible, k, workspace), whole)
    blocks = ops.select_candidates(q, weights, reader(keys), visible, 5, 4, 1 << 20)
    sliced = ops.select_candidates(q, weights, reader(keys), visible, 5, 4, workspace)
    assert torch.equal(sliced, blocks)
