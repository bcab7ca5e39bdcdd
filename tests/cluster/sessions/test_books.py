"""Do the sessions' books keep every path, expire what is idle, and stay within their memory?"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ripresa.cluster.sessions.books import (
    RECORD_BYTES,
    Key,
    Refusal,
    SessionBooks,
    SessionFacts,
    SessionHead,
    SessionPath,
    TurnRecord,
)

HEAD = SessionHead("model", "", b"head", idle_ttl_s=10.0)
MINE: Key = ("tenant", "mine")


def turn(turn_id: str, parent_id: str = "", size: int = 10) -> TurnRecord:
    return TurnRecord(turn_id, parent_id, b"m" * size, b"", b"", 1, "d0")


def append(books: SessionBooks, key: Key, turn: TurnRecord, now: float = 0.0) -> Refusal | None:
    """To the session that is open."""
    found = books.path(key, "", now)
    return found if isinstance(found, Refusal) else books.append(key, found.incarnation, turn, now)


def path(books: SessionBooks, key: Key, turn_id: str, now: float = 0.0) -> list[str]:
    found = books.path(key, turn_id, now)
    assert isinstance(found, SessionPath), found
    return [turn.turn_id for turn in found.turns]


def test_a_session_expires_when_it_is_idle_and_says_so() -> None:
    books = SessionBooks(1 << 20)
    books.open(MINE, HEAD, 0.0)
    assert append(books, MINE, turn("a"), 5.0) is None
    assert path(books, MINE, "a", 14.0) == ["a"]
    # Looking at it is no use of it.
    assert isinstance(books.get(MINE, 23.0), SessionFacts)
    assert books.get(MINE, 24.0) is Refusal.SESSION_EXPIRED
    assert append(books, MINE, turn("b", "a"), 24.0) is Refusal.SESSION_EXPIRED
    assert (books.num_sessions, books.num_bytes) == (0, 0)
    opened = books.open(MINE, HEAD, 25.0)
    assert isinstance(opened, SessionFacts)
    assert opened.head_turn is None
    assert books.path(MINE, "a", 25.0) is Refusal.TURN_NOT_FOUND


def test_sessions_that_expire_first_make_room() -> None:
    room = 3 * RECORD_BYTES + 3 * len(HEAD.conversation)
    books = SessionBooks(room)
    keys = [("", name) for name in "abcd"]
    for now, key in enumerate(keys[:3]):
        books.open(key, HEAD, float(now))
    path(books, keys[0], "", 3.0)
    books.open(keys[3], HEAD, 4.0)
    assert books.get(keys[1], 4.0) is Refusal.SESSION_EXPIRED
    assert all(isinstance(books.get(key, 4.0), SessionFacts) for key in (keys[0], *keys[2:]))
    assert append(books, keys[0], turn("x", size=room), 4.0) is Refusal.SESSION_TOO_LARGE
    assert books.open(("", "e"), SessionHead("m", "", b"x" * room, 10.0), 4.0) is (
        Refusal.SESSION_TOO_LARGE
    )


def test_a_session_used_twice_at_one_time_makes_room_once() -> None:
    books = SessionBooks(3 * HEAD.num_bytes)
    first, second, third = (("", name) for name in "abc")
    for key in (first, second, third):
        books.open(key, HEAD, 0.0)
    for _ in range(2):
        path(books, first, "", 1.0)
    path(books, second, "", 2.0)
    path(books, third, "", 3.0)
    # More than the first one leaves.
    assert append(books, third, turn("x", size=HEAD.num_bytes), 3.0) is None
    assert books.get(first, 3.0) is Refusal.SESSION_EXPIRED
    assert books.get(second, 3.0) is Refusal.SESSION_EXPIRED
    assert books.num_bytes == 2 * HEAD.num_bytes + RECORD_BYTES


def num_bytes(sessions: dict[Key, int], tenant: str) -> int:
    return sum(size for key, size in sessions.items() if key[0] == tenant)


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.integers(min_value=0, max_value=4),
            st.integers(min_value=0, max_value=4 * RECORD_BYTES),
            st.sampled_from([1.0, 50.0, 86400.0]),
        ),
        max_size=60,
    )
)
def test_no_tenant_loses_a_session_because_of_one_who_holds_more(
    steps: list[tuple[str, int, int, float]],
) -> None:
    max_bytes = 20 * RECORD_BYTES
    books = SessionBooks(max_bytes)
    sizes: dict[Key, int] = {}
    for now, (tenant, name, size, ttl_s) in enumerate(steps):
        sizes = {
            key: n for key, n in sizes.items() if isinstance(books.get(key, now), SessionFacts)
        }
        before, key = dict(sizes), (tenant, str(name))
        if key in sizes:
            record = turn(str(now), size=size)
            refused = append(books, key, record, now)
            added = record.num_bytes
        else:
            head = SessionHead("m", "", b"x" * size, ttl_s)
            opened = books.open(key, head, now)
            refused = opened if isinstance(opened, Refusal) else None
            added = head.num_bytes
        lost = {
            key: n for key, n in before.items() if not isinstance(books.get(key, now), SessionFacts)
        }
        holders = {owner for owner, _ in [*before, key]}
        if refused is not None:
            assert refused is Refusal.SESSION_TOO_LARGE
            assert not lost
            # It alone is more than his share.
            assert (before.get(key, 0) + added) * len(holders) > max_bytes
            sizes = before
            continue
        assert not lost or sum(before.values()) + added > max_bytes
        sizes = {key: n for key, n in before.items() if key not in lost}
        sizes[key] = sizes.get(key, 0) + added
        assert books.num_bytes == sum(sizes.values()) <= max_bytes
        for loser in {key[0] for key in lost} - {tenant}:
            assert num_bytes(before, loser) >= num_bytes(sizes, tenant)
            assert num_bytes(before, loser) * len(holders) > max_bytes


def test_many_long_lived_sessions_of_one_tenant_cost_another_none() -> None:
    books = SessionBooks(100 * RECORD_BYTES)
    books.open(MINE, HEAD, 0.0)
    greedy = SessionHead("m", "", b"x" * RECORD_BYTES, 86400.0)
    for number in range(1000):
        assert isinstance(books.open(("greedy", str(number)), greedy, 1.0), SessionFacts)
    assert append(books, MINE, turn("a"), 2.0) is None
    assert path(books, MINE, "a", 2.0) == ["a"]
    assert isinstance(books.get(("greedy", "999"), 2.0), SessionFacts)


@pytest.fixture
def tree() -> SessionBooks:
    books = SessionBooks(1 << 20)
    books.open(MINE, HEAD, 0.0)
    return books


def test_appending_is_idempotent_and_needs_its_parent(tree: SessionBooks) -> None:
    assert append(tree, MINE, turn("b", "a"), 0.0) is Refusal.TURN_NOT_FOUND
    for _ in range(2):
        assert append(tree, MINE, turn("a"), 0.0) is None
    assert tree.num_bytes == HEAD.num_bytes + turn("a").num_bytes
    closed = tree.close(MINE, 0.0)
    assert closed == HEAD
    assert tree.close(MINE, 0.0) is Refusal.SESSION_NOT_FOUND
    assert tree.num_bytes == 0


def test_a_later_session_of_the_same_id_gets_no_turn_of_an_earlier_one(tree: SessionBooks) -> None:
    """Whether the earlier one was closed, or has expired."""
    earlier = tree.path(MINE, "", 0.0)
    assert isinstance(earlier, SessionPath)
    tree.open(MINE, HEAD, 1.0)
    assert tree.append(MINE, earlier.incarnation, turn("a"), 1.0) is None
    for ending, now in (("close", 2.0), ("expire", 20.0)):
        if ending == "close":
            tree.close(MINE, now)
        tree.open(MINE, HEAD, now)
        assert tree.append(MINE, earlier.incarnation, turn("b"), now) is Refusal.SESSION_NOT_FOUND
        opened = tree.get(MINE, now)
        assert isinstance(opened, SessionFacts)
        assert opened.head_turn is None
        later = tree.path(MINE, "", now)
        assert isinstance(later, SessionPath)
        earlier = later


@given(parents=st.lists(st.integers(min_value=-1, max_value=30), max_size=30))
def test_every_turn_finds_its_own_path(parents: list[int]) -> None:
    books = SessionBooks(1 << 20)
    books.open(MINE, HEAD, 0.0)
    expected: list[list[str]] = []
    for number, parent in enumerate(parents):
        parent = min(parent, number - 1)
        above = [] if parent < 0 else expected[parent]
        assert append(books, MINE, turn(str(number), above[-1] if above else ""), 0.0) is None
        expected.append([*above, str(number)])
    assert [path(books, MINE, str(number)) for number in range(len(parents))] == expected
    assert path(books, MINE, "") == []
