"""Does the sampler draw from the right distribution, alone or in a batch, now or on replay?"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ripresa.workers.errors import ErrorCode, InvalidArgument, RipresaError
from ripresa.workers.request import SamplingParams
from ripresa.workers.sampler import sample, sample_batch, uniform

GREEDY = SamplingParams(max_tokens=1, temperature=0)
PLAIN = SamplingParams(max_tokens=1)
NUM_DRAWS = 8_000


def distribution(logits: list[float], params: SamplingParams) -> dict[int, float]:
    """What each token's probability should be, written out from the definitions."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: params.top_k]
    weight = {i: math.exp((logits[i] - max(logits)) / params.temperature) for i in order}
    total = sum(weight.values())
    kept: list[int] = []
    for i in order:
        kept.append(i)
        if sum(weight[j] for j in kept) / total >= params.top_p:
            break
    share = sum(weight[i] for i in kept)
    return {i: weight[i] / share for i in kept}


def chi_square(counts: dict[int, int], expected: dict[int, float]) -> float:
    assert set(counts) <= set(expected)
    num = sum(counts.values())
    return sum((counts.get(i, 0) - num * p) ** 2 / (num * p) for i, p in expected.items())


def draw(logits: list[float], params: SamplingParams, num: int = 1000) -> dict[int, int]:
    tokens = sample_batch(torch.tensor(logits).expand(num, -1), [params] * num, range(num))
    values, counts = np.unique(tokens, return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


LOGITS = [0.3, -1.2, 2.0, 0.3, 1.1, -0.4, 2.0, 0.0]


@pytest.mark.parametrize(
    "params",
    [
        PLAIN,
        replace(PLAIN, seed=7, temperature=0.5),
        replace(PLAIN, seed=-3, temperature=2.5),
        replace(PLAIN, seed=11, top_k=3),
        replace(PLAIN, seed=12, top_p=0.8),
        replace(PLAIN, seed=13, temperature=1.5, top_k=6, top_p=0.9),
    ],
    ids=["plain", "cold", "hot", "top_k", "top_p", "all"],
)
def test_distribution(params: SamplingParams) -> None:
    expected = distribution(LOGITS, params)
    counts = draw(LOGITS, params, NUM_DRAWS)
    freedom = len(expected) - 1
    assert chi_square(counts, expected) < freedom + 4 * math.sqrt(2 * freedom)
    # The same test tells a distribution that is a little off.
    tilted = {i: p * (1.1 if n else 0.9) for n, (i, p) in enumerate(expected.items())}
    scale = sum(tilted.values())
    assert chi_square(counts, {i: p / scale for i, p in tilted.items()}) > freedom + 20


def test_seeds_and_positions_are_independent() -> None:
    grid = np.array([[uniform(seed, position) for position in range(200)] for seed in range(50)])
    assert grid.min() >= 0
    assert grid.max() < 1
    assert abs(grid.mean() - 0.5) < 0.01
    assert len(np.unique(grid)) == grid.size
    for a, b in ((grid[:, :-1], grid[:, 1:]), (grid[:-1], grid[1:])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.04


def test_the_random_numbers_never_change() -> None:
    """Streams are continued by other releases too: these values are part of the contract."""
    assert [uniform(*key) for key in ((0, 0), (0, 1), (1, 0), (-1, 5), (2**63 - 1, 4096))] == [
        0.011546754286331562,
        0.8133540609793564,
        0.3035680343067586,
        0.05541565898515444,
        0.7685189023859905,
    ]


@given(
    st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40),
    st.floats(0.05, 5),
    st.none() | st.integers(1, 60),
    st.floats(0.001, 1),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 2**20),
)
@settings(max_examples=300, deadline=None)
def test_inverse_of_the_cumulative_distribution(
    logits: list[float],
    temperature: float,
    top_k: int | None,
    top_p: float,
    seed: int,
    position: int,
) -> None:
    params = SamplingParams(1, temperature, top_k=top_k, top_p=top_p, seed=seed)
    token = sample(torch.tensor(logits), params, position)
    u, below = uniform(seed, position), 0.0
    expected = distribution(logits, params)
    for i, p in expected.items():
        if i == token:
            assert below - 1e-9 <= u <= below + p + 1e-9
            return
        below += p
    # Rounding may move the end of the kept set by one token, no further.
    more = distribution(logits, replace(params, top_p=min(1.0, top_p * (1 + 1e-9))))
    assert token in more


