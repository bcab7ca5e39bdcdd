"""Has every served token the same chance to be scored again, and is the same one taken again?"""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ripresa.workers.config import ShadowConfig
from ripresa.workers.errors import ConfigError
from ripresa.workers.replay import PlanKind, Recipe, TailVariant
from ripresa.workers.shadow_samples import SEGMENT_TOKENS, is_behind_restart, is_sampled

NUM_REQUESTS = 4000
SHARE = 0.05


def lengths() -> list[int]:
    """Answers as agents give them: most are short, a few are very long."""
    random = Random(1)
    return [min(4000, math.ceil(random.paretovariate(1.1) * 8)) for _ in range(NUM_REQUESTS)]


def sampled(number: int, num_tokens: int, share: float = SHARE) -> list[int]:
    """Tokens of an answer that are taken."""
    return [i for i in range(num_tokens) if is_sampled(f"request-{number}", i, share)]


def test_the_mean_over_sampled_tokens_is_the_mean_over_tokens() -> None:
    """Of a value that depends on the length of the answer and on the place in it."""

    def value(index: int, num_tokens: int) -> float:
        return 1.0 / (1 + index) + (num_tokens > 100)

    answers = lengths()
    everything = [value(i, n) for n in answers for i in range(n)]
    found = [value(i, n) for number, n in enumerate(answers) for i in sampled(number, n, 0.3)]
    expected = sum(everything) / len(everything)
    by_request = sum(sum(value(i, n) for i in range(n)) / n for n in answers) / len(answers)
    # The ids are fixed, so that this is no matter of luck.
    assert sum(found) / len(found) == pytest.approx(expected, rel=0.05)
    assert by_request != pytest.approx(expected, rel=0.1), "the lengths would not matter"


def test_a_request_is_scored_with_a_chance_that_grows_with_its_tokens() -> None:
    for num_segments in (1, 4, 16):
        num_tokens = num_segments * SEGMENT_TOKENS
        share = sum(bool(sampled(n, num_tokens)) for n in range(1000)) / 1000
        assert share == pytest.approx(1 - (1 - SHARE) ** num_segments, abs=0.03)


def test_the_share_of_tokens_is_the_budget() -> None:
    answers = lengths()
    num_taken = sum(len(sampled(number, n)) for number, n in enumerate(answers))
    assert num_taken / sum(answers) == pytest.approx(SHARE, rel=0.1)


@example("\ud800", 0, 0.5, 0.5)  # JSON has lone surrogates
@given(st.text(), st.integers(0, 100_000), st.floats(0, 1), st.floats(0, 1))
def test_more_of_the_same_tokens_are_taken_by_a_larger_share(
    request_id: str, index: int, one: float, other: float
) -> None:
    smaller, larger = sorted((one, other))
    assert is_sampled(request_id, index, smaller) <= is_sampled(request_id, index, larger)
    first = index // SEGMENT_TOKENS * SEGMENT_TOKENS
    assert is_sampled(request_id, index, one) == is_sampled(request_id, first, one)
    assert is_sampled(request_id, index, 1.0)
    assert not is_sampled(request_id, index, 0.0)


def test_replays_count_and_the_restarts_of_a_mode_do_not() -> None:
    recipe = Recipe(PlanKind.COLD, 0, 0, 0, (), 5, TailVariant.FLOORED, 0)
    assert not is_behind_restart(recipe)
    bounded = Recipe(PlanKind.BOUNDED, 8, 8, 16, (16,), 20, TailVariant.FLOORED, 0)
    assert is_behind_restart(bounded)
    inherited = Recipe(PlanKind.WINDOW, 32, 25, 32, (16,), 40, TailVariant.FLOORED, 0)
    assert is_behind_restart(inherited)
    canonical = Recipe(
        PlanKind.ANCHOR, 24, 24, 40, (32,), 44, TailVariant.FLOORED, 0, anchor_interval=32
    )
    assert not is_behind_restart(canonical)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("share", -0.1),
        ("share", 1.5),
        ("share", math.nan),
        ("max_tokens", 0),
        ("capacity_bytes", -1),
        ("max_wait_s", 0.0),
        ("max_wait_s", math.inf),
    ],
)
def test_an_impossible_setting_is_refused_by_its_name(name: str, value: float) -> None:
    with pytest.raises(ConfigError) as caught:
        ShadowConfig(**{name: value})  # type: ignore[arg-type]
    assert caught.value.field == f"shadow.{name}"
