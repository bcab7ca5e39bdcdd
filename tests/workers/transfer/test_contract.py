"""Do all transports keep the transfer contract, whatever the control way does to them?"""

from __future__ import annotations

import asyncio
import pickle
import uuid
from dataclasses import replace

import pytest
import torch
from transfer_sides import (
    BLOCK_BYTES,
    DECODER,
    DIGEST,
    STATE_BYTES,
    Sides,
    blocks,
    manifest,
    payload,
    state,
)

from ripresa.workers.errors import ErrorCode, InvalidArgument, RipresaError, Unavailable
from ripresa.workers.transfer.base import (
    Accept,
    CloseLane,
    Complete,
    ControlMessage,
    Fail,
    KeepAlive,
    Manifest,
    Offer,
    OutboundTransfer,
    PullManifest,
    Section,
    SectionKind,
    SendSection,
    TransferState,
)
from ripresa.workers.transfer.checksum import payload_checksum, transfer_checksum
from ripresa.workers.transfer.faults import (
    Deliver,
    Fault,
    delay,
    drop,
    drop_answer,
    kill,
    miscount,
    repeat,
)

SECTIONS = (blocks(0, 0, 2), blocks(1, 2, 5), state(2))
# Messages of one transfer: Offer, OpenLane, three sections, Complete.
OFFER, OPEN, FIRST, SECOND, LAST, COMPLETE = range(6)


def fresh() -> Manifest:
    return manifest(uuid.uuid4().hex)


async def send_all(sides: Sides, wanted: Manifest, seed: int = 0) -> OutboundTransfer:
    transfer = await sides.backend.offer(DECODER, wanted)
    for section in SECTIONS:
        await transfer.send(section, payload(section, seed))
    await transfer.complete()
    return transfer


async def settle(sides: Sides) -> None:
    """Both sides are idle and hold nothing."""
    await sides.backend.drain()
    sides.backend.check_integrity()
    await sides.receiver("settle")


async def refusal_of(attempt: asyncio.Future[object] | object) -> RipresaError:
    with pytest.raises(RipresaError) as caught:
        await attempt  # type: ignore[misc]
    return caught.value


def expected_record(seed: int = 0) -> list[tuple[int, int]]:
    return [(s.index, payload_checksum(payload(s, seed))) for s in SECTIONS]


async def assert_works(sides: Sides) -> None:
    """A new transfer succeeds, whatever happened before."""
    wanted = fresh()
    await send_all(sides, wanted, seed=99)
    assert await sides.receiver("written", wanted.transfer_id) == expected_record(99)
    assert await sides.receiver("ends", wanted.transfer_id) == ["complete"]
    await settle(sides)


async def assert_failed_once(sides: Sides, wanted: Manifest) -> None:
    ends = await sides.receiver("ends", wanted.transfer_id)
    assert len(ends) == 1
    assert ends[0].startswith("failed: ")


async def test_everything_arrives(sides: Sides) -> None:
    wanted = fresh()
    transfer = await send_all(sides, wanted)
    assert transfer.state is TransferState.COMPLETE
    assert transfer.num_bytes_sent == sum(s.num_bytes for s in SECTIONS)
    assert await sides.receiver("written", wanted.transfer_id) == expected_record()
    assert await sides.receiver("ends", wanted.transfer_id) == ["complete"]
    with pytest.raises(RipresaError, match="is complete"):
        await transfer.send(SECTIONS[0], payload(SECTIONS[0]))
    await transfer.fail("too late to fail")
    assert transfer.state is TransferState.COMPLETE
    await settle(sides)


async def test_many_transfers_share_one_lane(sides: Sides) -> None:
    wanted = [fresh() for _ in range(12)]
    await asyncio.gather(*(send_all(sides, one, seed) for seed, one in enumerate(wanted)))
    for seed, one in enumerate(wanted):
        assert await sides.receiver("written", one.transfer_id) == expected_record(seed)
        assert await sides.receiver("ends", one.transfer_id) == ["complete"]
    assert sides.backend.num_open_lanes == 1
    await settle(sides)


