"""Is a block file exactly the block that was asked for, or refused?"""

from __future__ import annotations

from dataclasses import replace

import pytest
import xxhash
from block_files import FORM, identity, stored
from hypothesis import given
from hypothesis import strategies as st

from ripresa.workers.cache.block_file import BadBlock, decode, encode, file_name
from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.cache.block_record import BlockRecord, Producer
from ripresa.workers.cache.block_store import StoredBlock
from ripresa.workers.cache.cache_events import Origin

SMALL = replace(FORM, block_bytes=40)


@given(
    st.binary(min_size=16, max_size=16),
    st.lists(st.integers(0, 2**40), max_size=40),
    st.sampled_from(Producer),
    st.binary(min_size=40, max_size=40),
    st.none() | st.binary(min_size=16, max_size=16),
)
def test_a_block_comes_back_as_it_was(
    block_hash: bytes, restarts: list[int], producer: Producer, payload: bytes, parent: bytes | None
) -> None:
    name = BlockIdentity(block_hash, tuple(restarts))
    origin = Origin("t", b"f" * 16, parent)
    block = StoredBlock(BlockRecord(name, producer, "w1", origin), payload)
    assert decode(encode(block, SMALL), name, SMALL) == block


def test_every_flipped_bit_is_seen() -> None:
    content = encode(stored(1, (8,), SMALL), SMALL)
    for index in range(len(content)):
        for bit in range(8):
            broken = bytearray(content)
            broken[index] ^= 1 << bit
            with pytest.raises(BadBlock):
                decode(bytes(broken), identity(1, (8,)), SMALL)


def test_every_other_length_is_seen() -> None:
    content = encode(stored(1, form=SMALL), SMALL)
    for length in range(len(content)):
        with pytest.raises(BadBlock):
            decode(content[:length], identity(1), SMALL)
        with pytest.raises(BadBlock):
            decode(content[:length] + bytes(len(content) - length), identity(1), SMALL)
    for more in (b"\0", content):
        with pytest.raises(BadBlock):
            decode(content + more, identity(1), SMALL)


@pytest.mark.parametrize(
    "other",
    [
        replace(SMALL, layout_digest=b"another layout"),
        replace(SMALL, weights="w2"),
        replace(SMALL, rules_version="0"),
        replace(SMALL, block_bytes=39),
        replace(SMALL, block_bytes=41),
    ],
    ids=["layout", "weights", "rules", "shorter", "longer"],
)
def test_a_block_of_another_format_is_refused_under_the_right_name(other: object) -> None:
    content = encode(stored(1, form=SMALL), SMALL)
    with pytest.raises(BadBlock):
        decode(content, identity(1), other)  # type: ignore[arg-type]


def test_a_header_that_is_nested_without_end_is_a_bad_block() -> None:
    header = b"[" * 60_000
    body = b"RIPRESA\x01" + len(header).to_bytes(4, "little") + header + bytes(SMALL.block_bytes)
    with pytest.raises(BadBlock, match="header cannot be read"):
        decode(body + xxhash.xxh3_128_digest(body), identity(1), SMALL)


@pytest.mark.parametrize("asked", [identity(2), identity(1, (8,)), identity(1, (8, 16))])
def test_a_block_under_anothers_name_is_refused(asked: BlockIdentity) -> None:
    content = encode(stored(1, (16,), SMALL), SMALL)
    with pytest.raises(BadBlock, match="another block"):
        decode(content, asked, SMALL)


@pytest.mark.parametrize("changed", [{"layout_digest": b"x"}, {"weights": "w"}])
def test_formats_have_names_of_their_own(changed: dict[str, object]) -> None:
    names = {FORM.name, replace(FORM, **changed).name, replace(FORM, rules_version="0").name}  # type: ignore[arg-type]
    assert len(names) == 3
    assert all(len(name) == 32 and set(name) <= set("0123456789abcdef") for name in names)


def test_names_tell_lineages_apart_and_are_plain() -> None:
    lineages = [(), (8,), (8, 16), (81, 6), (816,), tuple(range(0, 4096, 8)), (-1,), (2**70,)]
    names = {file_name(identity(1, restarts)) for restarts in lineages}
    assert len(names) == len(lineages)
    odd = file_name(BlockIdentity(b"../../etc/passwd", (1,)))
    assert "/" not in odd
    assert not odd.startswith(".")


def test_what_cannot_be_written_is_refused() -> None:
    block = stored(1, form=SMALL)
    for wrong in (
        replace(block, payload=b"short"),
        replace(block, record=replace(block.record, weights="w2")),
        replace(block, record=replace(block.record, rules_version="0")),
        stored(1, tuple(range(20_000)), SMALL),
    ):
        with pytest.raises(ValueError, match=r"bytes|weights|lineage"):
            encode(wrong, SMALL)