def test_a_row_ignores_its_batch_mates() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(64, 500, generator=generator) * 3
    params = [
        SamplingParams(1, (0.0, 0.7, 1.3)[i % 3], top_k=(None, 5, 900)[i % 3], top_p=0.95, seed=i)
        for i in range(64)
    ]
    positions = [17 * i for i in range(64)]
    alone = [sample(*row) for row in zip(logits, params, positions, strict=True)]
    assert sample_batch(logits, params, positions) == alone
    shuffled = torch.randperm(64, generator=generator).tolist()
    moved = sample_batch(
        logits[shuffled], [params[i] for i in shuffled], [positions[i] for i in shuffled]
    )
    assert moved == [alone[i] for i in shuffled]
    strangers = torch.full((3, 500), 50.0)
    assert sample_batch(torch.cat([strangers, logits[:1]]), params[:1] * 4, [0] * 4)[3] == alone[0]


def test_replay_gives_the_same_tokens() -> None:
    logits = torch.randn(300, 100, generator=torch.Generator().manual_seed(4))
    params = [replace(PLAIN, seed=99)] * 300
    stream = sample_batch(logits, params, range(300))
    assert sample_batch(logits[120:], params[120:], range(120, 300)) == stream[120:]
    assert sample_batch(logits, [replace(PLAIN, seed=98)] * 300, range(300)) != stream
    assert sample_batch(logits, params, range(1, 301)) != stream


def test_greedy_takes_the_first_of_equals() -> None:
    assert sample(torch.tensor([1.0, 5.0, 5.0, 5.0]), GREEDY, 0) == 1


def test_ties_are_cut_by_index() -> None:
    flat = [1.0] * 10
    assert set(draw(flat, replace(PLAIN, top_k=3))) == {0, 1, 2}
    assert set(draw(flat, replace(PLAIN, top_p=0.35))) == {0, 1, 2, 3}
    assert set(draw([0.0, 2.0, 1.0, 1.0, 1.0], replace(PLAIN, top_k=3))) == {1, 2, 3}


def test_narrow_settings_are_greedy() -> None:
    for narrow in (
        replace(PLAIN, top_k=1),
        replace(PLAIN, top_p=1e-9),
        replace(PLAIN, temperature=1e-300),
        replace(PLAIN, temperature=5e-324),
    ):
        assert set(draw([0.5, 1.0, 1.25, 0.0], narrow)) == {2}, narrow
    assert set(draw(LOGITS, replace(PLAIN, temperature=1e-300))) == {2, 6}, "equals share"


def test_top_k_beyond_the_vocabulary_keeps_all() -> None:
    assert draw(LOGITS, replace(PLAIN, top_k=1000)) == draw(LOGITS, PLAIN)


def test_forbidden_and_negligible_tokens_are_never_drawn() -> None:
    logits = [0.0, -math.inf, 1.0, -2000.0, -math.inf]
    assert set(draw(logits, PLAIN)) == {0, 2}
    assert set(draw(logits, replace(PLAIN, top_k=4, top_p=0.999999))) == {0, 2}


def test_half_precision_rows_are_read_as_their_values() -> None:
    logits = torch.tensor(LOGITS, dtype=torch.bfloat16)
    assert [sample(logits, PLAIN, i) for i in range(50)] == [
        sample(logits.float(), PLAIN, i) for i in range(50)
    ]


@pytest.mark.parametrize("params", [GREEDY, PLAIN], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "logits",
    [[0.0, math.nan, 1.0], [math.inf, 0.0], [-math.inf] * 3, [math.nan] * 2],
    ids=["nan", "inf", "all_forbidden", "all_nan"],
)
def test_broken_logits_are_refused(logits: list[float], params: SamplingParams) -> None:
    with pytest.raises(RipresaError, match="cannot sample position 12") as caught:
        sample(torch.tensor(logits), params, 12)
    assert caught.value.code is ErrorCode.INTERNAL


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", 0),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
    ],
)
def test_parameters_out_of_range_are_named(field: str, value: float) -> None:
    with pytest.raises(InvalidArgument) as caught:
        sample(torch.zeros(4), replace(PLAIN, **{field: value}), 0)
    assert caught.value.field == field


def test_rows_parameters_and_positions_must_match() -> None:
    with pytest.raises(ValueError, match="zip"):
        sample_batch(torch.zeros(3, 4), [PLAIN] * 2, [0, 1, 2])
