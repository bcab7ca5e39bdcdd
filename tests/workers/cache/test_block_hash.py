"""Do block hashes name the tokens, their past and their context, and nothing else?"""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ripresa.workers.cache.block_hash import (
    HASH_BYTES,
    BlockHasher,
    BlockIdentity,
    HashContext,
    hash_blocks,
)
from ripresa.workers.errors import InvalidArgument

CONTEXT = HashContext(
    model="demo@1",
    weights="w1",
    kv_format="float32",
    geometry=b"layout",
    window=4,
    tenant_salt=b"tenant",
)
OTHERS: dict[str, object] = {
    "model": "demo@2",
    "weights": "w2",
    "kv_format": "fp8",
    "geometry": b"another layout",
    "window": 8,
    "tenant_salt": b"other tenant",
    "rules_version": "0",
}
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def test_a_known_hash_stays_what_it_is() -> None:
    """Blocks on disk and on other workers are found by it: a change needs a new rules version."""
    first, second = hash_blocks(CONTEXT, range(8))
    assert CONTEXT.root().hex() == "6c24a9979636fd0ac8b238a7e8295015"
    assert first.hex() == "9f802c112d502e123caefe274288cd46"
    assert second.hex() == "e03fa9ba4095df4ec38cd3bdd0fe278f"


def test_i15_every_field_of_the_context_changes_every_hash() -> None:
    assert OTHERS.keys() == {field.name for field in fields(HashContext)}
    tokens = range(16)
    seen = set(hash_blocks(CONTEXT, tokens))
    for name, value in OTHERS.items():
        hashes = hash_blocks(replace(CONTEXT, **{name: value}), tokens)
        assert not seen & set(hashes), name
        seen |= set(hashes)
    assert {len(block_hash) for block_hash in seen} == {HASH_BYTES}


def test_i15_neighbouring_fields_do_not_run_together() -> None:
    one = replace(CONTEXT, model="org_1", weights="2345")
    two = replace(CONTEXT, model="org_12", weights="345")
    assert one.root() != two.root()


@given(TOKENS, TOKENS)
def test_prompts_share_hashes_exactly_as_far_as_they_share_blocks(
    one: list[int], two: list[int]
) -> None:
    window = CONTEXT.window
    shared = 0
    while shared < min(len(one), len(two)) and one[shared] == two[shared]:
        shared += 1
    hashes = [hash_blocks(CONTEXT, tokens) for tokens in (one, two)]
    assert [len(h) for h in hashes] == [len(one) // window, len(two) // window]
    equal = [a == b for a, b in zip(*hashes, strict=False)]
    assert equal == [k < shared // window for k in range(len(equal))]
    assert len(set(hashes[0])) == len(hashes[0])


@given(TOKENS, st.lists(st.integers(0, 12)))
def test_a_stream_hashes_like_the_whole(tokens: list[int], pieces: list[int]) -> None:
    hasher = BlockHasher(CONTEXT)
    found: list[bytes] = []
    position = 0
    for size in (*pieces, len(tokens)):
        piece = tokens[position : position + size]
        found += hasher.extend(piece)
        position += len(piece)
        assert hasher.num_tokens == position
        assert hasher.num_blocks == len(found)
    assert tuple(found) == hash_blocks(CONTEXT, tokens)


@pytest.mark.parametrize("wrong", [-1, 2**32, 1.5, None], ids=str)
def test_a_token_that_is_none_is_refused_and_changes_nothing(wrong: object) -> None:
    hasher = BlockHasher(CONTEXT)
    hasher.extend([1, 2])
    with pytest.raises(InvalidArgument, match="token_ids"):
        hasher.extend([3, wrong])  # type: ignore[list-item]
    assert hasher.extend([3, 4]) == hash_blocks(CONTEXT, [1, 2, 3, 4])


def test_identity_is_hash_and_lineage() -> None:
    (block_hash,) = hash_blocks(CONTEXT, range(4))
    assert BlockIdentity(block_hash, (8,)) != BlockIdentity(block_hash, ())
    assert len({BlockIdentity(block_hash, (8,)), BlockIdentity(block_hash, (8,))}) == 1