async def test_concurrent_sends_of_one_transfer_keep_their_order(sides: Sides) -> None:
    wanted = fresh()
    transfer = await sides.backend.offer(DECODER, wanted)
    await asyncio.gather(*(transfer.send(s, payload(s)) for s in SECTIONS), transfer.complete())
    assert await sides.receiver("written", wanted.transfer_id) == expected_record()
    await settle(sides)


async def test_corrupt_payload_is_refused(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = fresh()
    transfer = await sides.backend.offer(DECODER, wanted)
    await transfer.send(SECTIONS[0], payload(SECTIONS[0]))
    with monkeypatch.context() as patch:
        sides.damage_payloads(patch)
        error = await refusal_of(transfer.send(SECTIONS[1], payload(SECTIONS[1])))
    assert error.code is ErrorCode.DATA_LOSS
    assert error.retryable
    assert transfer.state is TransferState.FAILED
    assert await sides.receiver("written", wanted.transfer_id) == expected_record()[:1]
    await assert_failed_once(sides, wanted)
    await settle(sides)
    await assert_works(sides)


async def test_wrong_transfer_checksum_is_refused(sides: Sides) -> None:
    wanted = fresh()
    sides.faults[COMPLETE] = miscount
    error = await refusal_of(send_all(sides, wanted))
    assert error.code is ErrorCode.DATA_LOSS
    await assert_failed_once(sides, wanted)
    await assert_works(sides)


async def test_wrong_layout_digest_is_refused(sides: Sides) -> None:
    wanted = replace(fresh(), layout_digest=b"another layout")
    error = await refusal_of(sides.backend.offer(DECODER, wanted))
    assert error.code is ErrorCode.FAILED_PRECONDITION
    assert wanted.transfer_id not in await sides.receiver("opened")
    assert await sides.receiver("ends", wanted.transfer_id) == []
    await assert_works(sides)


async def test_stale_generation_is_refused_and_a_newer_one_supersedes(sides: Sides) -> None:
    request_id = uuid.uuid4().hex
    old, new, stale = (
        manifest(uuid.uuid4().hex, generation=generation, request_id=request_id)
        for generation in (1, 2, 1)
    )
    first = await sides.backend.offer(DECODER, old)
    await first.send(SECTIONS[0], payload(SECTIONS[0]))
    rival = replace(old, transfer_id=uuid.uuid4().hex)
    assert "collides" in str(await refusal_of(sides.backend.offer(DECODER, rival)))
    await send_all(sides, new)
    assert "superseded" in str(await refusal_of(first.send(SECTIONS[1], payload(SECTIONS[1]))))
    assert "is stale" in str(await refusal_of(sides.backend.offer(DECODER, stale)))
    await assert_failed_once(sides, old)
    assert await sides.receiver("ends", new.transfer_id) == ["complete"]
    await assert_works(sides)


async def test_message_of_another_generation_does_no_harm(sides: Sides) -> None:
    wanted = fresh()
    transfer = await sides.backend.offer(DECODER, wanted)
    other = wanted.generation + 1
    for message in (
        SendSection(wanted.transfer_id, other, "no lane", SECTIONS[0]),
        Complete(wanted.transfer_id, other, 0),
        KeepAlive(wanted.transfer_id, other),
    ):
        error = await refusal_of(sides.receiver("deliver", message))
        assert f"generation {other}" in str(error)
    await sides.receiver("deliver", Fail(wanted.transfer_id, other, "stale"))
    for section in SECTIONS:
        await transfer.send(section, payload(section))
    await transfer.complete()
    assert await sides.receiver("ends", wanted.transfer_id) == ["complete"]
    await settle(sides)


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ([replace(SECTIONS[0], num_bytes=SECTIONS[0].num_bytes - 1)], "bytes"),
        ([replace(SECTIONS[0], num_bytes=0)], "bytes"),
        ([replace(SECTIONS[0], index=1)], "out of order"),
        ([SECTIONS[0], SECTIONS[2]], "out of order"),
        ([SECTIONS[0], blocks(1, 3, 5)], "from block 2"),
        ([blocks(0, 0, 0)], "from block 0"),
        ([state(0), blocks(1, 0, 1)], "after the STATE"),
    ],
    ids=["short", "empty", "late start", "gap", "block gap", "no blocks", "after the state"],
)
async def test_wrong_section_is_refused(sides: Sides, sections: list[Section], why: str) -> None:
    wanted = fresh()
    transfer = await sides.backend.offer(DECODER, wanted)
    for section in sections[:-1]:
        await transfer.send(section, payload(section))
    error = await refusal_of(transfer.send(sections[-1], payload(sections[-1])))
    assert error.code is ErrorCode.FAILED_PRECONDITION
    assert why in str(error)
    assert transfer.state is TransferState.FAILED
    await assert_failed_once(sides, wanted)
    await assert_works(sides)


