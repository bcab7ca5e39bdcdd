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
from ripresa.workers.sampler import TokenMask, logprobs_of, sample, sample_batch, uniform
from ripresa.workers.token_history import TokenRules

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


_extremes = st.sampled_from(
    [5e-324, 1e-320, 1e-308, 1e-9, 1.0, 50.0, 1e38, 1e308, 1.7e308, 0.0, math.nan, math.inf]
)
_signed = _extremes | _extremes.map(lambda value: -value)


@given(
    st.lists(
        st.floats(width=32) | st.sampled_from([3.4e38, -3.4e38, math.inf, -math.inf, math.nan]),
        min_size=6,
        max_size=6,
    ),
    st.builds(
        SamplingParams,
        max_tokens=st.just(1),
        temperature=_signed,
        min_p=_signed,
        top_k=st.none() | st.integers(-1, 2**64),
        top_p=_signed,
        presence_penalty=_signed,
        frequency_penalty=_signed,
        repetition_penalty=_signed,
        logit_bias=st.lists(st.tuples(st.integers(0, 9), _signed), max_size=2).map(tuple),
        banned_token_ids=st.lists(st.integers(0, 9), max_size=6).map(tuple),
    ),
    st.builds(
        TokenRules,
        # One beyond the vocabulary: the penalties of such a row fail by themselves.
        prompt_ids=st.lists(st.integers(0, 6), max_size=3, unique=True).map(tuple),
        said=st.dictionaries(st.integers(0, 6), st.integers(1, 2**20), max_size=4).map(
            lambda counts: tuple(counts.items())
        ),
        forbidden=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    ),
    st.none() | st.lists(st.booleans(), min_size=6, max_size=6).map(np.array),
)
@settings(max_examples=300, deadline=None)
def test_a_poisoned_row_fails_alone(
    logits: list[float], params: SamplingParams, rules: TokenRules, mask: TokenMask | None
) -> None:
    """Whatever it asks for and whatever the model says, it has a permitted token or an error."""
    mate = [0.5, -1.0, 2.0, 0.1, 0.0, 1.0]
    rows = torch.tensor([mate, logits, mate], dtype=torch.float32)
    first, token, last = sample_batch(
        rows, [PLAIN, params, PLAIN], [3, 4, 5], [None, rules, None], [None, mask, None]
    )
    assert (first, last) == tuple(sample(torch.tensor(mate), PLAIN, at) for at in (3, 5))
    if not isinstance(token, RipresaError):
        assert 0 <= token < 6
        assert math.isfinite(logits[token])
        assert token not in params.banned_token_ids
        assert mask is None or mask[token]


@pytest.mark.parametrize("factor", [5e-324, 1e-320])
def test_penalties_that_leave_no_finite_logit_are_refused(factor: float) -> None:
    said = TokenRules(prompt_ids=(1,))
    for params in (PLAIN, GREEDY):
        with pytest.raises(RipresaError, match="after the penalties") as caught:
            sample(torch.tensor([0.0, 5.0]), replace(params, repetition_penalty=factor), 7, said)
        assert caught.value.code is ErrorCode.INTERNAL


def test_rows_parameters_and_positions_must_match() -> None:
    with pytest.raises(ValueError, match="zip"):
        sample_batch(torch.zeros(3, 4), [PLAIN] * 2, [0, 1, 2])


def changed(logits: list[float], params: SamplingParams, rules: TokenRules) -> list[float]:
    """The logits after bias, penalties and bans, written out from the definitions."""
    values = list(logits)
    for token_id, bias in params.logit_bias:
        values[token_id] += bias
    said = dict(rules.said)
    for token_id in range(len(values)):
        if token_id in said or token_id in rules.prompt_ids:
            factor = params.repetition_penalty
            values[token_id] *= 1 / factor if values[token_id] > 0 else factor
        if token_id in said:
            values[token_id] -= params.frequency_penalty * said[token_id]
            values[token_id] -= params.presence_penalty
    for token_id in (*params.banned_token_ids, *rules.forbidden):
        values[token_id] = -math.inf
    return values


_small_ids = st.integers(0, 9)


@given(
    st.lists(st.floats(-9, 9, width=32), min_size=10, max_size=10),
    st.builds(
        SamplingParams,
        max_tokens=st.just(1),
        temperature=st.sampled_from([0.0, 0.7, 1.5]),
        min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
        top_k=st.sampled_from([None, 4]),
        top_p=st.sampled_from([1.0, 0.8]),
        presence_penalty=st.floats(-2, 2, width=32),
        frequency_penalty=st.floats(-2, 2, width=32),
        repetition_penalty=st.sampled_from([1.0, 0.5, 1.3]),
        logit_bias=st.dictionaries(_small_ids, st.floats(-100, 100, width=32), max_size=3).map(
            lambda biases: tuple(biases.items())
        ),
        banned_token_ids=st.lists(_small_ids, max_size=3).map(tuple),
    ),
    st.builds(
        TokenRules,
        prompt_ids=st.lists(_small_ids, max_size=4, unique=True).map(tuple),
        said=st.dictionaries(_small_ids, st.integers(1, 5), max_size=4).map(
            lambda counts: tuple(counts.items())
        ),
        forbidden=st.lists(_small_ids, max_size=3).map(tuple),
    ),
    st.integers(0, 1000),
)
@settings(max_examples=300, deadline=None)
def test_every_parameter_against_the_definitions(
    logits: list[float], params: SamplingParams, rules: TokenRules, position: int
) -> None:
    values = changed(logits, params, rules)
    best = max(values)
    token = sample(torch.tensor(logits), params, position, rules)
    assert values[token] > -math.inf
    if params.temperature == 0:
        assert values[token] >= best - 1e-9
        return
    # Rounding may move the end of a cut by one token, so the bounds give way a little.
    likely = [math.exp((value - best) / params.temperature) for value in values]
    assert likely[token] >= params.min_p * (1 - 1e-9)
    better = [i for i, share in enumerate(likely) if share > likely[token] * (1 + 1e-9)]
    assert params.top_k is None or len(better) < params.top_k
    kept = sorted((s for s in likely if s >= params.min_p), reverse=True)[: params.top_k]
    assert sum(likely[i] for i in better) <= params.top_p * sum(kept) * (1 + 1e-9)


