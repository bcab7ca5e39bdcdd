"""Does service survive the death of the directory's actor, and does its knowledge come back?"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from functools import partial

# Explicit, whatever the user's own Ray is set to; before Ray is imported.
os.environ["RAY_AUTH_MODE"] = "disabled"

import pytest
import ray
from directory_sides import SETTINGS, chain, summary

from ripresa.cluster.directory.client import DirectoryActors, DirectoryClient
from ripresa.cluster.directory.events import Answer, Follow, Lead, PlanByLoad
from ripresa.cluster.directory.prefix_directory import start_directory
from ripresa.cluster.directory.publisher import DirectoryPublisher
from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.cache.cache_events import Origin

pytestmark = pytest.mark.cluster

HASHES = chain("a", 6)
PATIENT = replace(SETTINGS, claim_s=60)
"""A busy machine confirms a claim late."""
ASKED_S = 0.05


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    folder = tempfile.mkdtemp(prefix="rip-")
    ray.init(
        address="local",
        num_cpus=1,
        include_dashboard=False,
        object_store_memory=150_000_000,
        _temp_dir=folder,
        log_to_driver=False,
    )
    try:
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
async def actors(cluster: None, request: pytest.FixtureRequest) -> AsyncIterator[DirectoryActors]:
    connect = partial(start_directory, PATIENT, name=request.node.name, is_detached=True)
    handles = await asyncio.to_thread(connect)
    yield DirectoryActors(handles, connect)
    for handle in await asyncio.to_thread(connect):
        ray.kill(handle)


@pytest.fixture
async def publishers(actors: DirectoryActors) -> AsyncIterator[list[DirectoryPublisher]]:
    """Two workers; the first holds the whole prompt, the second its beginning."""
    started = []
    for number, num_blocks in enumerate((6, 3)):
        publisher = DirectoryPublisher(f"w{number}", 1, [actors.send_to(0)], lambda lowest: None)
        for block in range(num_blocks):
            parent = HASHES[block - 1] if block else None
            publisher.held(BlockIdentity(HASHES[block], ()), Origin("t", HASHES[0], parent))
        await publisher.start()
        started.append(publisher)
    yield started
    for publisher in started:
        await publisher.stop()


async def eventually(
    client: DirectoryClient, condition: Callable[[Answer | PlanByLoad], bool]
) -> Answer | PlanByLoad:
    """Ask until the answer is as wanted."""
    async with asyncio.timeout(120):
        while True:
            answer = await client.lookup_or_claim(HASHES, "asking")
            if condition(answer):
                return answer
            await asyncio.sleep(ASKED_S)


def is_whole(answer: Answer | PlanByLoad) -> bool:
    return isinstance(answer, Answer) and summary(answer.lookup.prefixes) == {
        ("w0", (), 6),
        ("w1", (), 3),
    }


def has_no_hints(answer: Answer | PlanByLoad) -> bool:
    return isinstance(answer, PlanByLoad) or answer.lookup.prefixes == ()


@pytest.mark.parametrize("is_restarted", [True, False], ids=["restarted", "replaced"])
async def test_a_killed_directory_is_missed_and_rebuilt(
    actors: DirectoryActors, publishers: list[DirectoryPublisher], is_restarted: bool
) -> None:
    client = DirectoryClient(actors, timeout_s=5)
    await eventually(client, is_whole)
    (handle,) = await asyncio.to_thread(actors.connect)
    ray.kill(handle, no_restart=not is_restarted)
    await eventually(client, has_no_hints)
    await eventually(client, is_whole)


async def test_claims_work_between_processes(actors: DirectoryActors) -> None:
    client = DirectoryClient(actors, timeout_s=30)
    publisher = DirectoryPublisher("w", 4, [actors.send_to(0)], lambda lowest: None)
    await publisher.start()
    try:
        leader = await client.lookup_or_claim(HASHES, "leader")
        assert isinstance(leader, Answer)
        assert leader.flight == Lead(0, 6, PATIENT.claim_s)
        publisher.lead("leader", HASHES)
        flight = None
        async with asyncio.timeout(150):
            while not isinstance(flight, Follow) or flight.worker is None:
                answer = await client.lookup_or_claim(HASHES, "follower")
                assert isinstance(answer, Answer)
                flight = answer.flight
                assert isinstance(flight, Follow), "the leader was not confirmed in time"
        assert flight == Follow("leader", 0, 6, "w", 4)
    finally:
        await publisher.stop()