async def test_payload_that_is_not_the_section_is_refused_before_it_leaves(sides: Sides) -> None:
    wanted = fresh()
    transfer = await sides.backend.offer(DECODER, wanted)
    with pytest.raises(InvalidArgument, match="payload"):
        await transfer.send(SECTIONS[0], torch.zeros(3, dtype=torch.uint8))
    assert transfer.state is TransferState.FAILED
    await sides.backend.drain()
    await assert_failed_once(sides, wanted)
    await assert_works(sides)


async def test_completing_without_the_state_is_refused(sides: Sides) -> None:
    for count in (0, 2):
        wanted = fresh()
        transfer = await sides.backend.offer(DECODER, wanted)
        for section in SECTIONS[:count]:
            await transfer.send(section, payload(section))
        assert "before its STATE" in str(await refusal_of(transfer.complete()))
        await assert_failed_once(sides, wanted)
    await assert_works(sides)


@pytest.mark.parametrize("number", [OFFER, OPEN, FIRST, SECOND, LAST, COMPLETE])
async def test_repeated_messages_change_nothing(sides: Sides, number: int) -> None:
    wanted = fresh()
    sides.faults[number] = repeat
    await send_all(sides, wanted)
    assert await sides.receiver("written", wanted.transfer_id) == expected_record()
    assert await sides.receiver("ends", wanted.transfer_id) == ["complete"]
    await settle(sides)


def pull_manifest() -> PullManifest:
    return PullManifest(uuid.uuid4().hex, "encoder-0", DIGEST, 3, (24,))


def window(index: int, last_block: int) -> Section:
    return Section(index, SectionKind.WINDOW, last_block - 1, last_block, BLOCK_BYTES)


PULLED = (window(0, 3), blocks(1, 3, 5), window(2, 4), blocks(3, 5, 6), window(4, 9))


@pytest.mark.parametrize("count", range(len(PULLED) + 1))
async def test_a_pull_is_complete_after_any_section(sides: Sides, count: int) -> None:
    wanted = pull_manifest()
    transfer = await sides.backend.offer(DECODER, wanted)
    assert transfer.first_block == 3
    for section in PULLED[:count]:
        await transfer.send(section, payload(section))
    await transfer.complete()
    written = [(s.index, payload_checksum(payload(s))) for s in PULLED[:count]]
    assert await sides.receiver("written", wanted.transfer_id) == written
    assert await sides.receiver("ends", wanted.transfer_id) == ["complete"]
    await settle(sides)


async def test_blocks_of_a_pull_come_in_order_whatever_windows_lie_between(sides: Sides) -> None:
    wanted = pull_manifest()
    transfer = await sides.backend.offer(DECODER, wanted)
    for section in PULLED[:3]:
        await transfer.send(section, payload(section))
    repeated = blocks(3, 3, 5)
    error = await refusal_of(transfer.send(repeated, payload(repeated)))
    assert "from block 5 on" in str(error)
    await assert_failed_once(sides, wanted)
    await settle(sides)