def test_min_p_keeps_a_share_of_the_likeliest() -> None:
    params = replace(PLAIN, seed=5, min_p=0.4)
    best = max(LOGITS)
    kept = {i for i, x in enumerate(LOGITS) if math.exp(x - best) >= 0.4}
    expected = {i: math.exp(LOGITS[i]) for i in kept}
    total = sum(expected.values())
    counts = draw(LOGITS, params, NUM_DRAWS)
    assert chi_square(counts, {i: p / total for i, p in expected.items()}) < 20
    assert set(draw(LOGITS, replace(PLAIN, min_p=1.0))) == {2, 6}


def test_penalties_and_bias_change_the_greedy_choice() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, -1.0])
    said = TokenRules(said=((1, 2),))
    assert sample(logits, GREEDY, 0, said) == 1
    assert sample(logits, replace(GREEDY, presence_penalty=1.5), 0, said) == 2
    assert sample(logits, replace(GREEDY, frequency_penalty=0.6), 0, said) == 2
    assert sample(logits, replace(GREEDY, repetition_penalty=2), 0, said) == 2
    asked = TokenRules(prompt_ids=(1,))
    assert sample(logits, replace(GREEDY, repetition_penalty=2), 0, asked) == 2
    assert sample(logits, replace(GREEDY, presence_penalty=1.5), 0, asked) == 1
    assert sample(logits, replace(GREEDY, logit_bias=((3, 5.0),)), 0) == 3
    assert sample(logits, replace(GREEDY, banned_token_ids=(1, 2)), 0) == 0


def mask(*token_ids: int) -> TokenMask:
    allowed = np.zeros(len(LOGITS), np.bool_)
    allowed[list(token_ids)] = True
    return allowed


def test_only_what_the_mask_allows_comes_whatever_is_likely() -> None:
    for position in range(50):
        for params in (PLAIN, replace(PLAIN, top_k=3, top_p=0.7), replace(PLAIN, min_p=0.9)):
            assert sample(torch.tensor(LOGITS), params, position, None, mask(0, 3)) in (0, 3)
    assert (
        sample(torch.tensor(LOGITS), replace(GREEDY, logit_bias=((3, 99.0),)), 0, None, mask(0, 3))
        == 3
    )
    assert (
        sample(torch.tensor(LOGITS), replace(GREEDY, banned_token_ids=(3,)), 0, None, mask(0, 3))
        == 0
    )


def test_an_ending_that_alone_is_left_comes_before_min_tokens() -> None:
    early = TokenRules(forbidden=(3,))
    assert sample(torch.tensor(LOGITS), GREEDY, 0, early, mask(0, 3)) == 0
    assert sample(torch.tensor(LOGITS), GREEDY, 0, early, mask(3)) == 3
    banned = replace(GREEDY, banned_token_ids=(3,))
    with pytest.raises(RipresaError, match="every token is forbidden"):
        sample(torch.tensor(LOGITS), banned, 0, early, mask(3))


def test_nothing_left_to_choose_is_told() -> None:
    params = replace(PLAIN, banned_token_ids=(0,))
    with pytest.raises(RipresaError, match="every token is forbidden"):
        sample(torch.zeros(2), params, 0, TokenRules(forbidden=(1,)))


def test_log_probabilities_are_the_models_own() -> None:
    logits = torch.tensor(LOGITS)
    expected = torch.log_softmax(logits.double(), 0).tolist()
    found = logprobs_of(logits, 4, 3)
    assert found.chosen == pytest.approx(expected[4])
    # Equal ones in the order of their ids.
    assert [token_id for token_id, _ in found.top] == [2, 6, 4]
    assert [p for _, p in found.top] == pytest.approx([expected[i] for i in (2, 6, 4)])
    assert logprobs_of(logits, 4, 0).top == ()
    everything = logprobs_of(logits, 0, 99).top
    assert sum(math.exp(p) for _, p in everything) == pytest.approx(1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("presence_penalty", math.nan),
        ("frequency_penalty", math.inf),
        ("logit_bias", ((1, math.nan),)),
    ],
)
def test_changes_out_of_range_are_named(field: str, value: object) -> None:
    with pytest.raises(InvalidArgument) as caught:
        sample(torch.zeros(4), replace(PLAIN, **{field: value}), 0)
    assert caught.value.field == field
