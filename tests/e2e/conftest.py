"""Which clusters do end-to-end tests share? One at a time, kept while modules want the same one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from reference_engine import ReferenceEngine
from served_cluster import ServedCluster, served_cluster

from ripresa.cluster.gateway.tokenizer import Tokenizer
from ripresa.workers.demo.checkpoint import DEMO_MODEL

DETERMINISTIC = "numerics=deterministic"
PATIENT = (
    # A busy machine delays hints, confirmations and what workers bring each other; without them no
    # hit could be asserted.
    "directory.lookup_timeout_s=10",
    "directory.claim_s=20",
    "directory.late_s=10",
    "directory.lease_s=30",
    "transfer.chunk_timeout_s=10",
    "transfer.pull_timeout_s=20",
    "transfer.follow_timeout_s=60",
)
SPLIT = (
    DETERMINISTIC,
    *PATIENT,
    "encoders.replicas=2",
    "decoders.replicas=2",
    # These tests speak of encoders: no decode worker shall prefill while there is one.
    "planner.max_local_rows=0",
    # Small steps: a prompt of thousands of tokens can be caught in the middle.
    "encoders.max_batched_tokens=256",
    "encoders.num_blocks=320",
    "decoders.num_blocks=320",
    # Whole answers are set aside, so that it is known how many requests fill a worker.
    "decoders.reserved_output_tokens=4096",
    "transfer.max_section_blocks=2",
)
SPREAD = (
    DETERMINISTIC,
    *PATIENT,
    "encoders.replicas=3",
    "decoders.replicas=3",
    "planner.max_local_rows=0",
    "encoders.max_batched_tokens=256",
    "encoders.num_blocks=192",
    "decoders.num_blocks=192",
    # It delays workers' reports, too.
    "worker_lease_s=30",
)
WITHOUT_ENCODERS = (
    DETERMINISTIC,
    "encoders.replicas=0",
    "decoders.replicas=1",
    "decoders.num_blocks=320",
    "gateway.replicas=2",
    # Whatever is served behind a replay is scored again, and nothing else notices.
    "shadow.share=1",
    # No worker dies here; on a busy machine one may be late.
    "worker_lease_s=60",
)
RESUMABLE = (
    DETERMINISTIC,
    *PATIENT,
    "encoders.replicas=0",
    "decoders.replicas=2",
    "decoders.num_blocks=320",
    "gateway.replicas=2",
    # Gateways that were killed may be back later than a minute.
    "decoders.keep_streams_s=600",
)
TIMEOUT_S = 900
"""Of a test that names none: the first one of a cluster waits for its processes, too."""

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark, and order by cluster: each is started once, whatever the files are called.

    They come last: a process has one Ray at a time, and other tests start and stop their own.
    """
    mine = [item for item in items if item.path.is_relative_to(FOLDER)]
    others = [item for item in items if not item.path.is_relative_to(FOLDER)]
    for item in mine:
        item.add_marker(pytest.mark.cluster)
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
    order = (
        "split",
        "without_encoders",
        "resumable",
        "spread",
        "on_disk",
        "through_ray",
        "bundled",
    )

    def first_use(item: pytest.Item) -> int:
        names = getattr(item, "fixturenames", ())
        return max((1 + order.index(name) for name in order if name in names), default=0)

    items[:] = others + sorted(mine, key=first_use)


Clusters = Callable[[tuple[str, ...]], ServedCluster]


@pytest.fixture(scope="session")
def clusters() -> Iterator[Clusters]:
    """Gives the running cluster if it has these settings; else stops it and starts such a one."""
    running: dict[tuple[str, ...], ServedCluster] = {}
    with ExitStack() as stack:

        def give(settings: tuple[str, ...]) -> ServedCluster:
            if settings not in running:
                stack.close()
                running.clear()
                running[settings] = stack.enter_context(served_cluster(*settings))
            return running[settings]

        yield give


@pytest.fixture(scope="module")
def split(clusters: Clusters) -> ServedCluster:
    """Two encoder workers and two decode workers behind one gateway."""
    cluster = clusters(SPLIT)
    cluster.wait_until_whole()
    return cluster


@pytest.fixture(scope="module")
def without_encoders(clusters: Clusters) -> ServedCluster:
    """One decode worker that prefills by itself, behind two gateways that share a port."""
    return clusters(WITHOUT_ENCODERS)


@pytest.fixture(scope="module")
def resumable(clusters: Clusters) -> ServedCluster:
    """Two decode workers behind two gateways that share a port."""
    cluster = clusters(RESUMABLE)
    cluster.wait_until_whole()
    return cluster


@pytest.fixture(scope="module")
def spread(clusters: Clusters) -> ServedCluster:
    """Three encoder workers and three decode workers that share what they hold."""
    return clusters(SPREAD)


@pytest.fixture(scope="module")
def on_disk(clusters: Clusters, tmp_path_factory: pytest.TempPathFactory) -> ServedCluster:
    """An encoder worker and two decode workers that share a directory of blocks."""
    path = tmp_path_factory.mktemp("disk") / "blocks"
    return clusters(
        (DETERMINISTIC, "encoders.replicas=1", "decoders.replicas=2", f"disk.path={path}")
    )


@pytest.fixture(scope="module")
def through_ray(clusters: Clusters) -> ServedCluster:
    """An encoder worker whose state goes through the object store to a decode worker. Its pool is
    the smaller one."""
    return clusters(
        (
            *(DETERMINISTIC, "encoders.replicas=1", "decoders.replicas=1"),
            *("transfer.backend=object_store", "planner.max_local_rows=0"),
            *("encoders.num_blocks=4", "decoders.num_blocks=8"),
        )
    )


@pytest.fixture(scope="module")
def bundled(clusters: Clusters) -> ServedCluster:
    """The bundled model with default settings, and an encoder worker as in `ripresa demo`."""
    return clusters(("model.path=null", "encoders.replicas=1", "planner.max_local_rows=0"))


@pytest.fixture(scope="session")
def reference() -> ReferenceEngine:
    """The in-process engine, deterministic."""
    return ReferenceEngine()


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(DEMO_MODEL / "tokenizer.json")


@pytest.fixture(scope="session")
def agent_prompt(repository: Path) -> str:
    """A whole prompt of a coding agent, 2,989 tokens of the demo model."""
    call = json.loads((repository / "tests" / "data" / "miniswe_call.json").read_text())
    return str(call["input"])


@pytest.fixture(scope="session")
def agent_tokens(agent_prompt: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    return tuple(tokenizer.encode(agent_prompt))
