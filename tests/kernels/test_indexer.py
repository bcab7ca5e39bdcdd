"""Are exactly the best entries chosen, in any number of chunks, within the workspace?"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

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


class LargestTensor(TorchDispatchMode):
    """Remembers the bytes of the largest tensor that any operation made."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, torch.Tensor) and tensor.is_contiguous():
                self.num_bytes = max(self.num_bytes, tensor.numel() * tensor.element_size())
        return made


@pytest.mark.parametrize("rows", [1, 64])
def test_a_context_of_200_000_tokens_is_scored_within_the_workspace(rows: int) -> None:
    generator = torch.Generator().manual_seed(1)
    context, heads, dim, k, workspace = 200_000, 4, 32, 64, 8 << 20
    keys = torch.randn(1, context, dim, generator=generator)
    q = torch.randn(1, rows, heads, dim, generator=generator)
    weights = torch.randn(1, rows, heads, generator=generator)
    visible = torch.full((1, rows), context) - torch.arange(rows)
    with LargestTensor() as largest:
        chosen = ops.select_entries(q, weights, lambda a, b: keys[:, a:b], visible, k, workspace)
        ops.select_candidates(q, weights, lambda a, b: keys[:, a:b], visible, 256, 8, workspace)
    assert largest.num_bytes <= workspace
    best = scores_of(q, weights, keys)[0, 0, : int(visible[0, 0])].topk(k).indices
    # In float32 two entries at the boundary may change places.
    assert len(set(best.tolist()) & set(chosen[0, 0].tolist())) >= k - 1
