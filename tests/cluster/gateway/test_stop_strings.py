"""Is a stop string found wherever it lies, and is no text before it lost or shown too soon?"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ripresa.cluster.gateway.stop_strings import StoppableText, StopStrings
from ripresa.cluster.gateway.tokenizer import Tokenizer

_text = st.text("ab", max_size=14)


def first_match(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The visible text and the match, from the definition: read one character after another."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(_text, st.lists(st.text("ab", min_size=1, max_size=4), max_size=4), st.data())
def test_any_cut_finds_the_first_match(text: str, stops: list[str], data: st.DataObject) -> None:
    expected, matched = first_match(text, stops)
    strings, shown, rest = StopStrings(stops), "", text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        shown += strings.feed(rest[:size])
        rest = rest[size:]
        assert expected.startswith(shown)
    shown += strings.finish()
    assert (shown, strings.matched) == (expected, matched)


def test_no_more_is_held_back_than_may_be_a_beginning() -> None:
    strings = StopStrings(["<stop>"])
    assert strings.feed("a <st") == "a "
    assert strings.feed("ar <") == "<star "
    assert strings.finish() == "<"


def test_nothing_is_held_back_without_stop_strings() -> None:
    assert StopStrings([]).feed("abc") == "abc"


@given(_text, st.integers(0, 16), st.data())
def test_any_cut_of_the_tokens_counts_from_the_same_one_on(
    tokenizer: Tokenizer, text: str, min_tokens: int, data: st.DataObject
) -> None:
    ids = [token_id for letter in text for token_id in tokenizer.encode(letter)]
    behind, matched = first_match(text[min_tokens:], ["ab", "b"])
    stoppable, shown = StoppableText(tokenizer.stream(), ["ab", "b"], min_tokens), ""
    while ids:
        size = data.draw(st.integers(1, len(ids)))
        shown += stoppable.feed(ids[:size])
        ids = ids[size:]
    shown += stoppable.finish()
    assert (shown, stoppable.matched) == (text[:min_tokens] + behind, matched)
