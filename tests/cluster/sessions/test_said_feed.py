"""Does the feed tell each gateway all that others said, once and in order, within its bound?"""

from __future__ import annotations

import asyncio
from array import array

from hypothesis import given
from hypothesis import strategies as st

from ripresa.cluster.sessions.said_feed import (
    ANSWER_TOKENS,
    MAX_NEWS_TOKENS,
    FeedPlace,
    SaidAnswer,
    SaidFeed,
)
from ripresa.cluster.sessions.store import LocalSessionStore


def answer(name: int, num_tokens: int = 1) -> SaidAnswer:
    return SaidAnswer(name.to_bytes(16, "little"), array("I", range(num_tokens)).tobytes())


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.one_of(st.none(), st.lists(st.integers(0, 50), max_size=3)),
        ),
        max_size=60,
    )
)
def test_each_reader_hears_what_others_said_that_is_kept(
    steps: list[tuple[str, list[int] | None]],
) -> None:
    feed = SaidFeed(4 * ANSWER_TOKENS)
    places = dict.fromkeys("abc", FeedPlace())
    behind: dict[str, list[SaidAnswer]] = {name: [] for name in "abc"}
    said: list[SaidAnswer] = []
    for gateway, sizes in steps:
        if sizes is None:
            news = feed.news(gateway, places[gateway])
            places[gateway] = news.place
            expected = [one for one in behind[gateway] if one in newest(said, feed.max_tokens)]
            assert list(news.answers) == expected
            behind[gateway] = []
            continue
        added = [answer(len(said) + place, size) for place, size in enumerate(sizes)]
        feed.add(gateway, added)
        said += added
        for name, waiting in behind.items():
            if name != gateway:
                waiting += added
        assert feed.num_tokens == sum(one.num_tokens for one in newest(said, feed.max_tokens))
        assert feed.num_tokens <= feed.max_tokens


def newest(said: list[SaidAnswer], max_tokens: int) -> list[SaidAnswer]:
    """The last answers that fit together."""
    kept: list[SaidAnswer] = []
    for one in reversed(said):
        if sum(other.num_tokens for other in kept) + one.num_tokens > max_tokens:
            break
        kept.append(one)
    return kept


def test_much_is_told_in_pieces_and_a_new_feed_from_its_beginning() -> None:
    feed = SaidFeed(4 * MAX_NEWS_TOKENS)
    large = [answer(number, MAX_NEWS_TOKENS // 2) for number in range(3)]
    feed.add("a", [*large, answer(9, 5 * MAX_NEWS_TOKENS)])
    place, heard = FeedPlace(), []
    for _ in large:
        news = feed.news("b", place)
        place, heard = news.place, [*heard, *news.answers]
        assert len(news.answers) == 1
    assert heard == large
    assert feed.news("b", place).answers == ()
    successor = SaidFeed(1000)
    successor.add("a", [answer(7)])
    assert successor.news("b", place).answers == (answer(7),)


async def test_a_reader_waits_for_what_another_one_says() -> None:
    store = LocalSessionStore()
    waiting = asyncio.create_task(store.news("b", FeedPlace()))
    await store.share("b", [answer(1)])
    await store.share("a", [answer(2)])
    news = await asyncio.wait_for(waiting, 10)
    assert news.answers == (answer(2),)
    assert news.place.number == 2
