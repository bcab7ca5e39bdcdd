"""Do penalties, bans and a constraint's beginning follow from the tokens, whoever said them?"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ripresa.workers.request import OutputConstraint, SamplingParams
from ripresa.workers.token_history import TokenHistory, TokenRules

EOS = 1
PLAIN = SamplingParams(max_tokens=9)
WHOLE = OutputConstraint("start: /a/", "constraint")
BEHIND = OutputConstraint("start: /a/", "constraint", after=2, forbidden_before=(6,))
_ids = st.lists(st.integers(0, 6), max_size=12)
_params = st.builds(
    SamplingParams,
    max_tokens=st.just(99),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, -0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    min_tokens=st.integers(0, 6),
    stop_token_ids=st.sampled_from([(), (3,)]),
    ignore_eos=st.booleans(),
    constraint=st.sampled_from([None, WHOLE, BEHIND]),
)


def rules_after(params: SamplingParams, prompt: list[int], said: list[int]) -> TokenRules | None:
    return TokenHistory(params, prompt + said, len(prompt), EOS).rules()


@given(_params, st.lists(st.integers(0, 6), min_size=1, max_size=5), _ids, st.integers(0, 12))
def test_a_takeover_goes_on_by_the_same_rules(
    params: SamplingParams, prompt: list[int], said: list[int], cut: int
) -> None:
    history = TokenHistory(params, prompt + said[:cut], len(prompt), EOS)
    for token_id in said[cut:]:
        history.add(token_id)
    whole = TokenHistory(params, prompt + said, len(prompt), EOS)
    assert history.rules() == whole.rules()
    assert history.constrained_from == whole.constrained_from


def test_plain_parameters_look_at_nothing() -> None:
    assert rules_after(PLAIN, [1, 2], [3, 3]) is None


def test_counts_are_of_the_answer_and_the_prompt_only_matters_to_repetition() -> None:
    rules = rules_after(replace(PLAIN, frequency_penalty=1), [2, 2, 5], [3, 2, 3])
    assert rules == TokenRules(said=((3, 2), (2, 1)))
    rules = rules_after(replace(PLAIN, repetition_penalty=2), [5, 2, 2], [3])
    assert rules == TokenRules(prompt_ids=(2, 5), said=((3, 1),))


def test_no_ending_before_min_tokens() -> None:
    params = replace(PLAIN, min_tokens=2, stop_token_ids=(3,))
    assert rules_after(params, [0], [4]) == TokenRules(forbidden=(EOS, 3))
    assert rules_after(params, [0], [4, 4]) is None
    assert rules_after(replace(params, ignore_eos=True), [0], []) == TokenRules(forbidden=(3,))


def constrained_from(params: SamplingParams, prompt: list[int], said: list[int]) -> int | None:
    return TokenHistory(params, prompt + said, len(prompt), EOS).constrained_from


def test_a_constraint_holds_from_the_first_token() -> None:
    params = replace(PLAIN, constraint=WHOLE)
    assert rules_after(params, [0], []) is None
    assert constrained_from(params, [0], []) == constrained_from(params, [0], [4]) == 0
    assert constrained_from(PLAIN, [0], []) is None


def test_a_constraint_begins_behind_its_first_mark_in_the_answer() -> None:
    params = replace(PLAIN, constraint=BEHIND)
    assert rules_after(params, [2], [3]) == TokenRules(forbidden=(EOS, 6))
    assert constrained_from(params, [2], [3]) is None
    assert rules_after(params, [2], [3, 2]) is None
    assert constrained_from(params, [2], [3, 2]) == 2
    assert constrained_from(params, [2], [3, 2, 4, 2, 5]) == 2
