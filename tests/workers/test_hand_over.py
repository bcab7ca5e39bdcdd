"""Does a decode worker take a hand-over only in order, whole, and for the request that waits?"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import torch
from hash_machine import WINDOW
from hash_requests import make_request
from split_cluster import local_engine

from ripresa.workers.decode_engine import DecodeEngine
from ripresa.workers.errors import ErrorCode, RipresaError
from ripresa.workers.hand_over import InboundHandOver
from ripresa.workers.transfer.base import Manifest, Section, SectionKind, TransferState

REQUEST = make_request(20, generation=1)
MANIFEST = Manifest("t1", "r", 1, "e0", b"hash machine", 20, 0, REQUEST.recipe)
BLOCK_BYTES = 8 * WINDOW
BLOCKS = Section(0, SectionKind.BLOCKS, 0, 2, 2 * BLOCK_BYTES)


@asynccontextmanager
async def waiting_engine() -> AsyncIterator[DecodeEngine]:
    """A decode worker on which REQUEST waits for its state."""
    async with local_engine() as (engine, _):
        stream = engine.generate(REQUEST, local=False)
        await anext(stream)
        yield engine
        engine.check_integrity()
        await stream.aclose()


def payload(section: Section) -> torch.Tensor:
    return torch.zeros(section.num_bytes, dtype=torch.uint8)


def state_section(engine: DecodeEngine, index: int = 1) -> Section:
    num_bytes = engine.section_bytes(MANIFEST, Section(index, SectionKind.STATE, 0, 0, 0))
    return Section(index, SectionKind.STATE, 0, 0, num_bytes)


@pytest.mark.parametrize(
    "section",
    [
        Section(1, SectionKind.BLOCKS, 0, 1, BLOCK_BYTES),
        Section(0, SectionKind.BLOCKS, 1, 2, BLOCK_BYTES),
        Section(0, SectionKind.BLOCKS, 0, 0, 0),
        Section(0, SectionKind.BLOCKS, 0, 3, 3 * BLOCK_BYTES),
        Section(0, SectionKind.BLOCKS, 0, 1, BLOCK_BYTES - 8),
        Section(0, SectionKind.STATE, 0, 0, 8),
    ],
    ids=["index", "gap", "empty", "beyond_the_prompt", "size", "state_too_early"],
)
async def test_a_section_out_of_order_is_refused(section: Section) -> None:
    async with waiting_engine() as engine:
        engine.open(MANIFEST)
        with pytest.raises(RipresaError) as caught:
            engine.write(MANIFEST, section, payload(section))
        assert caught.value.code is ErrorCode.FAILED_PRECONDITION
        assert engine.stats().counters.transfer_bytes == 0
        engine.write(MANIFEST, BLOCKS, payload(BLOCKS))


async def test_repeated_messages_change_nothing() -> None:
    async with waiting_engine() as engine:
        for _ in range(2):
            engine.open(MANIFEST)
        for _ in range(2):
            engine.write(MANIFEST, BLOCKS, payload(BLOCKS))
        with pytest.raises(RipresaError, match="without its state"):
            engine.complete(MANIFEST)
        state = state_section(engine)
        for _ in range(2):
            engine.write(MANIFEST, state, payload(state))
        assert engine.stats().counters.transfer_bytes == BLOCKS.num_bytes + state.num_bytes
        for _ in range(2):
            engine.complete(MANIFEST)
        engine.fail(MANIFEST, "too late")
        assert engine.stats().num_waiting == 0


async def test_a_newer_transfer_replaces_one_that_is_under_way() -> None:
    newer = replace(MANIFEST, transfer_id="t2", generation=2)
    async with waiting_engine() as engine:
        engine.open(MANIFEST)
        engine.open(newer)
        with pytest.raises(RipresaError, match="replaced by a newer"):
            engine.write(MANIFEST, BLOCKS, payload(BLOCKS))
        engine.fail(MANIFEST, "stale")
        engine.write(newer, BLOCKS, payload(BLOCKS))


async def test_a_failed_transfer_makes_room_for_a_newer_one_only() -> None:
    async with waiting_engine() as engine:
        engine.open(MANIFEST)
        engine.write(MANIFEST, BLOCKS, payload(BLOCKS))
        for _ in range(2):
            engine.fail(MANIFEST, "the lane broke")
        for transfer_id in ("t1", "t2"):
            with pytest.raises(RipresaError, match="stale"):
                engine.open(replace(MANIFEST, transfer_id=transfer_id))
        newer = replace(MANIFEST, transfer_id="t2", generation=2)
        # The blocks that arrived are verified, and need not come again.
        assert engine.open(newer) == BLOCKS.last_block
        with pytest.raises(RipresaError, match="expected"):
            engine.write(newer, BLOCKS, payload(BLOCKS))


@pytest.mark.parametrize("field", [{"first_block": 1}, {"num_tokens": 21}])
async def test_a_manifest_that_does_not_fit_is_refused(field: dict[str, int]) -> None:
    async with waiting_engine() as engine:
        with pytest.raises(RipresaError) as caught:
            engine.open(replace(MANIFEST, **field))  # type: ignore[arg-type]
        assert caught.value.code is ErrorCode.FAILED_PRECONDITION


async def test_a_local_request_takes_no_transfer() -> None:
    async with local_engine() as (engine, _):
        stream = engine.generate(REQUEST, local=True)
        await anext(stream)
        with pytest.raises(RipresaError) as caught:
            engine.open(MANIFEST)
        assert caught.value.code is ErrorCode.NOT_FOUND
        await stream.aclose()


def test_an_end_is_final() -> None:
    hand_over = InboundHandOver(MANIFEST, 2, 0, 8)
    hand_over.move(TransferState.FAILED)
    assert not hand_over.is_open
    with pytest.raises(RipresaError, match="cannot go from failed"):
        hand_over.move(TransferState.COMPLETE)
