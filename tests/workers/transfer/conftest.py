"""Which sides do the transfer tests run on? In one loop, over two loops, over two processes."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

# The receiver's process imports the same file by its folder.
sys.path.insert(0, str(Path(__file__).parent))

from transfer_sides import ChildProcess, LoopbackSides, ProcessSides, Sides, ThreadSides

from ripresa.workers.transfer.base import LaneConfig

LIMITS = {
    "chunk_bytes": 1_000,
    "chunk_timeout_s": 1.0,
    "open_timeout_s": 5.0,
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


@pytest.fixture(params=["loopback", "gloo_threads", "gloo_processes"])
async def sides(request: pytest.FixtureRequest, config: LaneConfig) -> AsyncIterator[Sides]:
    made: Sides
    if request.param == "loopback":
        made = LoopbackSides(config)
    elif request.param == "gloo_threads":
        threads = ThreadSides(config)
        await threads.start()
        made = threads
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