async def test_late_messages_after_the_end_change_nothing(sides: Sides) -> None:
    wanted = fresh()
    await send_all(sides, wanted)
    unknown = replace(SECTIONS[0], num_bytes=1)
    key = (wanted.transfer_id, wanted.generation)
    agreed = transfer_checksum([c for _, c in expected_record()])
    assert await sides.receiver("deliver", Offer(wanted)) == Accept(*key, 10.0, 0)
    await sides.receiver("deliver", SendSection(*key, "gone", SECTIONS[0]))
    await sides.receiver("deliver", Complete(*key, agreed))
    await sides.receiver("deliver", KeepAlive(*key))
    await sides.receiver("deliver", Fail(*key, "too late"))
    for message in (SendSection(*key, "gone", unknown), Complete(*key, agreed + 1)):
        await refusal_of(sides.receiver("deliver", message))
    assert await sides.receiver("written", wanted.transfer_id) == expected_record()
    assert await sides.receiver("ends", wanted.transfer_id) == ["complete"]
    await settle(sides)


async def test_messages_about_nothing_are_refused(sides: Sides) -> None:
    nothing = uuid.uuid4().hex
    for message in (
        SendSection(nothing, 0, "no lane", SECTIONS[0]),
        Complete(nothing, 0, 0),
        KeepAlive(nothing, 0),
    ):
        error = await refusal_of(sides.receiver("deliver", message))
        assert error.code is ErrorCode.NOT_FOUND
    await sides.receiver("deliver", CloseLane("no lane"))
    await settle(sides)


@pytest.mark.parametrize("number", [OFFER, OPEN, FIRST, SECOND, LAST, COMPLETE])
async def test_cancelling_in_every_phase_leaves_nothing(sides: Sides, number: int) -> None:
    """The message under way arrives after the cancellation, and after the sender's Fail."""
    wanted = fresh()
    reached, release = asyncio.Event(), asyncio.Event()
    sides.faults[number] = delay(reached, release)
    task = asyncio.create_task(send_all(sides, wanted))
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await sides.backend.drain()
    release.set()
    opened = await sides.receiver("opened")
    assert (wanted.transfer_id in opened) == (number != OFFER)
    if number != OFFER:
        await assert_failed_once(sides, wanted)
    await assert_works(sides)
    assert wanted.transfer_id not in (await sides.receiver("opened"))[len(opened) :]
    assert len(await sides.receiver("ends", wanted.transfer_id)) == (number != OFFER)


async def test_cancelling_while_bytes_cross_leaves_nothing(sides: Sides) -> None:
    """The receiver has taken the message; the sender is cancelled when it says so."""
    wanted = fresh()
    taken = asyncio.Event()

    async def tell(message: ControlMessage, deliver: Deliver) -> Accept | None:
        answer = asyncio.create_task(deliver(message))
        taken.set()
        return await answer

    sides.faults[SECOND] = tell
    task = asyncio.create_task(send_all(sides, wanted))
    await taken.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await sides.backend.drain()
    await assert_failed_once(sides, wanted)
    await assert_works(sides)


async def test_one_cancelled_transfer_leaves_its_lane_mates_alone(sides: Sides) -> None:
    victim, others = fresh(), [fresh() for _ in range(6)]
    reached, release = asyncio.Event(), asyncio.Event()
    sides.faults[FIRST] = delay(reached, release)
    task = asyncio.create_task(send_all(sides, victim))
    await reached.wait()
    rest = [asyncio.create_task(send_all(sides, one, seed)) for seed, one in enumerate(others)]
    task.cancel()
    await asyncio.gather(*rest)
    release.set()
    for seed, one in enumerate(others):
        assert await sides.receiver("written", one.transfer_id) == expected_record(seed)
        assert await sides.receiver("ends", one.transfer_id) == ["complete"]
    assert task.cancelled()
    await assert_failed_once(sides, victim)
    await assert_works(sides)


LOSSES = [
    pytest.param(number, fault, id=f"{fault.__name__}-{number}")
    for number in (OFFER, OPEN, FIRST, LAST, COMPLETE)
    for fault in (drop, drop_answer)
]


