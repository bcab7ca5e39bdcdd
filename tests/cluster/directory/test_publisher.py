"""Does a worker tell the directory in batches, sooner where others wait, and again after a loss?"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from directory_sides import SETTINGS, chain, summary

from ripresa.cluster.directory.events import Accepted, Refused, Reply, Report, SendAll
from ripresa.cluster.directory.index import PrefixIndex, shard_of
from ripresa.cluster.directory.publisher import DirectoryPublisher
from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.cache.cache_events import origin
from ripresa.workers.errors import Unreachable

NEVER_S = 3_600.0
HASHES = chain("a", 6)


class Wire:
    """Carries reports to an index and keeps them; it can be cut."""

    def __init__(self, index: PrefixIndex) -> None:
        self.index = index
        self.exchanges: asyncio.Queue[tuple[Report, Reply]] = asyncio.Queue()
        self.failures = 0
        self.attempts: list[Report] = []

    async def __call__(self, report: Report) -> Reply:
        self.attempts.append(report)
        if self.failures:
            self.failures -= 1
            raise Unreachable("cut")
        reply = self.index.report(report, 0)
        self.exchanges.put_nowait((report, reply))
        return reply

    async def next(self) -> tuple[Report, Reply]:
        async with asyncio.timeout(30):
            return await self.exchanges.get()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self.next()


@pytest.fixture
def index() -> PrefixIndex:
    return PrefixIndex(SETTINGS, "d1")


@asynccontextmanager
async def publishing(
    *wires: Callable[[Report], Awaitable[Reply]],
    interval_s: float = 0.001,
    heartbeat_s: float = 0.001,
    refused: list[int] | None = None,
) -> AsyncIterator[DirectoryPublisher]:
    heard = [] if refused is None else refused
    publisher = DirectoryPublisher(
        "w", 1, wires, heard.append, interval_s=interval_s, heartbeat_s=heartbeat_s
    )
    await publisher.start()
    try:
        yield publisher
    finally:
        await publisher.stop()


def hold(publisher: DirectoryPublisher, hashes: tuple[bytes, ...], start: int = 0) -> None:
    for block in range(start, len(hashes)):
        publisher.held(BlockIdentity(hashes[block], ()), origin("t", hashes, block))


async def test_changes_travel_together(index: PrefixIndex) -> None:
    wire = Wire(index)
    async with publishing(wire, interval_s=0.001, heartbeat_s=NEVER_S) as publisher:
        assert isinstance((await wire.next())[1], SendAll)
        assert (await wire.next())[1] == Accepted()
        hold(publisher, HASHES)
        report, reply = await wire.next()
    assert reply == Accepted()
    assert [run.hashes for run in report.runs] == [HASHES]
    assert summary(index.lookup(HASHES, 0).prefixes) == {("w", (), 6)}


async def test_what_came_and_went_is_told_as_it_is(index: PrefixIndex) -> None:
    wire = Wire(index)
    async with publishing(wire) as publisher:
        hold(publisher, HASHES)
        publisher.dropped(BlockIdentity(HASHES[2], ()))
        await wire.until(lambda: bool(index.lookup(HASHES, 0).prefixes))
    assert summary(index.lookup(HASHES, 0).prefixes) == {("w", (), 2)}


async def test_a_block_that_others_wait_for_does_not_wait(index: PrefixIndex) -> None:
    wire = Wire(index)
    async with publishing(wire, interval_s=NEVER_S, heartbeat_s=NEVER_S) as publisher:
        await wire.next()
        await wire.next()
        index.lookup_or_claim(HASHES, "r", 0)
        publisher.lead("r", HASHES)
        assert (await wire.next())[0].leading == ("r",)
        hold(publisher, chain("unasked", 3))
        hold(publisher, HASHES[:2])
        report, _ = await wire.next()
        assert report.runs[-1].hashes == HASHES[:2]
        publisher.finish("r")
        assert (await wire.next())[0].ended == ("r",)
        assert wire.exchanges.empty()


async def test_signs_of_life_go_on_without_news(index: PrefixIndex) -> None:
    wire = Wire(index)
    async with publishing(wire):
        reports = [(await wire.next())[0] for _ in range(5)]
    assert [report.number for report in reports] == [0, 0, 1, 2, 3]
    assert not any(report.runs for report in reports)


async def test_a_report_that_did_not_arrive_is_sent_again(index: PrefixIndex) -> None:
    wire = Wire(index)
    async with publishing(wire) as publisher:
        await wire.next()
        await wire.next()
        wire.failures = 2
        hold(publisher, HASHES)
        await wire.until(lambda: bool(index.lookup(HASHES, 0).prefixes))
    sent = [report for report in wire.attempts if report.runs]
    assert len(sent) >= 1
    assert all(report is sent[0] for report in sent)
    assert index.counters.num_demands == 1


async def test_a_new_directory_gets_everything(index: PrefixIndex) -> None:
    wire = Wire(index)
    async with publishing(wire) as publisher:
        hold(publisher, HASHES)
        await wire.until(lambda: bool(index.lookup(HASHES, 0).prefixes))
        wire.index = successor = PrefixIndex(SETTINGS, "d2")
        await wire.until(lambda: bool(successor.lookup(HASHES, 0).prefixes))
    assert summary(successor.lookup(HASHES, 0).prefixes) == {("w", (), 6)}


async def test_a_leader_unknown_to_a_new_directory_stops_confirming(index: PrefixIndex) -> None:
    wire = Wire(index)
    async with publishing(wire) as publisher:
        publisher.lead("r", HASHES)
        reply: Reply = Accepted()
        while reply != Accepted(("r",)):
            _, reply = await wire.next()
        assert (await wire.next())[0].leading == ()


async def test_a_refused_worker_is_silent_until_it_has_another_incarnation(
    index: PrefixIndex,
) -> None:
    wire = Wire(index)
    refused: list[int] = []
    async with publishing(wire, refused=refused) as publisher:
        hold(publisher, HASHES)
        await wire.until(lambda: bool(index.lookup(HASHES, 0).prefixes))
        index.lost("w", 1)
        reply: Reply = Accepted()
        while reply != Refused(2):
            _, reply = await wire.next()
        clock = Wire(PrefixIndex(SETTINGS, "d2"))
        async with publishing(clock):
            for _ in range(50):
                await clock.next()
        assert wire.exchanges.empty()
        assert refused == [2]
        publisher.restart(2)
        await wire.until(lambda: bool(index.lookup(HASHES, 0).prefixes))
    assert index.lookup(HASHES, 0).prefixes[0].holder.incarnation == 2


async def test_a_reply_to_an_earlier_incarnation_is_not_taken(index: PrefixIndex) -> None:
    wire = Wire(index)
    asked, answered = asyncio.Event(), asyncio.Event()

    async def slow(report: Report) -> Reply:
        reply = await wire(report)
        asked.set()
        await answered.wait()
        return reply

    async with publishing(slow) as publisher:
        hold(publisher, HASHES)
        await asked.wait()
        publisher.restart(2)
        answered.set()
        await wire.until(lambda: bool(index.lookup(HASHES, 0).prefixes))
    assert index.lookup(HASHES, 0).prefixes[0].holder.incarnation == 2


async def test_each_shard_hears_of_its_own_prompts() -> None:
    indexes = [PrefixIndex(SETTINGS, f"d{n}") for n in range(2)]
    wires = [Wire(index) for index in indexes]
    prompts = [chain(f"p{n}", 3) for n in range(8)]
    async with publishing(*wires) as publisher:
        for prompt in prompts:
            hold(publisher, prompt)
        publisher.dropped(BlockIdentity(prompts[0][2], ()))
        for wire in wires:
            await wire.until(lambda wire=wire: bool(len(wire.index)))  # type: ignore[misc]
    for number, prompt in enumerate(prompts):
        for shard, index in enumerate(indexes):
            expected = {("w", (), 3 if number else 2)} if shard == shard_of(prompt[0], 2) else set()
            assert summary(index.lookup(prompt, 0).prefixes) == expected
