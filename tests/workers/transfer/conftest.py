"""Which sides do the transfer tests run on? In one loop, over two loops, over two processes."""

from __future__ import annotations

import logging
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

# The receiver's process imports the same file by its folder.
sys.path.insert(0, str(Path(__file__).parent))

from transfer_sides import (
    ChildProcess,
    LoopbackSides,
    ObjectStoreSides,
    ProcessSides,
    Sides,
    ThreadSides,
)

from ripresa.workers.transfer.base import LaneConfig

LIMITS = {
    "chunk_bytes": 1_000,
    "chunk_timeout_s": 1.0,
    "open_timeout_s": 12.0,
    "control_timeout_s": 5.0,
}


@pytest.fixture(scope="session")
def config() -> LaneConfig:
    return LaneConfig(**LIMITS)


@pytest.fixture(scope="session")
def receiver_process() -> Iterator[ChildProcess]:
    """A receiver that every test of the session may use; records are kept by transfer id."""
    child = ChildProcess("receiver_process.py", config=LIMITS)
    yield child
    child.stop()


@pytest.fixture(scope="module")
def object_store() -> Iterator[None]:
    """A Ray cluster of this process alone, with a small object store."""
    import ray

    from ripresa.workers.transfer.object_store import NAMESPACE, ObjectStoreTransport

    temp_dir = tempfile.mkdtemp(prefix="rip-", dir="/tmp")
    ray.init(
        address="local",
        num_cpus=1,
        object_store_memory=80 << 20,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _temp_dir=temp_dir,
        _node_ip_address="127.0.0.1",
    )
    try:
        # Its process starts within no test's timeouts.
        mailbox = ray.get_actor(ObjectStoreTransport().address()[0], NAMESPACE)
        ray.get(mailbox.lose.remote("no lane", "it never was"))
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(temp_dir, ignore_errors=True)


@pytest.fixture(
    params=[
        "loopback",
        "gloo_threads",
        "gloo_processes",
        pytest.param("object_store", marks=pytest.mark.cluster),
    ]
)
async def sides(request: pytest.FixtureRequest, config: LaneConfig) -> AsyncIterator[Sides]:
    made: Sides
    if request.param == "loopback":
        made = LoopbackSides(config)
    elif request.param == "gloo_threads":
        threads = ThreadSides(config)
        await threads.start()
        made = threads
    elif request.param == "object_store":
        request.getfixturevalue("object_store")
        through_ray = ObjectStoreSides(config)
        await through_ray.start()
        made = through_ray
    else:
        child: ChildProcess = request.getfixturevalue("receiver_process")
        made = await ProcessSides.connect(int(child.first_line), config)
    yield made
    await made.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real timeouts on every transport are for the CI tier; one transport's are not."""
    for item in items:
        if "test_lost_messages" in item.name and "[gloo" in item.name:
            item.add_marker(pytest.mark.slow)