@pytest.mark.parametrize(("number", "fault"), LOSSES)
async def test_lost_messages_end_by_a_timeout(sides: Sides, number: int, fault: Fault) -> None:
    wanted = fresh()
    sides.faults[number] = fault
    with pytest.raises(Unavailable):
        await send_all(sides, wanted)
    await sides.backend.drain()
    ends = await sides.receiver("ends", wanted.transfer_id)
    if (number, fault) == (COMPLETE, drop_answer):
        assert ends == ["complete"]
    else:
        assert len(ends) == (0 if (number, fault) == (OFFER, drop) else 1)
        assert all(end.startswith("failed") for end in ends)
    await assert_works(sides)


@pytest.mark.parametrize("number", [OFFER, OPEN, FIRST, LAST, COMPLETE])
async def test_peer_that_dies_makes_the_sender_fail_at_once(sides: Sides, number: int) -> None:
    wanted = fresh()
    sides.faults[number] = kill
    with pytest.raises(Unavailable, match="did not reach"):
        await send_all(sides, wanted)
    await sides.backend.drain()
    sides.backend.check_integrity()
    # The sender is as good as dead for the receiver, which hears it from elsewhere.
    await sides.receiver("peer_lost", "encoder-0")
    if number != OFFER:
        await assert_failed_once(sides, wanted)
    await sides.receiver("settle")


async def test_known_death_of_the_receiver_ends_transfers_without_a_timeout(sides: Sides) -> None:
    wanted = fresh()
    reached = asyncio.Event()
    sides.faults[FIRST] = delay(reached, asyncio.Event())
    transfer = await sides.backend.offer(DECODER, wanted)
    sending = asyncio.create_task(transfer.send(SECTIONS[0], payload(SECTIONS[0])))
    await reached.wait()
    sides.backend.peer_lost("decoder-0")
    with pytest.raises(Unavailable, match="decoder-0 died"):
        await sending
    assert transfer.state is TransferState.FAILED
    await sides.receiver("peer_lost", "encoder-0")
    await assert_works(sides)


async def test_sender_says_fail(sides: Sides) -> None:
    wanted = fresh()
    transfer = await sides.backend.offer(DECODER, wanted)
    await transfer.send(SECTIONS[0], payload(SECTIONS[0]))
    await transfer.fail("the prompt was cancelled")
    await transfer.fail("again")
    assert await sides.receiver("ends", wanted.transfer_id) == [
        "failed: the sender gave up: the prompt was cancelled"
    ]
    with pytest.raises(Unavailable, match="the prompt was cancelled"):
        await transfer.send(SECTIONS[1], payload(SECTIONS[1]))
    await assert_works(sides)


async def test_lane_that_the_receiver_closed_when_idle_is_replaced(sides: Sides) -> None:
    await send_all(sides, fresh())
    lane_id = next(m.endpoint.lane_id for m in sides.peer.delivered if hasattr(m, "endpoint"))
    await sides.receiver("deliver", CloseLane(lane_id))
    await assert_works(sides)
    assert sides.backend.num_open_lanes == 1


async def test_closing_the_backend_fails_what_runs(sides: Sides) -> None:
    wanted = fresh()
    transfer = await sides.backend.offer(DECODER, wanted)
    await transfer.send(SECTIONS[0], payload(SECTIONS[0]))
    await sides.backend.close()
    assert transfer.state is TransferState.FAILED
    sides.backend.check_integrity()
    with pytest.raises(Unavailable):
        await sides.backend.offer(DECODER, fresh())
    await assert_failed_once(sides, wanted)
    await sides.receiver("settle")
    assert sides.backend.num_open_lanes == 0


def test_every_message_survives_pickling() -> None:
    wanted = fresh()
    key = (wanted.transfer_id, 3)
    for message in (
        Offer(wanted),
        Accept(*key, 1.0, 0),
        SendSection(*key, "lane", SECTIONS[2]),
        Complete(*key, 2**64 - 1),
        Fail(*key, "why"),
        KeepAlive(*key),
        CloseLane("lane"),
    ):
        assert pickle.loads(pickle.dumps(message)) == message
    assert SECTIONS[2].num_bytes == STATE_BYTES
